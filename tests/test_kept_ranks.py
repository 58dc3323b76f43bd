"""Ranks that are kept begin every world as fresh ones do, or are not kept."""

import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dream_trainer.distributed import world
from tests.worlds import run_world

seen: list[int] = []


def state() -> dict[str, Any]:
    return {
        "torch": torch.rand(2).tolist(),
        "numpy": float(np.random.rand()),
        "place": os.getcwd(),
        "variables": {name: value for name, value in os.environ.items() if name != "MASTER_PORT"},
        "handler": signal.getsignal(signal.SIGTERM),
        "level": logging.getLogger("dream_trainer").level,
        "filters": len(warnings.filters),
        "path": list(sys.path),
        "launches": world._launches.count,
        "seen": list(seen),
    }


def changes_what_can_be_put_back() -> tuple[int, dict[str, Any]]:
    before = state()
    dist.init_process_group("gloo")
    dist.barrier()  # else one rank may leave while the other still connects
    dist.destroy_process_group()
    os.chdir("/")
    os.environ["LEFT"] = "here"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger("dream_trainer").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.path.append("/left")
    world._launches.count += 1
    seen.append(random.randrange(9))
    return os.getpid(), before


def test_what_can_be_put_back_is(tmp_path: Path) -> None:
    first, second = (run_world(changes_what_can_be_put_back, 2) for _ in range(2))
    assert first == second


def leaves_a_process_group() -> int:
    dist.init_process_group("gloo")
    return os.getpid()


def leaves_a_function() -> int:
    torch.optim.Optimizer.zero_grad = torch.optim.Optimizer.state_dict  # type: ignore[method-assign, assignment]
    return os.getpid()


def leaves_a_setting() -> int:
    torch.set_default_dtype(torch.float64)
    return os.getpid()


def leaves_a_thread() -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


@pytest.mark.parametrize("leaves", [leaves_a_process_group, leaves_a_function, leaves_a_setting, leaves_a_thread])
def test_what_cannot_be_put_back_ends_the_rank(leaves: Any) -> None:
    assert not set(run_world(leaves, 2)) & set(run_world(os.getpid, 2))


def fails_on_one() -> int:
    if os.environ["RANK"] == "1":
        raise ValueError(f"here: {os.getpid()}")
    return os.getpid()


def test_a_world_that_fails_is_thrown_away_and_a_fresh_one_is_of_its_own() -> None:
    before = run_world(os.getpid, 2)
    assert run_world(os.getpid, 2) == before
    assert not set(run_world(os.getpid, 2, fresh=True)) & set(before)
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed:(.|\n)*ValueError: here"):
        run_world(fails_on_one, 2)
    assert not set(run_world(os.getpid, 2)) & set(before)
