"""Where numbers and media go: the buffer they are collected in, and the loggers. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "CSVLogger": "csv_file",
    "ConsoleLogger": "console",
    "ImageFilesLogger": "image_files",
    "JSONLLogger": "jsonl",
    "Logger": "base",
    "MetricBuffer": "buffer",
    "Stamp": "base",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "weights_and_biases",
    "read_jsonl": "jsonl",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
