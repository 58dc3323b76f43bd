"""WandbLogger: one Weights & Biases run for all ranks and restarts."""

from __future__ import annotations

import html
import io
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dream_trainer.config.logger_parameters import WandbParameters
from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.jsonl import read_jsonl
from dream_trainer.loggers.line_files import LineFile
from dream_trainer.loggers.media import Audio, Histogram, Images, Media, Table, Text, Video
from dream_trainer.loggers.media_files import gif, pil_image, wav

if TYPE_CHECKING:
    import wandb


STEP = "trainer/global_step"


class WandbLogger(Logger):
    """Logs to Weights & Biases, by optimizer steps: each row has its step as "trainer/global_step", W&B's x-axis.

    `wandb.log(...)` of your own goes to the same run, from the first step of training on and on rank 0, unless you have
    called `wandb.init` yourself: your rows are rows of their own. As long as there are none, W&B's step is the
    optimizer step.

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

    is_open_early: ClassVar[bool] = True  # for `wandb.log`

    def __init__(self, parameters: WandbParameters | None = None) -> None:
        self.run: wandb.Run | None = None
        self._parameters = parameters or WandbParameters()
        self._id = secrets.token_hex(4)
        self._lines: LineFile | None = None
        self._resumed_step = 0
        self._known = -1  # the last optimizer step that W&B has from before the restart
        self._row = self._next_row = self._step = 0  # W&B's step of our last row, and of the next; its optimizer step
        self._has_others = False  # rows of the user's own

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
        path = run_dir / "wandb" / "lines.jsonl"
        self._lines = LineFile(path, resumed_step)
        if path.exists():
            for line in read_jsonl(path):
                if line["step"] > self._known:
                    self._send(line, int(line["step"]))

    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Logs one line. What has the same step becomes one row of W&B, unless there are rows of the user's own."""
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
        if self._resumed_step < step <= self._known:
            return  # it has this step from before the restart
        values = {name: value for name, value in values.items() if name != "step"} | {STEP: step}
        # W&B drops what has a step before its own, which rows of the user's move on.
        row = self.run.step
        self._has_others |= row > self._next_row
        row = max(row, step)
        if step != self._step and row == self._row:
            row += 1
        self.run.log(values, step=row, commit=self._has_others)
        self._step, self._row, self._next_row = step, row, row + self._has_others

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
