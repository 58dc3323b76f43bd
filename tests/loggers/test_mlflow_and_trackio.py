"""MLflowLogger and TrackioLogger with the real packages: what their stores hold, over kills and resumes.

The stores are files of this machine, and read with SQL, beside the packages.
"""

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import api
from tests.loggers.readers import MEDIA, stamp

CONFIG = {"project": "p", "group": "g", "experiment": "e", "seed": 7, "optimizer": {"lr": 0.5}}


def query(path: Path, question: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(question).fetchall()
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def nothing_leaves_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.slow
@pytest.mark.pitfall(44)
@pytest.mark.pitfall(48)
def test_a_run_that_was_killed_twice_and_resumed_is_one_curve(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    lives = subprocess.run(
        [sys.executable, "-m", "tests.loggers.killed_runs"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert lives.returncode == 0, lives.stderr
    lines = api.read_jsonl("runs/p/g/e/metrics.jsonl")
    names = ("train/loss", "lowest", "samples")
    curve = {name: [(line["step"], line[name]) for line in lines] for name in names}
    assert [step for step, _ in curve["lowest"]] == [3, 6, 9, 12]

    ((run,),) = query(tmp_path / "mlflow.db", "select run_uuid from runs where status = 'FINISHED'")
    assert query(tmp_path / "mlflow.db", "select count(*) from runs") == [(1,)]
    for name in names:
        stored = f"select step, value from metrics where run_uuid = '{run}' and key = '{name}' order by rowid"
        assert query(tmp_path / "mlflow.db", stored) == curve[name]

    rows = query(tmp_path / "trackio/p.db", "select step, metrics, run_id from metrics order by id")
    assert len({run for _, _, run in rows}) == 1
    stored_lines = [(step, json.loads(metrics)) for step, metrics, _ in rows]
    for name in names:
        assert [(step, values[name]) for step, values in stored_lines if name in values] == curve[name]
    assert [step for step, values in stored_lines if "end" in values] == [12]


def test_an_mlflow_run_has_names_config_and_all_kinds_of_media(tmp_path: Path) -> None:
    store = tmp_path / "mlflow.db"
    logger = api.MLflowLogger(api.MLflowParameters(tags={"kind": "small"}, name="shown"))
    logger.open(tmp_path, CONFIG, None)
    for _ in range(2):  # the second time as after a kill and a resume, when they come once more
        logger.log({"loss": 0.5, "top 5 (%)": math.nan}, stamp(4))
        assert all(logger.log_media(name, item, stamp(4)) for name, item in MEDIA.items())
        logger.open(tmp_path, CONFIG, 3)
    logger.close()
    assert query(store, "select name from experiments where name != 'Default'") == [("p",)]
    ((run, name),) = query(store, "select run_uuid, name from runs")
    assert (run, name) == (logger.run_id, "shown")
    assert dict(query(store, "select key, value from params")).items() >= {"seed": "7", "optimizer.lr": "0.5"}.items()
    assert dict(query(store, "select key, value from tags")).items() >= {"group": "g", "kind": "small"}.items()
    metrics = query(store, "select key, step, value, is_nan from metrics order by key")
    assert metrics == [("epoch", 4, 0, 0), ("loss", 4, 0.5, 0), ("samples", 4, 128, 0), ("top 5 ___", 4, 0, 1)]
    (artifacts,) = tmp_path.rglob("artifacts")
    found = {path.relative_to(artifacts).as_posix(): path for path in artifacts.rglob("*") if path.is_file()}
    assert sorted(name for name in found if not name.startswith("images/")) == [
        "config.json",
        "media/clip/step_00000004.gif",
        "media/note/step_00000004.md",
        "media/rows/step_00000004.json",
        "media/tone/step_00000004.wav",
        "media/weights/step_00000004.json",
    ]
    images = [name.split("+")[:3] for name in found if name.endswith(".png")]
    assert sorted(images) == [["images/val~pair~0", "step", "4"], ["images/val~pair~1", "step", "4"]]
    assert json.loads(found["config.json"].read_text()) == CONFIG
    assert json.loads(found["media/rows/step_00000004.json"].read_text())["data"] == [[1, "a"], [2, "b"]]

    logger.load_state_dict({"id": "0" * 32})  # of a run that this store does not have: it is a new one here
    logger.open(tmp_path, CONFIG, 3)
    logger.log({"loss": 0.25}, stamp(4))
    assert logger.run_id not in (run, "0" * 32)
    ours = f"run_uuid = '{logger.run_id}' and key = 'loss'"
    assert query(store, f"select step, value from metrics where {ours}") == [(4, 0.25)]
    logger.close()


TRACKIO = """
import sys, threading
from pathlib import Path
from tests.loggers.readers import MEDIA, stamp
from tests.loggers.test_mlflow_and_trackio import CONFIG
from dream_trainer.config.logger_parameters import TrackioParameters
from dream_trainer.loggers.trackers import TrackioLogger
logger = TrackioLogger(TrackioParameters(name="shown", init_arguments={"auto_log_cpu": False}))
assert "trackio" not in sys.modules and threading.active_count() == 1
logger.open(Path("run"), CONFIG, None)
assert all(logger.log_media(name, item, stamp(4)) for name, item in MEDIA.items())
logger.log({"loss": float("nan")}, stamp(4))
logger.close()
assert threading.active_count() == 1
"""


def test_a_trackio_run_has_its_names_its_config_and_every_kind_of_media(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", TRACKIO], env=environment, check=True, timeout=120)
    store = tmp_path / "trackio/p.db"
    ((name, config),) = query(store, "select run_name, config from configs")
    assert name == "shown"
    assert json.loads(config).items() >= {"seed": 7, "optimizer": {"lr": 0.5}, "_Group": "g"}.items()
    rows = [json.loads(metrics) for (metrics,) in query(store, "select metrics from metrics order by id")]
    merged = {name: value for row in rows for name, value in row.items()}
    kinds = {name: value["_type"] for name, value in merged.items() if isinstance(value, dict)}
    assert kinds == {
        "val/pair/0": "trackio.image",
        "val/pair/1": "trackio.image",
        "clip": "trackio.video",
        "tone": "trackio.audio",
        "weights": "trackio.histogram",
        "rows": "trackio.table",
        "note": "trackio.markdown",
    }
    assert (merged["epoch"], merged["samples"], str(merged["loss"]).lower()) == (0, 128, "nan")
    for name in ("val/pair/0", "clip", "tone"):
        assert (tmp_path / "trackio/media" / merged[name]["file_path"]).stat().st_size > 0


def test_parameters_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(api.ConfigError, match=r"tags\['kind'\]=3"):
        api.MLflowParameters(tags={"kind": 3})  # type: ignore[dict-item]
    with pytest.raises(api.ConfigError, match="init_arguments has project, which the config gives"):
        api.TrackioParameters(init_arguments={"project": "x"})
    wrong = api.TrackioParameters(init_arguments={"space": "x"})
    with pytest.raises(api.ConfigError, match="'space', which trackio.init does not take. Did you mean space_id?"):
        api.check_loggers(api.LoggerParameters(loggers=("trackio",), trackio=wrong))
