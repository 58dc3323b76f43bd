"""What loggers are given, and readers of what they wrote that share no code with them."""

import csv
import json
import struct
from pathlib import Path
from typing import Any

import torch

from dream_trainer.loggers.buffer import Stamp
from dream_trainer.loggers.interface import Audio, Histogram, Image, Images, Table, Text, Video

PIXELS = torch.zeros(3, 2, 5, dtype=torch.uint8)
MEDIA = {
    "val/pair": Images((Image(PIXELS, "first"), Image(PIXELS + 9))),
    "clip": Video(torch.stack([PIXELS, PIXELS + 1]), fps=5),
    "tone": Audio(torch.zeros(1, 50), 100),
    "weights": Histogram((3, 4), (-1.0, 0.0, 1.0)),
    "rows": Table(("x", "y"), ((1, "a"), (2, "b"))),
    "note": Text("a < b"),
}


def stamp(step: int) -> Stamp:
    return Stamp(step, step // 5, step * 32, 1.5e9 + step)


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file as text; an error if a row is longer or shorter than the header."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return [dict(zip(header, row, strict=True)) for row in rows]


def wandb_files(run_dir: Path) -> list[Path]:
    """W&B's offline files."""
    return list(run_dir.glob("wandb/offline-run-*/*.wandb"))


def newest_wandb_file(run_dir: Path) -> Path:
    """The one that W&B's own link leads to."""
    (path,) = (run_dir / "wandb" / "latest-run").glob("*.wandb")
    return path


def wandb_records(path: Path) -> list[Any]:
    """The protobuf records of a W&B file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if left_in_block < 7 or (kind == 0 and length == 0):
            position += left_in_block
            continue
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(parts))
            parts = b""
    return found


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """The rows of a W&B file, nested names joined by `/`, with W&B's own step as `_step`."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "history"
    ]
