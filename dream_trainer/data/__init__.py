"""Data loading that knows the world and can resume. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.data.lane_stream import StreamLoader as StreamLoader
    from dream_trainer.data.loader import DistributedDataLoader as DistributedDataLoader, PerRankLoader as PerRankLoader
    from dream_trainer.data.loader_groups import AlternatingLoaders as AlternatingLoaders, LoaderGroup as LoaderGroup
    from dream_trainer.data.mixture import Mixture as Mixture, Stage as Stage
    from dream_trainer.data.packing.attention_mask import (
        PackedSegments as PackedSegments,
        packed_attention as packed_attention,
        packed_attention_mask as packed_attention_mask,
    )
    from dream_trainer.data.packing.packed_rows import PackedRows as PackedRows, PaddedRows as PaddedRows
    from dream_trainer.data.sampler import ENDLESS as ENDLESS, OrderedDataset as OrderedDataset
    from dream_trainer.data.sources.shard_files import (
        JsonLines as JsonLines,
        ParquetRows as ParquetRows,
        TarSamples as TarSamples,
        WithLengths as WithLengths,
        measure_lengths as measure_lengths,
    )
    from dream_trainer.data.sources.stream_sources import (
        HuggingFaceShards as HuggingFaceShards,
        IterableShards as IterableShards,
        ShardedSource as ShardedSource,
        WebDatasetShards as WebDatasetShards,
    )
    from dream_trainer.data.sources.token_file import TokenFile as TokenFile, TokenFileWriter as TokenFileWriter
    from dream_trainer.data.stream import train_stream as train_stream
    from dream_trainer.data.transforms import (
        Batch as Batch,
        Filter as Filter,
        Map as Map,
        Pack as Pack,
        Shuffle as Shuffle,
        Transform as Transform,
        TransformedDataset as TransformedDataset,
        Unbatch as Unbatch,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
