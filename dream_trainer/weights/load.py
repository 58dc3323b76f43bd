"""Loading weights from a file into an existing model: names are matched on all ranks before anything is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dream_trainer.checkpoint.blocks import Part, WeightFiles, part_of
from dream_trainer.checkpoint.model_state import EXTRA_STATE, stored_in_place
from dream_trainer.checks import listed
from dream_trainer.compat.compiler import compiled_original
from dream_trainer.compat.pytorch import OfTensors, local_tensor
from dream_trainer.distributed.ranks import Ranks, from_all_ranks, on_all_ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.parallel.sharding import names_in_whole
from dream_trainer.screen import logger
from dream_trainer.stores.store_path import as_path
from dream_trainer.weights.weight_files import open_weights, renamer

_LISTED = 20


@dataclass(frozen=True)
class LoadReport:
    """Report of `load_weights`, by the names of the model's `state_dict()`; for all ranks together."""

    loaded: tuple[str, ...]
    """Filled from the file. A tied tensor appears under each of its names."""
    missing: tuple[str, ...]
    """In the model and not in the file: these keep the values they had."""
    unexpected: tuple[str, ...]
    """In the file, after the renames, and not in the model."""
    mismatched: Mapping[str, str]
    """In both but not loaded, each with the reason, such as the two shapes."""

    @property
    def is_complete(self) -> bool:
        """Whether file and model have the same names and shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        total = len({*self.loaded, *self.missing, *self.mismatched})
        return "\n  ".join([f"{len(self.loaded)} of the model's {total} tensors loaded", *_problems(self)])


def _problems(report: LoadReport) -> list[str]:
    reasons = tuple(f"{name} ({reason})" for name, reason in report.mismatched.items())
    found = {"missing (not in the file)": report.missing, "unexpected (not in the model)": report.unexpected}
    found["mismatched"] = reasons
    return [f"{len(names)} {kind}: {listed(names, _LISTED)}" for kind, names in found.items() if names]


def merged(reports: Sequence[LoadReport]) -> LoadReport:
    """One report of all ranks. With stages each rank has other names: unexpected is only what no rank expects."""
    missing = tuple(dict.fromkeys(name for report in reports for name in report.missing))
    mismatched = {name: reason for report in reports for name, reason in report.mismatched.items()}
    failed = {*missing, *mismatched}
    loaded = dict.fromkeys(name for report in reports for name in report.loaded if name not in failed)
    nowhere = set.intersection(*(set(report.unexpected) for report in reports))
    unexpected = tuple(name for name in reports[0].unexpected if name in nowhere)
    return LoadReport(tuple(loaded), missing, unexpected, mismatched)


def refusal(report: LoadReport) -> str:
    what = "it does not fit the model" if report.loaded else "nothing in it fits the model"
    advice = rename_hint(report)
    if not advice:
        ways = ["use renames to turn the file's names into the model's"] if report.missing and report.unexpected else []
        ways += ["use strict=False to load what fits"] if report.loaded else []
        advice = (", or ".join(ways) or "is it a file of this model").capitalize() + ("." if ways else "?")
        if report.missing and report.unexpected:
            advice += (
                " If the model's own load_state_dict translates these names (fused or packed weights), call it or "
                "from_pretrained in configure_models."
            )
    return "\n  ".join([f"{what}; nothing was written.", *_problems(report), advice])


def rename_hint(report: LoadReport) -> str:
    """The rename that would match most of the names that do not fit, by adding or removing one prefix; "" if none."""
    missing, unexpected = set(report.missing), set(report.unexpected)
    counts: Counter[tuple[str, str]] = Counter()
    for name in unexpected:
        for prefix, rest in _splits(name):
            counts["^" + re.escape(prefix), ""] += rest in missing
    for name in missing:
        for prefix, rest in _splits(name):
            counts["^", prefix] += rest in unexpected
    if not counts:
        return ""
    (pattern, replacement), matches = counts.most_common(1)[0]
    if 2 * matches < min(len(missing), len(unexpected)) or not matches:
        return ""
    if replacement == "base_model.model.":
        return "The model has peft's adapters: use load_base_weights."
    return f"Adding renames={{{pattern!r}: {replacement!r}}} would match {matches} of them."


def _splits(name: str) -> Iterable[tuple[str, str]]:
    parts = name.split(".")
    return ((".".join(parts[:at]) + ".", ".".join(parts[at:])) for at in range(1, len(parts)))


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    model_name: str | None = None,
    renames: Mapping[str, str] | None = None,
    strict: bool = True,
    optional: Collection[str] = (),
    world: Ranks | None = None,
) -> LoadReport:
    """Fills a model's parameters and persistent buffers in place from a file or directory. Every rank calls this.

    The model is on its device (not on meta) and may be sharded in any way; call this from the trainer's
    `load_pretrained`. Each rank reads what its shards need, about one tensor at a time. Values are cast to the model's
    dtypes; shapes must be equal. Of tied tensors one name in the file is enough. Extra state of modules is not changed.
    No code in the files is run.

    Args:
        model: The model to load into. If it was compiled by `torch.compile`, the original is used.
        path: A Hugging Face directory (safetensors, sharded or not, or `pytorch_model.bin`), a `.safetensors` file, an
            `*.index.json`, a `.pt`, `.pth`, `.bin` or `.ckpt` file with a state dict (bare, or under "state_dict",
            "model_state_dict" or "model"), a `step_*` directory of Dream Trainer, or a DCP directory (only its tensors
            are read).
        model_name: Which model of a Dream Trainer checkpoint; needed if it has several. Ignored for other files.
        renames: Regular expressions and their replacements for `re.sub`, applied to each of the file's names in this
            order: `{r"^transformer\\.": ""}`. A name that becomes empty is left out.
        strict: Whether every name must be in both, with equal shapes. If not, matching tensors are loaded, and others
            are reported and logged as a warning on rank 0.
        optional: Names of the model that the file need not have, such as those of a new head; they keep their values.
        world: The ranks. Default: those of the default process group, or only this process without one.

    Returns:
        The loaded and the missing tensors.

    Raises:
        CheckpointError: The file is missing, damaged, of an unknown kind or asks for code; or it does not fit and
            `strict` is set; or nothing in it fits. The same on every rank, and nothing was written (unless damage was
            found only in the middle of reading).
        ConfigError: `renames` has a faulty regular expression or replacement.
    """
    path = as_path(path).expanduser()
    rename = renamer(renames)
    world = world or Ranks.of_default_group()
    task = f"load weights from {path}"

    def match() -> tuple[WeightFiles, Sequence[_Target], LoadReport]:
        files = open_weights(path, model_name)
        sources = rename(name for name in files.shapes if name.rpartition(".")[2] != EXTRA_STATE)
        return files, *_matched(compiled_original(model) or model, files, sources, optional)

    files, targets, own_report = on_all_ranks(world, task, match)
    report = merged(world.all_gather_object(own_report))
    if not report.loaded or (strict and not report.is_complete):
        raise CheckpointError(f"Could not {task}: {refusal(report)}")
    # The files that any rank will read from are divided among the ranks: each is hashed once.
    boxes = {target.source: target.part.box for target in targets if local_tensor(target.tensor).numel()}
    of_ranks = from_all_ranks(world, task, lambda: files.checksums(boxes))
    entries = {file: entry for of_rank in of_ranks for file, entry in of_rank.items()}

    def verify() -> None:
        for file in sorted(entries)[world.rank :: world.world_size]:
            entries[file].verify(file)

    on_all_ranks(world, task, verify)
    on_all_ranks(world, task, lambda: _fill(files, targets))
    for target in targets:
        _origins[target.tensor] = Origin(str(path.resolve()), target.source)
    if world.is_main and not report.is_complete:
        messages = filter(None, (str(report), rename_hint(report)))
        logger.warning("%s fits the model in part: %s", path, "\n  ".join(messages))
    return report


class Origin(NamedTuple):
    path: str  # what was loaded, as an absolute path
    name: str  # the tensor's name there


_origins: MutableMapping[Tensor, Origin] = OfTensors()


def origin_of(tensor: Tensor) -> Origin | None:
    """Where `tensor` was filled from last; None if not by `load_weights`."""
    return _origins.get(tensor)


# -- which of the file's tensors goes where


class _Target(NamedTuple):
    source: str  # the name of a tensor in the file
    tensor: Tensor  # of the model
    part: Part

    def read(self, files: WeightFiles, source: str) -> Tensor:
        return self.part.of(files.read(source, self.part.box))


def _matched(
    model: nn.Module, files: WeightFiles, sources: Mapping[str, str], optional: Collection[str]
) -> tuple[Sequence[_Target], LoadReport]:
    # Parameters and persistent buffers under all their names, also those that other stages have.
    tensors = stored_in_place(model, "the model")
    for name, value in tensors.items():
        if value.is_meta:
            raise CheckpointError(f"{name} of the model is on the meta device. Load in load_pretrained(), not before.")
    for name, every in names_in_whole(model).items():
        tensors |= dict.fromkeys(every, tensors[name])
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    targets, loaded, missing, mismatched = [], list[str](), list[str](), dict[str, str]()
    for names in names_of.values():
        tensor = tensors[names[0]]
        fitting = []
        for name in (name for name in names if name in sources):
            shape = files.shapes[sources[name]]
            if shape == tuple(tensor.shape):
                fitting.append(name)
            else:
                mismatched[name] = f"{shape} in the file, {tuple(tensor.shape)} in the model"
        if fitting:
            target = _Target(sources[fitting[0]], tensor, part_of(tensor))
            targets.append(target)
            for other in fitting[1:]:
                pair = (target.source, sources[other]) if local_tensor(tensor).numel() else ()
                values = [target.read(files, source).to(tensor.dtype) for source in pair]
                if values and not torch.equal(*values):
                    mismatched[other] = f"tied to {fitting[0]} in the model, and with other values in the file"
            loaded += [name for name in names if name not in mismatched]
        elif not any(name in mismatched for name in names):
            missing += [name for name in names if name not in optional]
    unexpected = tuple(name for name in sources if name not in tensors)
    return targets, LoadReport(tuple(loaded), tuple(missing), unexpected, mismatched)


@torch.no_grad()
def _fill(files: WeightFiles, targets: Sequence[_Target]) -> None:
    for target in targets:
        local = local_tensor(target.tensor)
        if local.numel():
            local.copy_(target.read(files, target.source))
