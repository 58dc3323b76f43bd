"""Mixins: one capability, one file, with its config mixin. Names load on first use; importing one imports no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin as CheckpointConfigMixin
    from dream_trainer.config.device_parameters import (
        ActivationCheckpointingConfigMixin as ActivationCheckpointingConfigMixin,
        CompileConfigMixin as CompileConfigMixin,
        ContextParallelConfigMixin as ContextParallelConfigMixin,
        Float8ConfigMixin as Float8ConfigMixin,
        FSDPConfigMixin as FSDPConfigMixin,
        LocalSGDConfigMixin as LocalSGDConfigMixin,
        PipelineParallelConfigMixin as PipelineParallelConfigMixin,
        SetupConfigMixin as SetupConfigMixin,
        TensorParallelConfigMixin as TensorParallelConfigMixin,
    )
    from dream_trainer.config.logger_parameters import LoggerConfigMixin as LoggerConfigMixin
    from dream_trainer.config.training_parameters import EvalConfigMixin as EvalConfigMixin
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
    __getattr__, __dir__, __all__ = lazy_names(__name__)
