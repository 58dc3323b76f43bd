"""Definitions in a user's trainer class: which are called, and which raise an error."""
