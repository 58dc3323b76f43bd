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
    "ActivationCheckpointingConfigMixin": _MIXINS,
    "ActivationCheckpointingMixin": _MIXINS,
    "ActivationCheckpointingParameters": _MIXINS,
    "BaseTrainer": "dream_trainer.trainer.base",
    "BaseTrainerConfig": "dream_trainer.config.base",
    "Callback": "dream_trainer.callbacks.base",
    "CallbackCollection": "dream_trainer.callbacks.base",
    "CheckpointConfigMixin": _MIXINS,
    "CheckpointMixin": _MIXINS,
    "CheckpointParameters": "dream_trainer.config.checkpoint",
    "CompileConfigMixin": _MIXINS,
    "CompileMixin": _MIXINS,
    "CompileParameters": _MIXINS,
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
    "GroupParameters": "dream_trainer.optim",
    "LoadReport": "dream_trainer.checkpoint.weight_report",
    "LoggerConfigMixin": _MIXINS,
    "LoggerMixin": _MIXINS,
    "LoggerParameters": "dream_trainer.config.logger",
    "OptimizerParameters": "dream_trainer.optim",
    "ScheduleParameters": "dream_trainer.optim",
    "SetupConfigMixin": _MIXINS,
    "SetupMixin": _MIXINS,
    "TensorParallelConfigMixin": _MIXINS,
    "TensorParallelMixin": _MIXINS,
    "TensorParallelParameters": _MIXINS,
    "TrainingParameters": "dream_trainer.config.training",
    "WandbParameters": "dream_trainer.config.logger",
    "build_optimizer": "dream_trainer.optim",
    "build_optimizers": "dream_trainer.optim",
    "build_schedule": "dream_trainer.optim",
    "build_schedules": "dream_trainer.optim",
    "freeze": "dream_trainer.optim",
    "load_weights": "dream_trainer.checkpoint.weights",
    "parameter_groups": "dream_trainer.optim",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
