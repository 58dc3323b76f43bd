"""The state of torchmetrics' metrics that training updates, in checkpoints: each rank saves its own.

When the number of ranks has changed, each former rank's state goes to one rank, which combines those it gets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dream_trainer.modules.metrics import parts

PREFIX = "metrics."
"""Tensor names are `metrics.<metric>.<number of the part>.<state>`; entries of a list state `....<state>.<number>`."""

State = tuple[dict[str, Any], Mapping[str, Tensor]]


def metric_state(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """The record of this rank's metrics, copies of their tensors, and names that are left out, having others' state."""
    described: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    left_out = []
    for name, metric in metrics.items():
        if isinstance(metric, sys.modules["torchmetrics"].MetricCollection):
            list(metric.values(copy_state=False))  # members that share a state get it only when asked for
        states = [part.metric_state for part in parts(metric)]
        entries = [entry for state in states for value in state.values() for entry in _entries(value)]
        if not all(isinstance(entry, Tensor) for entry in entries):
            left_out.append(name)
            continue
        described[name] = [
            {
                "updates": part.update_count,
                "states": {key: len(value) if isinstance(value, list) else None for key, value in state.items()},
            }
            for part, state in zip(parts(metric), states, strict=True)
        ]
        for number, state in enumerate(states):
            for key, value in state.items():
                prefix = f"{PREFIX}{name}.{number}.{key}"
                names = [f"{prefix}.{index}" for index in range(len(value))] if isinstance(value, list) else [prefix]
                copies = [entry.detach().clone() for entry in _entries(value)]
                tensors |= zip(names, copies, strict=True)
    return described, tensors, left_out


def load_metric_state(metrics: Mapping[str, Any], saved: list[State]) -> list[str]:
    """Loads the combined state of former ranks; returns the names of metrics that start from zero instead."""
    lost = {name for described, _ in saved for name in described} - metrics.keys()
    for name, metric in metrics.items():
        states = [(described[name], tensors) for described, tensors in saved if name in described]
        metric_parts = parts(metric)
        fits = all(
            [entry["states"].keys() for entry in described] == [part.metric_state.keys() for part in metric_parts]
            for described, _ in states
        )
        joins = len(states) == 1 or all(
            part._reductions[key] in _ways() for part in metric_parts for key in part.metric_state
        )
        if states and not (fits and joins):
            lost.add(name)
            continue
        for number, part in enumerate(metric_parts if states else ()):
            _load_part(part, f"{PREFIX}{name}.{number}.", [(entry[number], tensors) for entry, tensors in states])
    return sorted(lost)


def _load_part(part: Any, prefix: str, states: list[State]) -> None:
    part.reset()
    for key in part.metric_state:
        values: list[Any] = []
        for described, tensors in states:
            length = described["states"][key]
            if length is None:
                values.append(tensors[f"{prefix}{key}"].to(part.device))
            else:
                values.append([tensors[f"{prefix}{key}.{index}"].to(part.device) for index in range(length)])
        value = values[0]
        for other in values[1:]:
            value = _ways()[part._reductions[key]](value, other)
        setattr(part, key, value)
    part._update_count = sum(described["updates"] for described, _ in states)


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _ways() -> dict[Any, Callable[[Any, Any], Any]]:
    """Maps a metric's reduction functions to functions that combine two ranks' states."""
    utilities = sys.modules["torchmetrics"].utilities.data
    return {
        utilities.dim_zero_sum: torch.add,
        utilities.dim_zero_max: torch.maximum,
        utilities.dim_zero_min: torch.minimum,
        utilities.dim_zero_cat: lambda one, other: (
            one + other if isinstance(one, list) else torch.cat([torch.atleast_1d(one), torch.atleast_1d(other)])
        ),
    }
