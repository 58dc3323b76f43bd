"""Documents in rows of one length, or padded with their like, and attention that keeps them apart."""
