"""MLflowLogger: one MLflow run for all ranks and restarts."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dream_trainer.config.logger_parameters import MLflowParameters
from dream_trainer.config.serialize import leaves
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.media import Audio, Histogram, Images, Media, Table, Text, Video
from dream_trainer.loggers.media_files import gif, pil_image, wav

if TYPE_CHECKING:
    from mlflow import MlflowClient

# What MLflow takes at most: metrics and parameters in one call, letters of a parameter's name and of its value.
_METRICS, _PARAMS = 1000, 100
_NAME, _VALUE = 250, 6000
_STEP_OF_IMAGE = re.compile(r"images/(.+)[+%]step[+%](\d+)[+%]timestamp")


class MLflowLogger(Logger):
    """Logs to MLflow; its own step is the optimizer step.

    The run's id goes into every checkpoint, so that a restart goes on with the same run. What MLflow has already stays
    as it is, since it cannot forget: values of steps that it has are passed over. Every line is in the store when `log`
    returns. The store is MLflow's default unless `tracking_uri` says otherwise; a store that does not know the run, as
    another file would not, gets a new one.

    Letters that MLflow has no place for in a metric's name become `_`. Infinities are the largest finite numbers in it.

    Args:
        parameters: Where the run is, and what MLflow shows it as.

    Attributes:
        run_id: Id of the MLflow run; None before the first line.
    """

    def __init__(self, parameters: MLflowParameters | None = None) -> None:
        self.run_id: str | None = None
        self._parameters = parameters or MLflowParameters()
        self._opened: tuple[MlflowClient, str] | None = None  # with the run's id
        # Of a run that goes on: the last step that MLflow has of a metric, and the images that it has.
        self._goes_on = False
        self._last_steps: dict[str, int] = {}
        self._images: set[tuple[str, int]] = set()

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Starts the MLflow run, or goes on with it."""
        from mlflow import MlflowClient

        self.close()
        client = MlflowClient(tracking_uri=self._parameters.tracking_uri)
        self._goes_on, self._last_steps, self._images = False, {}, set()
        if resumed_step is not None and self.run_id is not None and _is_known(client, self.run_id):
            self._goes_on = True
            client.update_run(self.run_id, status="RUNNING")
            found = (_STEP_OF_IMAGE.match(file.path) for file in client.list_artifacts(self.run_id, "images"))
            self._images = {(match[1], int(match[2])) for match in found if match}
        else:
            self.run_id = self._start(client, config)
        self._opened = client, self.run_id
        client.log_dict(self.run_id, config, "config.json")

    def _start(self, client: MlflowClient, config: dict[str, Any]) -> str:
        from mlflow.entities import Param

        name = self._parameters.experiment or config["project"]
        experiment = client.get_experiment_by_name(name)
        run = client.create_run(
            client.create_experiment(name) if experiment is None else experiment.experiment_id,
            run_name=self._parameters.name or f"{config['group']}/{config['experiment']}",
            tags={"group": config["group"], **self._parameters.tags},
        )
        run_id: str = run.info.run_id
        params = [Param(_legal(key)[:_NAME], str(value)[:_VALUE]) for key, value in leaves(config)]
        for first in range(0, len(params), _PARAMS):
            client.log_batch(run_id, params=params[first : first + _PARAMS], synchronous=True)
        return run_id

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Logs one line."""
        from mlflow.entities import Metric

        (client, run_id), time = self._open_run(), int(stamp.time * 1000)
        values = {"epoch": stamp.epoch, "samples": stamp.samples, **metrics}
        new = [
            Metric(name, value, time, stamp.step)
            for name, value in ((_legal(name), value) for name, value in values.items())
            if not self._goes_on or stamp.step > self._last_step(name)
        ]
        for first in range(0, len(new), _METRICS):
            client.log_batch(run_id, metrics=new[first : first + _METRICS], synchronous=True)

    def _last_step(self, name: str) -> int:
        """The last step that MLflow had of a metric when the run went on."""
        if name not in self._last_steps:
            client, run_id = self._open_run()
            history = client.get_metric_history(run_id, name)
            self._last_steps[name] = max((metric.step for metric in history), default=-1)
        return self._last_steps[name]

    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Logs images by their steps, which MLflow shows beside the metrics; everything else as artifacts."""
        client, run_id = self._open_run()
        if isinstance(media, Images):
            for index, image in enumerate(media.images):
                key = _legal(f"{name}/{index}" if len(media.images) > 1 else name).replace(":", "_")
                if (key.replace("/", "~"), stamp.step) not in self._images:
                    pixels, time = pil_image(image.pixels), int(stamp.time * 1000)
                    client.log_image(run_id, pixels, key=key, step=stamp.step, timestamp=time, synchronous=True)
            return True
        with tempfile.TemporaryDirectory() as directory:
            for path in _files(media, Path(directory) / f"step_{stamp.step:08d}"):
                client.log_artifact(run_id, str(path), f"media/{_legal(name)}")
        return True

    def _open_run(self) -> tuple[MlflowClient, str]:
        if self._opened is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        return self._opened

    def state_dict(self) -> dict[str, Any]:
        """The id of the MLflow run, once there is one."""
        return {} if self.run_id is None else {"id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the id."""
        self.run_id = state["id"]

    def close(self) -> None:
        """Says that the MLflow run is finished."""
        if self._opened is not None:
            (client, run_id), self._opened = self._opened, None
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
    """The name with nothing in it that MLflow refuses."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)


def _files(media: Media, stem: Path) -> Iterator[Path]:
    """Media other than images as a file that MLflow can show, `stem` with a suffix."""
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
        case Images():
            return
    path = stem.with_suffix(suffix)
    path.write_bytes(data)
    yield path
