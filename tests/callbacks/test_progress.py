"""Progress: sane in terminals, pipes and CI logs, cheap, and never dividing by zero."""

import html
import io
import re
import sys
import time
import timeit
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import Look, Pace, Progress
from tests.callbacks.recording import Clock, Terminal
from tests.trainer import small
from tests.trainer.small import Config, Samples, Spread, Validates, make_config
from tests.worlds import run_world


class Regression(Validates, Spread, dt.LoggerMixin):
    """Twelve batches of two samples, to train and to validate on."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, DataLoader(Samples(24), 2), DataLoader(Samples(24), 2))


def make(*callbacks: dt.Callback, cls: type[Regression] = Regression, **training: Any) -> Regression:
    return cls(make_config(callbacks=callbacks, log_every=1, **training))


def fit(callback: Progress, cls: type[Regression] = Regression, **training: Any) -> Regression:
    return small.fit(make(callback, cls=cls, **training))


@pytest.mark.pitfall(47)
def test_a_pipe_gets_plain_lines_without_control_codes() -> None:
    file = io.StringIO()
    fit(Progress(file=file, line_seconds=0.0), n_epochs=1)
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()
    assert lines[0].startswith("epoch 0 | step 1/12")
    assert re.fullmatch(
        r"epoch 0 \| step 12/12 \| train/loss \S+ \| \S+( K| M)? steps/s \| \S+( K| M)? samples/s"
        r"( \| waits for data \d+%)? \| eta 0:00",  # so small a model may
        lines[11],
    )
    assert re.fullmatch(r"validation \| step 12 \| val/loss \S+ \| took \d+\.\d s", lines[12])
    assert lines[13].startswith("epoch 1 | step 12/12 | train/loss")
    assert len(lines) == 14


@pytest.mark.parametrize("own", [False, True])
def test_the_console_is_a_bar_on_a_terminal_and_lines_elsewhere(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for file in (terminal := Terminal(), pipe := io.StringIO()):
        monkeypatch.setattr(sys, "stdout", file)
        config = make_config(callbacks=[Progress()] if own else [], log_every=1, loggers=("console",), n_epochs=1)
        assert len(small.fit(Regression(config)).callbacks) == own
    assert "step 12/12" in terminal.getvalue()
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")  # has its cursor back
    assert terminal.getvalue().count("validation | step 12") == 1
    assert "run directory: " in terminal.getvalue()
    assert "epoch 0 | step 12 | " not in terminal.getvalue()
    assert "epoch 0 | step 12 | " in pipe.getvalue()
    assert ("step 12/12" in pipe.getvalue()) == own  # its plain lines


@pytest.mark.pitfall(47)
def test_plain_lines_come_at_intervals() -> None:
    file = io.StringIO()
    fit(Progress(file=file, line_seconds=3600), n_epochs=2)
    kinds = [line.split(" | ")[0] for line in file.getvalue().splitlines()]
    assert kinds == ["epoch 0", "validation", "validation", "epoch 2"]


class FakeIPython:
    """What IPython documents of `get_ipython`, `display` and `DisplayHandle`, which is not installed here.

    `outputs` has the contents of each output of the cell, in the order in which they replaced each other.
    """

    def __init__(self, shell_config: dict[str, Any] | None) -> None:
        self.outputs: list[list[dict[str, str]]] = []
        shell = None if shell_config is None else SimpleNamespace(config=shell_config)
        package, display = ModuleType("IPython"), ModuleType("IPython.display")
        vars(package).update(get_ipython=lambda: shell, display=display)
        vars(display).update(display=self._display)
        self.modules = {"IPython": package, "IPython.display": display}

    def _display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        output = [data]
        self.outputs.append(output)
        return SimpleNamespace(update=lambda data, *, raw: output.append(data) if raw else None)


def test_a_notebook_gets_one_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ipython = FakeIPython({"IPKernelApp": {"connection_file": "kernel.json"}})
    for name, module in ipython.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    fit(Progress(("train/loss", "<b>"), refresh_seconds=0.0), n_epochs=1)
    (output,) = ipython.outputs
    assert any("validating" in shown["text/plain"] for shown in output)
    assert 'max="12" value="12"' in output[-1]["text/html"]
    assert "step 12/12 | train/loss" in output[-1]["text/plain"]
    assert html.escape(output[-1]["text/plain"]) in output[-1]["text/html"]
    printed = capsys.readouterr().out
    assert "validation | step 12 | val/loss" in printed
    assert "\x1b" not in printed
    assert "epoch 0 | step" not in printed


def test_no_number_is_cut_off_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    file = Terminal()
    fit(Progress(("train/loss", "val/loss"), file=file, refresh_seconds=0.0), n_epochs=2)
    assert "…" not in file.getvalue()
    last = file.getvalue().split("epoch 2")[-1]
    assert "eta" in last
    assert "samples/s" in last


def test_a_failed_run_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout
    file = Terminal()

    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            if batch_idx == 3:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Progress(file=file), Fails)
    assert sys.stdout is before
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


@pytest.mark.pitfall(47)
@pytest.mark.parametrize(
    "training",
    [{"n_epochs": 1, "gradient_accumulation_steps": 50}, {"max_steps": 1}, {"max_steps": 0}, {"n_epochs": 0}],
    ids=str,
)
def test_epochs_shorter_than_a_window_divide_nothing_by_zero(training: dict[str, Any]) -> None:
    clock = Clock()  # which never moves
    said = io.StringIO()
    fit(Progress(file=said, line_seconds=0.0, clock=clock), **training)
    assert not {"nan", "inf"} & set(said.getvalue().split())
    assert "steps/s" not in said.getvalue()


def on_a_rank(directory: str) -> str:
    import contextlib
    import os

    os.chdir(directory)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), make(Progress(line_seconds=0.0), n_epochs=1) as trainer:
        trainer.fit()
    return said.getvalue()


@pytest.mark.pitfall(47)
def test_one_rank_of_several_shows_progress(tmp_path: Path) -> None:
    first, second = run_world(on_a_rank, 2, str(tmp_path))
    assert "step 6/6 | train/loss" in first
    assert second == ""


class Saving(Regression, dt.CheckpointMixin, dt.EvalMixin):
    """With checkpoints."""


def test_saves_resumes_and_evaluations_are_told_in_lines_of_their_own() -> None:
    first, second = io.StringIO(), io.StringIO()
    saves = dt.CheckpointParameters(save_every_n_steps=6, save_every_n_epochs=None, async_save=False)
    with make(Progress(file=first), cls=Saving, checkpoint=saves, n_epochs=1) as trainer:
        trainer.fit()
        trainer.evaluate({"test": trainer.val_dataloaders[""]})
    with make(Progress(file=second), cls=Saving, checkpoint=saves, n_epochs=2, num_sanity_val_steps=1) as trainer:
        trainer.fit()
    told = [line for line in first.getvalue().splitlines() if not line.startswith("epoch")]
    assert told[0] == "checkpoint | runs/tests/trainer/run/checkpoints/step_00000006"
    assert re.fullmatch(r"validation \| step 12 \| val/loss \S+ \| took \d+\.\d s", told[1])
    assert told[2] == "checkpoint | runs/tests/trainer/run/checkpoints/step_00000012"
    assert re.fullmatch(r"evaluation \| step 12 \| val/test/loss \S+ \| took \d+\.\d s", told[3])
    assert len(told) == 4
    assert re.match(
        "resumed at step 12 from runs/tests/trainer/run/checkpoints/step_00000012\n"
        r"sanity validation \| step 12 \| val/loss \S+ \| took \d+\.\d s\n"
        r"epoch 1 \| step 13/24",
        second.getvalue(),
    )


def test_rates_are_of_training_alone_and_the_time_left_counts_validation_in() -> None:
    idle = 7.0  # in an earlier fit
    pace, now = Pace(Look(-idle, 100, 3200, 0, 0.0)), 0.0
    for step in range(101, 113):
        now += 60.0 if step <= 103 else 0.5  # compilation in the first three steps
        if step == 108:
            now += 8.0
            idle += 8.0
        pace.look(Look(now - idle, step, step * 32, 0, 0.0), now)
    assert pace.rates()[1:4] == pytest.approx((2.0, 64.0, 0.0))
    # Nine steps since warm-up took 4.5 s of training and 8 s of validation.
    assert pace.seconds_left(1012, 112, now, None) == pytest.approx(900 * 12.5 / 9)


def test_training_that_waits_for_its_data_says_so() -> None:
    class Slow(Samples):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    class SlowRegression(Regression):
        def configure_dataloaders(self) -> tuple[Any, Any]:
            return DataLoader(Slow(24), 2), None

    file = io.StringIO()
    fit(Progress(file=file), SlowRegression, n_epochs=1)
    (share,) = re.findall(r"waits for data (\d+)%", file.getvalue().splitlines()[-1])
    assert 50 < int(share) <= 100


@pytest.mark.pitfall(16)
def test_a_step_costs_a_look_at_the_clock() -> None:
    callback = Progress(file=io.StringIO(), line_seconds=3600)
    trainer = fit(callback, n_epochs=1)
    calls = 20000
    seconds = min(timeit.repeat(lambda: callback.post_train_step(trainer), number=calls, repeat=5)) / calls
    assert seconds < 2e-6
