"""ImageFilesLogger: files that an image library reads."""

from pathlib import Path

import pytest
import torch
from PIL import Image as Pillow

from tests.api import Image, ImageFilesLogger, Images, Text, Video
from tests.loggers.readers import stamp


def grey(value: int) -> Image:
    return Image(torch.full((1, 2, 3), value, dtype=torch.uint8), f"grey {value}")


def write(run_dir: Path, steps: range, resumed_step: int | None = None) -> None:
    logger = ImageFilesLogger()
    logger.open(run_dir, {}, resumed_step)
    for step in steps:
        logger.log_media("val/sample", Images((grey(step),)), stamp(step))
    logger.close()


def files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_images_have_their_pixels_and_captions(tmp_path: Path) -> None:
    logger = ImageFilesLogger()
    logger.open(tmp_path, {}, None)
    pixels = torch.arange(24, dtype=torch.uint8).reshape(4, 2, 3)
    assert logger.log_media("val/sample", Images((Image(pixels, "größer"), grey(9))), stamp(10))
    assert logger.log_media("clip", Video(torch.zeros(3, 3, 4, 4, dtype=torch.uint8), fps=10), stamp(10))
    assert not logger.log_media("note", Text("x"), stamp(10))
    names = ["clip/step_00000010.gif", "val/sample/step_00000010_0.png", "val/sample/step_00000010_1.png"]
    assert files(tmp_path / "media") == names
    picture = Pillow.open(tmp_path / "media" / names[1])
    assert (picture.mode, picture.size) == ("RGBA", (3, 2))
    assert picture.getpixel((2, 1)) == tuple(pixels[:, 1, 2].tolist())
    assert picture.text == {"Description": "größer"}


@pytest.mark.parametrize("name", ["../outside", "/absolute", "a/../../b", ".."])
def test_no_name_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    logger = ImageFilesLogger()
    logger.open(tmp_path / "run", {}, None)
    logger.log_media(name, Images((grey(1),)), stamp(1))
    assert all(name.startswith("run/media/") for name in files(tmp_path))


@pytest.mark.pitfall(44)
def test_a_resumed_run_has_every_step_once_and_a_new_one_keeps_the_earlier_files(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 5), resumed_step=3)
    assert files(tmp_path / "media") == [f"val/sample/step_0000000{step}.png" for step in (1, 2, 3, 4)]
    write(tmp_path, range(1, 2))
    assert len(files(tmp_path / "media")) == 1
    assert len(files(tmp_path / "media.1")) == 4
