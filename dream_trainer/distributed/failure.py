"""How a job ends when a rank has failed: without a collective, since the other ranks may be inside any."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch.distributed as dist


def end_job(exc: BaseException, report: str, *, rank: int, first: int) -> NoReturn:
    """Tells of this rank's failure and ends the process with status 1; its closing sockets free the other ranks.

    Arguments as in `tell_failure`.
    """
    tell_failure(exc, report, rank=rank, first=first)
    os._exit(1)


def tell_failure(exc: BaseException, report: str, *, rank: int, first: int) -> None:
    """Says on standard error that this rank failed.

    The rank whose failure came first prints `report` and hands `exc` to torchrun's summary; what the others see is
    its consequence, and they say so in one line.

    Args:
        exc: What ended this rank.
        report: What to print if this rank was first.
        rank: This rank.
        first: The rank that `first_to_fail` named.
    """
    if first == rank:
        sys.stderr.write(f"[rank {rank}] failed, the job ends:\n{report.rstrip()}\n")
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(exc)
    else:
        reason = f"{type(exc).__name__}: {exc}".split("\n")[0][:200]
        sys.stderr.write(f"[rank {rank}] stops because rank {first} failed (here: {reason}).\n")
    sys.stderr.flush()
    sys.stdout.flush()


def first_to_fail(store: dist.Store | None, rank: int) -> int:
    """The rank whose failure came first, by an atomic counter; this rank if the store is gone.

    Sets `failed` for those that look without failing themselves.

    Args:
        store: The job's store, under this attempt's prefix; None alone. No other thread may be using this connection.
        rank: This rank.
    """
    if store is None:
        return rank
    try:
        if store.add("failures", 1) == 1:
            store.set("failed", str(rank))
            return rank
        return int(store.get("failed"))
    except RuntimeError:  # the store went away with its rank
        return rank
