"""`checkpoints show`: what one checkpoint holds."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dream_trainer.callbacks.tables import print_table
from dream_trainer.checkpoint.loading import read_shared
from dream_trainer.checkpoint.lookup import find_checkpoint
from dream_trainer.cli.output import age_cell, described, mesh_cell, number_cell, print_json
from dream_trainer.cli.runs import directory_size
from dream_trainer.config.serialize import leaves
from dream_trainer.loggers.formatting import format_bytes, format_count
from dream_trainer.weights.export import model_names
from dream_trainer.weights.safetensors_file import TensorSpec
from dream_trainer.weights.stored_tensors import StoredTensors


def show(path: Path, step: int | None, *, tensors: bool, as_json: bool) -> int:
    """Shows one checkpoint; returns the exit code."""
    stored = StoredTensors(find_checkpoint(path, step))
    manifest, shared = stored.manifest, read_shared(stored.manifest.path)
    groups = _groups(stored, shared)
    if as_json:
        print_json(_show_record(stored, groups))
        return 0
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.wall_time))
    facts = [
        ["step", str(manifest.step)],
        ["epoch", str(manifest.epoch)],
        ["samples", f"{manifest.samples_seen:,}"],
        ["written", f"{written} ({age_cell(manifest.wall_time)} ago)"],
        ["size", f"{format_bytes(directory_size(manifest.path))} in {len(manifest.files) + 1} files"],
        ["ranks", str(manifest.world_size)],
        ["mesh", mesh_cell(manifest.mesh_shape)],
        *([name, version] for name, version in manifest.versions.items()),
    ]
    print_table(str(manifest.path), [], facts)
    if manifest.metrics:
        print_table("metrics", [], [[name, number_cell(value)] for name, value in manifest.metrics.items()])
    rows = [[name, str(len(specs)), _elements(specs), format_bytes(_bytes(specs))] for name, specs in groups.items()]
    print_table("holds", ["", "tensors", "elements", "size"], rows)
    if tensors:
        listed = [[name, str(list(spec.shape)), _dtype(spec)] for name, spec in stored.specs.items()]
        print_table("tensors", ["name", "shape", "dtype"], listed)
    config = [[name, str(value)] for name, value in leaves(manifest.config)]
    if config:
        print_table("config", [], config)
    return 0


def _show_record(stored: StoredTensors, groups: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "path": manifest.path,
        "step": manifest.step,
        **described(manifest),
        "holds": {
            name: {"tensors": len(specs), "bytes": _bytes(specs), "elements": _count(specs)}
            for name, specs in groups.items()
        },
        "tensors": {name: {"shape": spec.shape, "dtype": _dtype(spec)} for name, spec in stored.specs.items()},
        "files": {name: vars(entry) for name, entry in manifest.files.items()},
        "config": manifest.config,
    }


def _groups(stored: StoredTensors, shared: Mapping[str, Any]) -> dict[str, dict[str, TensorSpec]]:
    """The tensors by whose they are: `model net`, `optimizer adam`, `callback EMA 0`."""
    owners = {f"models.{name}.": f"model {name}" for name in model_names(stored, shared)}
    for name in shared.get("optimizers", {}):  # with "/", what lies beside its parameters' state
        owners |= {f"optimizers.{name}.": f"optimizer {name}", f"optimizers.{name}/": f"optimizer {name}"}
    groups: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in stored.specs.items():
        callback = re.match(r"callbacks\.(\w+)\.(\d+)\.", name)
        shared_name = re.sub(r"^ranks\.\d+\.", "", name)
        known = next((owner for prefix, owner in owners.items() if shared_name.startswith(prefix)), "other")
        owner = f"callback {callback[1]} {callback[2]}" if callback else known
        groups.setdefault(owner, {})[name] = spec
    return groups


def _count(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.nbytes // spec.dtype.itemsize for spec in specs.values())


def _elements(specs: Mapping[str, TensorSpec]) -> str:
    return format_count(_count(specs))


def _bytes(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs.values())


def _dtype(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")
