"""What training may change of models beside values: which parameters learn, modes of modules, and shapes of buffers.

A resume restores what training had changed since its setup. Where the setups differ, this run's holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dream_trainer.checkpoint.model_state import model_buffers, model_parameters
from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import gathered_twins, is_dtensor
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.parallel.sharding import fsdp_modules

logger = logging.getLogger("dream_trainer")

_LISTED = 5


class ModelForm:
    """The form of a run's models, compared with that of its setup."""

    def __init__(self) -> None:
        self._learned: dict[str, bool] = {}
        self._trained: dict[str, bool] = {}
        self._shapes: dict[str, torch.Size] = {}

    def note(self, models: Mapping[str, nn.Module]) -> None:
        """The setup is over, and nothing is resumed yet."""
        self._learned, self._trained, self._shapes = _learning(models), _modes(models), _shapes(models)

    def state(self, models: Mapping[str, nn.Module], world: Ranks) -> dict[str, Any]:
        """The form, and what of it has changed since the setup, as lists of names for a checkpoint; a collective."""
        learned, trained = _learning(models), _modes(models) if world.stages == 1 else {}
        own = {
            "frozen": [name for name, learns in learned.items() if not learns],
            "evaluating": [name for name, trains in trained.items() if not trains],
            "thawed": _changed(learned, self._learned),
            "switched": _changed(trained, self._trained),
            "reshaped": _changed(_shapes(models), self._shapes),
        }
        if world.stages > 1:  # each knows of its own
            of_ranks = world.all_gather_object(own)
            return {key: sorted({name for of_rank in of_ranks for name in of_rank[key]}) for key in own}
        reshaped = {name for of_rank in world.all_gather_object(own["reshaped"]) for name in of_rank}
        return own | {"reshaped": sorted(reshaped)}

    def reshaped(self, models: Mapping[str, nn.Module], saved: Mapping[str, Any]) -> set[str]:
        """The buffers that training has given another shape, here or in the run that wrote `saved`."""
        return {*saved.get("reshaped", ()), *_changed(_shapes(models), self._shapes)}

    def restore(self, models: Mapping[str, nn.Module], saved: Mapping[str, Any], world: Ranks) -> None:
        if not saved:
            return
        parameters, modules = model_parameters(models), _modules(models) if world.stages == 1 else {}
        frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
        learned, trained = _learning(models), _modes(models)
        thawed = {*saved["thawed"], *_changed(learned, self._learned)}
        switched = {*saved["switched"], *_changed(trained, self._trained)}
        differing = [name for name in parameters if learned[name] is (name in frozen)]
        for name in differing:
            if name in thawed:
                parameters[name].requires_grad_(name not in frozen)
        for module in (wrapped for model in models.values() for wrapped in fsdp_modules(model)):
            for sharded, gathered in gathered_twins(module):
                gathered.requires_grad_(sharded.requires_grad)
        modes = [name for name in modules if trained[name] is (name in evaluating) and name in switched]
        for name in modes:
            modules[name].training = name not in evaluating
        if world.is_main:
            restored = {
                "trainable": [name for name in differing if name in thawed - frozen],
                "frozen": [name for name in differing if name in thawed & frozen],
                "in training mode": [name for name in modes if name not in evaluating],
                "in eval mode": [name for name in modes if name in evaluating],
            }
            left = {
                "frozen in the checkpoint and trainable here": [name for name in differing if name in frozen - thawed],
                "trainable in the checkpoint and frozen here": [n for n in differing if n not in frozen | thawed],
            }
            if told := _told(restored):
                logger.info("as training had changed it before the checkpoint, %s", told)
            if told := _told(left):
                logger.warning(
                    "requires_grad is as this run's setup has it, and was not so in the checkpoint: %s", told
                )


def _learning(models: Mapping[str, nn.Module]) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model_parameters(models).items()}


def _modules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        f"models.{model_name}.{name}".rstrip("."): module
        for model_name, model in models.items()
        for name, module in model.named_modules()
    }


def _modes(models: Mapping[str, nn.Module]) -> dict[str, bool]:
    return {name: module.training for name, module in _modules(models).items()}


def _shapes(models: Mapping[str, nn.Module]) -> dict[str, torch.Size]:
    return {name: buffer.shape for name, buffer in model_buffers(models).items() if not is_dtensor(buffer)}


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return [name for name, value in now.items() if name in before and before[name] != value]


def _told(names_by_form: Mapping[str, Sequence[str]]) -> str:
    """The forms that some parameters or modules have, each with their names; "" if there are none."""
    short = {form: [name.removeprefix("models.") for name in names] for form, names in names_by_form.items()}
    return "; ".join(f"{form}: {listed(names, _LISTED)}" for form, names in short.items() if names)
