"""What is done to modules: sharding, precision, recomputation, entry points, statistics of norms."""
