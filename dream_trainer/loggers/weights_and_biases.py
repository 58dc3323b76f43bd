"""WandbLogger: one Weights & Biases run for all ranks and restarts."""

from __future__ import annotations

import html
import io
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dream_trainer.config.logger_parameters import WandbParameters
from dream_trainer.loggers.encode import gif, pil_image, wav
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.jsonl import read_jsonl
from dream_trainer.loggers.line_files import LineFile
from dream_trainer.loggers.media import Audio, Histogram, Images, Media, Table, Text, Video

if TYPE_CHECKING:
    import wandb


class WandbLogger(Logger):
    """Logs to Weights & Biases; its own step is the optimizer step.

    The run's id goes into every checkpoint, so that a restart goes on with the same run. What was logged is kept in
    `wandb/lines.jsonl` in the run directory, too, because W&B alone cannot go on exactly:

    - Online, it refuses steps before its last. Steps that it has already are passed over; steps before the checkpoint
      that a kill kept from it are given once more.
    - Offline, it cannot add to an earlier file. So the newest `wandb/offline-run-*` (also `wandb/latest-run`) has the
      whole curve from the first step, and is the only one to give to `wandb sync`. Media logged before the restart are
      in the earlier ones.

    Args:
        parameters: What W&B shows the run as.

    Attributes:
        run: The W&B run, from the first line to `close`; for what only W&B has, such as artifacts.
    """

    def __init__(self, parameters: WandbParameters | None = None) -> None:
        self.run: wandb.Run | None = None
        self._parameters = parameters or WandbParameters()
        self._id = secrets.token_hex(4)
        self._lines: LineFile | None = None
        self._resumed_step = 0

    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Starts the W&B run, or goes on with it."""
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
            # Without it, what is synced replaces what the server has of this id.
            resume=None if is_offline else "allow",
            reinit="create_new",
            **options.init_arguments,
        )
        self._id = self.run.id
        self._resumed_step = resumed_step or 0
        path = run_dir / "wandb" / "lines.jsonl"
        self._lines = LineFile(path, resumed_step)
        if path.exists():
            for line in read_jsonl(path):
                if line["step"] >= self.run.starting_step:
                    self._send(line, int(line["step"]))

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Logs one line. What has the same step becomes one row of W&B."""
        if self._lines is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        values = {"epoch": stamp.epoch, "samples": stamp.samples, **metrics}
        self._lines.write({"step": stamp.step, **values})
        self._send(values, stamp.step)

    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Logs any kind; text as HTML."""
        with tempfile.TemporaryDirectory() as directory:
            self._send({name: _wandb_media(media, Path(directory))}, stamp.step)
        return True

    def _send(self, values: dict[str, Any], step: int) -> None:
        assert self.run is not None  # open has made it
        started_at = self.run.starting_step
        if self._resumed_step < step < started_at:
            return  # it has this step from before the restart
        values = {name: value for name, value in values.items() if name != "step"}
        self.run.log(values, step=max(step, started_at))

    def state_dict(self) -> dict[str, Any]:
        """The id of the W&B run."""
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the id."""
        self._id = state["id"]

    def close(self) -> None:
        """Finishes the W&B run, waiting until everything is uploaded."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self.run is not None:
            self.run.finish()
            self.run = None


def _wandb_media(media: Media, directory: Path) -> Any:
    import numpy as np
    import wandb

    match media:
        case Images():
            return [wandb.Image(pil_image(image.pixels), caption=image.caption) for image in media.images]
        case Video():
            return wandb.Video(io.BytesIO(gif(media)), format="gif")
        case Audio():
            path = directory / "sound.wav"
            path.write_bytes(wav(media))
            return wandb.Audio(str(path))
        case Histogram():
            return wandb.Histogram(np_histogram=(np.array(media.counts), np.array(media.edges)))
        case Table():
            return wandb.Table(
                columns=list(media.columns), data=[list(row) for row in media.rows], allow_mixed_types=True
            )
        case Text():
            return wandb.Html(f"<pre>{html.escape(media.text)}</pre>")
