"""Dream Trainer: write your own PyTorch trainer, and run it unchanged from one CPU to a cluster.

Names load on first use (PEP 562), so `import dream_trainer` costs next to nothing and importing one mixin imports no
other.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MIXINS = "dream_trainer.trainer.mixins"
_HOMES = {
    "AbstractTrainer": "dream_trainer.trainer.abstract",
    "BaseTrainer": "dream_trainer.trainer.base",
    "BaseTrainerConfig": "dream_trainer.config.base",
    "Callback": "dream_trainer.callbacks.base",
    "CallbackCollection": "dream_trainer.callbacks.base",
    "CheckpointConfigMixin": _MIXINS,
    "CheckpointMixin": _MIXINS,
    "CheckpointParameters": "dream_trainer.config.checkpoint",
    "DeviceParameters": "dream_trainer.config.device",
    "DreamTrainer": "dream_trainer.trainer.dream",
    "DreamTrainerConfig": "dream_trainer.trainer.dream",
    "EMA": "dream_trainer.callbacks.ema",
    "EvalConfigMixin": _MIXINS,
    "EvalMixin": _MIXINS,
    "EvalParameters": _MIXINS,
    "FSDPConfigMixin": _MIXINS,
    "FSDPMixin": _MIXINS,
    "FSDPParameters": _MIXINS,
    "LoadReport": "dream_trainer.checkpoint.weight_report",
    "LoggerConfigMixin": _MIXINS,
    "LoggerMixin": _MIXINS,
    "LoggerParameters": _MIXINS,
    "SetupConfigMixin": _MIXINS,
    "SetupMixin": _MIXINS,
    "TrainingParameters": "dream_trainer.config.training",
    "load_weights": "dream_trainer.checkpoint.weights",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
