"""What a host keeps of the newest state: never more than two, never half a one, never another run's or user's."""

import logging
import shutil
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dream_trainer.checkpoint import store
from tests import api
from tests.checkpoint.states import DESCRIPTION, make_snapshot, save

MESH: dict[str, int] = DESCRIPTION["mesh_shape"]  # type: ignore[assignment]


def local(
    directory: Path,
    *,
    run: str = "run",
    mesh: dict[str, int] = MESH,
    world: api.Ranks | None = None,
    host: api.Ranks | None = None,
    ranks: range = range(1),
) -> Any:
    """What a rank of `world` keeps, in a host with these `ranks`; by default there is one rank."""
    world = world or api.Ranks.alone()
    return api.LocalCheckpoints(
        directory / "memory",
        experiment="e",
        root=directory / run,
        mesh_shape=mesh,
        ranks=ranks,
        world=world,
        beside=world,
        host=host or world,
    )


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "memory").glob("*/*/ranks_0-0/*/*"))


@pytest.fixture
def newest(tmp_path: Path) -> api.Manifest:
    """The run's newest checkpoint, of step 4, which local ones of steps 5 and 6 followed."""
    path = save(tmp_path / "run", 4)
    first = local(tmp_path)
    first.begin()
    first.write(make_snapshot(3))  # it follows nothing, and is not written
    assert kept(tmp_path) == []
    first.follow(path)
    for step in (4, 5, 6):
        first.write(make_snapshot(step))
        assert kept(tmp_path) == [f"step_{step:08d}"]
    return api.read_manifest(path)


def test_there_are_never_more_than_two(tmp_path: Path, newest: api.Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    publish = store.publish

    def counting(temporary: Path, final: Path) -> None:
        seen.append(kept(tmp_path))
        publish(temporary, final)
        seen.append(kept(tmp_path))

    monkeypatch.setattr(store, "publish", counting)
    run = local(tmp_path)
    found = run.find(newest)
    run.loaded(found, is_own=True)
    of_killed = found.path.parent.with_name("another")
    shutil.copytree(found.path, of_killed / ".step_00000007.tmp-0123456789abcdef")
    run.begin()
    for step in (7, 8):
        run.write(make_snapshot(step))
    assert [len(names) for names in seen] == [2, 2, 2, 2]
    assert kept(tmp_path) == ["step_00000008"]
    run.clear()
    assert list((tmp_path / "memory").iterdir()) == []


def test_only_what_follows_the_newest_checkpoint_is_found(tmp_path: Path, newest: api.Manifest) -> None:
    found = local(tmp_path).find(newest)
    assert found.step == 6
    assert found.path.is_relative_to(tmp_path / "memory")
    other = api.read_manifest(save(tmp_path / "run", 4, replace=True))  # as the step was saved again
    assert local(tmp_path).find(other) is None
    assert local(tmp_path, run="another").find(newest) is None
    assert local(tmp_path, mesh={"dp_shard": 2}).find(newest) is None


@pytest.mark.parametrize("what", ["manifest.json", ".metadata", "shared.json"])
def test_half_a_state_is_not_found(tmp_path: Path, newest: api.Manifest, what: str) -> None:
    (local(tmp_path).find(newest).path / what).unlink()
    assert local(tmp_path).find(newest) is None


def test_directories_that_others_could_have_written_are_not_read(
    tmp_path: Path, newest: api.Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    (of_user,) = (tmp_path / "memory").iterdir()
    of_user.chmod(0o777)
    assert local(tmp_path).find(newest) is None
    assert "not only this user's directory" in caplog.text
    moved = of_user.rename(tmp_path / "moved")
    moved.chmod(0o700)
    of_user.symlink_to(moved)
    assert local(tmp_path).find(newest) is None
    of_user.unlink()
    moved.rename(of_user)
    assert local(tmp_path).find(newest).step == 6


def test_where_there_is_no_room_the_last_one_stays_and_a_warning_says_so_once(
    tmp_path: Path, newest: api.Manifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = local(tmp_path)
    run.loaded(run.find(newest), is_own=True)
    run.begin()
    room = namedtuple("room", "total used free")(64 << 20, 0, 1000)
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(shutil, "disk_usage", lambda path: room)
        run.write(make_snapshot(7))
        run.write(make_snapshot(8))
    assert caplog.text.count("0 MiB free of 64") == 1
    assert kept(tmp_path) == ["step_00000006"]
    assert local(tmp_path).find(newest).step == 6
    run.write(make_snapshot(9))
    assert kept(tmp_path) == ["step_00000009"]


def test_a_run_that_went_on_elsewhere_keeps_nothing_of_before(tmp_path: Path, newest: api.Manifest) -> None:
    run = local(tmp_path)
    run.loaded(newest, is_own=True)
    run.begin()
    assert kept(tmp_path) == []
    run.write(make_snapshot(5))
    assert local(tmp_path).find(newest).step == 5
    run.loaded(newest, is_own=False)  # another run's: there is nothing to follow until it has saved
    run.write(make_snapshot(6))
    assert local(tmp_path).find(newest).step == 5


def test_only_who_asks_for_the_newest_is_given_what_followed_it(tmp_path: Path) -> None:
    root, alone = tmp_path / "run", api.Ranks.alone()
    theirs, words = tmp_path / "other/step_00000002", vars(api.BranchParameters(optimizer="new"))

    def asks(resume: Any, **branch: Any) -> bool:
        asked: list[api.Manifest] = []

        def nearer(newest: api.Manifest) -> bool:
            asked.append(newest)
            return True

        parameters = api.CheckpointParameters(
            resume=resume, best_metric="loss", best_mode="min", branch=api.BranchParameters(**branch)
        )
        with suppress(api.CheckpointError, api.ConfigError):
            api.resume(root, parameters, alone, lambda manifest, branch: None, nearer)
        return bool(asked)

    assert not asks("auto")
    save(root, 4)
    assert [asks(resume) for resume in ("auto", "latest", "best", 4, None)] == [True, True, False, False, False]
    assert not asks(str(theirs), optimizer="new")
    save(root, 6, description=DESCRIPTION | {"parent": {"checkpoint": str(theirs), "words": words, "step": 2}})
    assert asks(str(theirs), optimizer="new")  # it has begun there already
    assert not asks(str(theirs))
    assert not asks(str(tmp_path / "third"), optimizer="new")


@pytest.mark.parametrize(
    ("stages", "hosts", "writing"),
    [
        (1, [range(2), range(2, 4)], [0, 2]),
        (2, [range(1), range(1, 4)], [0, 1, 2]),
        (4, [range(2), range(2, 4)], [0, 1, 2, 3]),
    ],
)
def test_room_is_made_for_hosts_and_stages(stages: int, hosts: list[range], writing: list[int], tmp_path: Path) -> None:
    """On a host ranks of other stages have other tensors."""
    snapshot, found = make_snapshot(3), {}
    for ranks in hosts:
        for rank in ranks:
            world = api.Ranks(rank, 4, None, stages=stages)
            host = api.Ranks(rank - ranks[0], len(ranks), None)
            found[rank] = local(tmp_path, world=world, host=host, ranks=ranks)._bytes(snapshot)
    of_tensors = sum(tensor.nbytes for tensor in snapshot.tensors.values())
    least = min(found.values()) - of_tensors * (len(writing) == 4)
    assert [rank for rank, n_bytes in found.items() if n_bytes == least + of_tensors] == writing
    assert all(n_bytes == least for rank, n_bytes in found.items() if rank not in writing)
