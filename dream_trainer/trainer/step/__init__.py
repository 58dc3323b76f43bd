"""The arithmetic of a step: what happens between `backward` and the optimizer, and when it is left out."""
