"""Finds differences in what must be equal on all ranks: config, modules, data, optimizers and state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch.nn as nn
from torch import Tensor

from dream_trainer.checkpoint.optimizer_state import MACHINE_OPTIONS
from dream_trainer.checks import listed
from dream_trainer.data.loader import ShardReader, loader_batch_size, training_loaders
from dream_trainer.data.probe import Summary, differing, probed
from dream_trainer.distributed.ranks import Ranks, plain_facts, refuse_differences, refuse_unlike
from dream_trainer.errors import RanksDifferError
from dream_trainer.trainer.runtime import Runtime

T = TypeVar("T")

_MAY_DIFFER = frozenset(
    "device start_timeout_seconds step_timeout_seconds hang_timeout_seconds host_timeout_seconds directory init_from "
    "init_renames loggers wandb mlflow trackio".split()
)

_IN_ONE_ORDER = (
    "Build them in one order on every rank: iterate over a list or sorted(...), not over a set, whose order differs "
    "between processes."
)

_DIFFERENT_BUFFERS = "buffers of ranks"
_ROUNDING = 1e-5  # ranks may add up in other orders, in float32


def refuse_different_configs(runtime: Runtime) -> None:
    """Compares the seed and the parameters of the framework's own parts; a collective."""
    facts = {"seed": repr(runtime.config.seed)}
    for part in fields(runtime.config):
        value = vars(runtime.config)[part.name]
        if is_dataclass(value) and type(value).__module__.startswith("dream_trainer."):
            compared = {name: item for name, item in vars(value).items() if name not in _MAY_DIFFER}
            facts |= plain_facts(part.name, compared)
    refuse_differences(runtime.world, facts, "Build the config from the same values on every rank.")


def refuse_different_modules(world: Ranks, kind: str, modules: Mapping[str, nn.Module]) -> None:
    """Compares names, order and classes of modules, and names, shapes and types of tensors; a collective."""
    if world.world_size == 1:
        return
    facts = {kind: ", ".join(modules)}
    for name, module in modules.items():
        parts: dict[str, Iterable[str]] = {
            "parameter": (_described(path, tensor) for path, tensor in module.named_parameters()),
            "buffer": (_described(path, tensor) for path, tensor in module.named_buffers()),
            "module": (f"{path}: {type(part).__name__}" for path, part in module.named_modules()),
        }
        for part, described in parts.items():
            facts |= {f"{part} {index} of self.{name}": of_one for index, of_one in enumerate(described)}
    refuse_differences(world, facts, _IN_ONE_ORDER)


def _described(path: str, tensor: Tensor) -> str:
    of_type = f"{path} {str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"
    return of_type if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else f"{of_type}, frozen"


def agree_on_data(runtime: Runtime) -> int | None:
    """Compares loaders and dealt datasets; a collective. Returns the fewest windows of a pass, if all know it."""
    stream, world = runtime.data.stream, runtime.world
    assert stream is not None  # connect_data has just set it
    if world.world_size == 1:
        return stream.steps_per_epoch
    readers = _by_kind(
        {name: part.reader for name, part in stream.parts.items()},
        {name: batches.reader for name, batches in runtime.data.validation.items()},
    )
    known = {name: reader for name, reader in readers.items() if reader is not None}
    state = runtime.state
    facts: dict[str, Any] = {
        "training loaders": ", ".join(map(repr, stream.parts)),
        "validation loaders": ", ".join(map(repr, state.val_dataloaders)) or "none",
        "gradient accumulation": state.accumulation_steps,
    }
    for name, loader in _by_kind(training_loaders(state.train_dataloader), state.val_dataloaders).items():
        reader = readers.get(name)  # none of a loader whose first batches are overfitted
        facts[f"{name} loader: kind"] = type(loader).__name__
        loader_facts = {"batch size": loader_batch_size(loader)} if reader is None else reader.facts
        facts |= {f"{name} loader: {key}": value for key, value in loader_facts.items()}
    facts |= {f"training loader: {key}": value for key, value in stream.facts.items()}
    facts = {name: str(value) for name, value in facts.items()}
    data_of_ranks = world.all_gather_object((facts, stream.steps_per_epoch, probed(known)))
    refuse_unlike(
        {rank: facts for rank, (facts, _, _) in enumerate(data_of_ranks)},
        "The trainer deals one dataset to all ranks: give each the whole of it, with the same options. If it was "
        "already split by rank, wrap a loader over this rank's part in PerRankLoader.",
    )
    _refuse_other_samples(runtime, known, [summaries for _, _, summaries in data_of_ranks])
    steps = [count for _, count, _ in data_of_ranks]
    return None if None in steps else min(steps)


def _by_kind(training: Mapping[str, T], validation: Mapping[str, T]) -> dict[str, T]:
    kinds = {"training": training, "validation": validation}
    return {f"{kind} {name!r}" if name else kind: one for kind, named in kinds.items() for name, one in named.items()}


def _refuse_other_samples(
    runtime: Runtime, readers: Mapping[str, ShardReader], summaries_of_ranks: list[dict[str, list[Summary]]]
) -> None:
    """Raises if the ranks' samples differ; values that a rank draws again each time it is asked are not compared."""
    for name, reader in readers.items():
        by_sample = list(zip(*(summaries[name] for summaries in summaries_of_ranks), strict=True))
        if not any(differing(summaries_of_sample) for summaries_of_sample in by_sample):
            continue
        # Twice in one process: a worker begins with its generators where the last one did.
        twice = probed({name: reader}, times=2)[name]
        drawn_here = [
            [part for part in one.keys() | other.keys() if one.get(part) != other.get(part)]
            for one, other in zip(twice[::2], twice[1::2], strict=True)
        ]
        drawn_on_ranks = runtime.world.all_gather_object(drawn_here)
        for index, summaries_of_sample in enumerate(by_sample):
            unsure = {part for rank in drawn_on_ranks for part in rank[index]}
            steady = {part: rank for part, rank in differing(summaries_of_sample).items() if part not in unsure}
            if not steady or any(not summary for summary in summaries_of_sample):
                continue
            dataset, (part, rank) = reader.loader.dataset, next(iter(steady.items()))
            raise RanksDifferError(
                f"sample {index and len(dataset) - 1} of the dataset of {name} ({type(dataset).__name__}) is another "
                f"one on rank {rank} than on rank 0 (in {part}). The trainer deals one dataset to all ranks: give each "
                "the whole of it in the same order, or wrap a loader over this rank's part in PerRankLoader. Draw "
                "augmentation from the global generators, which are seeded for each sample."
            )


def refuse_different_optimizers(runtime: Runtime) -> None:
    """Compares optimizers, their options and the order of their parameters, and schedulers; a collective."""
    names = runtime.registry.parameter_names()
    facts: dict[str, Any] = {"total_steps": runtime.state.total_steps}
    order: dict[str, str] = {}
    for name, optimizer in runtime.registry.optimizers().items():
        facts[f"optimizer {name!r}: class"] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            prefix = f"optimizer {name!r}, group {index}"
            for key, value in group.items():
                if key not in MACHINE_OPTIONS:
                    facts |= plain_facts(f"{prefix}: {key}", _number(value))
            of_group = enumerate(group["params"])
            order |= {f"{prefix}, parameter {place}": names.get(id(p), "of no model") for place, p in of_group}
    for name, scheduler in runtime.registry.schedulers().items():
        facts[f"scheduler {name!r}: class"] = type(scheduler).__name__
        for key, value in scheduler.state_dict().items():
            facts |= plain_facts(f"scheduler {name!r}: {key}", _number(value))
    advice = "Build them from the same values on every rank."
    if runtime.world.stages > 1:
        advice += " Stages need the same groups in the same order, if with other parameters."
    refuse_differences(runtime.world, facts, advice)
    refuse_differences(runtime.world, order, _IN_ONE_ORDER, among=runtime.world.stage_rank)


def agreed_metrics(world: Ranks, metrics: dict[str, float]) -> dict[str, float]:
    """A validation's values: rank 0's, if no rank's differ by more than rounding; a collective."""
    first, *others = of_ranks = world.all_gather_object(metrics)
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    apart = [name for name in names if not all(_is_close(first.get(name), other.get(name)) for other in others)]
    if apart:
        spelled = [{name: repr(value) for name, value in of_rank.items() if name in apart} for of_rank in of_ranks]
        refuse_unlike(
            dict(enumerate(spelled)),
            "A validation's values decide on all ranks at once. Have the metric compute over the samples of all ranks: "
            "keep what it counts in states of add_state(..., dist_reduce_fx=...) and leave sync_on_compute at True.",
        )
    return dict(first)


def warn_of_different_buffers(runtime: Runtime) -> None:
    """Compares the models' buffers across ranks with other data, until a warning has named some; a collective."""
    buffers = runtime.parallel.buffers
    if buffers is None or _DIFFERENT_BUFFERS in runtime.said_once:
        return
    names = buffers.different(runtime.world)
    if names:
        runtime.warn_once(
            _DIFFERENT_BUFFERS,
            f"buffers differ between data-parallel ranks: {listed(names, 10)}. Each rank validates with its own, and "
            f'rank 0\'s are saved. Choose how ranks join them in buffer_policies(), such as {{"{names[0]}": "mean"}} '
            'for running averages, "rank 0" for queues and integers, or "as is".',
        )


def warn_of_different_state(runtime: Runtime, digests: Mapping[str, str]) -> None:
    """Compares state that a checkpoint only saves from rank 0; a collective. A difference may be intended."""
    first, *others = runtime.world.all_gather_object(digests)
    lost = {name for digests in others for name, digest in digests.items() if first.get(name) != digest}
    if lost:
        runtime.warn_once(
            "state of ranks",
            f"not the same on all ranks, and all get rank 0's back on a resume: {', '.join(sorted(lost))}. Reduce it "
            "first (self.world.all_reduce), or keep what is each rank's own in rank_state_dict() of the trainer.",
        )


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None or math.isnan(one) or math.isnan(other):
        return repr(one) == repr(other)
    return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING / 100)


def _number(value: Any) -> Any:
    """A learning rate may be a tensor."""
    return value.item() if type(value) is Tensor and value.numel() == 1 and not value.is_meta else value
