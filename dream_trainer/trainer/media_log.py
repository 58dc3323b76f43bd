"""MediaLog: what `log_images` and its kin of LoggerMixin have in common: whose media are taken, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dream_trainer.loggers import media
from dream_trainer.loggers.interface import Stamp
from dream_trainer.loggers.media_queue import MediaQueue

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


class MediaLog:
    """The media of one trainer.

    Args:
        trainer: Whose.
        queue: Where they wait to be written.
        stamp: Says at which step training is.
    """

    def __init__(self, trainer: AbstractTrainer, queue: MediaQueue, stamp: Callable[[], Stamp]) -> None:
        self._trainer, self._queue, self._stamp = trainer, queue, stamp

    @property
    def is_taken(self) -> bool:
        """Whether this rank writes what is logged now."""
        trainer = self._trainer
        return trainer.world.is_main and not (trainer.is_padding_batch or trainer.is_sanity_validation)

    def gathered(self, name: str, value: Any) -> Tensor:
        """`value` as a whole tensor; a collective where it is a DTensor.

        Raises:
            RuntimeError: It is one, and only rank 0 runs here.
        """
        world = self._trainer._world
        if world is not None and world.forbidden is not None and world.mesh is not None:
            from torch.distributed.tensor import DTensor

            if isinstance(value, DTensor):
                world.refuse_if_forbidden()
        return media.gathered(name, value)

    def pixels(self, name: str, value: Tensor) -> Tensor:
        """Of an image or a video, as it is shown; values beyond 0 to 1 are said once."""
        pixels, was_clamped = media.pixels(name, value)
        if was_clamped:
            self._trainer.warn_once(
                f"clamped {name}", f"{name!r} has values outside of 0 to 1, which are clamped for display."
            )
        return pixels

    def add(self, name: str, item: media.Media) -> None:
        """Puts it where it is written from, with the running window or validation."""
        trainer = self._trainer
        if not trainer.training:
            prefix = f"val/{trainer.val_name}/" if trainer.val_name else "val/"
            self._queue.add_in_validation(prefix + name.removeprefix("val/"), item)
            return
        if trainer.is_evaluating:  # in its post_val_epoch
            return
        is_between_windows = trainer.local_batches > 0 and not trainer._accumulation.is_open
        self._queue.add(name, item, self._stamp() if is_between_windows else None)
