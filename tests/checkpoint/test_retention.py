"""Retention leaves the newest, the named and the best, and counts and removes nothing but whole checkpoints."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import api
from tests.checkpoint.states import DESCRIPTION, killed_at, save

NAN = math.nan
METRICS = (5.0, 1.0, 4.0, NAN, 3.0, 2.0)
POLICY = api.CheckpointParameters(keep_last=2, keep_best=1, best_metric="val/loss", best_mode="min")


def save_with(root: Path, step: int, value: Any = None) -> Path:
    metrics = {} if value is None else {"val/loss": value}
    return save(root, step, tensors={"w": torch.ones(1)}, description={**DESCRIPTION, "metrics": metrics})


def manifests(*values: Any) -> list[api.Manifest]:
    """Manifests of steps 1, 2, ... with these metrics; None for one without."""
    return [
        api.Manifest(
            path=Path(f"step_{step:08d}"),
            step=step,
            metrics={} if value is None else {"val/loss": value},
            epoch=0,
            samples_seen=0,
            world_size=1,
            mesh_shape={},
            config={},
            versions={},
            wall_time=0.0,
            files={},
        )
        for step, value in enumerate(values, start=1)
    ]


def steps(root: Path) -> set[int]:
    return {manifest.step for manifest in api.list_checkpoints(root)}


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (api.CheckpointParameters(keep_last=1), {6}),
        (api.CheckpointParameters(keep_last=100), {1, 2, 3, 4, 5, 6}),
        (api.CheckpointParameters(keep_every_n_steps=4), {4, 6}),
        (api.CheckpointParameters(keep_every_n_steps=2, keep_last=2), {2, 4, 5, 6}),
        (api.CheckpointParameters(keep_best=1, best_metric="val/loss"), {2, 6}),
        (api.CheckpointParameters(keep_best=2, best_metric="val/loss", best_mode="max"), {1, 3, 6}),
        (api.CheckpointParameters(keep_best=1, best_metric="val/other", best_mode="min"), {1, 2, 3, 4, 5, 6}),
        (POLICY, {2, 5, 6}),
    ],
)
def test_what_any_rule_names_is_kept_and_the_newest(retention: api.CheckpointParameters, expected: set[int]) -> None:
    assert api.kept(manifests(*METRICS), retention) == expected
    assert api.kept(manifests(*METRICS)[::-1], retention) == expected


@pytest.mark.pitfall(36)
@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ((NAN, None, 3.0, NAN), "min", 3),
        ((NAN, None, 3.0, NAN), "max", 3),
        ((0.0, 1.0, -1.0), "min", 3),
        ((0.0, -1.0), "max", 1),
        ((2.0, 1.0, 1.0), "min", 2),
        ((math.inf, 5.0), "min", 2),
        ((np.float32(2), np.float32(1)), "min", 2),
        ((True, 5.0), "min", 2),
        ((NAN, None, "0.1"), "min", None),
        ((), "min", None),
    ],
)
def test_the_best_is_a_number_and_the_earlier_of_equals(values: tuple[Any, ...], mode: Any, best: int | None) -> None:
    found = api.best_checkpoint(manifests(*values), "val/loss", mode)
    assert (found and found.step) == best


@pytest.mark.pitfall(30)
def test_what_is_not_whole_neither_counts_nor_is_removed(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_with(tmp_path, step, float(step))
    (tmp_path / "step_00000005" / "manifest.json").unlink()
    (tmp_path / "step_00000004" / "shared.json").write_bytes(b"")
    others = ["step_00000009", ".aside-0123abcd-step_00000007", "notes", ".step_00000008.tmp-mine"]
    for name in others:
        (tmp_path / name).mkdir()
    assert [path.name for path in api.retire(tmp_path, api.CheckpointParameters(keep_last=2))] == ["step_00000001"]
    assert steps(tmp_path) == {2, 3}
    assert {path.name for path in tmp_path.iterdir()} == {*others, *(f"step_{step:08d}" for step in (2, 3, 4, 5))}


@pytest.mark.pitfall(30)
def test_the_only_whole_checkpoint_stays_though_newer_ones_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        save_with(tmp_path, step)
    (tmp_path / "step_00000002" / "manifest.json").write_bytes(b"")
    for retention in (api.CheckpointParameters(keep_last=1), api.CheckpointParameters(keep_every_n_steps=2), POLICY):
        assert api.retire(tmp_path, retention) == []
    assert steps(tmp_path) == {1}


@pytest.mark.pitfall(30)
def test_killed_at_any_point_it_leaves_whole_checkpoints_and_goes_on_when_run_again(tmp_path: Path) -> None:
    call, killed, saved = 0, True, tmp_path / "saved"
    for step, value in enumerate(METRICS, start=1):
        save_with(saved, step, value)
    while killed:
        call += 1
        root = tmp_path / str(call)
        shutil.copytree(saved, root)
        killed = killed_at(call, lambda: api.retire(root, POLICY))  # noqa: B023 (called at once)
        listed = {path.name for path in root.iterdir() if path.name.startswith("step_")}
        assert listed == {f"step_{step:08d}" for step in steps(root)}
        assert {2, 5, 6} <= steps(root)
        for manifest in api.list_checkpoints(root):
            api.verify_checkpoint(manifest.path, world=api.Ranks.alone())
        api.retire(root, POLICY)
        assert steps(root) == {2, 5, 6}
        save_with(root, 7, 9.0)  # removes what the killed one left behind
        api.retire(root, POLICY)
        assert {path.name for path in root.iterdir()} == {f"step_{step:08d}" for step in (2, 6, 7)}
    assert call > 10
