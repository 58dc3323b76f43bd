"""Configs: dataclasses that are validated when built, and their ways to a dict, a file and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.config.command_line import parse as parse
    from dream_trainer.config.config_files import load_config as load_config
    from dream_trainer.config.device_parameters import DeviceParameters as DeviceParameters
    from dream_trainer.config.device_parameters import MeshShape as MeshShape
    from dream_trainer.config.device_parameters import resolve_mesh as resolve_mesh
    from dream_trainer.config.serialize import difference as difference
    from dream_trainer.config.serialize import from_dict as from_dict
    from dream_trainer.config.serialize import to_dict as to_dict
    from dream_trainer.config.trainer_config import BaseTrainerConfig as BaseTrainerConfig
    from dream_trainer.config.trainer_config import check_config as check_config
    from dream_trainer.config.training_parameters import TrainingParameters as TrainingParameters
    from dream_trainer.config.training_parameters import accumulation_steps as accumulation_steps
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "BaseTrainerConfig": "config.trainer_config",
            "DeviceParameters": "config.device_parameters",
            "MeshShape": "config.device_parameters",
            "TrainingParameters": "config.training_parameters",
            "accumulation_steps": "config.training_parameters",
            "check_config": "config.trainer_config",
            "difference": "config.serialize",
            "from_dict": "config.serialize",
            "load_config": "config.config_files",
            "parse": "config.command_line",
            "resolve_mesh": "config.device_parameters",
            "to_dict": "config.serialize",
        },
    )
