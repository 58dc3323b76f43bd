"""Tests of `dream-trainer check` and `dream_trainer.testing`."""
