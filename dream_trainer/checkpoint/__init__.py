"""How a checkpoint lies on disk, and how state gets into it and out of it. `store.py` is the file to read first."""
