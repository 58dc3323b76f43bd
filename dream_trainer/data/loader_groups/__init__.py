"""Several training loaders read as one."""
