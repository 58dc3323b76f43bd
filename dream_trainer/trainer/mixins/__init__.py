"""Mixins: one capability, one file, with its config mixin. Names load on first use; importing one imports no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin as CheckpointConfigMixin
    from dream_trainer.config.checkpoint_parameters import CheckpointParameters as CheckpointParameters
    from dream_trainer.config.device_parameters import SetupConfigMixin as SetupConfigMixin
    from dream_trainer.config.logger_parameters import LoggerConfigMixin as LoggerConfigMixin
    from dream_trainer.config.logger_parameters import LoggerParameters as LoggerParameters
    from dream_trainer.config.logger_parameters import MLflowParameters as MLflowParameters
    from dream_trainer.config.logger_parameters import TrackioParameters as TrackioParameters
    from dream_trainer.config.logger_parameters import WandbParameters as WandbParameters
    from dream_trainer.config.parallel_parameters import (
        ActivationCheckpointingConfigMixin as ActivationCheckpointingConfigMixin,
    )
    from dream_trainer.config.parallel_parameters import (
        ActivationCheckpointingParameters as ActivationCheckpointingParameters,
    )
    from dream_trainer.config.parallel_parameters import CompileConfigMixin as CompileConfigMixin
    from dream_trainer.config.parallel_parameters import CompileParameters as CompileParameters
    from dream_trainer.config.parallel_parameters import (
        ContextParallelConfigMixin as ContextParallelConfigMixin,
    )
    from dream_trainer.config.parallel_parameters import ContextParallelParameters as ContextParallelParameters
    from dream_trainer.config.parallel_parameters import Float8ConfigMixin as Float8ConfigMixin
    from dream_trainer.config.parallel_parameters import Float8Parameters as Float8Parameters
    from dream_trainer.config.parallel_parameters import FSDPConfigMixin as FSDPConfigMixin
    from dream_trainer.config.parallel_parameters import FSDPParameters as FSDPParameters
    from dream_trainer.config.parallel_parameters import LocalSGDConfigMixin as LocalSGDConfigMixin
    from dream_trainer.config.parallel_parameters import LocalSGDParameters as LocalSGDParameters
    from dream_trainer.config.parallel_parameters import (
        PipelineParallelConfigMixin as PipelineParallelConfigMixin,
    )
    from dream_trainer.config.parallel_parameters import (
        PipelineParallelParameters as PipelineParallelParameters,
    )
    from dream_trainer.config.parallel_parameters import TensorParallelConfigMixin as TensorParallelConfigMixin
    from dream_trainer.config.parallel_parameters import TensorParallelParameters as TensorParallelParameters
    from dream_trainer.config.training_parameters import EvalConfigMixin as EvalConfigMixin
    from dream_trainer.config.training_parameters import EvalParameters as EvalParameters
    from dream_trainer.trainer.mixins.activation_checkpointing import (
        ActivationCheckpointingMixin as ActivationCheckpointingMixin,
    )
    from dream_trainer.trainer.mixins.checkpointing import CheckpointMixin as CheckpointMixin
    from dream_trainer.trainer.mixins.compile import CompileMixin as CompileMixin
    from dream_trainer.trainer.mixins.context_parallel import ContextParallelMixin as ContextParallelMixin
    from dream_trainer.trainer.mixins.evaluation import EvalMixin as EvalMixin
    from dream_trainer.trainer.mixins.expert_parallel import ExpertParallelMixin as ExpertParallelMixin
    from dream_trainer.trainer.mixins.float8 import Float8Mixin as Float8Mixin
    from dream_trainer.trainer.mixins.fsdp import FSDPMixin as FSDPMixin
    from dream_trainer.trainer.mixins.local_sgd import LocalSGDMixin as LocalSGDMixin
    from dream_trainer.trainer.mixins.logger import LoggerMixin as LoggerMixin
    from dream_trainer.trainer.mixins.pipeline_parallel import PipelineParallelMixin as PipelineParallelMixin
    from dream_trainer.trainer.mixins.setup import SetupMixin as SetupMixin
    from dream_trainer.trainer.mixins.tensor_parallel import TensorParallelMixin as TensorParallelMixin
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "ActivationCheckpointingConfigMixin": "config.parallel_parameters",
            "ActivationCheckpointingMixin": "trainer.mixins.activation_checkpointing",
            "ActivationCheckpointingParameters": "config.parallel_parameters",
            "CheckpointConfigMixin": "config.checkpoint_parameters",
            "CheckpointMixin": "trainer.mixins.checkpointing",
            "CheckpointParameters": "config.checkpoint_parameters",
            "CompileConfigMixin": "config.parallel_parameters",
            "CompileMixin": "trainer.mixins.compile",
            "CompileParameters": "config.parallel_parameters",
            "ContextParallelConfigMixin": "config.parallel_parameters",
            "ContextParallelMixin": "trainer.mixins.context_parallel",
            "ContextParallelParameters": "config.parallel_parameters",
            "EvalConfigMixin": "config.training_parameters",
            "EvalMixin": "trainer.mixins.evaluation",
            "EvalParameters": "config.training_parameters",
            "ExpertParallelMixin": "trainer.mixins.expert_parallel",
            "Float8ConfigMixin": "config.parallel_parameters",
            "Float8Mixin": "trainer.mixins.float8",
            "Float8Parameters": "config.parallel_parameters",
            "FSDPConfigMixin": "config.parallel_parameters",
            "FSDPMixin": "trainer.mixins.fsdp",
            "FSDPParameters": "config.parallel_parameters",
            "LoggerConfigMixin": "config.logger_parameters",
            "LoggerMixin": "trainer.mixins.logger",
            "LocalSGDConfigMixin": "config.parallel_parameters",
            "LocalSGDMixin": "trainer.mixins.local_sgd",
            "LocalSGDParameters": "config.parallel_parameters",
            "LoggerParameters": "config.logger_parameters",
            "PipelineParallelConfigMixin": "config.parallel_parameters",
            "PipelineParallelMixin": "trainer.mixins.pipeline_parallel",
            "PipelineParallelParameters": "config.parallel_parameters",
            "SetupConfigMixin": "config.device_parameters",
            "SetupMixin": "trainer.mixins.setup",
            "TensorParallelConfigMixin": "config.parallel_parameters",
            "TensorParallelMixin": "trainer.mixins.tensor_parallel",
            "TensorParallelParameters": "config.parallel_parameters",
            "MLflowParameters": "config.logger_parameters",
            "TrackioParameters": "config.logger_parameters",
            "WandbParameters": "config.logger_parameters",
        },
    )
