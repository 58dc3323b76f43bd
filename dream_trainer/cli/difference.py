"""`checkpoints diff`: what two checkpoints have and do not have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dream_trainer.callbacks.tables import print_table
from dream_trainer.checkpoint.lookup import find_checkpoint
from dream_trainer.cli.output import mesh_cell, number_cell, print_json
from dream_trainer.config.serialize import difference
from dream_trainer.weights.stored_tensors import StoredTensors

SHOWN = 30
"""Tensors listed in a table; JSON has all."""

_TENSOR_DIFFERENCES = ("only_in_a", "only_in_b", "other_kind", "max_difference")
_CHUNK = 1 << 24  # elements compared at once, so that float64 copies stay small


def diff(a: Path, b: Path, *, values: bool, as_json: bool) -> int:
    """Compares two checkpoints; returns the exit code, 1 if they differ."""
    first, second = (StoredTensors(find_checkpoint(path)) for path in (a, b))
    tensors = _tensor_difference(first, second, values=values)
    differences = {
        "a": first.manifest.path,
        "b": second.manifest.path,
        "manifest": _manifest_difference(first, second),
        "metrics": _metrics_difference(first.manifest.metrics, second.manifest.metrics),
        "config": difference(first.manifest.config, second.manifest.config),
        "tensors": tensors,
    }
    if as_json:
        print_json(differences)
    else:
        _print(differences)
    shown = (*(differences[name] for name in ("manifest", "metrics", "config")), *map(tensors.get, _TENSOR_DIFFERENCES))
    return int(any(shown))


def _manifest_difference(first: StoredTensors, second: StoredTensors) -> dict[str, list[Any]]:
    a, b = vars(first.manifest), vars(second.manifest)
    names = ("step", "epoch", "samples_seen", "world_size", "mesh_shape", "versions")
    return {name: [a[name], b[name]] for name in names if a[name] != b[name]}


def _metrics_difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys([*a, *b])
    return {name: [a.get(name), b.get(name)] for name in names if repr(a.get(name)) != repr(b.get(name))}  # NaN is NaN


def _tensor_difference(first: StoredTensors, second: StoredTensors, *, values: bool) -> dict[str, Any]:
    common = [name for name in first.specs if name in second.specs]
    alike = [name for name in common if first.specs[name] == second.specs[name]]
    changed = {}
    for name in alike if values else []:
        distance = max_difference(first.read(name), second.read(name))
        if distance is not None:
            changed[name] = distance
    return {
        "only_in_a": [name for name in first.specs if name not in second.specs],
        "only_in_b": [name for name in second.specs if name not in first.specs],
        "other_kind": {name: [_kind(first, name), _kind(second, name)] for name in common if name not in alike},
        "same_kind": len(alike),
        "equal": len(alike) - len(changed) if values else None,
        "max_difference": changed if values else None,
    }


def max_difference(a: Tensor, b: Tensor) -> float | None:
    """The largest absolute difference of two tensors of one shape and dtype; None if they are equal bit for bit.

    Equal infinities and NaN opposite NaN differ by 0; NaN opposite a number makes the result NaN.
    """
    a, b = a.reshape(-1), b.reshape(-1)
    if a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    kind = torch.complex128 if a.is_complex() else torch.float64
    worst = 0.0
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.to(kind), y.to(kind)
        same = (x == y) | (x.isnan() & y.isnan())
        largest = float(torch.where(same, 0.0, (x - y).abs()).max())
        if math.isnan(largest):
            return math.nan
        worst = max(worst, largest)
    return worst


def _kind(stored: StoredTensors, name: str) -> str:
    spec = stored.specs[name]
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"


def _print(found: dict[str, Any]) -> None:
    print(f"a: {found['a']}\nb: {found['b']}")
    facts = [[name, _cell(name, a), _cell(name, b)] for name, (a, b) in found["manifest"].items()]
    facts += [[name, number_cell(a), number_cell(b)] for name, (a, b) in found["metrics"].items()]
    if facts:
        print_table("different", ["", "a", "b"], facts)
    if found["config"]:
        print("config")
        for line in found["config"]:
            print(f"  {line}")
    tensors = found["tensors"]
    for key, title in (("only_in_a", "tensors only in a"), ("only_in_b", "tensors only in b")):
        if tensors[key]:
            print(title)
            for name in tensors[key]:
                print(f"  {name}")
    if tensors["other_kind"]:
        rows = [[name, a, b] for name, (a, b) in tensors["other_kind"].items()]
        print_table("tensors of another shape or dtype", ["name", "a", "b"], rows)
    _print_values(tensors)


def _print_values(tensors: dict[str, Any]) -> None:
    changed = tensors["max_difference"]
    if changed is None:
        print(f"{tensors['same_kind']} tensors have the same name, shape and dtype; values were not compared")
        return
    if changed:
        # NaN is what one looks for, then weights: the optimizers' step counters would hide them.
        ordered = sorted(
            changed.items(), key=lambda item: (not math.isnan(item[1]), not item[0].startswith("models."), -item[1])
        )
        rows = [[name, number_cell(distance)] for name, distance in ordered[:SHOWN]]
        print_table("values", ["name", "largest absolute difference"], rows)
        if len(ordered) > SHOWN:
            print(f"  and {len(ordered) - SHOWN} more; --json lists all")
    print(f"{tensors['equal']} of {tensors['same_kind']} tensors that both have are equal bit for bit")


def _cell(name: str, value: Any) -> str:
    if name == "mesh_shape":
        return mesh_cell(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
