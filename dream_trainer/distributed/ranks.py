"""Ranks: the processes of a job, how they communicate outside the step path, agree, and are compared."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dream_trainer.checks import listed
from dream_trainer.errors import CheckpointError, DamagedCheckpointError, RanksDifferError

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Ranks:
    """This process's place among the ranks, and collectives over all of them; every rank calls each. At world size 1
    nothing is sent: every collective returns this rank's value."""

    rank: int  # 0-based
    world_size: int
    cpu_group: dist.ProcessGroup | None  # for agreement outside the step path; None at world size 1
    _: KW_ONLY
    data_copies: int = 1  # how many neighbouring ranks see the same data (tp)
    sample_copies: int = 1  # how many see the same samples, or parts of them (cp x tp)
    stages: int = 1  # number of groups of neighbouring ranks that see the same data (pp)
    forbidden: str | None = field(default=None, init=False)  # code running on one rank only, so collectives raise

    @classmethod
    def alone(cls) -> Ranks:
        """One process, whether it has a process group or not: tools, and tests that need no second rank."""
        return Ranks(0, 1, None)

    @classmethod
    def of_default_group(cls) -> Ranks:
        """The ranks of PyTorch's default process group; only this process without one."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks.alone()
        return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_peers(self) -> int:
        """The same number on ranks that have the same parts of models and other data."""
        return self.rank // (self.world_size // self.stages) * self.data_copies + self.rank % self.data_copies

    @property
    def counts_data(self) -> bool:
        """Whether this rank counts its tokens, so that ranks with the same data count each token once."""
        return self.rank % self.data_copies == 0 and self._is_of_last_stages

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts its samples, so that ranks with parts of the same samples count each once."""
        return self.rank % self.sample_copies == 0 and self._is_of_last_stages

    @property
    def _is_of_last_stages(self) -> bool:
        """They have the outputs, and so the loss function's logs."""
        return self.rank >= self.world_size - self.world_size // self.stages

    def barrier(self) -> None:
        if self._may_communicate():
            dist.barrier(group=self.cpu_group)

    def all_gather_object(self, value: Any, /) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank. Values are pickled between this job's own ranks."""
        if not self._may_communicate():
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.cpu_group)
        return gathered

    def gather_object(self, value: Any, /) -> list[Any] | None:
        """Every rank's `value`, in rank order, on rank 0; None on the others, which so take no part of its cost."""
        if not self._may_communicate():
            return [value]
        gathered: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, gathered, group=self.cpu_group, group_dst=0)
        return gathered

    def scatter_object(self, values: Sequence[Any] | None, /) -> Any:
        """Rank 0's `values[rank]` on each rank; the others pass None."""
        if not self._may_communicate():
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, None if values is None else list(values), group=self.cpu_group, group_src=0)
        return box[0]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s `value` on every rank."""
        if not self._may_communicate():
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.cpu_group, group_src=src)
        return box[0]

    def broadcast(self, values: Tensor, src: int = 0) -> Tensor:
        """Overwrites a contiguous CPU tensor with rank `src`'s, of the same shape, and returns it."""
        if self._may_communicate():
            dist.broadcast(values, group=self.cpu_group, group_src=src)
        return values

    def all_reduce(self, values: Tensor, op: str = "sum") -> Tensor:
        """Reduces a CPU tensor over all ranks in place and returns it; `op` is "sum", "min" or "max"."""
        if self._may_communicate():
            ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
            dist.all_reduce(values, op=ops[op], group=self.cpu_group)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """CPU tensors of one shape `[n]` from every rank as `[world_size, n]`, in one collective, without gradients."""
        if values.device.type != "cpu" or (values.requires_grad and torch.is_grad_enabled()):
            raise ValueError(
                f"all_gather was given values on {values.device}{', with gradients' if values.requires_grad else ''}: "
                "it takes CPU tensors, and does not pass gradients. For values that a loss needs from all ranks write "
                "world.all_gather_with_gradient(values); for numbers give values.detach().cpu()."
            )
        if not self._may_communicate():
            return values.unsqueeze(0)
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(gathered, values, group=self.cpu_group)
        return torch.stack(gathered)

    def _may_communicate(self) -> bool:
        self.refuse_if_forbidden()
        return self.world_size > 1

    def refuse_if_forbidden(self) -> None:
        """Raises where only one rank runs, whose collective the others would never join."""
        if self.forbidden is not None:
            raise RuntimeError(
                f"a collective was called in {self.forbidden}: the other ranks would never join it. "
                "Call it on all ranks, or read what you need in a callback without main_process_only."
            )


class _Failure(NamedTuple):
    message: str  # the error's text for the other ranks
    is_damage: bool
    traceback: str  # empty if the message is enough


def on_all_ranks(world: Ranks, task: str, function: Callable[[], T]) -> T:
    """Runs `function` on every rank and returns this rank's result; a failure on any rank is one error on all."""
    result = cast(T, None)
    own: _Failure | None = None
    cause: Exception | None = None
    try:
        result = function()
    except CheckpointError as error:
        own, cause = _Failure(str(error), isinstance(error, DamagedCheckpointError), ""), error
    except Exception as error:
        own, cause = _Failure(f"{type(error).__name__}: {error}", False, traceback.format_exc()), error
    told: list[_Failure | None] = world.all_gather_object(own)
    failures = {rank: failure for rank, failure in enumerate(told) if failure is not None}
    if not failures:
        return result
    messages = [failure.message for failure in failures.values()]
    if len(messages) == world.world_size and len(set(messages)) == 1:
        text = messages[0]
    else:
        text = "; ".join(f"rank {rank}: {failure.message}" for rank, failure in failures.items())
    kind = DamagedCheckpointError if any(failure.is_damage for failure in failures.values()) else CheckpointError
    raised = kind(f"Could not {task}: {text}")
    if cause is None:
        # All ranks raise at once, and the traceback that a user gets to see may be that of a rank where nothing failed.
        for rank, failure in failures.items():
            if failure.traceback:
                raised.add_note(f"On rank {rank}:\n{failure.traceback}")
    raise raised from cause


def from_all_ranks(world: Ranks, task: str, function: Callable[[], T]) -> list[T]:
    """As `on_all_ranks`, but returns the results of all ranks, which must be picklable, in rank order."""
    return world.all_gather_object(on_all_ranks(world, task, function))


def from_main_rank(world: Ranks, task: str, function: Callable[[], T]) -> T:
    """Runs `function` on rank 0 only and returns its result, which must be picklable, on every rank."""
    return cast(T, world.broadcast_object(on_all_ranks(world, task, lambda: function() if world.is_main else None)))


def refuse_differences(ranks: Ranks, facts: Mapping[str, Any], advice: str, *, among: int = 0) -> None:
    """Raises RanksDifferError on every rank if facts differ; a collective, of digests first."""
    for of_group in differing_facts(ranks, facts, among=among):
        refuse_unlike(of_group, advice)


def differing_facts(ranks: Ranks, facts: Mapping[str, Any], *, among: int = 0) -> list[dict[int, dict[str, str]]]:
    """The facts that differ within a group of ranks, by rank, for each group; a collective."""
    if ranks.world_size == 1:
        return []
    spelled_facts = {name: value if isinstance(value, str) else repr(value) for name, value in facts.items()}
    digest = hashlib.sha256(repr(sorted(spelled_facts.items())).encode(errors="surrogatepass")).digest()
    groups = [group for group, _ in dict.fromkeys(ranks.all_gather_object((among, digest)))]
    if len(set(groups)) == len(groups):
        return []
    every = ranks.all_gather_object((among, spelled_facts))
    return [
        {rank: of_rank for rank, (other, of_rank) in enumerate(every) if other == group}
        for group in dict.fromkeys(groups)
        if groups.count(group) > 1
    ]


def refuse_unlike(every: Mapping[int, Mapping[str, str]], advice: str) -> None:
    """Raises RanksDifferError if facts differ, which `every` has by rank; it names each value and its ranks."""
    names = dict.fromkeys(name for facts in every.values() for name in facts)
    by_name = {name: {rank: facts.get(name, "none") for rank, facts in every.items()} for name in names}
    differences = [f"{name} ({_spelled(values)})" for name, values in by_name.items() if len(set(values.values())) > 1]
    if differences:
        raise RanksDifferError(
            f"not the same on all ranks, though the run takes it for that: {listed(differences, 5)}. {advice}"
        )


def _spelled(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    spelled = [
        f"{value[:200]} on rank{'s' if len(holders) > 1 else ''} {listed([*map(str, holders)], 8)}"
        for value, holders in list(ranks.items())[:4]
    ]
    return "; ".join([*spelled, "..."] if len(ranks) > 4 else spelled)


def plain_facts(name: str, value: Any) -> dict[str, str]:
    """The plain values in a nested value (numbers, strings), each under its own name; others are left out."""
    if isinstance(value, str | bool | int | float | timedelta | None):
        return {name: repr(value)}
    if isinstance(value, Mapping):
        parts = [plain_facts(f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [plain_facts(f"{name}[{index}]", item) for index, item in enumerate(value)]
    else:
        parts = []
    return {key: item for part in parts for key, item in part.items()}
