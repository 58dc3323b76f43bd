"""Runs whose checkpoints lie in an object store: what is there at each moment, and what a restart makes of it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dream_trainer.checkpoint import remote_run
from tests.api import CheckpointError, NewFile, Ownership, Ranks, StorePath, list_checkpoints, verify_checkpoint
from tests.stores.jobs import Fit, Wide, config, train
from tests.stores.servers import SECRET, Server
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import weights
from tests.worlds import run_world


def stored_steps(url: str) -> list[int]:
    """The steps whose checkpoints are whole in the store, checksums included."""
    found = list_checkpoints(StorePath(url) / "p/g/e/checkpoints")
    return [verify_checkpoint(manifest.path, world=Ranks.alone()).step for manifest in found]


def waiting(directory: str | Path = "runs") -> list[str]:
    """What lies on the local disk."""
    return sorted(path.name for path in (Path(directory) / "p/g/e/checkpoints").iterdir())


def wait_until(happened: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def same(a: Fit, b: Fit) -> bool:
    return same_bits(weights(a.model), weights(b.model))


def test_a_run_is_saved_there_kept_there_and_goes_on_from_there(url: str, s3: Server, tmp_path: Path) -> None:
    run = train(url, 8, keep_last=2)
    assert stored_steps(url) == [6, 8]
    assert [manifest.step for manifest in run.checkpoints()] == [6, 8]
    assert waiting() == []  # the disk is a place to wait
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"not-to-be-seen" not in path.read_bytes()

    assert same(train(url, 12, keep_last=2), train(None, 12, experiment="straight"))
    assert stored_steps(url) == [10, 12]


def test_a_restart_on_another_machine_goes_on(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train(url, 4)
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    run = train(url, 8)
    assert stored_steps(url) == [2, 4, 6, 8]
    assert same(run, train(None, 8, experiment="straight"))
    # What the run writes about itself goes on, too.
    assert json.loads((run.run_dir / "run.json").read_text())["starts"] == 2
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {4, 8} <= {line["step"] for line in lines}


def test_an_older_checkpoint_sets_the_newer_aside(url: str) -> None:
    train(url, 6)
    train(url, 8, resume=2)
    assert stored_steps(url) == [2, 4, 6, 8]
    names = [path.name for path in (StorePath(url) / "p/g/e/checkpoints").iterdir()]
    assert sorted(name.split("-")[-1] for name in names if name.startswith(".aside-")) == [
        "step_00000004",
        "step_00000006",
    ]


def test_weights_and_branches_come_from_there(url: str) -> None:
    run = train(url, 4)
    address = f"{url}/p/g/e"
    other = train(None, 1, experiment="other", init_from=f"{address}/checkpoints/step_00000004")
    assert other.global_step == 1
    assert same(train(None, 6, experiment="branch", resume=address), train(url, 6))
    run = Fit(run.config)
    with run:
        run.load_checkpoint(f"{address}/checkpoints/step_00000002")
        assert run.global_step == 2


def check_run_without_store(
    url: str, server: Any, caplog: pytest.LogCaptureFixture, patience_seconds: float = 30
) -> None:
    """A run whose store is away for some steps ends as if it had been there, and has sent all."""

    class Watched(Fit):
        def post_train_step(self) -> None:
            if self.global_step == 3:
                wait_until(lambda: stored_steps(url) == [2])
                server.stop()
            if self.global_step == 7:
                wait_until(lambda: {"step_00000004", "step_00000006"} <= set(waiting()))
                wait_until(lambda: "They wait in" in caplog.text, patience_seconds)
                server.start()

    run = train(url, 10, trainer=Watched)
    assert stored_steps(url) == [2, 4, 6, 8, 10]
    assert waiting() == []
    assert same(run, train(None, 10, experiment="straight"))
    assert "takes checkpoints again" in caplog.text


def test_the_run_goes_on_while_the_store_is_away(url: str, s3: Server, caplog: pytest.LogCaptureFixture) -> None:
    check_run_without_store(url, s3, caplog)
    assert SECRET not in caplog.text


def test_what_was_not_sent_is_sent_first_by_the_next(url: str, s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(Fit):
        def post_train_step(self) -> None:
            if self.global_step == 3:
                s3.stop()

    monkeypatch.setattr(remote_run, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(CheckpointError, match="the same command sends them first"):
        train(url, 6, trainer=Watched)
    assert {"step_00000004", "step_00000006"} <= set(waiting())
    with pytest.raises(CheckpointError, match="the store cannot be used"):
        train(url, 8)
    s3.start()
    run = train(url, 8)
    assert stored_steps(url) == [2, 4, 6, 8]
    assert same(run, train(None, 8, experiment="straight"))


def test_throttling_and_a_store_that_forgets_parts_lose_nothing(url: str, s3: Server) -> None:
    throttled = iter(range(8))
    s3.before = lambda method, path: setattr(s3, "throttled", int(method == "PUT" and next(throttled, 1) % 2 == 0))
    train(url, 6)
    assert stored_steps(url) == [2, 4, 6]


def test_a_full_disk_is_an_error_and_what_is_in_the_store_stays(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = NewFile.write

    class Full(Fit):
        def post_train_step(self) -> None:
            if self.global_step == 3:
                wait_until(lambda: stored_steps(url) == [2])
                monkeypatch.setattr(NewFile, "write", refuse)

    def refuse(self: NewFile, content: Any, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="No space left"):
        train(url, 8, trainer=Full)
    monkeypatch.setattr(NewFile, "write", write)
    assert stored_steps(url) == [2]
    assert same(train(url, 8), train(None, 8, experiment="straight"))


def test_wrong_credentials_end_the_run_before_its_first_step(url: str, s3: Server) -> None:
    s3.refuses = True
    with pytest.raises(CheckpointError, match=r"s3://bucket/runs/p/g/e.*credentials") as raised:
        train(url, 2)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def check_another_job_ends_it(url: str, directory: Path) -> None:
    """A run that another job takes, which lives in `directory`, ends with an error."""
    others: list[Ownership] = []

    class Frozen(Fit):
        def post_train_step(self) -> None:
            if self.global_step == 3:  # as if this job had not renewed its claim for a minute
                wait_until(lambda: stored_steps(url) == [2])
                others.append(Ownership(StorePath(url) / "p/g/e", directory, lease_seconds=0.1))

    try:
        with pytest.raises(CheckpointError, match="another job has taken"):
            train(url, 20, trainer=Frozen)
    finally:
        others[0].release()
    assert stored_steps(url) == [2]


def test_another_job_that_took_the_run_ends_this_one(url: str, tmp_path: Path) -> None:
    check_another_job_ends_it(url, tmp_path)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("before the upload", marks=pytest.mark.slow),
        "between files",
        pytest.param("before the manifest", marks=pytest.mark.slow),
        pytest.param("after the manifest", marks=pytest.mark.slow),
    ],
)
def test_a_job_killed_at_any_phase_of_sending_goes_on(url: str, phase: str) -> None:
    command = [sys.executable, "-m", "tests.stores.jobs", url, "6"]
    killed = run_command([*command, phase])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert stored_steps(url) == ([2, 4] if phase == "after the manifest" else [2])
    assert "step_00000004" in waiting()
    restarted = run_command(command)
    assert restarted.returncode == 0, restarted.stderr
    assert stored_steps(url) == [2, 4, 6]
    assert waiting() == []
    straight = weights(train(None, 6, experiment="straight").model)
    assert json.loads(restarted.stdout) == {name: value.tolist() for name, value in straight.items()}


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def sharded(url: str | None, max_steps: int, experiment: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """On each rank: what the weights are in the end, and how much of which files this rank read from the store."""
    read: dict[str, int] = {}
    ranges = StorePath.read_ranges

    def noting(self: StorePath, parts: Any) -> list[bytes]:
        read[self.name] = read.get(self.name, 0) + sum(end - start for start, end in parts)
        return ranges(self, parts)

    StorePath.read_ranges = noting  # type: ignore[method-assign]
    try:
        run = Wide(config(url, max_steps, experiment=experiment))
        with run:
            run.fit()
            found = weights(run.model)
    finally:
        StorePath.read_ranges = ranges  # type: ignore[method-assign]
    return found, read


def test_each_rank_sends_and_reads_its_own_shards_and_another_number_of_ranks_all(url: str) -> None:
    run_world(sharded, 2, url, 4, "e")
    assert stored_steps(url) == [2, 4]
    again = run_world(sharded, 2, url, 8, "e")
    straight = run_world(sharded, 2, None, 8, "straight")
    for rank, ((found, read), (expected, _)) in enumerate(zip(again, straight, strict=True)):
        assert same_bits(found, expected)
        own, other = f"__{rank}_0.distcp", f"__{1 - rank}_0.distcp"
        size = (StorePath(url) / "p/g/e/checkpoints/step_00000004" / own).stat().st_size
        assert read[own] == size  # once, and from end to end
        assert read.get(other, 0) < size / 5  # where what is not sharded lies
    alone = run_world(sharded, 1, url, 8, "e")
    assert same_bits(alone[0][0], again[0][0])
