"""TensorBoardLogger: what TensorBoard's own reader finds in the files."""

import io
import math
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.api import Audio, Histogram, Image, Images, Table, TensorBoardLogger, Text, Video
from tests.loggers.readers import stamp


def read(run_dir: Path) -> Any:
    # Zero keeps every event instead of a sample of them.
    keep_all = dict.fromkeys(("scalars", "images", "audio", "histograms", "tensors"), 0)
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=keep_all)
    found.Reload()
    return found


def shown(run_dir: Path, tag: str) -> list[int]:
    """Steps of a tag as the command `tensorboard --load_fast=false` has them, whose accumulator is another one."""
    found = plugin_event_accumulator.EventAccumulator(
        str(run_dir / "tensorboard"), tensor_size_guidance={"scalars": 0, "images": 0}
    )
    found.Reload()
    return [event.step for event in found.Tensors(tag)]


def recorded(run_dir: Path) -> list[int]:
    """Steps of all summaries in all files, as they lie there."""
    files = sorted((run_dir / "tensorboard").iterdir())
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    return [event.step for event in events if event.HasField("summary")]


def write(run_dir: Path, steps: range, resumed_step: int | None = None, *, killed: bool = False) -> None:
    logger = TensorBoardLogger()
    logger.open(run_dir, {}, resumed_step)
    for step in steps:
        logger.log({"train/loss": 1 / step, "train/lr": 0.5}, stamp(step))
        logger.log_media("picture", Images((Image(torch.zeros(1, 1, 1, dtype=torch.uint8)),)), stamp(step))
    if not killed:
        logger.close()


@pytest.mark.pitfall(44)
@pytest.mark.parametrize("resumed_step", [0, 6])
def test_a_killed_and_resumed_run_is_one_curve_with_every_step_once(tmp_path: Path, resumed_step: int) -> None:
    write(tmp_path, range(1, 10), killed=True)
    write(tmp_path, range(resumed_step + 1, 13), resumed_step)
    found = read(tmp_path)
    for tag, value in (("train/loss", lambda step: 1 / step), ("train/lr", lambda step: 0.5)):
        events = found.Scalars(tag)
        assert [event.step for event in events] == list(range(1, 13))
        assert [event.value for event in events] == pytest.approx([value(step) for step in range(1, 13)])
        assert [event.wall_time for event in events] == [1.5e9 + step for step in range(1, 13)]
    assert [event.step for event in found.Images("picture")] == list(range(1, 13))
    assert shown(tmp_path, "train/loss") == shown(tmp_path, "picture") == list(range(1, 13))


@pytest.mark.pitfall(44)
def test_steps_that_do_not_come_again_are_in_no_file_after_a_resume_also_of_a_cut_file(tmp_path: Path) -> None:
    # TensorBoard's default reader forgets a step only when its tag comes again.
    write(tmp_path, range(1, 10), killed=True)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes() + b"\xff" * 9)  # a length of 2**64 - 1, and a byte of its checksum
    write(tmp_path, range(12, 15), 6)
    write(tmp_path, range(20, 22), 13)
    assert recorded(tmp_path) == [step for step in (*range(1, 7), 12, 13, 20, 21) for _ in range(2)]
    assert shown(tmp_path, "picture") == [*range(1, 7), 12, 13, 20, 21]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, {}, None)
    logger.log({"a": 1.5, "b": math.nan}, stamp(3))
    found = read(tmp_path)
    assert [(event.step, event.value) for event in found.Scalars("a")] == [(3, 1.5)]
    assert math.isnan(found.Scalars("b")[0].value)
    logger.close()


def test_a_run_from_nothing_keeps_the_earlier_files(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    write(tmp_path, range(1, 5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tensorboard", "tensorboard.1"]
    assert len(read(tmp_path).Scalars("train/loss")) == 4


def test_every_kind_of_media_is_what_it_was(tmp_path: Path) -> None:
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).reshape(3, 1, 1).expand(3, 2, 5)
    grey = torch.full((1, 2, 2), 7, dtype=torch.uint8)
    tone = torch.stack([torch.linspace(-1, 1, 50), torch.zeros(50)])
    logger = TensorBoardLogger()
    logger.open(tmp_path, {}, None)
    shown = {
        "pair": Images((Image(red, "a caption"), Image(grey))),
        "clip": Video(torch.stack([red, red // 2]), fps=5),
        "tone": Audio(tone, 100),
        "weights": Histogram((3, 0, 4), (-1.0, 0.0, 1.0, 2.0)),
        "note": Text("**bold**"),
        "rows": Table(("x", "y"), ((1, "a|b"),)),
    }
    assert all(logger.log_media(name, media, stamp(4)) for name, media in shown.items())
    logger.close()
    found = read(tmp_path)
    (first,) = found.Images("pair/0")
    picture = Pillow.open(io.BytesIO(first.encoded_image_string))
    assert (picture.size, picture.getpixel((4, 1)), first.step) == ((5, 2), (255, 0, 0), 4)
    assert found.SummaryMetadata("pair/0").summary_description == "a caption"
    assert Pillow.open(io.BytesIO(found.Images("pair/1")[0].encoded_image_string)).getpixel((0, 0)) == 7
    clip = Pillow.open(io.BytesIO(found.Images("clip")[0].encoded_image_string))
    assert (clip.format, clip.n_frames, clip.info["duration"]) == ("GIF", 2, 200)
    with wave.open(io.BytesIO(found.Audio("tone")[0].encoded_audio_string)) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (2, 100, 50)
        samples = torch.frombuffer(bytearray(sound.readframes(50)), dtype=torch.int16).reshape(50, 2).t() / 32767
    torch.testing.assert_close(samples, tone, atol=1e-4, rtol=0)
    counts = found.Histograms("weights")[0].histogram_value
    assert (list(counts.bucket), list(counts.bucket_limit), counts.num) == ([3, 0, 4], [0, 1, 2], 7)
    assert found.Tensors("note/text_summary")[0].tensor_proto.string_val[0] == b"**bold**"
    assert b"| 1 | a\\|b |" in found.Tensors("rows/text_summary")[0].tensor_proto.string_val[0]
