"""Programs of users, right and wrong ones."""
