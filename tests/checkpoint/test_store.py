"""A checkpoint is published whole or not at all, and what is read back is what was written."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from dream_trainer.checkpoint import files
from tests import api
from tests.checkpoint.states import DESCRIPTION, assert_same_bits, flip, killed_at, save, some_tensors


def steps(root: Path) -> list[int]:
    return [manifest.step for manifest in api.list_checkpoints(root)]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    shared = {"schedule": {1: (2, math.inf)}, "name": "run"}
    rank_state = {"position": 7, "noise": np.arange(3)}
    rank_tensors = {"random.cpu": torch.get_rng_state(), "buffer": torch.randn(2, 3).T}
    path = save(tmp_path / "checkpoints", 1000, shared=shared, rank_state=rank_state, rank_tensors=rank_tensors)

    assert path == tmp_path / "checkpoints" / "step_00001000"
    assert api.read_shared(path) == shared
    state, tensors = api.read_rank(path, 0)
    assert state["position"] == 7
    assert (state["noise"] == np.arange(3)).all()
    assert {name: value.tolist() for name, value in tensors.items()} == {
        name: value.tolist() for name, value in rank_tensors.items()
    }
    loaded = {name: torch.zeros_like(value) for name, value in some_tensors().items()}
    api.load_tensors(path, loaded, world=api.Ranks.alone())
    assert_same_bits(loaded, some_tensors(1000))
    assert api.tensor_metadata(path) == {name: (value.shape, value.dtype) for name, value in loaded.items()}


@pytest.mark.pitfall(36)
def test_the_manifest_says_what_the_checkpoint_is_whatever_the_metrics(tmp_path: Path) -> None:
    metrics = {"loss": math.nan, "gain": -1.5, "zero": 0.0, "missing": None, "val/acc": math.inf}
    path = save(tmp_path, 3, description={**DESCRIPTION, "metrics": metrics, "config": {"betas": (0.9, 0.95)}})
    manifest = api.read_manifest(path)
    assert path.name == "step_00000003"
    assert (manifest.step, manifest.epoch, manifest.samples_seen, manifest.world_size) == (3, 1, 64, 1)
    assert manifest.config == {"betas": (0.9, 0.95)}
    assert repr(manifest.metrics) == repr(metrics)
    assert manifest.versions["torch"] == torch.__version__
    assert set(manifest.files) == {path.name for path in path.iterdir()} - {"manifest.json"}


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    assert api.list_checkpoints(tmp_path / "absent") == []
    for step in (20, 3, 100_000_000):
        save(tmp_path, step)
    (tmp_path / "step_00000004").mkdir()
    (tmp_path / "step_00000005").write_text("a file")
    (tmp_path / "best").mkdir()
    assert steps(tmp_path) == [3, 20, 100_000_000]


def test_saving_a_step_again_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    before = content(path)
    assert save(tmp_path, 1, shared={"another": 1}) == path
    assert content(path) == before


def test_saving_a_step_again_replaces_a_damaged_one(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip(path / "__0_0.distcp")
    assert save(tmp_path, 1) == path
    api.verify_checkpoint(path, world=api.Ranks.alone())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_newer_schema_is_named_even_if_it_holds_unknown_types_and_is_not_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = path / "manifest.json"
    schema = {"schema_version": api.SCHEMA_VERSION + 1, "novel": {"$novel": 1}}
    newer = json.dumps({**json.loads(manifest.read_text()), **schema})
    manifest.write_text(newer)
    for use in (lambda: api.read_manifest(path), lambda: save(tmp_path, 1)):
        with pytest.raises(
            api.CheckpointError, match=rf"schema version {api.SCHEMA_VERSION + 1}.*Update dream_trainer"
        ) as raised:
            use()
        assert not isinstance(raised.value, api.DamagedCheckpointError)
    assert manifest.read_text() == newer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_reads_the_tensors(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    loaded = {name: torch.zeros_like(value) for name, value in some_tensors().items()}
    dcp.load(loaded, checkpoint_id=path)
    assert_same_bits(loaded, some_tensors(5))


def test_the_manifests_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tensors={"w": torch.randn(100_000)}, rank_tensors={"c": torch.ones(3)})
    on_disk = {
        name: api.FileEntry(size=len(raw), xxh3=xxhash.xxh3_128_hexdigest(raw)) for name, raw in content(path).items()
    }
    del on_disk["manifest.json"]
    assert api.read_manifest(path).files == on_disk


def test_a_save_removes_what_killed_jobs_left_and_nothing_of_the_users(tmp_path: Path) -> None:
    left = files.make_temporary(tmp_path, 7)
    (left / "__0_0.distcp").write_text("half")
    for name in (".step_7.tmp", "step_00000009", "notes", ".step_00000001.tmp-mine"):
        (tmp_path / name).mkdir()
    save(tmp_path, 8)
    assert {entry.name for entry in tmp_path.iterdir()} == {
        *(".step_7.tmp", "step_00000009", "notes", ".step_00000001.tmp-mine"),
        "step_00000008",
    }


@pytest.mark.pitfall(38)
@pytest.mark.parametrize(
    ("other", "weight", "told"),
    [
        ("renamed", torch.zeros(3, 4), r"has no models\.net\.renamed"),
        (None, torch.zeros(3, 4), r"it contains models\.net\.steps, which this run does not have"),
        *(
            ("steps", target, r"models\.net\.weight \(saved \(3, 4\) torch\.float32, here")
            for target in (torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(12))
        ),
    ],
)
def test_another_models_tensors_are_named_are_no_damage_and_are_not_written(
    other: str | None, weight: torch.Tensor, told: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 1)
    named = {} if other is None else {f"models.net.{other}": torch.tensor(0)}
    with pytest.raises(api.CheckpointError, match=told) as raised:
        api.load_tensors(path, {"models.net.weight": weight, **named}, world=api.Ranks.alone())
    assert raised.type is api.CheckpointError
    assert not weight.any()


def disk_calls(monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> list[tuple[str, Path]]:
    """What `function` has the disk hold (`fsync`, of what) and renames (to what), in order."""
    calls: list[tuple[str, Path]] = []
    fsync, rename, unlink = os.fsync, os.rename, os.unlink

    def noted_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").resolve()))
        fsync(descriptor)

    def noted_rename(old: str, new: str, **options: Any) -> None:
        rename(old, new, **options)
        calls.append(("rename", Path(new).resolve()))

    def noted_unlink(path: str, **options: Any) -> None:
        unlink(path, **options)
        calls.append(("unlink", Path(path)))

    with monkeypatch.context() as patch:
        for name, noted in (("fsync", noted_fsync), ("rename", noted_rename), ("unlink", noted_unlink)):
            patch.setattr(os, name, noted)
        function()
    return calls


@pytest.mark.pitfall(29)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of descriptors are read from /proc")
def test_the_disk_holds_files_before_the_name_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path.resolve()
    for is_replaced in (False, True):
        if is_replaced:
            (root / "step_00000001" / "manifest.json").write_text("")
        calls = disk_calls(monkeypatch, lambda: save(root, 1))
        named = calls.index(("rename", root / "step_00000001"))
        before = [path for what, path in calls[:named] if what == "fsync"]
        (temporary,) = {path.parent for path in before} - {root, root.parent}
        # All of its files, and then the directory that has their names.
        names = {path.name.removesuffix(".tmp") for path in before}
        assert names >= {path.name for path in (root / "step_00000001").iterdir()}
        assert temporary in before[before.index(temporary / "manifest.json") :]
        # The new name, before anything of what it replaced goes.
        unlinked = [place for place, (what, _) in enumerate(calls) if what == "unlink" and place > named]
        assert ("fsync", root) in calls[named : min(unlinked, default=len(calls))]
        assert bool(unlinked) is is_replaced


@pytest.mark.pitfall(29)
def test_killed_at_any_point_of_a_save_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    seen: set[tuple[int, ...]] = set()
    call = 0
    killed = True
    while killed:
        call += 1
        root = tmp_path / str(call)
        first = save(root, 1)
        before = content(first)
        killed = killed_at(call, lambda: save(root, 2))  # noqa: B023 (called at once)
        seen.add(tuple(steps(root)))
        for manifest in api.list_checkpoints(root):
            api.verify_checkpoint(manifest.path, world=api.Ranks.alone())
        assert content(first) == before
        assert save(root, 2).name in {entry.name for entry in root.iterdir()}
        assert steps(root) == [1, 2]
        assert len(list(root.iterdir())) == 2
    assert seen == {(1,), (1, 2)}
    assert call > 10


@pytest.mark.pitfall(29)
def test_killed_while_a_whole_checkpoint_is_replaced_loses_neither_it_nor_the_step(tmp_path: Path) -> None:
    seen: set[int] = set()
    call = 0
    killed = True
    while killed:
        call += 1
        root = tmp_path / str(call)
        save(root, 1, shared={"version": 1})
        killed = killed_at(call, lambda: save(root, 1, shared={"version": 2}, replace=True))  # noqa: B023
        was_away = not steps(root)
        files.recover_replaced(root)
        shared = api.read_shared(api.verify_checkpoint(root / "step_00000001", world=api.Ranks.alone()).path)
        seen.add(-1 if was_away else shared["version"])
        assert shared["version"] in ((1,) if was_away else (1, 2))
        save(root, 2)
        assert [entry.name for entry in sorted(root.iterdir())] == ["step_00000001", "step_00000002"]
    assert seen == {1, -1, 2}


def test_only_what_is_named_as_a_checkpoint_is_discarded(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="is not named as a checkpoint"):
        files.discard(tmp_path / "mine")
    assert (tmp_path / "mine").exists()


@pytest.mark.pitfall(29)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of descriptors are read from /proc")
def test_the_disk_holds_the_other_name_before_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    calls = disk_calls(monkeypatch, lambda: files.discard(path))
    assert [what for what, _ in calls[:3]] == ["rename", "fsync", "unlink"]
    assert calls[1][1] == tmp_path.resolve()
