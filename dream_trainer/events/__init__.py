"""Callbacks, which watch a run, and the events they receive."""
