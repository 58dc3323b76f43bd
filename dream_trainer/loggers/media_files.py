"""ImageFilesLogger: images and videos as files that any viewer shows."""

from __future__ import annotations

import io
import re
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dream_trainer.loggers.interface import Logger, Stamp
from dream_trainer.loggers.line_files import set_aside
from dream_trainer.loggers.media import Audio, Image, Images, Media, Video

if TYPE_CHECKING:
    import PIL.Image

_STEP = re.compile(r"step_(\d+)(_\d+)?\.(png|gif)")


class ImageFilesLogger(Logger):
    """Writes `media/<name>/step_00000010.png` in the run directory; of several images `step_00000010_0.png` and so on.

    A caption is in its file as the PNG text `Description`. Videos are GIF files. Numbers are not its business.

    When a run resumes at a step, files of later steps are removed, since they will come again. A run that starts from
    nothing where there is a directory keeps that as `media.1` (2, 3, ...).
    """

    requires: ClassVar[tuple[str, ...]] = ("PIL",)
    _directory: Path | None = None

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        self._directory = run_dir / "media"
        if resumed_step is None:
            set_aside(self._directory)
            return
        for path in self._directory.rglob("step_*"):
            match = _STEP.fullmatch(path.name)
            if match and int(match[1]) > resumed_step:
                path.unlink()

    @override
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        """Does nothing."""

    @override
    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        match media:
            case Images():
                files = [("png", png(image)) for image in media.images]
            case Video():
                files = [("gif", gif(media))]
            case _:
                return False
        # A name is a path below the directory, whatever it has in it.
        folder = self._opened(self._directory).joinpath(
            *(part for part in re.split(r"[/\\]", name) if part.strip(". "))
        )
        folder.mkdir(parents=True, exist_ok=True)
        for index, (suffix, data) in enumerate(files):
            number = f"_{index}" if len(files) > 1 else ""
            (folder / f"step_{stamp.step:08d}{number}.{suffix}").write_bytes(data)
        return True


def pil_image(pixels: Tensor) -> PIL.Image.Image:
    """Pixels `[channels, height, width]`, uint8, as an image of Pillow."""
    from PIL import Image as Pillow

    mode = {1: "L", 3: "RGB", 4: "RGBA"}[pixels.shape[0]]
    size = pixels.shape[2], pixels.shape[1]
    return Pillow.frombytes(mode, size, pixels.permute(1, 2, 0).contiguous().numpy().tobytes())


def png(image: Image) -> bytes:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    if image.caption is not None:
        info.add_itxt("Description", image.caption)
    return _saved(pil_image(image.pixels), format="PNG", pnginfo=info)


def gif(video: Video) -> bytes:
    first, *others = (pil_image(frame) for frame in video.frames)
    duration = 1000 / video.fps  # milliseconds
    return _saved(first, format="GIF", save_all=True, append_images=others, duration=duration, loop=0)


def wav(audio: Audio) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(audio.samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(audio.sample_rate)
        samples = (audio.samples * 32767).round().to(torch.int16)
        file.writeframes(samples.t().contiguous().numpy().astype("<i2").tobytes())
    return buffer.getvalue()


def _saved(image: PIL.Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()
