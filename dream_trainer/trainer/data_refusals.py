"""Loaders that work alone, and not together with what else the run has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from dream_trainer.data.loader_groups.loader_group import AlternatingLoaders
from dream_trainer.data.ordered import OrderedDataset, innermost
from dream_trainer.data.stream import ShardStream, loader_batch_size
from dream_trainer.errors import DataError

if TYPE_CHECKING:
    from dream_trainer.data.loader import ShardReader
    from dream_trainer.trainer.abstract import AbstractTrainer


def refuse_unlike_turns(loader: Any) -> None:
    """Raises where steps of one global batch would need an accumulation for each loader."""
    if isinstance(loader, AlternatingLoaders):
        sizes = {name: loader_batch_size(one) for name, one in loader.loaders.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(
                f"global_batch_size derives one accumulation, and the batch sizes of the loaders differ: {sizes}. Use "
                "one batch size, or set gradient_accumulation_steps instead."
            )


def refuse_short_batches(trainer: AbstractTrainer, microbatches: int) -> None:
    """Raises where it is known that batches can be cut into equal micro-batches, and an epoch's last one cannot."""
    assert trainer._data.stream is not None  # connected before
    for stream in trainer._data.stream.parts.values():
        if not isinstance(stream, ShardStream) or stream.steps_per_epoch is None:  # or its passes have no end
            continue
        loader, sharding = stream.reader.loader, stream.reader.sampler.sharding
        n_trained = stream.length - stream.dropped_samples
        n_windows = n_trained // stream.global_batch_size
        ends_before = trainer.total_steps is not None and trainer.total_steps <= n_windows
        makes_other_rows = loader.collate_fn is not default_collate
        if ends_before or makes_other_rows or sharding.batch_size % microbatches:
            continue
        last, extra = divmod(n_trained % sharding.chunk_size, sharding.dp_size)
        if last % microbatches or extra:
            raise DataError(
                f"the last batch of an epoch, of {last + bool(extra)} samples, cannot be cut into microbatches="
                f"{microbatches} of one size, as training in a pipeline needs. Use drop_last=True, a number of samples "
                f"that is a multiple of {microbatches * sharding.dp_size}, or a collate_fn that pads it."
            )


def refuse_one_order_for_both(trainer: AbstractTrainer) -> None:
    """Raises where training and validation read one OrderedDataset: each validation would begin it anew."""
    assert trainer._data.stream is not None  # just opened
    training = [_order_of(part.reader) for part in trainer._data.stream.parts.values()]
    for name, batches in trainer._data.validation.items():
        order = _order_of(batches.reader)
        if order is not None and any(order is other for other in training):
            raise DataError(
                f"the training loader and the validation loader{name and f' {name!r}'} read the same "
                f"{type(order).__name__}, which has one place: validation would begin it again in the middle of "
                "training. Make one for each."
            )


def _order_of(reader: ShardReader | None) -> OrderedDataset | None:
    return None if reader is None or reader.ordered is None else innermost(reader.ordered)
