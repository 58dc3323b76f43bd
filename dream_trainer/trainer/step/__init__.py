"""The arithmetic of a step: the work between `backward` and the optimizer, and when it is skipped."""
