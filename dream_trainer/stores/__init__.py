"""Object stores, such as S3: their bytes, paths in them that read as those of a disk do, and whose a run there is.

What is done with checkpoints in them is `dream_trainer.checkpoint`'s.
"""
