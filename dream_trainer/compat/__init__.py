"""Every private or moving name of PyTorch, each with a test: the rest of the package knows none."""
