"""MLflowLogger with the real package: what its store, a file of this machine, holds over kills and resumes."""

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


@pytest.fixture
def mlflow_logger() -> api.MLflowLogger:
    return api.MLflowLogger(api.MLflowParameters(tags={"kind": "small"}, name="shown"))


def test_an_mlflow_run_has_names_config_and_all_kinds_of_media(tmp_path: Path, mlflow_logger: api.MLflowLogger) -> None:
    store = tmp_path / "mlflow.db"
    mlflow_logger.open(tmp_path, CONFIG, None)
    for _ in range(2):  # the second time as after a kill and a resume, when they come once more
        mlflow_logger.log({"loss": 0.5, "top 5 (%)": math.nan}, stamp(4))
        assert all(mlflow_logger.log_media(name, item, stamp(4)) for name, item in MEDIA.items())
        mlflow_logger.open(tmp_path, CONFIG, 3)
    mlflow_logger.close()
    assert query(store, "select name from experiments where name != 'Default'") == [("p",)]
    ((run, name),) = query(store, "select run_uuid, name from runs")
    assert (run, name) == (mlflow_logger.run_id, "shown")
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

    mlflow_logger.load_state_dict({"id": "0" * 32})  # of a run that this store does not have: it is a new one here
    mlflow_logger.open(tmp_path, CONFIG, 3)
    mlflow_logger.log({"loss": 0.25}, stamp(4))
    assert mlflow_logger.run_id not in (run, "0" * 32)
    ours = f"run_uuid = '{mlflow_logger.run_id}' and key = 'loss'"
    assert query(store, f"select step, value from metrics where {ours}") == [(4, 0.25)]
    mlflow_logger.close()


def test_parameters_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(api.ConfigError, match=r"tags\['kind'\]=3"):
        api.MLflowParameters(tags={"kind": 3})  # type: ignore[dict-item]
    with pytest.raises(api.ConfigError, match="init_arguments has project, which the config gives"):
        api.WandbParameters(init_arguments={"project": "x"})
    wrong = api.WandbParameters(init_arguments={"note": "x"})
    with pytest.raises(api.ConfigError, match="'note', which wandb.init does not take. Did you mean notes?"):
        api.check_loggers(api.LoggerParameters(loggers=("wandb",), wandb=wrong))
