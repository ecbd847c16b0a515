"""Uses of Lightning as rows of a table: the use, and the checks."""
