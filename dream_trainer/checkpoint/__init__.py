"""How a checkpoint lies on disk, and how state gets into it and out of it: functions of plain arguments.

When to save and what to resume is `CheckpointMixin`'s. `store.py` is the file to read first. Import from the modules:
some hold a function of their own name.
"""
