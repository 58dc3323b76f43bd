"""ImageFiles: images that the steps return, as PNG files in the run directory."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from dream_trainer.checks import check_name
from dream_trainer.config.parameter_class import PositiveInt, check_fields
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback
from dream_trainer.trainer.abstract import AbstractTrainer


@dataclass(eq=False, repr=False)
class ImageFiles(Callback):
    """Writes images that `training_step` or `validation_step` returned under `key` as one grid a time, on rank 0.

    They go to `<run_dir>/images/train/<key>/step_00001000.png` and `<run_dir>/images/val/<key>/...`, with a named
    validation loader's name after `val`. In training those of every `every_n_steps`-th optimizer step are written, of a
    validation those of rank 0's first batch. Only then the device is waited for. A full disk is reported once and does
    not stop training. `log_image` gives images to the loggers instead.

    Args:
        key: Key in the step's result. Its value is `[batch, channels, height, width]` of 1, 3 or 4 channels, floating
            point from 0 to 1, or uint8. In validation no DTensor: `full_tensor()` gathers it in the step.
        every_n_steps: Optimizer steps (`global_step`) between two files of training.
        max_images: Images in a grid; the first of the batch.

    Raises:
        ConfigError: A value is invalid; at the end of setup, also if Pillow is not installed.
    """

    key: Annotated[str, partial(check_name, example="samples")]
    _: KW_ONLY
    every_n_steps: PositiveInt = 100
    max_images: PositiveInt = 64

    def __post_init__(self) -> None:
        check_fields(self, ImageFiles)

    def post_setup(self, trainer: AbstractTrainer) -> None:
        if find_spec("PIL") is None:
            raise ConfigError("ImageFiles writes with Pillow, which is not installed. Run pip install pillow.")

    def post_train_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        if not trainer.is_accumulating_gradients and trainer.global_step % self.every_n_steps == 0:
            self._write(trainer, result, Path("train"))

    def post_val_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        if batch_idx == 0 and not (trainer.is_evaluating or trainer.is_sanity_validation):
            self._refuse_shards(result)
            self._write(trainer, result, Path("val", trainer.val_name))

    def _refuse_shards(self, result: dict[str, Any]) -> None:
        """Raises on shards: gathering takes all ranks, and ranks without a batch are not called."""
        from torch.distributed.tensor import DTensor

        if isinstance(result.get(self.key), DTensor):
            raise TypeError(
                f"{self.key!r} of validation_step is a DTensor, and a rank without a batch would not help "
                "to gather it. Return its full_tensor(), which all ranks take part in."
            )

    def _write(self, trainer: AbstractTrainer, result: dict[str, Any], folder: Path) -> None:
        if self.key not in result:
            return
        from dream_trainer.loggers.media import Image, gathered, grid, pixels
        from dream_trainer.loggers.media_files import png

        batch = gathered(self.key, result[self.key])
        if not trainer.world.is_main:
            return
        if batch.dim() != 4:
            raise ValueError(
                f"{self.key!r} has shape {tuple(batch.shape)}. Return [batch, channels, height, width] under it."
            )
        images, _ = pixels(self.key, batch[: self.max_images])
        path = trainer.run_dir / "images" / folder / self.key / f"step_{trainer.global_step:08d}.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(Image(grid(self.key, list(images)))))
        except OSError as error:
            trainer.warn_once(f"images {path.parent}", f"ImageFiles cannot write {path}: {error}; training continues.")
