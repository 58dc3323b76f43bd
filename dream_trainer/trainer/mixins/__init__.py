"""Mixins: one capability, one file, with its config mixin. Names load on first use; importing one imports no other."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ActivationCheckpointingConfigMixin": "activation_checkpointing",
    "ActivationCheckpointingMixin": "activation_checkpointing",
    "ActivationCheckpointingParameters": "activation_checkpointing",
    "CheckpointConfigMixin": "checkpoint",
    "CheckpointMixin": "checkpoint",
    "CheckpointParameters": "checkpoint",
    "CompileConfigMixin": "compile",
    "CompileMixin": "compile",
    "CompileParameters": "compile",
    "EvalConfigMixin": "evaluation",
    "EvalMixin": "evaluation",
    "EvalParameters": "evaluation",
    "FSDPConfigMixin": "fsdp",
    "FSDPMixin": "fsdp",
    "FSDPParameters": "fsdp",
    "LoggerConfigMixin": "logger",
    "LoggerMixin": "logger",
    "LoggerParameters": "logger",
    "SetupConfigMixin": "setup",
    "SetupMixin": "setup",
    "TensorParallelConfigMixin": "tensor_parallel",
    "TensorParallelMixin": "tensor_parallel",
    "TensorParallelParameters": "tensor_parallel",
    "WandbParameters": "logger",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
