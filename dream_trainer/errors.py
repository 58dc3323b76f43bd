"""The framework's errors for mistakes in a user's code, config, data or checkpoints.

Every class also derives from the built-in that fits, so `except ValueError` works where one expects it to.
"""


class DreamTrainerError(Exception):
    """Base of every error that Dream Trainer raises on purpose."""


class ConfigError(DreamTrainerError, ValueError):
    """A config field has an invalid value, by itself or on this machine."""


class HookError(DreamTrainerError, TypeError):
    """A hook is missing, or returned something of the wrong kind."""


class RanksDifferError(DreamTrainerError, ValueError):
    """Something is not the same on all ranks that has to be: config, data, optimizers."""


class DataError(DreamTrainerError, ValueError):
    """A data loader is empty, uneven, or cannot be split over ranks."""


class InitError(DreamTrainerError, RuntimeError):
    """A parameter was left uninitialised, or init code did something that a meta build cannot replay."""


class StepError(DreamTrainerError, RuntimeError):
    """`backward` or `step` was called where it would train wrong."""


class NonFiniteError(DreamTrainerError, FloatingPointError):
    """The gradient norm was NaN or infinite, and the policy says to stop."""


class CheckpointError(DreamTrainerError, RuntimeError):
    """A checkpoint is damaged, belongs to another run, or cannot be written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's file is missing, incomplete, changed since it was written, or asks to run code.

    Resuming "auto" passes such a checkpoint over for the next older one; every other CheckpointError ends the run.
    """
