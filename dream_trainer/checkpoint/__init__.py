"""Layout of checkpoints on disk, and saving and loading of state. `store.py` is the file to read first."""
