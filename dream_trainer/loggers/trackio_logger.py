"""TrackioLogger: one Trackio run for all ranks and restarts."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from dream_trainer.config.logger_parameters import TrackioParameters
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.jsonl import read_jsonl
from dream_trainer.loggers.line_files import LineFile
from dream_trainer.loggers.media import Audio, Histogram, Images, Media, Table, Text, Video
from dream_trainer.loggers.media_files import gif, pil_image, wav

if TYPE_CHECKING:
    from trackio.run import Run

_Row = tuple[int, frozenset[str]]
"""A step, and the names that were logged together."""


class TrackioLogger(Logger):
    """Logs to Trackio; its own step is the optimizer step.

    Trackio's own thread writes what it is given every half second, so a kill may take the last lines with it. They are
    kept in `trackio/lines.jsonl` in the run directory, too: a run that goes on gives Trackio those before its
    checkpoint that are not in the store, and passes over what is. That is for the store on this machine; to a Space,
    which cannot be asked, what came after the checkpoint is given once more.

    Args:
        parameters: What Trackio shows the run as.

    Attributes:
        run: The Trackio run, from the first line to `close`.
    """

    def __init__(self, parameters: TrackioParameters | None = None) -> None:
        self.run: Run | None = None
        self._parameters = parameters or TrackioParameters()
        self._has_begun = False
        self._lines: LineFile | None = None
        self._stored: Counter[_Row] = Counter()  # what Trackio has already, and is going to be given once more

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Starts the Trackio run, or goes on with it."""
        import trackio

        self.close()
        goes_on = self._has_begun and resumed_step is not None
        # Embedded in a notebook, it would start a server.
        arguments = {"embed": False, **self._parameters.init_arguments}
        self.run = trackio.init(
            project=config["project"],
            name=self._parameters.name or f"{config['group']}/{config['experiment']}",
            group=config["group"],
            config=config,
            resume="allow" if goes_on else "never",
            **arguments,
        )
        self._has_begun = True
        self._stored = _stored_rows(self.run) if goes_on else Counter()
        path = run_dir / "trackio" / "lines.jsonl"
        self._lines = LineFile(path, resumed_step)
        if path.exists():
            for line in read_jsonl(path):
                self._send({name: value for name, value in line.items() if name != "step"}, int(line["step"]))

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Logs one line."""
        if self._lines is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        values = {"epoch": stamp.epoch, "samples": stamp.samples, **metrics}
        self._lines.write({"step": stamp.step, **values})
        self._send(values, stamp.step)

    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Logs any kind; text as Markdown."""
        with tempfile.TemporaryDirectory() as directory:  # Trackio copies the files at once
            self._send(_trackio_media(name, media, Path(directory)), stamp.step)
        return True

    def _send(self, values: dict[str, Any], step: int) -> None:
        assert self.run is not None  # open has made it
        row = step, frozenset(values)
        if self._stored[row] > 0:
            self._stored[row] -= 1
        else:
            self.run.log(values, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Whether there is a run to go on with."""
        return {"has_begun": self._has_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back."""
        self._has_begun = state["has_begun"]

    def close(self) -> None:
        """Finishes the Trackio run, waiting until everything is written."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self.run is not None:
            run, self.run = self.run, None
            run.finish()


def _stored_rows(run: Run) -> Counter[_Row]:
    """What the store on this machine has of a run: how often it has each row."""
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
    return Counter((int(row["step"]), frozenset(row) - {"step", "timestamp"}) for row in rows)


def _trackio_media(name: str, media: Media, directory: Path) -> dict[str, Any]:
    import trackio

    match media:
        case Images():
            several = len(media.images) > 1
            return {
                f"{name}/{index}" if several else name: trackio.Image(pil_image(image.pixels), caption=image.caption)
                for index, image in enumerate(media.images)
            }
        case Video():
            path = directory / "video.gif"
            path.write_bytes(gif(media))
            return {name: trackio.Video(str(path))}
        case Audio():
            path = directory / "sound.wav"
            path.write_bytes(wav(media))
            return {name: trackio.Audio(str(path))}
        case Histogram():
            counts = numpy.array(media.counts), numpy.array(media.edges)
            return {name: trackio.Histogram(np_histogram=counts)}
        case Table():
            return {name: trackio.Table(columns=list(media.columns), data=[list(row) for row in media.rows])}
        case Text():
            return {name: trackio.Markdown(media.text)}
