"""What is logged together: dicts of values, and images in one grid."""

from typing import Any

import numpy
import pytest
import torch
from PIL import Image as Pillow

from tests.api import Images, pil_image
from tests.trainer.test_logger_mixin import Algorithm, Memory, fit, make_config


@pytest.mark.parametrize("method", ["log", "log_dict"])
def test_a_dict_is_logged_as_its_values_one_by_one(method: str) -> None:
    class Together(Algorithm):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            result = super().training_step(batch, batch_idx)
            x = batch[0]
            getattr(self, method)({"dict/first": x[0], "dict": {"square": x[0] ** 2}})
            getattr(self, method)({"dict/most": x[0]}, reduce="max", weight=1)
            self.log("one/first", x[0])
            self.log("one/square", x[0] ** 2)
            self.log("one/most", x[0], reduce="max", weight=1)
            return result

    for _, line in fit(Together, make_config(every=2)).lines:
        assert {name[5:]: value for name, value in line.items() if name.startswith("dict/")} == {
            name[4:]: value for name, value in line.items() if name.startswith("one/")
        }
        assert "dict/square" in line


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (({"loss": 1.0}, 2.0), {}, "a dict and a value"),
        (("loss",), {}, r"log\('loss'\) has no value"),
        (({"loss": 1.0},), {"step": 4}, "unexpected keyword argument 'step'"),
    ],
)
def test_neither_a_name_with_a_value_nor_a_dict(arguments: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Algorithm(make_config()).log(*arguments, **options)


def logged(images: Any, **options: Any) -> numpy.ndarray:
    """What one log_image_grid gives to the loggers, as Pillow sees it."""

    class Shows(Algorithm):
        def post_fit(self) -> None:
            self.log_image_grid("grid", images, caption="all of them", **options)

    memory: Memory = fit(Shows, make_config())
    ((_, name, item),) = memory.media
    assert isinstance(item, Images)
    assert (name, item.images[0].caption) == ("grid", "all of them")
    return numpy.asarray(pil_image(item.images[0].pixels).convert("RGB"))


def pasted(images: list[Pillow.Image], columns: int, size: tuple[int, int]) -> numpy.ndarray:
    """The same page, put together by Pillow."""
    width, height = size
    rows = -(-len(images) // columns)
    page = Pillow.new("RGB", (columns * (width + 2) + 2, rows * (height + 2) + 2))
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        page.paste(image.convert("RGB"), (2 + column * (width + 2), 2 + row * (height + 2)))
    return numpy.asarray(page)


@pytest.mark.parametrize(("options", "columns"), [({}, 3), ({"columns": 5}, 5), ({"columns": 1}, 1)])
def test_a_batch_becomes_one_page(options: dict[str, int], columns: int) -> None:
    batch = torch.randint(256, (7, 3, 4, 5), dtype=torch.uint8)
    images = [Pillow.fromarray(image.permute(1, 2, 0).numpy()) for image in batch]
    assert (logged(batch, **options) == pasted(images, columns, (5, 4))).all()
    assert (logged(batch / 255, **options) == pasted(images, columns, (5, 4))).all()
    assert (logged(batch.numpy(), **options) == pasted(images, columns, (5, 4))).all()


def test_images_of_several_sizes_and_colours_become_one_page() -> None:
    images = [Pillow.new("RGB", (6, 2), (10, 200, 30)), Pillow.new("L", (3, 4), 90), Pillow.new("1", (2, 2), 1)]
    assert (logged(images) == pasted(images, 2, (6, 4))).all()


def test_what_makes_no_page_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="'grid' has images with an alpha channel and without"):
        logged([torch.zeros(3, 2, 2), torch.zeros(4, 2, 2)])
    with pytest.raises(ValueError, match="columns=0 of 'grid'"):
        logged(torch.zeros(2, 3, 2, 2), columns=0)
    with pytest.raises(ValueError, match=r"'grid' has shape \(2, 2, 2\)"):
        logged(torch.zeros(3, 2, 2, 2))
