"""LogMethods: `self.log` and its kin, which every trainer has; LoggerMixin brings the log behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

if TYPE_CHECKING:
    from dream_trainer.loggers.buffer import Reduction
    from dream_trainer.loggers.media import MediaLog
    from dream_trainer.loggers.records import Records
    from dream_trainer.loggers.run_log import RunLog

_ELSEWHERE = {
    "prog_bar": "the Progress callback shows what its `metrics` name",
    "on_step": "training's values are averaged over log_every_n_steps, validation's over the validation",
    "on_epoch": "training's values are averaged over log_every_n_steps, validation's over the validation",
    "sync_dist": "every value is reduced over all ranks",
    "reduce_fx": "pass reduce",
    "batch_size": "pass weight; the default is the batch's size",
    "step": "the step is the optimizer step that the value belongs to",
    "commit": "a line is written every log_every_n_steps",
}


class LogMethods:
    """Logging from anywhere in the trainer. Without LoggerMixin these methods do nothing, and warn of it once."""

    warn_once: Callable[[str, str], None]
    _records: Records
    _run_log: RunLog | None = None  # LoggerMixin's

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Tensor | float | None = None,
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
        **unknown: Never,
    ) -> None:
        """Logs a value, or a dict of them; the loggers get it reduced over all micro-batches and ranks since the last
        flush.

        Nothing waits for the device. Ranks need not log the same names. A tensor that you will change in place
        afterwards is to be logged as its `clone()`.

        Args:
            name: As the loggers will show it. In validation `val/` (and the loader's name) is put before it, if it is
                not there; not in `post_val_epoch` and `post_epoch`, whose values are a line of their own at the step of
                the validation's or the epoch's end. Or values by their names, nested ones as `outer/inner`.
            value: A number or a tensor of one element.
            weight: Weight in the mean; zero counts for nothing under any reduction. Default: the micro-batch's backward
                weight if it has one, otherwise its batch size; 1 before the first batch.
            reduce: "mean", "sum", "min", "max" or "last" (on the highest rank that logged it).

        Raises:
            TypeError: The value is not a scalar, or there is one beside a dict.
            ValueError: The name belongs to the stamp of a line, or had another reduction before.
        """
        for option in unknown:
            known = _ELSEWHERE.get(option, "it has weight and reduce")
            raise TypeError(f"log() has no option {option!r}: {known}.")
        if self._run_log is None:
            self._media_log("log")  # warns
        elif isinstance(name, Mapping):
            if value is not None:
                raise TypeError("log() was given a dict and a value. Log a name and its value, or only a dict.")
            self.log_dict(name, weight=weight, reduce=reduce)
        elif value is None:
            raise TypeError(f"log({name!r}) has no value. Log a number or a tensor of one element under that name.")
        else:
            self._records.current.add(name, value, weight, reduce)

    def log_dict(
        self,
        values: Mapping[str, Any],
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
        **unknown: Never,
    ) -> None:
        """Logs several values, nested dicts under `outer/inner`, as `log` does with a dict."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                inner = {f"{name}/{key}": item for key, item in value.items()}
                self.log_dict(inner, weight=weight, reduce=reduce, **unknown)
            else:
                self.log(name, value, weight=weight, reduce=reduce, **unknown)

    def log_image(self, name: str, image: Any, caption: str | None = None) -> None:
        """Logs an image; `log_images` has the rules.

        Args:
            name: As the loggers will show it.
            image: One of Pillow's, or a tensor or array `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`, on any device: floating point from 0 to 1, uint8 from 0 to 255, or bool.
            caption: Text beside the image, where the logger can show it.
        """
        self.log_images(name, [image], [caption])

    def log_images(self, name: str, images: Iterable[Any], captions: Sequence[str | None] | None = None) -> None:
        """Logs images side by side, as rank 0 has them; `log_image(name, image, caption=None)` logs a single one.

        Like all media, they are copied to the host now, which waits for the device: log them now and then. They are
        written with the step that the running window completes; in a validation under `val/` with its numbers. A
        DTensor is gathered, so all ranks of its mesh must log it; of other tensors only rank 0's count.

        Args:
            name: As the loggers will show it.
            images: Images of Pillow's, or tensors or arrays `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`, on any device: floating point from 0 to 1 (values beyond are clamped, with one
                warning; NaN is 0), uint8 from 0 to 255, or bool, where True is white. Other integers are an error.
            captions: One text for each image, or None for it; where the logger can show them.

        Raises:
            RuntimeError: A DTensor is logged where only rank 0 runs, as in a main_process_only callback.
            ValueError: A shape is not that of an image, or there are more or fewer captions than images.
            TypeError: An image is not a tensor or array, or of another dtype.
        """
        if media := self._media_log("log_images"):
            media.images(name, images, captions)

    def log_image_grid(
        self, name: str, images: Iterable[Any], *, columns: int | None = None, caption: str | None = None
    ) -> None:
        """Logs images beside and below each other as a single one, as `log_images` does.

        Args:
            name: As the loggers will show it.
            images: `[n, channels, height, width]`, or single ones as in `log_images`. Smaller ones lie in the upper
                left of their cells; grey ones become colour beside others.
            columns: How many are beside each other; None for as near to a square as `n` allows.
            caption: Text of the whole, where the logger can show it.

        Raises:
            ValueError: A shape is not that of an image, some have an alpha channel and some do not, or there is no
                column.
            TypeError: An image is not a tensor or array, or of another dtype.
        """
        if media := self._media_log("log_image_grid"):
            media.image_grid(name, images, columns, caption)

    def log_video(self, name: str, frames: Any, fps: float) -> None:
        """Logs a video, as `log_images` does.

        Args:
            name: As the loggers will show it.
            frames: `[time, channels, height, width]`, with values as of images.
            fps: Frames per second.

        Raises:
            ValueError: The shape is not that of a video, or `fps` is not positive.
        """
        if media := self._media_log("log_video"):
            media.video(name, frames, fps)

    def log_audio(self, name: str, samples: Any, sample_rate: int) -> None:
        """Logs sound, as `log_images` does.

        Args:
            name: As the loggers will show it.
            samples: `[samples]` or `[channels, samples]` of 1 or 2 channels, floating point from -1 to 1.
            sample_rate: Samples per second.

        Raises:
            ValueError: The shape is not that of a sound.
            TypeError: The samples are not floating point.
        """
        if media := self._media_log("log_audio"):
            media.audio(name, samples, sample_rate)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Logs rows under named columns, as `log_images` does; cells are numbers, strings, or shown by `str`.

        Raises:
            ValueError: A row has more or fewer cells than there are columns.
            TypeError: The columns are a string, or the rows or one of them are not a sequence.
        """
        if media := self._media_log("log_table"):
            media.table(name, columns, rows)

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Logs how the finite elements of a tensor of any shape are distributed, as `log_images` does.

        They are counted on their device, in `bins` bins of one width from the lowest to the highest.

        Raises:
            ValueError: There is no bin.
        """
        if media := self._media_log("log_histogram"):
            media.histogram(name, values, bins)

    def log_text(self, name: str, text: str) -> None:
        """Logs text, as Markdown where it can be shown; with the step, as `log_images` does.

        Raises:
            TypeError: It is not a string.
        """
        if media := self._media_log("log_text"):
            media.text(name, text)

    def _media_log(self, method: str) -> MediaLog | None:
        """Where media go; None, with a warning for each method, if there is no log."""
        if self._run_log is None:
            self.warn_once(method, f"{type(self).__name__}.{method} does nothing: the trainer has no LoggerMixin.")
            return None
        return self._run_log.media


def unlogged(step: str, result: Mapping[str, Any]) -> str | None:
    """The warning of a `step` that logged nothing though its result has a tensor of several elements; else None."""
    for name, value in result.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            return (
                f"nothing that {step} returned is logged: {name!r} is a tensor of shape {tuple(value.shape)}. "
                "Return tensors of one element, such as its mean()."
            )
    return None
