"""Configs: dataclasses that are validated when built, and their ways to a dict, a file and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.config.command_line import parse as parse
    from dream_trainer.config.config_files import load_config as load_config
    from dream_trainer.config.device_parameters import DeviceParameters as DeviceParameters
    from dream_trainer.config.serialize import difference as difference, from_dict as from_dict, to_dict as to_dict
    from dream_trainer.config.trainer_config import BaseTrainerConfig as BaseTrainerConfig
    from dream_trainer.config.training_parameters import TrainingParameters as TrainingParameters
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
