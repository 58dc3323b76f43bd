"""Several sources as one dataset, by weights that may change."""
