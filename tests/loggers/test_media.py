"""What users give to be shown: which shapes and values are taken, and what becomes of them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dream_trainer.loggers import interface
from tests.api import JSONLLogger, Ranks, Record, Records, Stamp


def logged(kind: str, *arguments: Any) -> tuple[Any, list[str]]:
    """The only value that a call of `MediaLog` logs, and its warnings."""
    records, warned = Records(), list[str]()
    records.current = Record(media=[])
    log = interface.MediaLog(records, Ranks.alone(), lambda _, message: warned.append(message))
    vars(interface.MediaLog)[kind](log, "sample", *arguments)
    ((_, item, _),) = records.current.media or ()
    return item, warned


def pixels(image: Any) -> tuple[torch.Tensor, list[str]]:
    found, warned = logged("images", [image], None)
    return found.images[0].pixels, warned


def test_floats_from_0_to_1_bytes_and_masks_become_bytes() -> None:
    for value in (
        torch.tensor([[[0.0, 0.5, 1.0]]], dtype=torch.float64),
        torch.tensor([[0, 0.5, 1]], dtype=torch.bfloat16),
        torch.tensor([[[0, 128, 255]]], dtype=torch.uint8),
    ):
        found, warned = pixels(value)
        assert (found.tolist(), found.dtype, warned) == ([[[0, 128, 255]]], torch.uint8, [])
    assert pixels(torch.tensor([[True, False]]))[0].tolist() == [[[255, 0]]]


def test_values_beyond_are_clamped_and_said_to_be() -> None:
    found, (warning,) = pixels(torch.tensor([[-1.0, 2.0, math.nan, math.inf]]))
    assert found.tolist() == [[[0, 255, 0, 255]]]
    assert "'sample' has values outside of 0 to 1" in warning


@pytest.mark.parametrize("shape", [(5, 4, 3), (2, 4, 5), (7,), (3, 0, 5)])
def test_what_has_no_shape_of_an_image_is_refused_by_its_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'sample' has shape .* \[channels, height, width\]") as error:
        pixels(torch.zeros(shape))
    assert ("permute(2, 0, 1)" in str(error.value)) == (shape == (5, 4, 3))


def test_what_is_of_another_type_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"'sample' has dtype torch.int64"):
        pixels(torch.zeros(3, 2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="'sample' is of type str"):
        pixels("text")
    with pytest.raises(ValueError, match=r"'sample' has shape \(5, 100\)"):
        logged("audio", torch.zeros(5, 100), 8000)


@pytest.mark.parametrize("values", [torch.randn(10_000), torch.ones(5), torch.zeros(0), torch.arange(9) / 8])
def test_a_histogram_counts_as_numpy_does(values: torch.Tensor) -> None:
    found = interface.histogram(torch.cat([values, torch.tensor([math.nan, math.inf])]), bins=16)
    edges = np.array(found.edges)
    assert len(edges) == 17
    assert sum(found.counts) == len(values)
    if len(values):
        expected, numpys_edges = np.histogram(values.double().numpy(), bins=16)
        np.testing.assert_allclose(edges, numpys_edges, atol=1e-6)
        # A value on an edge may fall to either side in float32.
        assert np.abs(np.array(found.counts) - expected).sum() <= 2


def test_table_cells_are_plain() -> None:
    found, _ = logged("table", ["a", "b"], [[torch.tensor(1.5), None], {"a": Path("x"), "b": True}])
    assert found.rows == ((1.5, None), ("x", True))
    with pytest.raises(ValueError, match="row 1 of 'sample' has 1 cells for the 2 columns"):
        logged("table", ["a", "b"], [[1, 2], [3]])


@pytest.mark.pitfall(44)
def test_texts_tables_and_histograms_are_lines_of_media_jsonl_over_restarts(tmp_path: Path) -> None:
    shown = {
        "note": interface.Text("hello"),
        "rows": interface.Table(("x",), ((math.nan,), ("a",))),
        "weights": interface.Histogram((1, 2), (0.0, 1.0, 2.0)),
    }
    for first, resumed in ((1, None), (3, 2)):
        logger = JSONLLogger()
        logger.open(tmp_path, {}, resumed)
        for step in range(first, 5):
            for name, item in shown.items():
                assert logger.log_media(name, item, Stamp(step, 0, 0, 0.0))
        assert not logger.log_media("picture", interface.Images(()), Stamp(9, 0, 0, 0.0))
        logger.close()
    lines = [json.loads(line) for line in (tmp_path / "media.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"]) for line in lines] == [(step, name) for step in (1, 2, 3, 4) for name in shown]
    assert lines[0] == {
        "step": 1,
        "epoch": 0,
        "samples": 0,
        "time": 0.0,
        "name": "note",
        "kind": "text",
        "text": "hello",
    }
    assert (lines[1]["columns"], lines[1]["rows"]) == (["x"], [["NaN"], ["a"]])
    assert (lines[2]["counts"], lines[2]["edges"]) == ([1, 2], [0, 1, 2])


@pytest.mark.parametrize(
    ("mode", "shape"), [("RGB", (3, 2, 4)), ("L", (1, 2, 4)), ("RGBA", (4, 2, 4)), ("1", (1, 2, 4))]
)
def test_an_image_of_pillow_is_shown_as_it_is(mode: str, shape: tuple[int, ...]) -> None:
    from PIL import Image

    image = Image.new(mode, (4, 2), {"1": 1, "L": 200}.get(mode, (200,) * len(mode)))
    shown, warned = pixels(image)
    assert (tuple(shown.shape), warned) == (shape, [])
    expected = np.asarray(image.convert("L" if mode in ("1", "L") else "RGBA" if mode == "RGBA" else "RGB"))
    assert np.array_equal(shown.numpy().transpose(1, 2, 0).squeeze(), expected)
