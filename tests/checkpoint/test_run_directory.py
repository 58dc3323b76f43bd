"""One job at a time writes to a run directory, and all its ranks see the same one."""

import errno
import fcntl
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dream_trainer.checkpoint import run_directory
from tests.api import CheckpointError, DeviceParameters, Ranks, TokenFileWriter, World, claim, is_claimed, main, release
from tests.worlds import SERVER, run_world


def hold(directory: Path, told: Connection) -> None:
    """Another job."""
    claim(directory, Ranks.alone())
    told.send("held")
    time.sleep(60)


@pytest.mark.pitfall(55)
def test_a_second_live_job_is_refused_and_a_killed_one_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "PATIENCE_SECONDS", 0.5)
    ours, theirs = SERVER.Pipe()
    holder = SERVER.Process(target=hold, args=(tmp_path, theirs))
    holder.start()
    try:
        assert ours.recv() == "held"
        with pytest.raises(CheckpointError, match="another live job"):
            claim(tmp_path, Ranks.alone())
    finally:
        holder.kill()
        holder.join()
    claim(tmp_path, Ranks.alone())
    release(tmp_path)


def test_trainers_of_one_process_share_a_claim(tmp_path: Path) -> None:
    claim(tmp_path, Ranks.alone())
    claim(tmp_path, Ranks.alone())
    release(tmp_path)
    assert is_locked(tmp_path)
    release(tmp_path)
    assert not is_locked(tmp_path)


def is_locked(run_dir: Path) -> bool:
    with (run_dir / run_directory.LOCK_NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_disk_without_locks_is_one_warning_and_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some network disks answer, for runs, `runs`, `prune` and token files."""

    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    checkpoints = tmp_path / "checkpoints"
    claim(tmp_path, Ranks.alone())
    checkpoints.mkdir()
    assert is_claimed(tmp_path)  # by this process
    release(tmp_path)
    assert is_claimed(tmp_path) is None
    assert main(["checkpoints", "prune", str(tmp_path), "--keep-last", "1"]) == 0
    with TokenFileWriter(tmp_path / "tokens.bin", vocabulary_size=9) as writer:
        writer.add([1, 2, 3])
    warnings = [record.message for record in caplog.records if "no file locks" in record.message]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]


def claim_in_own_directory(root: str) -> str:
    world = World(DeviceParameters(device="cpu"), shard_by_default=False)
    run_directory.PATIENCE_SECONDS = 0.3
    folder = Path(root) / str(world.rank)
    folder.mkdir()
    os.chdir(folder)
    try:
        claim(Path("runs"), world)
        return "claimed"
    except CheckpointError as error:
        return str(error)
    finally:
        release(Path("runs"))
        world.close()


@pytest.mark.pitfall(55)
def test_ranks_with_different_directories_of_one_name_are_told_on_all_ranks(tmp_path: Path) -> None:
    for message in run_world(claim_in_own_directory, 2, str(tmp_path)):
        assert "not the directory that rank 0 sees" in message
