"""The states of the process's random generators: python, numpy, torch on the CPU, and torch on the device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dream_trainer.compat.pytorch import default_generator_of
from dream_trainer.distributed.seeds import undisturbed_cpu_state
from dream_trainer.errors import CheckpointError

_PREFIX = "random."


def random_state(device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The global generators' states for typed JSON, and as byte tensors by name, read without drawing."""
    torch_state, python_state, numpy_state = undisturbed_cpu_state()
    tensors = {f"{_PREFIX}{kind}": generator.get_state() for kind, generator in _generators(device).items()}
    state = {"python": python_state, "numpy": numpy_state or np.random.get_state(legacy=False)}
    return state, tensors | {f"{_PREFIX}cpu": torch_state}


def set_random_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the global generators to what `random_state` returned, or raises if it is of another kind of device."""
    generators = _generators(device)
    saved = {name.removeprefix(_PREFIX) for name in tensors if name.startswith(_PREFIX)}
    if saved != set(generators):
        raise CheckpointError(
            f"The random states are of {sorted(saved)}, and this rank draws on {sorted(generators)}. "
            "Resume on the same kind of device, or reseed."
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    for kind, generator in generators.items():
        generator.set_state(tensors[f"{_PREFIX}{kind}"].cpu())


def _generators(device: torch.device) -> dict[str, torch.Generator]:
    cpu = torch.device("cpu")
    return {kind.type: default_generator_of(kind) for kind in (cpu, device)}
