"""MediaRecording: the part of LoggerMixin that takes images, video, sound, tables, histograms and text.

They go to the host when they are logged, on rank 0, and to the loggers when their window, or their validation, is
through, after all numbers of earlier steps: W&B takes steps in their order alone. So they have the step of its numbers,
and a window that runs again writes them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from dream_trainer.loggers import media
from dream_trainer.loggers.group import LoggerGroup
from dream_trainer.loggers.interface import Stamp
from dream_trainer.trainer.abstract import AbstractTrainer


class MediaRecording(AbstractTrainer):
    """Media from anywhere in the trainer."""

    # LoggerMixin's.
    _opened_loggers: Callable[[], LoggerGroup]
    _stamp: Callable[[], Stamp]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # On rank 0: what is to be written, with its step if that is known already; how much of it was logged before the
        # running window; and that of the running validation.
        self._media: list[tuple[str, media.Media, Stamp | None]] = []
        self._media_before_window = 0
        self._val_media: list[tuple[str, media.Media]] = []

    def log_images(self, name: str, images: Iterable[Any], captions: Sequence[str | None] | None = None) -> None:
        """Logs images side by side, as rank 0 has them; `log_image(name, image, caption=None)` logs a single one.

        Like all media, they are copied to the host now, which waits for the device: log them now and then. They are
        written with the step that the running window completes; in a validation under `val/` with its numbers. A
        DTensor is gathered, so all ranks of its mesh must log it; of other tensors only rank 0's count.

        Args:
            name: As the loggers will show it.
            images: Images of Pillow's, or tensors or arrays `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`, on any device: floating point from 0 to 1 (values beyond are clamped, which is said
                once; NaN is 0), uint8 from 0 to 255, or bool, where True is white. Other integers are an error.
            captions: One text for each image, or None for it; where the logger can show them.

        Raises:
            RuntimeError: A DTensor is logged where rank 0 runs alone, as in a main_process_only callback.
            ValueError: A shape is no image's, or there are more or fewer captions than images.
            TypeError: An image is no tensor or array, or of another dtype.
        """
        found = [self._gathered(name, image) for image in images]
        captions = [None] * len(found) if captions is None else captions
        if len(captions) != len(found):
            raise ValueError(f"{name!r} has {len(found)} images and {len(captions)} captions. Give one for each.")
        for image in found:
            if image.dim() > 3:
                raise ValueError(
                    f"{name!r} has shape {tuple(image.shape)}, more than one image's [channels, height, width]. "
                    f"Log several with log_images({name!r}, images)."
                )
        if found and self._takes_media():
            shown = tuple(
                media.Image(self._pixels(name, image), text) for image, text in zip(found, captions, strict=True)
            )
            self._add_media(name, media.Images(shown))

    def log_video(self, name: str, frames: Any, fps: float) -> None:
        """Logs a video, as `log_images` does.

        Args:
            name: As the loggers will show it.
            frames: `[time, channels, height, width]`, with values as of images.
            fps: Frames per second.

        Raises:
            ValueError: The shape is no video's, or `fps` is not positive.
        """
        found = self._gathered(name, frames)
        if found.dim() != 4 or not fps > 0:
            shape = tuple(found.shape)
            raise ValueError(
                f"{name!r} has shape {shape}, fps={fps}. Log [time, channels, height, width], fps above 0."
            )
        if self._takes_media():
            self._add_media(name, media.Video(self._pixels(name, found), fps))

    def log_audio(self, name: str, samples: Any, sample_rate: int) -> None:
        """Logs sound, as `log_images` does.

        Args:
            name: As the loggers will show it.
            samples: `[samples]` or `[channels, samples]` of 1 or 2 channels, floating point from -1 to 1.
            sample_rate: Samples per second.

        Raises:
            ValueError: The shape is no sound's.
            TypeError: The samples are not floating point.
        """
        found = self._gathered(name, samples)
        if self._takes_media():
            self._add_media(name, media.audio(name, found, sample_rate))

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Logs rows under named columns, as `log_images` does; cells are numbers, strings, or shown by `str`.

        Raises:
            ValueError: A row has more or fewer cells than there are columns.
            TypeError: The columns are a string, or the rows or one of them are no sequence.
        """
        found = media.table(name, columns, rows)
        if self._takes_media():
            self._add_media(name, found)

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Logs how the finite elements of a tensor of any shape are distributed, as `log_images` does.

        They are counted on their device, in `bins` bins of one width from the lowest to the highest.

        Raises:
            ValueError: There is no bin.
        """
        if bins < 1:
            raise ValueError(f"bins={bins} of histogram {name!r} is too small. Use 1 or more.")
        found = self._gathered(name, values)
        if self._takes_media():
            self._add_media(name, media.histogram(found, bins))

    def log_text(self, name: str, text: str) -> None:
        """Logs text, as Markdown where it can be shown; with the step, as `log_images` does.

        Raises:
            TypeError: It is no string.
        """
        if not isinstance(text, str):
            raise TypeError(f"{name!r} is of type {type(text).__name__}, no text. Log a string, such as str(x).")
        if self._takes_media():
            self._add_media(name, media.Text(text))

    def _gathered(self, name: str, value: Any) -> Tensor:
        world = self._world
        if world is not None and world.forbidden is not None and world.mesh is not None:
            from torch.distributed.tensor import DTensor

            if isinstance(value, DTensor):
                world.refuse_if_forbidden()
        return media.gathered(name, value)

    def _takes_media(self) -> bool:
        return self.world.is_main and not (self.is_padding_batch or self.is_sanity_validation)

    def _pixels(self, name: str, value: Tensor) -> Tensor:
        found, was_clamped = media.pixels(name, value)
        if was_clamped:
            self._say_once(f"clamped {name}", f"{name!r} has values outside of 0 to 1, which are clamped for display.")
        return found

    def _add_media(self, name: str, item: media.Media) -> None:
        if not self.training:
            own = f"val/{self.val_name}/" if self.val_name else "val/"
            self._val_media.append((own + name.removeprefix("val/"), item))
            return
        if self.is_evaluating:  # in its post_val_epoch
            return
        is_between_windows = self.local_batches > 0 and not self._accumulation.is_open
        self._media.append((name, item, self._stamp() if is_between_windows else None))

    # -- when it is written

    def _land(self) -> None:
        super()._land()
        for name, item, stamp in self._media:
            self._opened_loggers().log_media(name, item, stamp or self._stamp())
        self._media.clear()

    def _window_started(self) -> None:
        super()._window_started()
        if self._media_before_window != len(self._media):
            self._media_before_window = len(self._media)

    def _window_dropped(self) -> None:
        super()._window_dropped()
        del self._media[self._media_before_window :]

    @contextmanager
    def _validation_context(self) -> Iterator[None]:
        """What it logs is kept until `_validated` takes it, which never comes after `evaluate` and `predict`."""
        self._val_media.clear()
        with super()._validation_context():
            yield

    def _validated(self, metrics: dict[str, float]) -> None:
        super()._validated(metrics)
        self._media += [(name, item, self._stamp()) for name, item in self._val_media]
        self._val_media.clear()
        self._land()
