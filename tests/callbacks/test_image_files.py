"""ImageFiles: the files, read back with Pillow."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

import dream_trainer as dt
from tests.api import ImageFiles
from tests.trainer.small import Alone, Batch, batches, fit, make_config


def pictures(step: int) -> Tensor:
    """Five images of 3 by 4 pixels, each of one colour; no two alike."""
    colours = torch.arange(15).reshape(5, 3, 1, 1) + step
    return (colours / 255).expand(5, 3, 3, 4)


class Paints(Alone, dt.EvalMixin):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return super().training_step(batch, batch_idx) | {"picture": pictures(batch_idx)}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return {"picture": pictures(100 + batch_idx), "grey": torch.full((1, 1, 2, 2), 2.0)}


def pixels(path: Path) -> numpy.ndarray:
    with Image.open(path) as image:
        return numpy.asarray(image)


def test_what_the_steps_return_is_in_the_files() -> None:
    callbacks = [ImageFiles("picture", every_n_steps=2), ImageFiles("grey"), ImageFiles("nothing", every_n_steps=1)]
    config = make_config(
        n_epochs=1, gradient_accumulation_steps=2, val_every_n_steps=2, num_sanity_val_steps=1, callbacks=callbacks
    )
    with Paints(config, batches(8), {"a": batches(2), "b": batches(1)}) as trainer:
        trainer.fit()
        trainer.evaluate(batches(1))
    root = trainer.run_dir / "images"
    names = {path.relative_to(root).as_posix() for path in root.rglob("*.png")}
    kinds = ("train/picture", "val/a/grey", "val/a/picture", "val/b/grey", "val/b/picture")
    assert names == {f"{kind}/step_0000000{step}.png" for kind in kinds for step in (2, 4)}

    found = pixels(root / "train/picture/step_00000002.png")  # of batches 0 to 3 the last
    assert found.shape == (2 * 5 + 2, 3 * 6 + 2, 3)
    for index in range(5):
        row, column = divmod(index, 3)
        inside = found[2 + 5 * row : 5 + 5 * row, 2 + 6 * column : 6 + 6 * column]
        assert (inside == 3 * index + 3 + numpy.arange(3)).all()
    assert not found[:2].any()
    assert not found[7:, 14:].any()  # no sixth image
    assert (pixels(root / "val/a/picture/step_00000004.png")[2, 2] == [100, 101, 102]).all()
    assert (pixels(root / "val/a/grey/step_00000004.png")[2:4, 2:4] == 255).all()  # clamped


def test_a_grid_holds_no_more_images_than_asked_for() -> None:
    t = fit(
        Paints(make_config(n_epochs=1, callbacks=[ImageFiles("picture", every_n_steps=1, max_images=1)]), batches(1))
    )
    assert pixels(t.run_dir / "images/train/picture/step_00000001.png").shape == (7, 8, 3)


def test_a_shape_that_is_no_batch_of_images_is_an_error() -> None:
    config = make_config(n_epochs=1, callbacks=[ImageFiles("loss", every_n_steps=1)])
    with Paints(config, batches(1)) as trainer, pytest.raises(ValueError, match=r"'loss' has shape \(\)"):
        trainer.fit()


def test_files_that_cannot_be_written_do_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(n_epochs=1, callbacks=[ImageFiles("picture", every_n_steps=1)])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "images").touch()
    assert fit(Paints(config, batches(3))).global_step == 3
    assert caplog.text.count("cannot write") == 1
