"""Logger: a destination of numbers and other logged values; and those values: checked, gathered, and on the host.
Making one of a tensor waits for the device."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy
import torch
from torch import Tensor

from dream_trainer.compat.pytorch import is_dtensor
from dream_trainer.config.logger_parameters import LoggerParameters
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.loggers.buffer import Records, Stamp, whole

T = TypeVar("T")
Cell = str | int | float | bool | None


class Logger(ABC):
    """A place that numbers are written to. It lives on rank 0 only, and its methods may not run collectives.

    An exception from any of them is reported once and does not stop training, unless `strict=True`.

    Attributes:
        requires: Packages that it imports when it opens; a missing one is an error when the trainer is built.
    """

    requires: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def configured(cls, parameters: LoggerParameters) -> Self:
        """The logger that `logger_parameters.loggers` names. Default: made without arguments."""
        return cls()

    @classmethod  # noqa: B027 (most loggers have no parameters)
    def check(cls, parameters: LoggerParameters) -> None:
        """Raises ConfigError if it does not support these parameters; called when the trainer is built."""

    @abstractmethod
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        """Called once when training begins, and again after a checkpoint was loaded in the middle of a run.

        `run_dir` may not exist yet. Records of steps after `resumed_step` will come again, so drop them; it is None
        for a new run.
        """

    @abstractmethod
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Writes `metrics`, means (or the requested reductions) over all values since the last call."""

    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        """Writes an image, video, sound, table, histogram or text, one of the classes in this module.

        Returns whether this logger shows that kind. Default: none.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """This logger's state for checkpoints, even before `open`: numbers, strings, containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most loggers keep nothing)
        """Restores the result of `state_dict`, before `open`. Another run's checkpoint gives nothing."""

    def close(self) -> None:  # noqa: B027 (most loggers have nothing to release)
        """Releases resources of `open`. Default: nothing."""

    def _opened(self, what: T | None) -> T:
        if what is None:
            raise RuntimeError("log() was called before open(). Open the logger on a run directory first.")
        return what


@dataclass(frozen=True)
class Image:
    pixels: Tensor  # `[channels, height, width]`, uint8, of 1 (grey), 3 (RGB) or 4 (RGBA) channels, on the CPU
    caption: str | None = None


@dataclass(frozen=True)
class Images:
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Video:
    frames: Tensor  # `[time, channels, height, width]`, uint8, on the CPU
    fps: float  # frames per second


@dataclass(frozen=True)
class Audio:
    samples: Tensor  # `[channels, samples]`, float32 from -1 to 1, on the CPU
    sample_rate: int  # samples per second


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Histogram:
    """How many values lie between two edges and the next; values that are not finite are left out."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]  # one more than counts, in rising order


@dataclass(frozen=True)
class Text:
    """Text; Markdown where it can be shown."""

    text: str


Media = Images | Video | Audio | Table | Histogram | Text


class MediaLog:
    """Makes media of logged values and adds them to the current record, on rank 0. Every rank gathers and checks."""

    def __init__(self, records: Records, world: Ranks, warn_once: Callable[[str, str], None]) -> None:
        self._records, self.world, self._warn_once = records, world, warn_once

    def _gathered(self, name: str, value: Any) -> Tensor:
        """`value` as a plain tensor without gradient, on its device. A DTensor is gathered, by all ranks."""
        if isinstance(value, Tensor):
            if self.world.forbidden is not None and is_dtensor(value):
                self.world.refuse_if_forbidden()
            return whole(value.detach())
        pillow = sys.modules.get("PIL.Image")
        if pillow is not None and isinstance(value, pillow.Image):
            # an image of Pillow's as `[channels, height, width]`, uint8: grey, RGB or RGBA, whichever holds all of it
            grey = value.mode in ("1", "L")
            has_alpha = value.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in value.info
            kind = "L" if grey else "RGBA" if has_alpha else "RGB"
            pixels = torch.from_numpy(numpy.array(value.convert(kind)))
            return pixels.unsqueeze(0) if grey else pixels.permute(2, 0, 1)
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name!r} is of type {type(value).__name__}. Log a tensor or an array of numbers."
            ) from error

    def _pixels(self, name: str, value: Tensor) -> Tensor:
        """Images or frames `[..., channels, height, width]` as uint8 on the CPU."""
        if value.dim() == 2:
            value = value.unsqueeze(0)
        if value.dim() < 3 or value.shape[-3] not in (1, 3, 4) or value.numel() == 0:
            hint = " Use image.permute(2, 0, 1)." if value.dim() == 3 and value.shape[-1] in (1, 3, 4) else ""
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)}. Log [channels, height, width] with 1, 3 or 4 channels, or "
                f"[height, width].{hint}"
            )
        if value.dtype == torch.uint8:
            return value.cpu().contiguous()
        if value.dtype == torch.bool:
            return value.cpu().to(torch.uint8) * 255
        if not value.is_floating_point():
            raise TypeError(
                f"{name!r} has dtype {value.dtype}. Log floating point from 0 to 1, or uint8 from 0 to 255."
            )
        value = value.cpu().float().nan_to_num(0.0, 1.0, 0.0)
        lowest, highest = value.aminmax()
        if lowest < -1e-3 or highest > 1 + 1e-3:
            self._warn_once(f"clamped {name}", f"{name!r} has values outside of 0 to 1, which are clamped for display.")
        return value.clamp(0, 1).mul(255).round().to(torch.uint8)

    def _add(self, name: str, make: Callable[[], Media]) -> None:
        record = self._records.current
        if self.world.is_main and record.media is not None:
            name = record.prefix + name.removeprefix("val/") if record.prefix else name
            record.media.append((name, make(), record.media_stamp()))

    def images(self, name: str, images: Iterable[Any], captions: Sequence[str | None] | None) -> None:
        tensors = [self._gathered(name, image) for image in images]
        shown = list(zip(tensors, [None] * len(tensors) if captions is None else captions, strict=True))
        for image in tensors:
            if image.dim() > 3:
                raise ValueError(
                    f"{name!r} has shape {tuple(image.shape)}, more than one image's [channels, height, width]. "
                    f"Log several with log_images({name!r}, images)."
                )
        if tensors:
            self._add(name, lambda: Images(tuple(Image(self._pixels(name, image), text) for image, text in shown)))

    def image_grid(self, name: str, images: Iterable[Any], columns: int | None, caption: str | None) -> None:
        if columns is not None and columns < 1:
            raise ValueError(f"columns={columns} of {name!r} is too small. Use 1 or more.")
        if isinstance(images, Tensor):  # gathered at once
            images = self._gathered(name, images)
        tensors = [self._gathered(name, image) for image in images]
        if tensors:
            pictures = (self._pixels(name, image) for image in tensors)
            self._add(name, lambda: Images((Image(grid(name, list(pictures), columns), caption),)))

    def video(self, name: str, frames: Any, fps: float) -> None:
        tensor = self._gathered(name, frames)
        if tensor.dim() != 4 or not fps > 0:
            shape = tuple(tensor.shape)
            raise ValueError(
                f"{name!r} has shape {shape}, fps={fps}. Log [time, channels, height, width], fps above 0."
            )
        self._add(name, lambda: Video(self._pixels(name, tensor), fps))

    def audio(self, name: str, samples: Any, sample_rate: int) -> None:
        tensor = self._gathered(name, samples)
        if tensor.dim() == 1:
            tensor = tensor.unsqueeze(0)
        if tensor.dim() != 2 or tensor.shape[0] not in (1, 2) or tensor.numel() == 0:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)}. Log [samples], or [channels, samples] of 1 or 2."
            )
        if not tensor.is_floating_point():
            raise TypeError(f"{name!r} has dtype {tensor.dtype}. Log floating point samples from -1 to 1.")
        plain = tensor.float().nan_to_num(0.0, 1.0, -1.0).clamp(-1, 1)
        self._add(name, lambda: Audio(plain.cpu(), int(sample_rate)))

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Cells are plain: numbers and 0-dim tensors as numbers, anything else that is not a string as its `str`."""
        if isinstance(columns, str):
            raise TypeError(f"the columns of {name!r} are the string {columns!r}. Use a list of names: [{columns!r}].")
        checked_rows = []
        for number, row in enumerate(rows):
            if isinstance(row, str) or not isinstance(row, Iterable) or (isinstance(row, Tensor) and not row.dim()):
                raise TypeError(f"row {number} of {name!r} is {row!r}. Log each row as a list of its cells: [{row!r}].")
            cells = list(row.values() if isinstance(row, Mapping) else row)
            if len(cells) != len(columns):
                raise ValueError(
                    f"row {number} of {name!r} has {len(cells)} cells for the {len(columns)} columns {columns}."
                )
            plain = [whole(c.detach()).item() if isinstance(c, Tensor) and c.numel() == 1 else c for c in cells]
            checked_rows.append(tuple(c if isinstance(c, str | int | float | bool | None) else str(c) for c in plain))
        self._add(name, lambda: Table(tuple(columns), tuple(checked_rows)))

    def histogram(self, name: str, values: Any, bins: int) -> None:
        if bins < 1:
            raise ValueError(f"bins={bins} of histogram {name!r} is too small. Use 1 or more.")
        tensor = self._gathered(name, values)
        self._add(name, lambda: histogram(tensor, bins))

    def text(self, name: str, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"{name!r} is of type {type(text).__name__}, no text. Log a string, such as str(x).")
        self._add(name, lambda: Text(text))


def grid(name: str, images: Sequence[Tensor], columns: int | None = None, padding: int = 2) -> Tensor:
    """A grid of images, on black."""
    channels, height, width = (max(sizes) for sizes in zip(*(image.shape for image in images), strict=True))
    if channels == 4 and any(len(image) != 4 for image in images):
        raise ValueError(f"{name!r} has images with an alpha channel and without. Log image[:3] of those with one.")
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    page = torch.zeros(
        channels, rows * (height + padding) + padding, columns * (width + padding) + padding, dtype=torch.uint8
    )
    for index, image in enumerate(images):
        top = padding + index // columns * (height + padding)
        left = padding + index % columns * (width + padding)
        page[:, top : top + image.shape[1], left : left + image.shape[2]] = image  # one channel fills them all
    return page


def histogram(value: Tensor, bins: int) -> Histogram:
    """Counts of `value`'s finite elements in `bins` bins of one width; counted on its device."""
    value = value.reshape(-1).float()
    value = value[value.isfinite()]
    low, high = (float(edge) for edge in value.aminmax()) if value.numel() else (0.0, 0.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    # By index and not by histc, whose float32 sums are wrong beyond 2**24 of a bin.
    index = ((value - low) * (bins / (high - low))).long().clamp_(0, bins - 1)
    counts = torch.bincount(index, minlength=bins)
    return Histogram(tuple(counts.tolist()), tuple(edges.tolist()))


def markdown(shown: Table) -> str:
    """The table in Markdown."""
    lines = [shown.columns, ("---",) * len(shown.columns), *shown.rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
