"""WandbLogger with the real W&B: what its files hold, and what its server is sent, over kills and resumes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.sdk.lib import module

import dream_trainer as dt
from tests.api import WandbLogger, WandbParameters
from tests.loggers.readers import MEDIA, newest_wandb_file, stamp, wandb_files, wandb_history, wandb_records
from tests.loggers.wandb_server import wandb_server
from tests.trainer.small import Alone, Batch, Validates, batches, make_config

CONFIG = {"project": "p", "group": "g", "experiment": "e", "seed": 7}
OFFLINE = WandbParameters(mode="offline", tags=("a", "b"), name="shown")


@pytest.fixture(autouse=True)
def own_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B's process ends with the test, so that each test's environment counts and nothing is left running."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    wandb.teardown()
    yield
    wandb.teardown()
    module.unset_globals()  # a run that a test left as a kill does


def train(logger: WandbLogger, run_dir: Path, steps: range, resumed_step: int | None = None) -> dict[str, Any]:
    """Logs training at each step and validation at every third, and returns what a checkpoint would keep."""
    logger.open(run_dir, CONFIG, resumed_step)
    for step in steps:
        logger.log({"train/loss": 1 / step}, stamp(step))
        if step % 3 == 0:
            logger.log({"val/loss": 2 / step}, stamp(step))
    return logger.state_dict()


def finish(logger: WandbLogger) -> None:
    """Closes it, and waits until W&B's process has written all that it holds."""
    logger.close()
    wandb.teardown()


def curve(rows: list[dict[str, Any]]) -> list[tuple[int, float, float | None]]:
    return [(row["_step"], row["train/loss"], row.get("val/loss")) for row in rows]


STRAIGHT = [(step, 1 / step, 2 / step if step % 3 == 0 else None) for step in range(1, 13)]


def test_an_offline_run_has_its_names_its_config_and_every_step_once(tmp_path: Path) -> None:
    logger = WandbLogger(OFFLINE)
    train(logger, tmp_path, range(1, 13))
    logger.log({"train/loss": math.nan}, stamp(13))
    finish(logger)
    (path,) = wandb_files(tmp_path)
    (run,) = [record.run for record in wandb_records(path) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.display_name, list(run.tags)) == ("p", "g", "shown", ["a", "b"])
    assert {item.key: item.value_json for item in run.config.update}["seed"] == "7"
    *rows, last = wandb_history(path)
    assert curve(rows) == STRAIGHT
    assert [(row["epoch"], row["samples"]) for row in rows] == [(step // 5, step * 32) for step in range(1, 13)]
    assert str(last["train/loss"]) in ("NaN", "nan")


@pytest.mark.pitfall(44)
def test_an_online_run_killed_and_resumed_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wandb_server() as (address, histories):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        logger = WandbLogger(WandbParameters(mode="online"))
        state = train(logger, tmp_path, range(1, 10))
        logger.close()
        assert curve(histories[state["id"]]) == STRAIGHT[:9]
        # The server has more than the first checkpoint, and, as if the network had failed, less than the second.
        for resumed_step, last in ((6, 11), (9, 12)):
            logger = WandbLogger(WandbParameters(mode="online"))
            logger.load_state_dict(state)
            train(logger, tmp_path, range(resumed_step + 1, last + 1), resumed_step)
            logger.close()
            assert curve(histories[state["id"]]) == STRAIGHT[:last]
            del histories[state["id"]][7:]
        assert list(histories) == [state["id"]]
        wandb.teardown()


@pytest.mark.pitfall(102)
def test_rows_of_the_users_own_and_ours_stand_beside_each_other(tmp_path: Path) -> None:
    """Two calls in each step move W&B's own step beyond the optimizer's; one of them has a name of ours."""
    logger = WandbLogger(OFFLINE)
    logger.open(tmp_path, CONFIG, None)
    for step in range(1, 7):
        wandb.log({"mine": step, "train/loss": -1.0})
        wandb.log({"also": step})
        logger.log({"train/loss": 1 / step}, stamp(step))
        if step % 3 == 0:
            logger.log({"val/loss": 2 / step}, stamp(step))
    finish(logger)
    rows = wandb_history(newest_wandb_file(tmp_path))
    ours = {row["trainer/global_step"]: row["train/loss"] for row in rows if row.get("train/loss", -1.0) > 0}
    assert ours == {step: 1 / step for step in range(1, 7)}
    validated = {row["trainer/global_step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert validated == {3: 2 / 3, 6: 2 / 6}
    assert [row["mine"] for row in rows if "mine" in row] == [*range(1, 7)]
    assert [row["also"] for row in rows if "also" in row] == [*range(1, 7)]


@pytest.mark.pitfall(102)
def test_an_online_run_with_rows_of_the_users_own_goes_on_with_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wandb_server() as (address, histories):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        state, resumed_step = None, None
        for first, last in ((1, 5), (4, 8)):  # steps 4 and 5 come again after the restart
            logger = WandbLogger(WandbParameters(mode="online"))
            if state is not None:
                logger.load_state_dict(state)
            logger.open(tmp_path, CONFIG, resumed_step)
            for step in range(first, last + 1):
                wandb.log({"mine": step})
                wandb.log({"mine": -step})
                logger.log({"train/loss": 1 / step}, stamp(step))
            state, resumed_step = logger.state_dict(), 3
            logger.close()
        (rows,) = histories.values()
        lines = [(row["trainer/global_step"], row["train/loss"]) for row in rows if "train/loss" in row]
        assert lines == [(step, 1 / step) for step in range(1, 9)]
        wandb.teardown()


def test_a_run_of_the_users_own_stays_the_one_of_wandb_log(tmp_path: Path) -> None:
    theirs = wandb.init(project="theirs", mode="offline", dir=tmp_path / "theirs")
    logger = WandbLogger(OFFLINE)
    train(logger, tmp_path, range(1, 3))
    wandb.log({"mine": 1})
    assert wandb.run is theirs
    theirs.finish()
    finish(logger)
    assert [row for row in wandb_history(newest_wandb_file(tmp_path)) if "mine" in row] == []


class LogsByItself(Validates, Alone, dt.LoggerMixin):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        wandb.log({"mine": batch_idx})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        wandb.log({"mine in validation": batch_idx})
        return super().validation_step(batch, batch_idx)


@pytest.mark.pitfall(102)
def test_training_code_logs_to_the_trainers_run_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = make_config(n_epochs=2, loggers=("wandb",), log_every=2, num_sanity_val_steps=1)
    with LogsByItself(config, batches(4), batches(2)) as trainer:
        trainer.fit()
        told = {line["step"]: line["train/loss"] for line in trainer.history if "train/loss" in line}
        run_dir = trainer.run_dir
    wandb.teardown()
    rows = wandb_history(newest_wandb_file(run_dir))
    assert {row["trainer/global_step"]: row["train/loss"] for row in rows if "train/loss" in row} == told
    assert list(told) == [2, 4, 6, 8]
    assert [row["mine"] for row in rows if "mine" in row] == [0, 1, 2, 3] * 2
    assert [row["mine in validation"] for row in rows if "mine in validation" in row] == [0, 0, 1, 0, 1]


def test_arguments_of_init_reach_wandb(tmp_path: Path) -> None:
    arguments = {"notes": "why", "job_type": "sweep", "settings": {"x_label": "mine"}}
    logger = WandbLogger(WandbParameters(mode="offline", init_arguments=arguments))
    train(logger, tmp_path, range(1, 2))
    assert logger.run.settings.x_label == "mine"
    finish(logger)
    (path,) = wandb_files(tmp_path)
    (run,) = [record.run for record in wandb_records(path) if record.WhichOneof("record_type") == "run"]
    assert (run.notes, run.job_type, run.project) == ("why", "sweep", "p")


def test_wandb_mode_decides_where_the_config_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = WandbLogger()
    train(logger, tmp_path, range(1, 3))
    finish(logger)
    assert not wandb_files(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(logger, tmp_path, range(1, 3))
    finish(logger)
    assert len(wandb_files(tmp_path)) == 1


def test_every_kind_of_media_has_its_place_and_its_file(tmp_path: Path) -> None:
    logger = WandbLogger(OFFLINE)
    logger.open(tmp_path, CONFIG, None)
    assert all(logger.log_media(name, media, stamp(4)) for name, media in MEDIA.items())
    logger.log({"loss": 0.5}, stamp(4))
    finish(logger)
    (path,) = wandb_files(tmp_path)
    (row,) = wandb_history(path)
    kinds = {name: row[f"{name}/_type"] for name in MEDIA}
    assert kinds == {
        "val/pair": "images/separated",
        "clip": "video-file",
        "tone": "audio-file",
        "weights": "histogram",
        "rows": "table-file",
        "note": "html-file",
    }
    assert (row["_step"], row["loss"], row["val/pair/count"], row["val/pair/captions"][0]) == (4, 0.5, 2, "first")
    assert (row["weights/values"], row["weights/bins"]) == ([3, 4], [-1, 0, 1])
    for name in ("clip", "tone", "rows", "note"):
        assert (path.parent / "files" / row[f"{name}/path"]).stat().st_size > 0
    assert "a &lt; b" in (path.parent / "files" / row["note/path"]).read_text()
