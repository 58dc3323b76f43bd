"""`dream-trainer plot`: the right numbers on the right axes, read back from matplotlib's artists and from the files."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api import draw, main, panels, read_log


def record(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "samples": 8 * step, "time": 1000.0 + 2 * step} | metrics


def write(run: Path, records: list[dict[str, Any]]) -> Path:
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return run


def read_run(run: Path) -> list[dict[str, float]]:
    return read_log(run / "metrics.jsonl")


def a_run(path: Path, offset: float = 0.0) -> Path:
    records = []
    for step in range(1, 5):
        train = {"train/loss": 1.0 / step + offset, "train/grad_norm": float(step), "lr": 0.1 / step, "other": 5.0}
        records.append(record(step, **train))
        if step % 2 == 0:
            records.append(record(step, **{"val/loss": 2.0 / step, "val/a/accuracy": 0.5, "val/b/accuracy": 0.25}))
    return write(path, records)


def lines(figure: Any) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Points of each line by its label, by the title of its panel."""
    return {
        axes.get_title(): {
            line.get_label(): list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
            for line in axes.get_lines()
        }
        for axes in figure.axes
        if axes.axison
    }


def test_the_usual_metrics_are_drawn_as_logged(tmp_path: Path) -> None:
    found = lines(draw(panels({"one": read_run(a_run(tmp_path / "one"))}, (), "steps"), x="steps"))
    assert list(found) == ["loss", "accuracy", "learning rate", "gradient norm"]
    assert found["loss"] == {
        "train/loss": [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)],
        "val/loss": [(2, 1.0), (4, 0.5)],
    }
    assert found["accuracy"] == {"val/a/accuracy": [(2, 0.5), (4, 0.5)], "val/b/accuracy": [(2, 0.25), (4, 0.25)]}
    assert found["learning rate"] == {"lr": [(1, 0.1), (2, 0.05), (3, 0.1 / 3), (4, 0.025)]}
    assert found["gradient norm"] == {"train/grad_norm": [(1, 1), (2, 2), (3, 3), (4, 4)]}


@pytest.mark.parametrize(("x", "places"), [("samples", [8, 16, 24, 32]), ("time", [0, 1 / 30, 2 / 30, 3 / 30])])
def test_the_axis_may_be_samples_or_time(tmp_path: Path, x: str, places: list[float]) -> None:
    figure = draw(panels({"one": read_run(a_run(tmp_path / "one"))}, ("train/loss",), x), x=x)
    assert [place for place, _ in lines(figure)["loss"]["train/loss"]] == pytest.approx(places)
    assert figure.axes[0].get_xlabel() == {"samples": "samples", "time": "minutes"}[x]


def test_several_runs_share_a_panel_and_are_told_apart(tmp_path: Path) -> None:
    runs = {name: read_run(a_run(tmp_path / name, offset)) for name, offset in (("one", 0.0), ("two", 1.0))}
    figure = draw(panels(runs, ("*loss",), "steps"), x="steps")
    found = lines(figure)["loss"]
    assert set(found) == {f"{run}: {metric}" for run in runs for metric in ("train/loss", "val/loss")}
    assert found["two: train/loss"][0] == (1, 2.0)
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in figure.axes[0].get_lines()}
    assert len(set(looks.values())) == 4
    assert looks["one: train/loss"][0] == looks["one: val/loss"][0] != looks["two: val/loss"][0]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == list(found)


def test_nan_is_a_gap_and_a_step_logged_again_counts_once(tmp_path: Path) -> None:
    records = [record(1, **{"train/loss": 9.0}), record(1, **{"train/loss": 1.0}), record(2, **{"train/loss": "NaN"})]
    records.append(record(3, **{"train/loss": "Infinity"}))
    (curve,) = panels({"one": read_run(write(tmp_path / "one", records))}, ("train/loss",), "steps")["loss"]
    assert list(curve.points) == [1, 2, 3]
    assert curve.points[1] == 1.0
    assert not any(map(math.isfinite, list(curve.points.values())[1:]))


def test_the_command_writes_what_the_suffix_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    for name in ("a/run", "b/run"):
        a_run(tmp_path / name)
    assert main(["plot", "a/run", "b/run/metrics.jsonl", "--output", "out/both.svg"]) == 0
    text = Path("out/both.svg").read_text()
    for expected in ("a/run: train/loss", "b/run: val/loss", "learning rate", "optimizer steps"):
        assert expected in text
    assert main(["plot", "a/run", "--metrics", "val/*", "--x", "time", "--log-y"]) == 0
    with Image.open("plot.png") as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 20
    assert capsys.readouterr().out.splitlines()[-1] == "drew loss, accuracy: plot.png"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "no run was given"),
        (["run", "--output", "plot.bmp"], 2, r"plot.bmp.*\.png, \.svg or \.pdf"),
        (["run", "--metrics", "nothing"], 2, "nothing: no such metric. There are .*train/loss"),
        (["binary"], 1, "damaged"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_not_drawn(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(Path("run"))
    Path("binary").mkdir()
    Path("binary/metrics.jsonl").write_bytes(b'{"step": "\xff\xfe"}\n')
    assert main(["plot", *arguments]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not list(Path().glob("plot.*"))


def test_a_missing_matplotlib_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", str(a_run(tmp_path / "run"))]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
