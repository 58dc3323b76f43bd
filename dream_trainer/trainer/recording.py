"""Recording: what training code says about itself, declared once; LoggerMixin does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

if TYPE_CHECKING:
    from dream_trainer.loggers.buffer import Reduction

_ELSEWHERE = {
    "prog_bar": "the Progress callback shows what its `metrics` name",
    "on_step": "training's values are averaged over log_every_n_steps, validation's over the validation",
    "on_epoch": "training's values are averaged over log_every_n_steps, validation's over the validation",
    "sync_dist": "every value is reduced over all ranks",
    "reduce_fx": "pass reduce",
    "batch_size": "pass weight; the default is the batch's size",
}


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Raises TypeError for options that `log` does not have, with what does their work here."""
    for name in options:
        raise TypeError(f"log() has no option {name!r}: {_ELSEWHERE.get(name, 'it has weight and reduce')}.")


class Recording:
    """`log` and its kin. Without LoggerMixin they do nothing, and say so once."""

    _say_once: Callable[[str, str], None]

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
        **unknown: Never,
    ) -> None:
        """Logs a value (LoggerMixin). Without LoggerMixin it does nothing, and says so once."""
        refuse_unknown(unknown)
        self._say_that_nothing_is_logged("log")

    def log_dict(
        self,
        values: dict[str, Any],
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
        **unknown: Never,
    ) -> None:
        """Logs several values, nested dicts under `outer/inner` (LoggerMixin)."""
        refuse_unknown(unknown)
        for name, value in values.items():
            if isinstance(value, dict):
                self.log_dict({f"{name}/{key}": item for key, item in value.items()}, weight=weight, reduce=reduce)
            else:
                self.log(name, value, weight=weight, reduce=reduce)

    def log_image(self, name: str, image: Any, caption: str | None = None) -> None:
        """Logs an image (LoggerMixin); `log_images` says when it is written and what it raises.

        Args:
            name: As the loggers will show it.
            image: One of Pillow's, or a tensor or array `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`, on any device: floating point from 0 to 1, uint8 from 0 to 255, or bool.
            caption: Text beside the image, where the logger can show it.
        """
        self.log_images(name, [image], [caption])

    def log_images(self, name: str, images: Iterable[Any], captions: Sequence[str | None] | None = None) -> None:
        """Logs images side by side (LoggerMixin)."""
        self._say_that_nothing_is_logged("log_images")

    def log_video(self, name: str, frames: Any, fps: float) -> None:
        """Logs frames `[time, channels, height, width]` (LoggerMixin)."""
        self._say_that_nothing_is_logged("log_video")

    def log_audio(self, name: str, samples: Any, sample_rate: int) -> None:
        """Logs sound `[channels, samples]` (LoggerMixin)."""
        self._say_that_nothing_is_logged("log_audio")

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Logs rows under named columns (LoggerMixin)."""
        self._say_that_nothing_is_logged("log_table")

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Logs how the elements of a tensor are distributed (LoggerMixin)."""
        self._say_that_nothing_is_logged("log_histogram")

    def log_text(self, name: str, text: str) -> None:
        """Logs text, as Markdown where it can be shown (LoggerMixin)."""
        self._say_that_nothing_is_logged("log_text")

    def _say_if_unlogged(self, step: str, result: Mapping[str, Any]) -> None:
        """Says once of a `step` that logged nothing if its result has a tensor of several elements, which is no log."""
        for name, value in result.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                self._say_once(
                    f"unlogged {step}",
                    f"nothing that {step} returned is logged: {name!r} is a tensor of shape {tuple(value.shape)}. "
                    "Return tensors of one element, such as its mean().",
                )
                return

    def _say_that_nothing_is_logged(self, method: str) -> None:
        self._say_once(method, f"{type(self).__name__}.{method} does nothing: the trainer has no LoggerMixin.")
