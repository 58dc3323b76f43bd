"""What writing and reading a checkpoint needs to know of the world, and how all ranks come to one outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from dream_trainer.errors import CheckpointError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class CheckpointWorld(Protocol):
    """The ranks that write or read a checkpoint together.

    Attributes:
        rank: This rank, 0-based.
        world_size: Number of ranks.
        is_main: Whether this is rank 0.
        cpu_group: A gloo group over all ranks that nothing else uses meanwhile; None at world size 1.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    @property
    def cpu_group(self) -> dist.ProcessGroup | None: ...
    def all_gather_object(self, value: Any, /) -> list[Any]: ...


class Alone:
    """A world of one process, with or without a process group: tools, and tests that need no second rank."""

    rank = 0
    world_size = 1
    is_main = True
    cpu_group: dist.ProcessGroup | None = None

    def all_gather_object(self, value: Any, /) -> list[Any]:
        """The one value, as a list."""
        return [value]


def on_all_ranks(world: CheckpointWorld, task: str, function: Callable[[], T]) -> T:
    """Runs `function` on every rank and returns this rank's result; a failure on any rank is one error on all.

    No rank goes on while another has failed, so none waits in a collective that the other will never enter.

    Args:
        world: The ranks; each must call this.
        task: What is being done, for the message: "write the checkpoint".
        function: The work of this rank. It must not communicate.

    Raises:
        CheckpointError: It failed on some rank; the message has every failure with its rank, the same on all ranks.
    """
    cause: Exception | None = None
    failure: str | None = None
    result: T | None = None
    try:
        result = function()
    except Exception as error:
        cause = error
        failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    failures = {rank: told for rank, told in enumerate(world.all_gather_object(failure)) if told is not None}
    raise_failures(task, failures, world, cause)
    return cast(T, result)


def raise_failures(
    task: str, failures: Mapping[int, str], world: CheckpointWorld, cause: BaseException | None = None
) -> None:
    """Raises one CheckpointError for the failures of `{rank: message}`, if there are any."""
    if not failures:
        return
    if len(failures) == world.world_size and len(set(failures.values())) == 1:
        told = next(iter(failures.values()))
    else:
        told = "; ".join(f"rank {rank}: {message}" for rank, message in failures.items())
    raise CheckpointError(f"Could not {task}: {told}") from cause
