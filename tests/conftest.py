"""Nothing is shared here: the fixtures are those of ``lightning_sparse.testing.plugin``, as for users of the kit."""
