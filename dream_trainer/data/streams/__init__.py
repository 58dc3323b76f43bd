"""Sequential sources read in lanes, so that a step has the same samples on any number of ranks."""
