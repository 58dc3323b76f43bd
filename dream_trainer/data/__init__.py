"""Data loading that knows the world and can resume. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.data.loader import DistributedDataLoader as DistributedDataLoader
    from dream_trainer.data.loader import PerRankLoader as PerRankLoader
    from dream_trainer.data.stream import train_stream as train_stream
    from dream_trainer.data.validation_data import validation_batches as validation_batches
    from dream_trainer.data.window_sizes import DataPosition as DataPosition
    from dream_trainer.data.window_sizes import TrainStream as TrainStream
    from dream_trainer.data.window_sizes import Window as Window
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "DataPosition": "data.window_sizes",
            "DistributedDataLoader": "data.loader",
            "PerRankLoader": "data.loader",
            "TrainStream": "data.window_sizes",
            "Window": "data.window_sizes",
            "train_stream": "data.stream",
            "validation_batches": "data.validation_data",
        },
    )
