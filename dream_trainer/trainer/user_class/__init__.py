"""What a user's trainer class defines: what of it is called, and what is refused."""
