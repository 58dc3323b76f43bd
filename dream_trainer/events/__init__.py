"""What watches a run: callbacks, and the events they hear."""
