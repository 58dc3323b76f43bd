"""From what a run goes on: which checkpoint, what if it is damaged or of another model, and what is made up for."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import CheckpointError
from tests.trainer import saves
from tests.trainer.small import WIDTH, Batch, Samples, assert_same_weights, weights


class Looks(dt.Callback):
    def __init__(self) -> None:
        self._start: dict[str, torch.Tensor] = {}

    def pre_fit(self, trainer: Any) -> None:
        self._start = weights(trainer.model)


def test_evaluating_a_run_without_a_checkpoint_says_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    def said(trainer: saves.Saves, *, fits: bool = False) -> int:
        caplog.clear()
        with trainer:
            if fits:
                trainer.fit()
            for _ in range(2):
                trainer.evaluate()
        return caplog.text.count("runs/tests/checkpoint/run/checkpoints has no checkpoint")

    assert said(saves.Saves(saves.make_config())) == 1
    assert said(saves.Saves(saves.make_config(resume=None))) == 0
    assert said(saves.Saves(saves.make_config(training={"n_epochs": 1, "num_sanity_val_steps": 1})), fits=True) == 0
    assert said(saves.Saves(saves.make_config())) == 0
    with saves.Saves(
        saves.make_config(experiment="other", init_from="runs/tests/checkpoint/run/checkpoints/step_00000006")
    ) as other:
        other.evaluate()
    assert "other/checkpoints has no checkpoint: these weights are as setup left them" in caplog.text


def test_latest_is_the_newest_and_an_error_where_there_is_none() -> None:
    with pytest.raises(CheckpointError, match=r'resume="latest".*run/checkpoints has no checkpoint.*"auto"'):
        saves.run(resume="latest")
    saves.run(save_every_n_steps=2)
    trainer = saves.run(resume="latest", training={"n_epochs": 2})
    assert trainer.loaded == ["step_00000006"]
    assert trainer.global_step == 2 * saves.STEPS


@pytest.mark.parametrize(("mode", "step"), [("min", 2), ("max", 4)])
def test_best_is_the_one_whose_own_validation_was_best(mode: str, step: int, caplog: pytest.LogCaptureFixture) -> None:
    script = (0.5, -1.0, 0.5, 7.0, float("nan"), 0.0)
    saves.fit_scripted(script, save_every_n_steps=1)
    with caplog.at_level(logging.WARNING, "dream_trainer"):
        trainer = saves.fit_scripted((*script, 0.0), save_every_n_steps=2, resume="best", best_mode=mode)
    assert trainer.loaded == [f"step_{step:08d}"]
    assert f"continuing from step {step}; set aside: " in caplog.text
    assert trainer.saved == [*range(step + 2, 8, 2), 7]
    assert saves.steps_of(trainer) == [*range(1, step + 1), *trainer.saved]


@pytest.mark.parametrize("way", ["resume", "load_checkpoint"])
def test_an_evaluation_of_an_older_checkpoint_leaves_the_run_as_it_is(way: str) -> None:
    def config(**checkpoint: Any) -> saves.Config:
        made = saves.make_config(training={"n_epochs": 3}, **checkpoint)
        made.logger_parameters = dt.LoggerParameters(loggers=("jsonl",), log_every_n_steps=1)
        return made

    class Logs(dt.LoggerMixin, saves.Saves):
        def predict_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.model(batch[0])

    first = Logs(config())
    saves.fit(first)
    before = files_of(first.run_dir)
    with Logs(config(resume=saves.STEPS) if way == "resume" else config()) as trainer:
        if way == "load_checkpoint":
            trainer.load_checkpoint(first.checkpoint_dir / f"step_{saves.STEPS:08d}")
        assert trainer.evaluate() == pytest.approx(dict.fromkeys(["val/loss"], first.history_of("val/loss")[0][1]))
        assert len(trainer.predict(DataLoader(Samples(4), 2))) == 4
        assert trainer.global_step == saves.STEPS
        assert files_of(first.run_dir) == before
    assert files_of(first.run_dir) == before
    second = Logs(config(resume=saves.STEPS))
    with second:
        second.evaluate()
        second.fit()
    assert saves.steps_of(second) == [saves.STEPS, 2 * saves.STEPS, 3 * saves.STEPS]
    assert len(list(second.checkpoint_dir.glob(".aside-*"))) == 2


def files_of(directory: Path) -> dict[str, bytes]:
    """What lies under a directory, but for the lock, by its path."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_best_without_a_value_is_an_error_that_says_so() -> None:
    saves.fit_scripted((1.0, 2.0), save_every_n_steps=1, val_every=2, stop_after=1)
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* has a value of 'val/loss'"):
        saves.fit_scripted((1.0, 2.0), resume="best")


def export_of_another_run() -> tuple[str, dict[str, torch.Tensor]]:
    """A file with weights that are not those a run of the tests starts from."""
    trainer = saves.run(experiment="elsewhere")
    with saves.Saves(saves.make_config(experiment="elsewhere")) as again:
        (path,) = again.export("weights.safetensors")
    assert trainer.loaded == []
    return str(path), weights(trainer.model)


@pytest.mark.pitfall(37)
def test_init_from_gives_the_start_and_is_ignored_once_there_is_something_to_resume() -> None:
    path, given = export_of_another_run()
    first, later = Looks(), Looks()
    straight = saves.run(experiment="straight", init_from=path, training={"n_epochs": 2}, callbacks=[first])
    assert_same_weights(first._start, given)
    assert straight.loaded == []
    saves.run(init_from=path, training={"max_steps": 4})
    Path(path).unlink()  # nobody looks at it again
    resumed = saves.run(init_from=path, training={"n_epochs": 2}, callbacks=[later])
    assert resumed.loaded == ["step_00000004"]
    assert not torch.equal(later._start["1.weight"], given["1.weight"])
    assert_same_weights(weights(resumed.model), weights(straight.model))


@pytest.mark.pitfall(38)
def test_a_name_in_init_from_that_does_not_fit_is_an_error_that_lists_it_unless_renamed() -> None:
    from safetensors.torch import load_file, save_file

    path, given = export_of_another_run()
    tensors = load_file(path)
    tensors["tail.weight"] = tensors.pop("1.weight")
    save_file(tensors, "renamed.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)1\.weight.*tail\.weight|tail\.weight.*1\.weight"):
        saves.run(init_from="renamed.safetensors")
    renamed, lax = Looks(), Looks()
    saves.run(
        experiment="renamed", init_from="renamed.safetensors", init_renames={r"^tail\.": "1."}, callbacks=[renamed]
    )
    assert_same_weights(renamed._start, given)
    saves.run(experiment="lax", init_from="renamed.safetensors", init_strict=False, callbacks=[lax])
    assert_same_weights(
        {n: t for n, t in lax._start.items() if n != "1.weight"}, {n: t for n, t in given.items() if n != "1.weight"}
    )
    assert not torch.equal(lax._start["1.weight"], given["1.weight"])


def test_init_from_a_file_that_is_not_there_names_it() -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors"):
        saves.run(init_from="nowhere.safetensors")


@pytest.mark.pitfall(29)
def test_the_next_older_is_loaded_exactly_and_one_warning_names_the_file(caplog: pytest.LogCaptureFixture) -> None:
    first = saves.run(save_every_n_steps=2)
    expected = saves.all_tensors(first.checkpoint_dir / "step_00000004")
    newest = first.checkpoint_dir / "step_00000006"
    name = saves.damage(newest)
    with pytest.raises(CheckpointError, match=rf"step_00000006/{name}"):
        saves.run(resume=str(newest))  # asked for by name, it is an error though others are whole
    look = Looks()
    with caplog.at_level(logging.WARNING, "dream_trainer"):
        trainer = saves.run(callbacks=[look])
    (message,) = [r.getMessage() for r in caplog.records if "skipping a damaged" in r.getMessage()]
    assert f"step_00000006/{name}" in message
    assert trainer.loaded == ["step_00000004"]
    for parameter, value in look._start.items():
        assert torch.equal(value, expected[f"models.model.{parameter}"])
    assert_same_weights(weights(trainer.model), weights(first.model))


@pytest.mark.parametrize("resume", ["auto", "latest"])
def test_if_none_is_whole_nothing_starts_anew(resume: str, caplog: pytest.LogCaptureFixture) -> None:
    first = saves.run(save_every_n_steps=2)
    for step in (2, 4, 6):
        saves.damage(first.checkpoint_dir / f"step_{step:08d}")
    before = {path: path.stat().st_mtime_ns for path in first.checkpoint_dir.rglob("*")}
    trainer = saves.Saves(saves.make_config(resume=resume))
    with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints in .* is whole"):
        saves.fit(trainer)
    assert trainer.losses == []
    assert caplog.text.count("skipping a damaged") == 3
    assert {path: path.stat().st_mtime_ns for path in first.checkpoint_dir.rglob("*")} == before


@pytest.mark.pitfall(40, 41)
@pytest.mark.parametrize("place", ["model.safetensors", "checkpoints/step_00000099"])
def test_an_export_beside_the_checkpoints_is_none_of_them_and_among_them_there_is_none(place: str) -> None:
    straight = saves.run(experiment="straight", training={"n_epochs": 2})
    with saves.Saves(saves.make_config()) as trainer:
        trainer.fit()
        if place.startswith("checkpoints"):
            with pytest.raises(CheckpointError, match="belongs to a run's checkpoints"):
                trainer.export(trainer.run_dir / place)
        else:
            assert all(file.is_file() for file in trainer.export(trainer.run_dir / place))
    again = saves.run()
    assert (again.loaded, again.losses, again.saved) == (["step_00000006"], [], [])
    longer = saves.run(training={"n_epochs": 2})
    assert longer.loaded == ["step_00000006"]
    assert_same_weights(weights(longer.model), weights(straight.model))


class Altered(saves.Saves):
    change = ""

    def configure_models(self) -> None:
        super().configure_models()
        blocks: Any = self.model.get_submodule("0")
        head = self.model.get_submodule("1")
        if self.change == "renamed":
            self.model = nn.Sequential()
            self.model.add_module("0", blocks)
            self.model.add_module("tail", head)
        elif self.change == "wider":
            blocks[1][0] = nn.Linear(WIDTH, 2 * WIDTH).double()
            self.model[1] = nn.Linear(2 * WIDTH, 1).double()
        elif self.change == "left out":
            blocks[0][0].requires_grad_(False)

    def configure_optimizers(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad or self.change != "left out"]
        self.optimizer = torch.optim.SGD(trained[::-1] if self.change == "reversed" else trained, lr=0.1, momentum=0.9)


def altered(config: saves.Config, change: str, **options: Any) -> Altered:
    trainer = Altered(config, **options)
    trainer.change = change
    return trainer


@pytest.mark.pitfall(38, 39)
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("renamed", [r"only in the checkpoint: model\.1\.bias, model\.1\.weight", r"only here: .*model\.tail\.weight"]),
        ("left out", [r"only in the checkpoint: model\.0\.0\.0\.bias, model\.0\.0\.0\.weight"]),
        ("wider", [r"models.model.1.weight \(saved \(1, 3\) torch.float64, here \(1, 6\) torch.float64\)"]),
    ],
)
def test_another_model_is_an_error_that_names_what_does_not_fit(change: str, names: list[str]) -> None:
    saves.run(training={"max_steps": 3})
    trainer = altered(saves.make_config(), change)
    with pytest.raises(CheckpointError, match=".*".join(names)):
        saves.fit(trainer)
    assert trainer.losses == []
    assert trainer.saved == []


@pytest.mark.pitfall(39)
def test_optimizer_state_follows_names_and_not_positions() -> None:
    straight = saves.run(experiment="straight")
    saves.run(training={"max_steps": 3})
    trainer = saves.fit(altered(saves.make_config(), "reversed"))
    assert trainer.loaded == ["step_00000003"]
    assert_same_weights(weights(trainer.model), weights(straight.model))


class Signalled(saves.Saves):
    """Gets SIGTERM in the validations after these steps, once each, or before the first step."""

    steps: tuple[int, ...] = ()
    at_start = False

    def post_setup(self) -> None:
        if self.at_start:
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.global_step in self.steps and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().validation_step(batch, batch_idx)


@pytest.fixture
def straight() -> saves.Saves:
    return saves.run(experiment="straight", training=saves.VALIDATING, callbacks=[saves.Validated()])


@pytest.mark.pitfall(42)
@pytest.mark.parametrize(
    ("steps", "rules"),
    [((3,), {"save_every_n_steps": 3}), ((6, 6, 9, 12), saves.NOTHING | {"save_at_end": True})],
    ids=["by steps", "at the end"],
)
def test_a_validation_that_a_signal_ended_is_made_up_for(
    steps: tuple[int, ...], rules: dict[str, Any], straight: saves.Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for step in steps:
        trainer = Signalled(saves.make_config(training=saves.VALIDATING, callbacks=[saves.Validated()], **rules))
        trainer.steps = (step,)
        with pytest.raises(SystemExit) as ended, trainer:
            trainer.fit()
        assert ended.value.code == 143
        assert trainer.global_step == step
        assert [found for found, _ in trainer.get_callback(saves.Validated)._found] == [
            validated for validated in (3, 6, 9, 12) if validated < step
        ]
        newest = trainer.checkpoints()[-1]
        assert (newest.step, newest.metrics) == (step, {})
    resumed = saves.run(training=saves.VALIDATING, callbacks=[saves.Validated()], **rules)
    assert resumed.loaded == [f"step_{steps[-1]:08d}"]
    saves.assert_as(straight, resumed)


@pytest.mark.pitfall(42)
def test_a_signal_before_all_steps_leaves_step_0(straight: saves.Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    trainer = Signalled(saves.make_config(training=saves.VALIDATING, callbacks=[saves.Validated()]))
    trainer.at_start = True
    with pytest.raises(SystemExit) as ended:
        trainer.fit()
    assert ended.value.code == 143
    assert trainer.losses == []
    assert trainer.saved == saves.steps_of(trainer) == [0]
    resumed = saves.run(training=saves.VALIDATING, callbacks=[saves.Validated()])
    assert resumed.loaded == ["step_00000000"]
    assert resumed.seen == straight.seen
    saves.assert_as(straight, resumed)
