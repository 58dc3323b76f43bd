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
    from dream_trainer import callbacks as callbacks
    from dream_trainer import config as config
    from dream_trainer import data as data
    from dream_trainer import errors as errors
    from dream_trainer import loggers as loggers
    from dream_trainer import modules as modules
    from dream_trainer import optim as optim
    from dream_trainer import simple as simple
    from dream_trainer.callbacks.weight_average import EMA as EMA
    from dream_trainer.config.checkpoint_parameters import BranchParameters as BranchParameters
    from dream_trainer.config.checkpoint_parameters import CheckpointConfigMixin as CheckpointConfigMixin
    from dream_trainer.config.checkpoint_parameters import CheckpointParameters as CheckpointParameters
    from dream_trainer.config.device_parameters import DeviceParameters as DeviceParameters
    from dream_trainer.config.device_parameters import SetupConfigMixin as SetupConfigMixin
    from dream_trainer.config.dream_trainer_config import DreamTrainerConfig as DreamTrainerConfig
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
    from dream_trainer.config.trainer_config import BaseTrainerConfig as BaseTrainerConfig
    from dream_trainer.config.training_parameters import EvalConfigMixin as EvalConfigMixin
    from dream_trainer.config.training_parameters import EvalParameters as EvalParameters
    from dream_trainer.config.training_parameters import TrainingParameters as TrainingParameters
    from dream_trainer.events.callback import Callback as Callback
    from dream_trainer.events.collection import CallbackCollection as CallbackCollection
    from dream_trainer.optim.groups import GroupParameters as GroupParameters
    from dream_trainer.optim.groups import freeze as freeze
    from dream_trainer.optim.groups import parameter_groups as parameter_groups
    from dream_trainer.optim.learning_rates import ScheduleParameters as ScheduleParameters
    from dream_trainer.optim.learning_rates import TokenAxis as TokenAxis
    from dream_trainer.optim.learning_rates import build_schedule as build_schedule
    from dream_trainer.optim.learning_rates import build_schedules as build_schedules
    from dream_trainer.optim.optimizer_parameters import OptimizerParameters as OptimizerParameters
    from dream_trainer.optim.optimizers import build_optimizer as build_optimizer
    from dream_trainer.optim.optimizers import build_optimizers as build_optimizers
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
    from dream_trainer.weights.adapters import load_adapters as load_adapters
    from dream_trainer.weights.adapters import load_base_weights as load_base_weights
    from dream_trainer.weights.hub import push_to_hub as push_to_hub
    from dream_trainer.weights.load import load_weights as load_weights
    from dream_trainer.weights.load_report import LoadReport as LoadReport
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "AbstractTrainer": "trainer.abstract",
            "ActivationCheckpointingConfigMixin": "config.parallel_parameters",
            "ActivationCheckpointingMixin": "trainer.mixins.activation_checkpointing",
            "ActivationCheckpointingParameters": "config.parallel_parameters",
            "BaseTrainer": "trainer.base",
            "BaseTrainerConfig": "config.trainer_config",
            "BranchParameters": "config.checkpoint_parameters",
            "Callback": "events.callback",
            "CallbackCollection": "events.collection",
            "CheckpointConfigMixin": "config.checkpoint_parameters",
            "CheckpointMixin": "trainer.mixins.checkpointing",
            "CheckpointParameters": "config.checkpoint_parameters",
            "CompileConfigMixin": "config.parallel_parameters",
            "CompileMixin": "trainer.mixins.compile",
            "CompileParameters": "config.parallel_parameters",
            "ContextParallelConfigMixin": "config.parallel_parameters",
            "ContextParallelMixin": "trainer.mixins.context_parallel",
            "ContextParallelParameters": "config.parallel_parameters",
            "DeviceParameters": "config.device_parameters",
            "DreamTrainer": "trainer.dream",
            "DreamTrainerConfig": "config.dream_trainer_config",
            "EMA": "callbacks.weight_average",
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
            "GroupParameters": "optim.groups",
            "LocalSGDConfigMixin": "config.parallel_parameters",
            "LocalSGDMixin": "trainer.mixins.local_sgd",
            "LocalSGDParameters": "config.parallel_parameters",
            "LoadReport": "weights.load_report",
            "LoggerConfigMixin": "config.logger_parameters",
            "LoggerMixin": "trainer.mixins.logger",
            "LoggerParameters": "config.logger_parameters",
            "OptimizerParameters": "optim.optimizer_parameters",
            "ScheduleParameters": "optim.learning_rates",
            "PipelineParallelConfigMixin": "config.parallel_parameters",
            "PipelineParallelMixin": "trainer.mixins.pipeline_parallel",
            "PipelineParallelParameters": "config.parallel_parameters",
            "SetupConfigMixin": "config.device_parameters",
            "SetupMixin": "trainer.mixins.setup",
            "TensorParallelConfigMixin": "config.parallel_parameters",
            "TensorParallelMixin": "trainer.mixins.tensor_parallel",
            "TensorParallelParameters": "config.parallel_parameters",
            "TrainingParameters": "config.training_parameters",
            "MLflowParameters": "config.logger_parameters",
            "TrackioParameters": "config.logger_parameters",
            "WandbParameters": "config.logger_parameters",
            "build_optimizer": "optim.optimizers",
            "build_optimizers": "optim.optimizers",
            "TokenAxis": "optim.learning_rates",
            "build_schedule": "optim.learning_rates",
            "build_schedules": "optim.learning_rates",
            "freeze": "optim.groups",
            "load_adapters": "weights.adapters",
            "load_base_weights": "weights.adapters",
            "load_weights": "weights.load",
            "parameter_groups": "optim.groups",
            "push_to_hub": "weights.hub",
        },
        packages=("callbacks", "config", "data", "errors", "loggers", "modules", "optim", "simple"),
    )
