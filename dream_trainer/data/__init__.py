"""Data loading that knows the world and can resume. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.data.loader import DistributedDataLoader as DistributedDataLoader, PerRankLoader as PerRankLoader
    from dream_trainer.data.loader_groups.loader_group import (
        AlternatingLoaders as AlternatingLoaders,
        LoaderGroup as LoaderGroup,
    )
    from dream_trainer.data.mixtures.mixture import Mixture as Mixture, mixture_of as mixture_of
    from dream_trainer.data.mixtures.mixture_order import IndexPermutation as IndexPermutation, Stage as Stage
    from dream_trainer.data.ordered import ENDLESS as ENDLESS, OrderedDataset as OrderedDataset
    from dream_trainer.data.packing.attention_mask import (
        PackedSegments as PackedSegments,
        packed_attention as packed_attention,
        packed_attention_mask as packed_attention_mask,
    )
    from dream_trainer.data.packing.packed_rows import PackedRows as PackedRows, PaddedRows as PaddedRows
    from dream_trainer.data.sources.measured import (
        Pieces as Pieces,
        WithLengths as WithLengths,
        measure_lengths as measure_lengths,
    )
    from dream_trainer.data.sources.shard_files import (
        JsonLines as JsonLines,
        ParquetRows as ParquetRows,
        TarSamples as TarSamples,
    )
    from dream_trainer.data.sources.stream_sources import (
        HuggingFaceShards as HuggingFaceShards,
        IterableShards as IterableShards,
        ShardedSource as ShardedSource,
        WebDatasetShards as WebDatasetShards,
    )
    from dream_trainer.data.sources.token_file import TokenFile as TokenFile, TokenFileWriter as TokenFileWriter
    from dream_trainer.data.stream import train_stream as train_stream
    from dream_trainer.data.streams.lane_stream import StreamLoader as StreamLoader
    from dream_trainer.data.streams.pack_stream import Pack as Pack
    from dream_trainer.data.transforms import (
        Batch as Batch,
        Filter as Filter,
        Map as Map,
        Shuffle as Shuffle,
        Transform as Transform,
        TransformedDataset as TransformedDataset,
        Unbatch as Unbatch,
    )
    from dream_trainer.data.validation_data import validation_batches as validation_batches
    from dream_trainer.data.window import DataPosition as DataPosition, TrainStream as TrainStream, Window as Window
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
