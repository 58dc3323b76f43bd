"""Loggers that write files. Lines (console, JSON, CSV) are appended, cut back on a resume, and replaced whole or not at
all; images and videos are files that any viewer shows."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import secrets
import wave
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import torch
from torch import Tensor
from typing_extensions import override

from dream_trainer.loggers.buffer import Stamp
from dream_trainer.loggers.interface import Audio, Histogram, Image, Images, Logger, Media, Table, Text, Video
from dream_trainer.screen import format_metrics, show

if TYPE_CHECKING:
    import PIL.Image

_STEP = re.compile(r"step_(\d+)(_\d+)?\.(png|gif)")
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_in_json = json.JSONEncoder(allow_nan=False, check_circular=False).encode  # `json.dumps` makes one for each call


class LineFile:
    """JSON objects that have a `step`, one per line; non-finite numbers are written as strings."""

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        self._path = path
        self._file: TextIO | None = None
        if resumed_step is None:
            set_aside(path)
        elif path.exists():
            replace_file(path, "".join(line for line, record in read_lines(path) if record["step"] <= resumed_step))

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, which is in the operating system's hands when this returns."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        try:
            line = _in_json(record)
        except ValueError:  # rare, and a search in each line would double its cost
            line = _in_json(json_ready(record))
        self._file.write(line + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole line of the file with the object in it; a last line that a kill cut short is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and line.endswith("\n"):
                yield line, record


def set_aside(path: Path) -> None:
    """Renames a file or directory, if it is there, to `name.1.suffix` (2, 3, ...)."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole or not at all; of several processes that do so at once, the last one counts."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def json_ready(value: Any) -> Any:
    """`value` with strings for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class ConsoleLogger(Logger):
    """One line for each set of metrics, without control codes, on `sys.stdout`; none next to a bar that shows them."""

    is_beside_bar = False

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        show(f"run directory: {run_dir}" + ("" if resumed_step is None else f", resumed at step {resumed_step}"))

    @override
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        # Flushed, so that a piped log is whole when the process is killed.
        if not self.is_beside_bar:
            show(f"epoch {stamp.epoch} | step {stamp.step} | {format_metrics(metrics)}")


class JSONLLogger(Logger):
    """Appends to `metrics.jsonl` in the run directory.

    Each line is one object: `step`, `epoch`, `samples`, `time` (seconds since 1970), then the metrics. JSON has no NaN,
    so non-finite numbers become one of the strings `"NaN"`, `"Infinity"`, `"-Infinity"`; `read_jsonl` turns them into
    floats. Texts, tables and histograms go to `media.jsonl`: the stamp, `name`, `kind` and the fields of that kind.

    When a run resumes at a step, the lines of later steps are dropped, since they will come again.
    """

    _lines: LineFile | None = None
    _media: LineFile | None = None

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        self.close()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = LineFile(run_dir / "metrics.jsonl", resumed_step)
        self._media = LineFile(run_dir / "media.jsonl", resumed_step)

    @override
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        self._opened(self._lines).write(stamp._asdict() | metrics)

    @override
    def log_media(self, name: str, media: Media, stamp: Stamp) -> bool:
        if self._media is None or not isinstance(media, Text | Table | Histogram):
            return False
        self._media.write(stamp._asdict() | {"name": name, "kind": type(media).__name__.lower(), **vars(media)})
        return True

    @override
    def close(self) -> None:
        for file in (self._lines, self._media):
            if file is not None:
                file.close()
        self._lines = self._media = None


def read_jsonl(path: Path | str, last_step: int | None = None) -> list[dict[str, float]]:
    """The lines of a file that JSONLLogger wrote, non-finite numbers as floats, up to `last_step`."""
    return [
        {name: _NONFINITE[value] if isinstance(value, str) else value for name, value in record.items()}
        for _, record in read_lines(Path(path))
        if last_step is None or record["step"] <= last_step
    ]


class CSVLogger(Logger):
    """Appends to `metrics.csv` in the run directory: `step`, `epoch`, `samples`, `time`, then a column for each metric.

    A cell is empty where a line has no such metric; NaN and infinities are `nan`, `inf`, `-inf`. A metric that comes
    later adds a column: the file is replaced whole, once, so it is valid at any moment. Resumes as JSONLLogger does.
    """

    _path: Path | None = None

    @override
    def open(self, run_dir: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.csv"
        self._columns = list(Stamp._fields)
        rows: list[dict[str, Any]] = []
        if resumed_step is None:
            set_aside(self._path)
        elif self._path.exists():
            self._columns, rows = _read_csv(self._path)
        self._rewrite(self._path, [row for row in rows if int(row["step"]) <= (resumed_step or 0)])

    @override
    def log(self, metrics: dict[str, float], stamp: Stamp) -> None:
        path = self._opened(self._path)
        new = [name for name in metrics if name not in self._columns]
        if new:
            _, rows = _read_csv(path)
            self._columns += new
            self._rewrite(path, rows)
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(_text(self._columns, [stamp._asdict() | metrics]))

    def _rewrite(self, path: Path, rows: Iterable[dict[str, Any]]) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        replace_file(path, _text(self._columns, [header, *rows]))


def _text(columns: list[str], rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows; a last row that a kill cut short is left out."""
    text = path.read_text(encoding="utf-8")
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    rows = list(reader)
    return list(reader.fieldnames or Stamp._fields), rows


class ImageFilesLogger(Logger):
    """Writes `media/<name>/step_00000010.png` in the run directory; of several images `step_00000010_0.png` and so on.

    A caption is in its file as the PNG text `Description`. Videos are GIF files. Resumes as JSONLLogger does.
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
