"""Data loading that knows the world and can resume. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.data.loader import DistributedDataLoader as DistributedDataLoader
    from dream_trainer.data.loader import PerRankLoader as PerRankLoader
    from dream_trainer.data.loader_groups.loader_group import AlternatingLoaders as AlternatingLoaders
    from dream_trainer.data.loader_groups.loader_group import LoaderGroup as LoaderGroup
    from dream_trainer.data.mixtures.mixture import Mixture as Mixture
    from dream_trainer.data.mixtures.mixture import mixture_of as mixture_of
    from dream_trainer.data.mixtures.mixture_order import IndexPermutation as IndexPermutation
    from dream_trainer.data.mixtures.mixture_weights import Stage as Stage
    from dream_trainer.data.ordered import ENDLESS as ENDLESS
    from dream_trainer.data.ordered import OrderedDataset as OrderedDataset
    from dream_trainer.data.packing.attention_mask import PackedSegments as PackedSegments
    from dream_trainer.data.packing.attention_mask import packed_attention as packed_attention
    from dream_trainer.data.packing.attention_mask import packed_attention_mask as packed_attention_mask
    from dream_trainer.data.packing.packed_rows import PackedRows as PackedRows
    from dream_trainer.data.packing.padding import PaddedRows as PaddedRows
    from dream_trainer.data.sources.measured import Pieces as Pieces
    from dream_trainer.data.sources.measured import WithLengths as WithLengths
    from dream_trainer.data.sources.measured import measure_lengths as measure_lengths
    from dream_trainer.data.sources.shard_files import JsonLines as JsonLines
    from dream_trainer.data.sources.shard_files import ParquetRows as ParquetRows
    from dream_trainer.data.sources.shard_files import TarSamples as TarSamples
    from dream_trainer.data.sources.stream_sources import HuggingFaceShards as HuggingFaceShards
    from dream_trainer.data.sources.stream_sources import IterableShards as IterableShards
    from dream_trainer.data.sources.stream_sources import ShardedSource as ShardedSource
    from dream_trainer.data.sources.stream_sources import WebDatasetShards as WebDatasetShards
    from dream_trainer.data.sources.token_file import TokenFile as TokenFile
    from dream_trainer.data.sources.token_file import TokenFileWriter as TokenFileWriter
    from dream_trainer.data.stream import train_stream as train_stream
    from dream_trainer.data.streams.lane_stream import StreamLoader as StreamLoader
    from dream_trainer.data.streams.pack_stream import Pack as Pack
    from dream_trainer.data.transformed_dataset import TransformedDataset as TransformedDataset
    from dream_trainer.data.transforms import Batch as Batch
    from dream_trainer.data.transforms import Filter as Filter
    from dream_trainer.data.transforms import Map as Map
    from dream_trainer.data.transforms import Shuffle as Shuffle
    from dream_trainer.data.transforms import Transform as Transform
    from dream_trainer.data.transforms import Unbatch as Unbatch
    from dream_trainer.data.validation_data import validation_batches as validation_batches
    from dream_trainer.data.window import DataPosition as DataPosition
    from dream_trainer.data.window import TrainStream as TrainStream
    from dream_trainer.data.window import Window as Window
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "Batch": "data.transforms",
            "AlternatingLoaders": "data.loader_groups.loader_group",
            "DataPosition": "data.window",
            "DistributedDataLoader": "data.loader",
            "LoaderGroup": "data.loader_groups.loader_group",
            "Mixture": "data.mixtures.mixture",
            "mixture_of": "data.mixtures.mixture",
            "Stage": "data.mixtures.mixture_weights",
            "IndexPermutation": "data.mixtures.mixture_order",
            "ENDLESS": "data.ordered",
            "Filter": "data.transforms",
            "HuggingFaceShards": "data.sources.stream_sources",
            "IterableShards": "data.sources.stream_sources",
            "Map": "data.transforms",
            "OrderedDataset": "data.ordered",
            "Pack": "data.streams.pack_stream",
            "PackedRows": "data.packing.packed_rows",
            "Pieces": "data.sources.measured",
            "PackedSegments": "data.packing.attention_mask",
            "PaddedRows": "data.packing.padding",
            "PerRankLoader": "data.loader",
            "ShardedSource": "data.sources.stream_sources",
            "Shuffle": "data.transforms",
            "StreamLoader": "data.streams.lane_stream",
            "JsonLines": "data.sources.shard_files",
            "ParquetRows": "data.sources.shard_files",
            "TarSamples": "data.sources.shard_files",
            "WithLengths": "data.sources.measured",
            "measure_lengths": "data.sources.measured",
            "TokenFile": "data.sources.token_file",
            "TokenFileWriter": "data.sources.token_file",
            "TrainStream": "data.window",
            "Transform": "data.transforms",
            "TransformedDataset": "data.transformed_dataset",
            "Unbatch": "data.transforms",
            "WebDatasetShards": "data.sources.stream_sources",
            "Window": "data.window",
            "packed_attention": "data.packing.attention_mask",
            "packed_attention_mask": "data.packing.attention_mask",
            "train_stream": "data.stream",
            "validation_batches": "data.validation_data",
        },
    )
