"""What people do with Lightning, as rows of a table: how it is done, and what it must have done."""
