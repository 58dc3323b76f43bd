"""A worker that hangs in its fork, as Python 3.11's may, is forked again; one that runs is left alone."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from dream_trainer.compat import forked_start
from tests.api import DistributedDataLoader, started, sure_to_start

only_where_forks_hang = pytest.mark.skipif(
    sys.version_info >= (3, 11, 10), reason="this Python's forked processes start by themselves"
)

_hang: list[Path] = []  # a forked process that finds one here and can remove it hangs before it runs


def _hang_once() -> None:
    for file in _hang:
        if file.exists():
            file.unlink()
            time.sleep(1000)


os.register_at_fork(after_in_child=_hang_once)


@pytest.fixture
def first_fork_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(forked_start, "START_SECONDS", 1.0)
    _hang.append(tmp_path / "hangs")
    _hang[0].touch()
    yield _hang[0]
    _hang.clear()


def batches_of(workers: int, context: str | None) -> list[list[int]]:
    loader = DistributedDataLoader(range(8), 2, num_workers=workers, multiprocessing_context=context, timeout=20)
    return [batch.tolist() for batch in loader]


@only_where_forks_hang
@pytest.mark.parametrize("context", [None, "fork"])
def test_a_hung_fork_is_repeated(first_fork_hangs: Path, context: str | None, caplog: pytest.LogCaptureFixture) -> None:
    before = _children()
    assert batches_of(2, context) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not first_fork_hangs.exists()
    assert "hung in its fork" in caplog.text
    assert _children() <= before  # one of an earlier test may have ended


@only_where_forks_hang
def test_an_interrupted_wait_leaves_no_process(first_fork_hangs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_start, "START_SECONDS", 30.0)
    before = _children()
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        batches_of(1, "fork")
    timer.join()
    assert not first_fork_hangs.exists()
    assert _children() <= before  # one of an earlier test may have ended


def test_a_worker_that_runs_keeps_its_process_and_a_loader_its_context() -> None:
    loader: DataLoader[int] = DataLoader(range(8), num_workers=1)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(list(started(loader))), torch.arange(8))
    assert loader.multiprocessing_context is None
    spawning = torch.multiprocessing.get_context("spawn")
    assert sure_to_start(spawning) is spawning


def _children() -> set[int]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return {int(pid) for pid in children.read_text().split()}
