"""Experiment trackers: one run of Weights & Biases, MLflow or Trackio for all ranks and restarts."""

from __future__ import annotations

import html
import json
import re
import secrets
import tempfile
from abc import abstractmethod
from collections import Counter
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy
from typing_extensions import override

from dream_trainer.checks import did_you_mean, refuse
from dream_trainer.config.logger_parameters import (
    LoggerParameters,
    MLflowParameters,
    TrackioParameters,
    WandbParameters,
)
from dream_trainer.config.serialize import leaves
from dream_trainer.loggers.buffer import Stamp
from dream_trainer.loggers.interface import Audio, Histogram, Images, Logger, Media, Table, Text, Video
from dream_trainer.loggers.line_files import LineFile, gif, pil_image, read_jsonl, wav

if TYPE_CHECKING:
    import wandb
    from mlflow import MlflowClient
    from trackio.run import Run

STEP = "trainer/global_step"
# MLflow's limits: metrics and parameters in one call, letters of a parameter's name and of its value.
_METRICS, _PARAMS = 1000, 100
_NAME, _VALUE = 250, 6000
_STEP_OF_IMAGE = re.compile(r"images/(.+)[+%]step[+%](\d+)[+%]timestamp")


class _JournalLogger(Logger):
    """A tracker that may lose lines in a kill, so they are also in `<package>/lines.jsonl` of the run directory."""

    _package: ClassVar[str]  # also the field of its parameters
    _known = -1  # the last step that the tracker has from before the restart
    _lines: LineFile | None = None
    run: Any = None

    @classmethod
    @override
    def configured(cls, parameters: LoggerParameters) -> Self:
        return cls(getattr(parameters, cls._package))  # type: ignore[call-arg]  # both take their parameters

    @classmethod
    @override
    def check(cls, parameters: LoggerParameters) -> None:
        arguments = getattr(parameters, cls._package).init_arguments
        known = list(signature(import_module(cls._package).init).parameters) if arguments else []
        for name in arguments:
            refuse(
                name not in known,
                f"init_arguments has {name!r}, which {cls._package}.init does not take. {did_you_mean(name, known)}",
            )

    def _open_journal(self, run_dir: Path, resumed_step: int | None) -> None:
        """Sends the lines of before the restart that the tracker does not have."""
        path = run_dir / self._package / "lines.jsonl"
        self._lines = LineFile(path, resumed_step)
        if path.exists():
            for line in read_jsonl(path):
                step = int(line.pop("step"))
                if step > self._known:
                    self._send(line, step)

    @override
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        values = _values(metrics, stamp)
        self._opened(self._lines).write({"step": stamp.step, **values})
        self._send(values, stamp.step)

    @override
    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Logs any kind; text as HTML in W&B, as Markdown in Trackio."""
        with tempfile.TemporaryDirectory() as directory:  # they copy files at once
            self._send(self._shown(name, media, Path(directory)), stamp.step)
        return True

    @abstractmethod
    def _send(self, values: dict[str, Any], step: int) -> None:
        """Gives values to the tracker."""

    def _shown(self, name: str, media: Media, directory: Path) -> dict[str, Any]:
        """The tracker's object for `media`, whose files are in `directory`; most classes have one name in both."""
        tracker: Any = import_module(self._package)
        is_wandb = self._package == "wandb"
        match media:
            case Images():
                images = [tracker.Image(pil_image(image.pixels), caption=image.caption) for image in media.images]
                if is_wandb:  # which has galleries
                    return {name: images}
                return dict(zip(_numbered(name, len(images)), images, strict=True))
            case Video():
                return {name: tracker.Video(_file(directory / "video.gif", gif(media)))}
            case Audio():
                return {name: tracker.Audio(_file(directory / "sound.wav", wav(media)))}
            case Histogram():
                return {name: tracker.Histogram(np_histogram=(numpy.array(media.counts), numpy.array(media.edges)))}
            case Table():
                rows = [list(row) for row in media.rows]
                options = {"allow_mixed_types": True} if is_wandb else {}
                return {name: tracker.Table(columns=list(media.columns), data=rows, **options)}
            case Text() if is_wandb:
                return {name: tracker.Html(f"<pre>{html.escape(media.text)}</pre>")}
            case Text():
                return {name: tracker.Markdown(media.text)}

    @override
    def close(self) -> None:
        lines, self._lines, run, self.run = self._lines, None, self.run, None
        if lines is not None:
            lines.close()
        if run is not None:
            run.finish()


class WandbLogger(_JournalLogger):
    """Logs to Weights & Biases, by optimizer steps: each row has its step as "trainer/global_step", W&B's x-axis.

    Every checkpoint keeps the run's id, so that a restart continues the same run. W&B cannot continue exactly by
    itself, so the lines are also in `wandb/lines.jsonl` in the run directory. Online, steps that it has are skipped,
    and those before the checkpoint that a kill kept from it are sent again. Offline, the newest `wandb/offline-run-*`
    has the whole curve.

    Attributes:
        run: The W&B run, from the first line to `close`; for features that only W&B has, such as artifacts.
    """

    requires: ClassVar[tuple[str, ...]] = ("wandb",)
    _package: ClassVar[str] = "wandb"
    run: wandb.Run | None = None

    def __init__(self, parameters: WandbParameters | None = None) -> None:
        self._parameters = parameters or WandbParameters()
        self._id = secrets.token_hex(4)
        self._resumed_step = 0
        self._row = self._next_row = self._step = 0  # W&B's step of our last row, and of the next; its optimizer step
        self._has_others = False  # the user's rows

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        import wandb

        self.close()
        options = self._parameters
        is_offline = (options.mode or wandb.setup().settings.mode) in ("offline", "dryrun")
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            dir=str(run_dir),
            project=config["project"],
            group=config["group"],
            name=options.name or config["experiment"],
            entity=options.entity,
            tags=options.tags,
            mode=options.mode,
            config=config,
            id=self._id,
            # Without it, a sync replaces the server's data of this id.
            resume=None if is_offline else "allow",
            # The user's own run stays the one of `wandb.log`; without one it is this.
            reinit="finish_previous" if wandb.run is None else "create_new",
            **options.init_arguments,
        )
        self._id = self.run.id
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        self._resumed_step = resumed_step or 0
        self._next_row = self.run.starting_step
        self._row = self._known = self._next_row - 1
        if self._next_row > 0:
            self._known = int(self.run.summary.get(STEP, self._known))  # type: ignore[no-untyped-call]
        self._has_others = False
        self._open_journal(run_dir, resumed_step)

    @override
    def _send(self, values: dict[str, Any], step: int) -> None:
        """Values with the same step become one row of W&B, unless the user adds rows."""
        if self._resumed_step < step <= self._known:
            return  # it has this step from before the restart
        run = self._opened(self.run)
        # W&B drops what has a step before its own, which rows of the user's move on.
        row = run.step
        self._has_others |= row > self._next_row
        row = max(row, step)
        if step != self._step and row == self._row:
            row += 1
        run.log(values | {STEP: step}, step=row, commit=self._has_others)
        self._step, self._row, self._next_row = step, row, row + self._has_others

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]


class TrackioLogger(_JournalLogger):
    """Logs to Trackio; its own step is the optimizer step.

    Trackio's own thread writes every half second, so a kill may take the last lines with it. They are in
    `trackio/lines.jsonl` in the run directory, too: a resumed run sends those before its checkpoint that the store on
    this machine does not have.

    Attributes:
        run: The Trackio run, from the first line to `close`.
    """

    requires: ClassVar[tuple[str, ...]] = ("trackio", "PIL")
    _package: ClassVar[str] = "trackio"
    run: Run | None = None

    def __init__(self, parameters: TrackioParameters | None = None) -> None:
        self._parameters = parameters or TrackioParameters()
        # Rows that Trackio already has, and would get again: a step, and the names that were logged together.
        self._stored: Counter[tuple[int, frozenset[str]]] = Counter()

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self.close()
        # Embedded in a notebook, it would start a server.
        arguments = {"embed": False, **self._parameters.init_arguments}
        self.run = trackio.init(
            project=config["project"],
            name=_run_name(self._parameters.name, config),
            group=config["group"],
            config=config,
            resume="never" if resumed_step is None else "allow",
            **arguments,
        )
        self._stored = Counter()
        if resumed_step is not None:  # in the store on this machine
            rows = SQLiteStorage.get_logs(self.run.project, self.run.name, run_id=self.run.id)
            self._stored.update((int(row["step"]), frozenset(row) - {"step", "timestamp"}) for row in rows)
        self._open_journal(run_dir, resumed_step)

    @override
    def _send(self, values: dict[str, Any], step: int) -> None:
        row = step, frozenset(values)
        if self._stored[row] > 0:
            self._stored[row] -= 1
        else:
            self._opened(self.run).log(values, step=step)


class MLflowLogger(Logger):
    """Logs to MLflow; its own step is the optimizer step.

    Every checkpoint keeps the run's id, so that a restart continues the same run; a store that does not know it gets a
    new one. MLflow cannot forget, so values of steps that it already has are skipped. Characters that it does not allow
    in a metric's name become `_`. Infinities become its largest finite numbers.

    Attributes:
        run_id: Id of the MLflow run; None before the first line.
    """

    requires: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic", "PIL")

    def __init__(self, parameters: MLflowParameters | None = None) -> None:
        self.run_id: str | None = None
        self._parameters = parameters or MLflowParameters()
        self._run: tuple[MlflowClient, str] | None = None  # with the run's id
        # For a continued run: the last step that MLflow has of a metric, and the images that it has.
        self._last_steps: dict[str, int] | None = None
        self._images: set[tuple[str, int]] = set()

    @classmethod
    @override
    def configured(cls, parameters: LoggerParameters) -> Self:
        return cls(parameters.mlflow)

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.close()
        client = MlflowClient(tracking_uri=self._parameters.tracking_uri)
        self._last_steps, self._images = None, set()
        if resumed_step is not None and self.run_id is not None and _is_known(client, self.run_id):
            self._last_steps = {}
            client.update_run(self.run_id, status="RUNNING")
            found = (_STEP_OF_IMAGE.match(file.path) for file in client.list_artifacts(self.run_id, "images"))
            self._images = {(match[1], int(match[2])) for match in found if match}
        else:
            name = self._parameters.experiment or config["project"]
            experiment = client.get_experiment_by_name(name)
            run = client.create_run(
                client.create_experiment(name) if experiment is None else experiment.experiment_id,
                run_name=_run_name(self._parameters.name, config),
                tags={"group": config["group"], **self._parameters.tags},
            )
            params = [Param(_legal(key)[:_NAME], str(value)[:_VALUE]) for key, value in leaves(config)]
            for first in range(0, len(params), _PARAMS):
                client.log_batch(run.info.run_id, params=params[first : first + _PARAMS], synchronous=True)
            self.run_id = run.info.run_id
        self._run = client, self.run_id
        client.log_dict(self.run_id, config, "config.json")

    @override
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        from mlflow.entities import Metric

        (client, run_id), time = self._opened(self._run), int(stamp.time * 1000)
        new = [
            Metric(name, value, time, stamp.step)
            for name, value in ((_legal(name), value) for name, value in _values(metrics, stamp).items())
            if stamp.step > self._last_step(name)
        ]
        for first in range(0, len(new), _METRICS):
            client.log_batch(run_id, metrics=new[first : first + _METRICS], synchronous=True)

    def _last_step(self, name: str) -> int:
        """The last step that MLflow had of a metric when the run continued; -1 of a new run."""
        if self._last_steps is None:
            return -1
        if name not in self._last_steps:
            client, run_id = self._opened(self._run)
            history = client.get_metric_history(run_id, name)
            self._last_steps[name] = max((metric.step for metric in history), default=-1)
        return self._last_steps[name]

    @override
    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Logs images by their steps, which MLflow shows with the metrics; everything else as artifacts."""
        client, run_id = self._opened(self._run)
        if isinstance(media, Images):
            for image, numbered in zip(media.images, _numbered(name, len(media.images)), strict=True):
                key = _legal(numbered).replace(":", "_")
                if (key.replace("/", "~"), stamp.step) not in self._images:
                    pixels, time = pil_image(image.pixels), int(stamp.time * 1000)
                    client.log_image(run_id, pixels, key=key, step=stamp.step, timestamp=time, synchronous=True)
            return True
        match media:
            case Video():
                suffix, data = ".gif", gif(media)
            case Audio():
                suffix, data = ".wav", wav(media)
            case Histogram():
                suffix, data = ".json", json.dumps(vars(media)).encode()
            case Table():  # as MLflow's own tables are written
                suffix, data = ".json", json.dumps({"columns": media.columns, "data": media.rows}).encode()
            case Text():
                suffix, data = ".md", media.text.encode()
        with tempfile.TemporaryDirectory() as directory:
            path = _file(Path(directory) / f"step_{stamp.step:08d}{suffix}", data)
            client.log_artifact(run_id, path, f"media/{_legal(name)}")
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.run_id is None else {"id": self.run_id}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["id"]

    @override
    def close(self) -> None:
        if self._run is not None:
            (client, run_id), self._run = self._run, None
            client.set_terminated(run_id)


def _is_known(client: MlflowClient, run_id: str) -> bool:
    from mlflow import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def _legal(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)


def _values(metrics: dict[str, float], stamp: Stamp) -> dict[str, float]:
    return {"epoch": stamp.epoch, "samples": stamp.samples, **metrics}


def _run_name(name: str | None, config: dict[str, Any]) -> str:
    return name or f"{config['group']}/{config['experiment']}"


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}/{index}" for index in range(count)] if count > 1 else [name] * count


def _file(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)
