"""Dream Trainer: write your own PyTorch trainer, and run it unchanged from one CPU to a cluster.

Names load on first use (PEP 562), so `import dream_trainer` costs next to nothing and importing one mixin imports no
other.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names
from dream_trainer.version import __version__ as __version__

if sys.platform == "win32":
    raise ImportError("Dream Trainer runs on Linux and macOS, not on Windows. Use it in WSL 2 (wsl --install).")

if TYPE_CHECKING:
    from dream_trainer import (
        callbacks as callbacks,
        config as config,
        data as data,
        errors as errors,
        loggers as loggers,
        modules as modules,
        optim as optim,
        recipes as recipes,
        simple as simple,
    )
    from dream_trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from dream_trainer.callbacks.weight_average import EMA as EMA
    from dream_trainer.config.checkpoint_parameters import (
        BranchParameters as BranchParameters,
        CheckpointConfigMixin as CheckpointConfigMixin,
        CheckpointParameters as CheckpointParameters,
    )
    from dream_trainer.config.command_line import parse as parse
    from dream_trainer.config.config_files import load_config as load_config
    from dream_trainer.config.device_parameters import (
        ActivationCheckpointingConfigMixin as ActivationCheckpointingConfigMixin,
        ActivationCheckpointingParameters as ActivationCheckpointingParameters,
        CompileConfigMixin as CompileConfigMixin,
        CompileParameters as CompileParameters,
        ContextParallelConfigMixin as ContextParallelConfigMixin,
        ContextParallelParameters as ContextParallelParameters,
        DeviceParameters as DeviceParameters,
        Float8ConfigMixin as Float8ConfigMixin,
        Float8Parameters as Float8Parameters,
        FSDPConfigMixin as FSDPConfigMixin,
        FSDPParameters as FSDPParameters,
        LocalSGDConfigMixin as LocalSGDConfigMixin,
        LocalSGDParameters as LocalSGDParameters,
        PipelineParallelConfigMixin as PipelineParallelConfigMixin,
        PipelineParallelParameters as PipelineParallelParameters,
        SetupConfigMixin as SetupConfigMixin,
        TensorParallelConfigMixin as TensorParallelConfigMixin,
        TensorParallelParameters as TensorParallelParameters,
    )
    from dream_trainer.config.logger_parameters import (
        LoggerConfigMixin as LoggerConfigMixin,
        LoggerParameters as LoggerParameters,
        MLflowParameters as MLflowParameters,
        TrackioParameters as TrackioParameters,
        WandbParameters as WandbParameters,
    )
    from dream_trainer.config.trainer_config import (
        BaseTrainerConfig as BaseTrainerConfig,
        DreamTrainerConfig as DreamTrainerConfig,
    )
    from dream_trainer.config.training_parameters import (
        EvalConfigMixin as EvalConfigMixin,
        EvalParameters as EvalParameters,
        TrainingParameters as TrainingParameters,
    )
    from dream_trainer.events.callback import Callback as Callback
    from dream_trainer.events.collection import CallbackCollection as CallbackCollection
    from dream_trainer.loggers.progress import Progress as Progress
    from dream_trainer.optim.learning_rates import (
        ScheduleParameters as ScheduleParameters,
        TokenAxis as TokenAxis,
        build_schedule as build_schedule,
        build_schedules as build_schedules,
    )
    from dream_trainer.optim.optimizers import (
        GroupParameters as GroupParameters,
        OptimizerParameters as OptimizerParameters,
        build_optimizer as build_optimizer,
        build_optimizers as build_optimizers,
        freeze as freeze,
        parameter_groups as parameter_groups,
    )
    from dream_trainer.simple.from_objects import Trainer as Trainer
    from dream_trainer.trainer.abstract import AbstractTrainer as AbstractTrainer
    from dream_trainer.trainer.base import BaseTrainer as BaseTrainer
    from dream_trainer.trainer.dream import DreamTrainer as DreamTrainer
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
    from dream_trainer.weights.adapters import load_adapters as load_adapters, load_base_weights as load_base_weights
    from dream_trainer.weights.export import push_to_hub as push_to_hub
    from dream_trainer.weights.load import LoadReport as LoadReport, load_weights as load_weights
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
