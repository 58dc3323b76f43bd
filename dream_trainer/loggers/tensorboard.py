"""TensorBoardLogger: event files for TensorBoard."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from typing_extensions import override

from dream_trainer.loggers.buffer import Stamp
from dream_trainer.loggers.interface import Audio, Histogram, Images, Logger, Media, Table, Text, Video, markdown
from dream_trainer.loggers.line_files import set_aside

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


class TensorBoardLogger(Logger):
    """Writes event files to `tensorboard/` in the run directory: `tensorboard --logdir runs`.

    When a run resumes at a step, events of later steps are dropped from the earlier files, and a new file makes a
    TensorBoard that has read them forget them. Tables are shown as text.
    """

    requires: ClassVar[tuple[str, ...]] = ("tensorboard", "google_crc32c")
    _file: BinaryIO | None = None

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        self.close()
        directory = run_dir / "tensorboard"
        if resumed_step is None:
            set_aside(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("events.out.tfevents.*"):
            _drop_later_events(path, resumed_step or 0)
        now = time.time()
        # TensorBoard reads the files of a directory in the order of their names.
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab")
        self._write(now, file_version="brain.Event:2")
        # At a second start event TensorBoard forgets earlier events from its step on; the first start does nothing.
        start = SessionLog(status=SessionLog.START)
        self._write(now, step=0 if resumed_step is None else resumed_step + 1, session_log=start)

    @override
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        summary = Summary()
        for name, value in metrics.items():  # half the time of a list of Summary.Value
            summary.value.add(tag=name, simple_value=value)
        self._write(stamp.time, step=stamp.step, summary=summary)

    @override
    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        self._write(stamp.time, step=stamp.step, summary=_summary(name, media))
        return True

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, wall_time: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        file = self._opened(self._file)
        file.write(_record(Event(wall_time=wall_time, **content).SerializeToString()))
        file.flush()


def _drop_later_events(path: Path, last_step: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    temporary = path.with_name("earlier.tmp")  # a name that TensorBoard passes over
    size = path.stat().st_size
    with path.open("rb") as file, temporary.open("wb") as kept:
        while length := file.read(8):
            rest = file.read(4 + min(size, int.from_bytes(length, "little")) + 4)
            data = rest[4:-4]
            if _record(data) != length + rest:
                break
            if Event.FromString(data).step <= last_step:
                kept.write(length + rest)
        kept.flush()
        os.fsync(kept.fileno())
    temporary.replace(path)


def _record(data: bytes) -> bytes:
    """A record of the TFRecord format: length, checksum of it, data, checksum of them."""
    from google_crc32c import value

    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked(value(length)), data, _masked(value(data))))


def _masked(checksum: int) -> bytes:
    """A CRC-32C, rotated and shifted as the format wants it, so that checksums of checksums are none."""
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def _summary(name: str, media: Media) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
    from torch.utils.tensorboard.summary import histogram_raw, text

    from dream_trainer.loggers.line_files import gif, png, wav

    def encoded(shape: tuple[int, ...], data: bytes) -> Summary.Image:
        channels, height, width = shape
        return Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=data)

    match media:
        case Images():
            values = []
            for index, image in enumerate(media.images):
                value = Summary.Value(tag=f"{name}/{index}" if len(media.images) > 1 else name)
                value.image.CopyFrom(encoded(image.pixels.shape, png(image)))
                value.metadata.CopyFrom(SummaryMetadata(summary_description=image.caption or ""))
                values.append(value)
            return Summary(value=values)
        case Video():
            return Summary(value=[Summary.Value(tag=name, image=encoded(media.frames.shape[1:], gif(media)))])
        case Audio():
            sound = Summary.Audio(
                sample_rate=media.sample_rate,
                num_channels=media.samples.shape[0],
                length_frames=media.samples.shape[1],
                encoded_audio_string=wav(media),
                content_type="audio/wav",
            )
            return Summary(value=[Summary.Value(tag=name, audio=sound)])
        case Histogram():
            edges, counts = media.edges, media.counts
            return histogram_raw(name, edges[0], edges[-1], sum(counts), 0.0, 0.0, edges[1:], counts)
        case Table():
            return text(name, markdown(media))
        case Text():
            return text(name, media.text)
