"""Readers of what loggers wrote that share no code with them."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path
from typing import Any


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
