"""Media as the bytes of common files. Images want Pillow."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dream_trainer.loggers.media import Audio, Image, Video

if TYPE_CHECKING:
    import PIL.Image


def pil_image(pixels: Tensor) -> PIL.Image.Image:
    """Pixels `[channels, height, width]`, uint8, as an image of Pillow."""
    from PIL import Image as Pillow

    mode = {1: "L", 3: "RGB", 4: "RGBA"}[pixels.shape[0]]
    size = pixels.shape[2], pixels.shape[1]
    return Pillow.frombytes(mode, size, pixels.permute(1, 2, 0).contiguous().numpy().tobytes())


def png(image: Image) -> bytes:
    """A PNG file; the caption is in it as the text `Description`."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    if image.caption is not None:
        info.add_itxt("Description", image.caption)
    return _saved(pil_image(image.pixels), format="PNG", pnginfo=info)


def gif(video: Video) -> bytes:
    """An endless GIF file."""
    first, *others = (pil_image(frame) for frame in video.frames)
    duration = 1000 / video.fps  # milliseconds
    return _saved(first, format="GIF", save_all=True, append_images=others, duration=duration, loop=0)


def wav(audio: Audio) -> bytes:
    """A WAV file of 16 bits."""
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
