"""LoggerMixin through real trainers: what is logged, with which weight, at which step, also over ranks and restarts."""

import json
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
import torch.nn as nn
from PIL import Image as Pillow

import dream_trainer as dt
from tests.api import ConfigError, Images, Logger, Media, Stamp, Text, pil_image, read_jsonl
from tests.loggers.readers import csv_rows, newest_wandb_file, wandb_history
from tests.trainer.small import Alone, Config, Spread, batches
from tests.worlds import run_world

CPU = dt.DeviceParameters(device="cpu")


class Memory(Logger):
    def __init__(self) -> None:
        self.lines: list[tuple[Stamp, dict[str, float]]] = []
        self.media: list[tuple[int, str, Media]] = []
        self.steps: list[int] = []  # of everything, in the order in which it came

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        assert config["project"] == "p"

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        self.lines.append((stamp, dict(metrics)))
        self.steps.append(stamp.step)

    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        self.steps.append(stamp.step)
        self.media.append((stamp.step, name, media))
        return not isinstance(media, Text)

    def column(self, name: str) -> dict[int, float]:
        return {stamp.step: metrics[name] for stamp, metrics in self.lines if name in metrics}


class Algorithm(dt.BaseTrainer, dt.LoggerMixin):
    """Batches are (x, number of tokens); the loss that is logged is the batch's x[0]."""

    batches: ClassVar[list[Any]] = [
        (torch.tensor([float(i)] * size), tokens) for i, (size, tokens) in enumerate([(1, 7), (3, 2), (2, 9), (4, 1)])
    ]
    weighted: ClassVar[bool] = False
    lr = 0.0

    def __init__(self, config: Any, *extra: Logger) -> None:
        super().__init__(config)
        self._extra = list(extra)

    def configure_loggers(self) -> list[Logger]:
        return [*super().configure_loggers(), *self._extra]

    def setup(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.batches, None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, tokens = batch
        self.log("before", x[0])
        self.backward(self.model(x[:, None]).mean(), weight=tokens if self.weighted else None)
        self.log("after", x[0])
        self.log("own", x[0], weight=1)
        self.log("highest", x[0], reduce="max")
        self.step(self.model, self.optimizer)
        return {"loss": x[0], "parts": {"half": x[0] / 2}, "logits": torch.zeros(3), "note": "text"}


def make_config(every: int = 1, loggers: tuple[Any, ...] = (), experiment: str = "e", **training: Any) -> Config:
    return Config(
        project="p",
        group="g",
        experiment=experiment,
        training_parameters=dt.TrainingParameters(**({"n_epochs": 1} | training)),
        device_parameters=CPU,
        logger_parameters=dt.LoggerParameters(loggers=loggers, log_every_n_steps=every),
    )


def fit(cls: type[Algorithm], config: Any) -> Memory:
    memory = Memory()
    with cls(config, memory) as trainer:
        trainer.fit()
    return memory


@pytest.mark.pitfall(3)
@pytest.mark.pitfall(45)
@pytest.mark.parametrize(("weighted", "weights"), [(False, [1, 3, 2, 4]), (True, [7, 2, 9, 1])])
def test_the_default_weight_is_that_of_the_batchs_backward_or_its_size(weighted: bool, weights: list[int]) -> None:
    class Events(Algorithm):
        def pre_train_batch(self, batch: Any, batch_idx: int) -> None:
            self.log("pre", batch[0][0])

        def post_train_batch(self, result: dict[str, Any], batch_idx: int) -> None:
            self.log("post", result["loss"])

    Events.weighted = weighted
    ((_, metrics),) = fit(Events, make_config(every=100, gradient_accumulation_steps=2)).lines
    expected = sum(value * weight for value, weight in enumerate(weights)) / sum(weights)
    names = ("pre", "before", "after", "post", "train/loss")
    others = {"own": 1.5, "highest": 3, "train/parts/half": expected / 2}
    assert metrics == pytest.approx(dict.fromkeys(names, expected) | others, rel=1e-12)


def test_log_works_before_the_first_step_and_in_every_training_event() -> None:
    steps = {"post_setup": [1], "pre_fit": [1], "post_train_step": [1, 2, 3, 4], "post_epoch": [4], "post_fit": [4]}
    events = {event: lambda self, event=event: self.log(event, 7.0) for event in steps}
    memory = fit(type("Everywhere", (Algorithm,), events), make_config())
    assert {event: memory.column(event) for event in steps} == {e: dict.fromkeys(at, 7.0) for e, at in steps.items()}


@pytest.mark.pitfall(48)
def test_what_is_logged_after_a_validation_has_its_step_or_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Logs(Validating, dt.EvalMixin):
        def post_val_epoch(self, metrics: dict[str, float]) -> None:
            self.log("squared", metrics["val/loss"] * self.global_step)
            self.log_text("note", "x")
            if not self.is_evaluating:
                self.evaluate()

        def pre_val_epoch(self) -> None:
            self.log("too early", 1.0)

    memory = Memory()
    config = make_config(every=4, n_epochs=2, val_every_n_steps=1, num_sanity_val_steps=1)
    with Logs(config, memory) as trainer:
        trainer.fit()
        trainer.evaluate()
    lines = [(stamp.step, metrics) for stamp, metrics in memory.lines if "squared" in metrics]
    assert lines == [(step, {"squared": 4.0 * step}) for step in range(1, 9)]
    assert memory.column("train/loss").keys() == {4, 8}
    assert memory.column("val/loss").keys() == set(range(1, 9))
    assert [step for step, name, _ in memory.media if name == "note"] == list(range(1, 9))
    ignored = [line for line in caplog.messages if "which logs nothing" in line]
    assert ignored == ["log('too early') was called in a sanity validation, which logs nothing: ignored."]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        *((lambda t, name=name: t.log(name, 1.0), ValueError, name) for name in Stamp._fields),
        (lambda t: t.log("", 1.0), TypeError, "'' is not a name"),
        (lambda t: t.log({"loss": 1.0}, 2.0), TypeError, "a dict and a value"),
        (lambda t: t.log("loss"), TypeError, r"log\('loss'\) has no value"),
        (lambda t: t.log({"loss": 1.0}, step=4), TypeError, "unexpected keyword argument 'step'"),
        (
            lambda t: t.log_image("seen", torch.zeros(4, 3, 8, 8)),
            ValueError,
            r"'seen' has shape \(4, 3, 8, 8\).*log_images\('seen', images\)",
        ),
        (
            lambda t: t.log("seen", import_module("torchmetrics").MeanMetric()),
            TypeError,
            "'seen' is of type MeanMetric.*assigned to the trainer",
        ),
    ],
)
def test_what_cannot_be_logged_is_refused_by_its_name(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(Algorithm(make_config()))


class Validating(Algorithm):
    val_batches: ClassVar[list[Any]] = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.batches, self.val_batches

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.log("val/largest", batch.max(), reduce="max")
        self.log("tokens", batch.numel(), reduce="sum")
        return {"loss": batch.mean()}


def test_a_prefix_that_the_user_writes_too_is_there_once() -> None:
    class Says(Validating):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {f"train/{name}": value for name, value in super().training_step(batch, batch_idx).items()}

        def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {f"val/{name}": value for name, value in super().validation_step(batch, batch_idx).items()}

    said, not_said = fit(Says, make_config()), fit(Validating, make_config(experiment="other"))
    assert [metrics for _, metrics in said.lines] == [metrics for _, metrics in not_said.lines]


@pytest.mark.parametrize("where", ["open", "log", "state_dict", "close"])
def test_a_failing_logger_is_reported_once_and_training_goes_on(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any, **__: Any) -> None:
        failures.append(where)
        raise OSError("no space left")

    failures: list[str] = []
    broken, memory = Memory(), Memory()
    setattr(broken, where, fails)
    with Resumable(make_config(max_steps=4), broken, memory) as trainer:
        trainer.fit()
        assert [manifest.step for manifest in trainer.checkpoints()] == [4]
    assert len(memory.lines) == 4
    assert len(failures if where == "log" else broken.lines) == (0 if where == "open" else 4)
    (report,) = [text for text in caplog.messages if "Memory failed" in text]
    assert "no space left" in report


def test_a_strict_run_ends_with_the_loggers_exception() -> None:
    config = make_config()
    config.logger_parameters = dt.LoggerParameters(loggers=(), log_every_n_steps=2, strict=True)
    memory = Memory()
    memory.log = lambda *_: 1 / 0  # type: ignore[assignment,method-assign]
    trainer = Algorithm(config, memory)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert trainer.global_step == 3  # step 2's numbers are read a step later


@pytest.mark.pitfall(52)
@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("wandb", "wandb", "wandb"),
        ("tensorboard", "tensorboard", "tensorboard"),
        ("tensorboard", "google_crc32c", "google-crc32c"),
        ("images", "PIL", "pillow"),
    ],
)
def test_a_package_that_is_missing_is_named_as_pip_knows_it_when_the_trainer_is_built(
    name: Any, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = make_config(loggers=(name,))
    with pytest.raises(ConfigError, match=rf"pip install {package},"):
        Algorithm(config)


def test_by_default_there_is_a_console_and_a_jsonl_file(capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(project="p", group="g", experiment="e", device_parameters=CPU)
    with Algorithm(config) as trainer:
        trainer.fit()
    (record,) = read_jsonl("runs/p/g/e/metrics.jsonl")
    assert (record["step"], record["samples"], record["highest"]) == (4, 10, 3)
    assert json.loads(Path("runs/p/g/e/config.json").read_text())["logger_parameters"]["log_every_n_steps"] == 10
    assert "epoch 0 | step 4 | own 1.500 | train/loss 1.900" in capsys.readouterr().out


class Shows(Validating, dt.EvalMixin):
    """Every batch x has x[0] as its grey value, from 0 to 3 tenths."""

    def post_setup(self) -> None:
        self.log_text("before all", "x")

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.log_image("sample", torch.full((1, 2, 2), float(batch[0][0]) / 10), f"batch {batch_idx}")
        return result

    def post_train_step(self) -> None:
        self.log_histogram("weights", self.model.weight)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.log_images("val/seen", [torch.zeros(2, 2), torch.ones(3, 2, 2)])
        return super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("predicted", 1.0)
        self.log_text("predicted", "x")

    def pre_val_epoch(self) -> None:
        self.log("sanity" if self.is_sanity_validation else "outside", 1.0)

    def post_epoch(self) -> None:
        self.log_text("epoch", "x")


@pytest.mark.pitfall(48)
def test_media_have_their_windows_step_and_none_is_outside_of_training(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    config = make_config(gradient_accumulation_steps=2, num_sanity_val_steps=1)
    with Shows(config, memory) as trainer:
        trainer.evaluate()
        trainer.fit()
        trainer.evaluate()
        trainer.predict(trainer.val_batches)
    assert [(step, name) for step, name, _ in memory.media] == [
        (1, "before all"),
        (1, "sample"),
        (1, "sample"),
        (1, "weights"),
        (2, "sample"),
        (2, "sample"),
        (2, "weights"),
        (2, "val/seen"),
        (2, "val/seen"),
        (2, "epoch"),
    ]
    samples = [media for _, name, media in memory.media if name == "sample" and isinstance(media, Images)]
    assert [int(media.images[0].pixels[0, 0, 0]) for media in samples] == [round(i / 10 * 255) for i in range(4)]
    assert [media.images[0].caption for media in samples] == [f"batch {i}" for i in range(4)]
    assert memory.column("sanity") == memory.column("predicted") == {}
    assert memory.steps == sorted(memory.steps)
    (report,) = [line for line in caplog.messages if "is written nowhere" in line]
    assert "Text" in report


def test_a_window_that_runs_again_keeps_what_was_logged_before_it() -> None:
    class Retries(Validating):
        failures = 0

        def backward(self, loss: torch.Tensor, **options: Any) -> None:
            is_bad = self.global_step == 4 and self.failures == 0
            super().backward(loss * float("nan") if is_bad else loss, **options)
            self.failures += is_bad

        def count(self, name: str) -> None:
            self.log(name, 1.0, weight=1.0, reduce="sum")
            self.log_text(name, "x")

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.count("batches")
            return super().training_step(batch, batch_idx)

        def post_epoch(self) -> None:
            self.count("epochs")

    memory = Memory()
    with Retries(make_config(every=100, on_nonfinite="retry", n_epochs=2), memory) as trainer:
        trainer.fit()
    assert trainer.failures == 1
    for name, count in {"batches": trainer.local_batches, "epochs": 2}.items():
        assert sum(metrics.get(name, 0) for _, metrics in memory.lines) == count
        assert len([True for _, shown, _ in memory.media if shown == name]) == count


def test_without_the_mixin_media_do_nothing_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(Alone):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.log_image("x", torch.zeros(2, 2))
            return super().training_step(batch, batch_idx)

    with Bare(make_config(), batches(2)) as trainer:
        trainer.fit()
    assert len([text for text in caplog.messages if "LoggerMixin" in text]) == 1


def test_the_history_is_every_line_also_without_a_logger() -> None:
    class Looks(Validating):
        def post_fit(self) -> None:
            assert self.history
            assert self.history_of("may yet come") == []
            self.log("end", 1.0)

    trainer = Looks(make_config(every=2, val_every_n_steps=2))
    assert trainer.history_of("val/loss") == []
    with trainer:
        trainer.fit()
        assert [(line["step"], line["samples"], line["epoch"]) for line in trainer.history] == [
            (2, 4, 0),
            (2, 4, 0),
            (4, 10, 0),
            (4, 10, 0),
            (4, 10, 1),
        ]
        assert trainer.history_of("end") == [(4, 1.0)]
        assert trainer.history_of("val/loss") == [(2, 4.0), (4, 4.0)]
        assert dict(trainer.history_of("train/loss")) == pytest.approx({2: 0.75, 4: 16 / 6})
        with pytest.raises(KeyError, match=r"no metric 'val/los' was logged; there are .*train/loss, .*val/loss"):
            trainer.history_of("val/los")


class Resumable(Algorithm, dt.CheckpointMixin):
    lr = 0.01

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, _ = batch
        loss = self.model(x[:, None]).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer)
        self.log("lowest", x[0] / 3, reduce="min")
        return {"loss": loss}

    def configure_dataloaders(self) -> tuple[Any, Any]:
        data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 48), torch.ones(48))
        return torch.utils.data.DataLoader(data, batch_size=4), None


class Killed(Exception):
    pass


class Dies(Resumable):
    stop: int | None = None

    def post_train_step(self) -> None:
        if self.global_step == self.stop:
            raise Killed


def run_until(stop: int | None, experiment: str, *loggers: Any) -> Resumable:
    """Trains 12 steps, saved every 4th, flushed every 3rd; dies after `stop` as if by SIGKILL: nothing is closed."""
    config = make_config(every=3, loggers=loggers, experiment=experiment)
    config.checkpoint_parameters = dt.CheckpointParameters(save_every_n_steps=4)
    trainer = Dies(config)
    trainer.stop = stop
    with pytest.raises(Killed) if stop else trainer:
        trainer.fit()
    return trainer


@pytest.mark.pitfall(44)
@pytest.mark.pitfall(48)
def test_a_killed_and_resumed_run_is_one_curve_in_every_logger_and_in_its_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    straight = run_until(None, "straight", "jsonl")
    for stop in (7, 11, None):
        trainer = run_until(stop, "resumed", "jsonl", "csv", "tensorboard", "wandb")
        wandb.teardown()
    run_dir = trainer.run_dir
    curve = [(record["step"], record["train/loss"], record["lowest"]) for record in straight.history]
    assert [step for step, *_ in curve] == [3, 6, 9, 12]

    names = ("train/loss", "lowest")
    assert [
        (int(row["step"]), *(float(row[name]) for name in names)) for row in csv_rows(run_dir / "metrics.csv")
    ] == curve
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    for name, values in zip(names, zip(*(values for _, *values in curve), strict=True), strict=True):
        found = events.Scalars(name)
        assert [event.step for event in found] == [3, 6, 9, 12]
        assert [event.value for event in found] == pytest.approx(values, rel=1e-6)  # its floats have 32 bits
    rows = wandb_history(newest_wandb_file(run_dir))
    assert [(row["_step"], *(row[name] for name in names)) for row in rows] == curve
    assert len({path.name.split("-")[-1] for path in run_dir.glob("wandb/offline-run-*/*.wandb")}) == 1
    assert trainer.history == read_jsonl(run_dir / "metrics.jsonl")
    assert trainer.history_of("lowest") == [(step, lowest) for step, _, lowest in curve]


class Counting(Resumable, dt.EvalMixin):
    """Each optimizer step counts 1; something may happen at one of them."""

    disturbed: str | None = None

    def configure_dataloaders(self) -> tuple[Any, Any]:
        train, _ = super().configure_dataloaders()
        return train, [torch.ones(2), torch.ones(2)]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.disturbed == "step" and self.global_step == 7:
            raise Killed
        result = super().training_step(batch, batch_idx)
        self.log("steps", 1.0, reduce="sum")
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.disturbed == "validation" and self.global_step == 4:
            signal.raise_signal(signal.SIGTERM)
        return {"loss": batch.mean()}

    def post_train_step(self) -> None:
        if self.disturbed == "kill" and self.global_step == 7:
            raise KeyboardInterrupt  # is not saved after

    def pre_epoch(self) -> None:
        if self.disturbed == "start":
            signal.raise_signal(signal.SIGTERM)

    def on_save(self, path: Path) -> None:
        if self.disturbed == "save" and self.global_step == 6:
            signal.raise_signal(signal.SIGTERM)


def counting(disturbed: str | None) -> Counting:
    """Twelve steps with a line at each fifth, a validation at each fourth, and a checkpoint at each sixth."""
    config = make_config(every=5, loggers=("jsonl",), val_every_n_steps=4, val_every_n_epochs=None)
    config.checkpoint_parameters = dt.CheckpointParameters(save_every_n_steps=6, async_save=False)
    trainer = Counting(config)
    trainer.disturbed = disturbed
    return trainer


@pytest.mark.pitfall(44)
@pytest.mark.parametrize("runs", [("step",), ("validation",), ("save",), ("kill", "start")], ids=str)
def test_whatever_ends_a_run_each_value_counts_once_after_the_resume(runs: tuple[str, ...]) -> None:
    for disturbed in runs:
        ends = pytest.raises((Killed, KeyboardInterrupt, SystemExit))
        with ends, counting(disturbed) as trainer:
            trainer.fit()
    with counting(None) as trainer:
        trainer.fit()
        history = trainer.history
    lines = read_jsonl("runs/p/g/e/metrics.jsonl")
    counted = [(line["step"], line["steps"]) for line in lines if "steps" in line]
    # The tail of what a signal ended is written, unless the checkpoint has it already.
    edges = [4, 5, 10, 12] if runs == ("validation",) else [5, 10, 12]
    assert counted == [(last, last - first) for first, last in zip([0, *edges], edges, strict=False)]
    assert [line["step"] for line in lines if "val/loss" in line] == [4, 8, 12]
    assert history == lines


class Distributed(Spread, dt.LoggerMixin):
    make_model = staticmethod(lambda: nn.Linear(1, 1))

    def configure_dataloaders(self) -> tuple[Any, Any]:
        train = torch.utils.data.DataLoader(torch.linspace(0, 1, 24).unsqueeze(1), batch_size=4)
        return train, torch.utils.data.DataLoader(torch.arange(7.0).unsqueeze(1), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        tokens = batch.sum()
        self.backward(self.model(batch).mean(), weight=tokens)
        self.step(self.model, self.optimizer)
        if self.world.rank == self.world.world_size - 1:
            self.log("last rank only", 1.0 + self.world.rank)
        if self.global_step == 1 and self.world.is_main:
            self.log("once", 7.0)
        return {"x": batch.mean()}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.log("count", batch.numel(), reduce="sum")
        if self.world.rank == 0:
            self.log("first rank only", 1.0)
        return {"x": batch.mean()}

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        self.heard.append((step, dict(metrics)))

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.log("ranks", 1, reduce="sum")
        if self.world.is_main:
            self.log("main", metrics["val/x"])

    def post_epoch(self) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = self.world.mesh["dp_replicate"]
        whole = torch.tensor([[0.0, 0.2], [0.4, 0.8], [1.0, 1.0]])
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.log_image("sharded", sharded)
        self.log_histogram("sharded values", sharded, bins=2)
        self.log_text("said by", f"rank {self.world.rank}")

    heard: ClassVar[list[Any]] = []


def on_a_rank() -> tuple[list[Any], list[Any]]:
    with Distributed(make_config(loggers=("jsonl", "images"), every=2)) as trainer:
        trainer.fit()
    lines = [{key: value for key, value in line.items() if key != "time"} for line in trainer.history]
    assert [line["step"] for line in lines] == [step for step, _ in trainer.heard]
    return [trainer.heard, lines], read_jsonl("runs/p/g/e/metrics.jsonl") if trainer.world.is_main else []


@pytest.mark.pitfall(45)
@pytest.mark.pitfall(46)
def test_ranks_log_different_things_and_all_get_the_exact_values(tmp_path: Path) -> None:
    (told, written), (other, _) = run_world(on_a_rank, 2)
    assert told == other
    heard, _ = told
    steps = [step for step, _ in heard]
    assert steps == [2, 3, 3, 3]
    assert [record["step"] for record in written] == steps
    assert heard[0][1]["last rank only"] == 2.0
    assert heard[0][1]["once"] == 7.0
    assert "once" not in heard[1][1]
    assert heard[2][1] == {"val/count": 7.0, "val/first rank only": 1.0, "val/x": 3.0}
    assert heard[3][1] == {"ranks": 2.0, "main": 3.0}
    # Two steps x two ranks x four samples, each micro-batch's mean weighted by its sum.
    first = torch.linspace(0, 1, 24)[:16].reshape(4, 4).double()
    closed_form = float((first.mean(1) * first.sum(1)).sum() / first.sum())
    assert heard[0][1]["train/x"] == pytest.approx(closed_form, rel=1e-6)  # the batches' own means are float32
    run_dir = tmp_path / "runs/p/g/e"
    names = ["config.json", "media", "media.jsonl", "metrics.jsonl", "run.json"]
    assert sorted(path.name for path in run_dir.iterdir()) == names
    # Media of sharded tensors are whole, and written once.
    picture = Pillow.open(run_dir / "media/sharded/step_00000003.png")
    assert list(picture.tobytes()) == [0, 51, 102, 204, 255, 255]
    counts, text = [json.loads(line) for line in (run_dir / "media.jsonl").read_text().splitlines()]
    assert (counts["counts"], counts["edges"], text["text"]) == ([3, 3], [0, 0.5, 1], "rank 0")


def test_the_history_keeps_its_last_lines() -> None:
    config = make_config()
    config.logger_parameters = dt.LoggerParameters(loggers=(), log_every_n_steps=1, history_lines=2)
    with Algorithm(config) as trainer:
        trainer.fit()
    assert [line["step"] for line in trainer.history] == [3, 4]


@pytest.mark.parametrize("method", ["log", "log_dict"])
def test_a_dict_is_logged_as_its_values_one_by_one(method: str) -> None:
    class Together(Algorithm):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            result = super().training_step(batch, batch_idx)
            x = batch[0]
            getattr(self, method)({"dict/first": x[0], "dict": {"square": x[0] ** 2}})
            getattr(self, method)({"dict/most": x[0]}, reduce="max", weight=1)
            self.log("one/first", x[0])
            self.log("one/square", x[0] ** 2)
            self.log("one/most", x[0], reduce="max", weight=1)
            return result

    for _, line in fit(Together, make_config(every=2)).lines:
        assert {name[5:]: value for name, value in line.items() if name.startswith("dict/")} == {
            name[4:]: value for name, value in line.items() if name.startswith("one/")
        }
        assert "dict/square" in line


def logged(images: Any, **options: Any) -> numpy.ndarray:
    """What one log_image_grid gives to the loggers, as Pillow sees it."""

    class Shows(Algorithm):
        def post_fit(self) -> None:
            self.log_image_grid("grid", images, caption="all of them", **options)

    memory: Memory = fit(Shows, make_config())
    ((_, name, item),) = memory.media
    assert isinstance(item, Images)
    assert (name, item.images[0].caption) == ("grid", "all of them")
    return numpy.asarray(pil_image(item.images[0].pixels).convert("RGB"))


def pasted(images: list[Pillow.Image], columns: int, size: tuple[int, int]) -> numpy.ndarray:
    """The same page, put together by Pillow."""
    width, height = size
    rows = -(-len(images) // columns)
    page = Pillow.new("RGB", (columns * (width + 2) + 2, rows * (height + 2) + 2))
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        page.paste(image.convert("RGB"), (2 + column * (width + 2), 2 + row * (height + 2)))
    return numpy.asarray(page)


@pytest.mark.parametrize(("options", "columns"), [({}, 3), ({"columns": 5}, 5), ({"columns": 1}, 1)])
def test_a_batch_becomes_one_page(options: dict[str, int], columns: int) -> None:
    batch = torch.randint(256, (7, 3, 4, 5), dtype=torch.uint8)
    images = [Pillow.fromarray(image.permute(1, 2, 0).numpy()) for image in batch]
    assert (logged(batch, **options) == pasted(images, columns, (5, 4))).all()
    assert (logged(batch / 255, **options) == pasted(images, columns, (5, 4))).all()
    assert (logged(batch.numpy(), **options) == pasted(images, columns, (5, 4))).all()


def test_images_of_several_sizes_and_colours_become_one_page() -> None:
    images = [Pillow.new("RGB", (6, 2), (10, 200, 30)), Pillow.new("L", (3, 4), 90), Pillow.new("1", (2, 2), 1)]
    assert (logged(images) == pasted(images, 2, (6, 4))).all()


def test_what_makes_no_page_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="'grid' has images with an alpha channel and without"):
        logged([torch.zeros(3, 2, 2), torch.zeros(4, 2, 2)])
    with pytest.raises(ValueError, match="columns=0 of 'grid'"):
        logged(torch.zeros(2, 3, 2, 2), columns=0)
    with pytest.raises(ValueError, match=r"'grid' has shape \(2, 2, 2\)"):
        logged(torch.zeros(3, 2, 2, 2))
