"""The validation loop: exact means over ragged data, and training left exactly as it was.

A rank that ran out of batches repeats its last one with weight 0, only where the forward runs collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dream_trainer.distributed.pulse import Flags
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_device
from dream_trainer.errors import DataError, HookError
from dream_trainer.loggers.records import NoRecord, Record
from dream_trainer.modules.forward_state import in_evaluation
from dream_trainer.modules.precision import float32_products
from dream_trainer.trainer.cooperation import unlogged
from dream_trainer.trainer.rank_differences import agreed_metrics, warn_of_different_buffers

if TYPE_CHECKING:
    from dream_trainer.data.validation_data import ValidationBatches
    from dream_trainer.trainer.abstract import AbstractTrainer
    from dream_trainer.trainer.coordinator import Coordinator
    from dream_trainer.trainer.validation_metrics import ValidationMetrics

_NOTHING = object()


def validate(
    trainer: AbstractTrainer,
    loaders: dict[str, ValidationBatches],
    max_batches: int | None,
    coordinator: Coordinator | None = None,
) -> dict[str, float]:
    """Runs `validation_step` over `loaders` and returns exact metrics, named `val/...` and `val/<loader>/...`."""
    metrics: dict[str, float] = {}
    with validation_mode(trainer), trainer._validation_context():
        warn_of_different_buffers(trainer)
        trainer._notify("pre_val_epoch")
        for name, batches in loaders.items():
            trainer.val_name = name
            prefix = f"val/{name}/" if name else "val/"
            further = trainer._start_loader_metrics()
            media = None if trainer.is_sanity_validation else trainer._records.validation_media
            record = Record(prefix=prefix, media=media, needs_weight=trainer.world.mesh_shape.cp > 1)
            with trainer._records.inside(record), trainer._parallel.whole():
                _run_loader(trainer, batches, in_step(trainer, batches, max_batches, coordinator), record, further)
            logged = _without_prefix(record.metrics.reduce(trainer.world))
            of_metrics = {key: value for part in further for key, value in _without_prefix(part.values()).items()}
            for key in logged.keys() & of_metrics.keys():
                trainer.warn_once(
                    f"twice {key}",
                    f"{key!r} is logged by validation_step and by the metric of that name, whose value counts. Return "
                    "it under another name, or not at all.",
                )
            logged |= of_metrics
            metrics |= {prefix + key: value for key, value in logged.items()}
    return agreed_metrics(trainer.world, metrics)


@contextmanager
def validation_mode(trainer: AbstractTrainer) -> Iterator[None]:
    """Inside: eval mode, no gradients, and separate random numbers. At the end everything is restored, in any case."""
    trainer.training = False
    is_sanity, records = trainer.is_sanity_validation, trainer._records
    where = "a sanity validation" if is_sanity else "predict or before a validation's loaders"
    nowhere = NoRecord(where, trainer.warn_once, None if is_sanity else records.validation_media)
    try:
        with (
            records.inside(nowhere),
            torch.no_grad(),
            preserved_random_state(trainer.world.device),
            float32_products(trainer.config.device_parameters, trainer.world.device, trainer.warn_once),
            in_evaluation(trainer.named_models().values()),
            ExitStack() as contexts,
        ):
            seed_device(hash_seed(b"validation", trainer.config.seed, trainer.world.data_rank), trainer.world.device)
            trainer._parallel.forget_whole()
            for callback in trainer.callbacks.in_order():
                if trainer.world.is_main or not callback.main_process_only:
                    contexts.enter_context(callback.validation_context(trainer))
            yield
    finally:
        trainer._parallel.reshard()
        trainer._parallel.forget_whole()
        trainer.training, trainer.is_padding_batch, trainer.val_name = True, False, ""


def _without_prefix(metrics: dict[str, float]) -> dict[str, float]:
    return {key.removeprefix("val/"): value for key, value in metrics.items()}


def _run_loader(
    trainer: AbstractTrainer,
    source: ValidationBatches,
    batches: Iterable[tuple[Any, bool]],
    record: Record,
    further: Sequence[ValidationMetrics],
) -> None:
    count, batch_size = trainer._data.count, source.batch_size
    before, after = trainer._events["pre_val_batch"], trainer._events["post_val_batch"]
    for batch_idx, (batch, is_padding) in enumerate(batches):
        moved = trainer.move_batch(batch, trainer.world.device)
        if is_padding:
            _keep_company(trainer, moved, batch_idx, record, further)
            continue
        dealt = source.samples_in(batch_idx) if count.own is None else None
        record.weight = count(batch, batch_size) if dealt is None else dealt
        for listener in before:
            listener(moved, batch_idx)
        result, weight = _result_and_weight(trainer._window.validation_step(moved, batch_idx), record)
        record.metrics.add_result(result, weight)
        if batch_idx == 0 and not after and not record.metrics.has_values():
            message = unlogged("validation_step", result)
            if message is not None:
                trainer.warn_once("unlogged validation_step", message)
        for listener in after:
            listener(result, batch_idx)


def _result_and_weight(returned: Any, record: Record) -> tuple[dict[str, Any], Any]:
    """What a step returned: values to log, and the weight that it gave them or else the batch's size."""
    if record.needs_weight and isinstance(returned, dict) and returned:
        raise HookError(
            "validation_step returned values without their weight, under context_parallel, where ranks have different "
            "numbers of labels in their parts of a sequence. Return such a dict and the number of labels: "
            '{"loss": loss}, count.'
        )
    result, weight = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, record.weight)
    if not isinstance(result, dict):
        raise HookError(
            f"validation_step returned {type(returned).__name__}. Return a dict of values to log, {{}} for none; or "
            "such a dict and the weight of its values."
        )
    return result, weight


def _keep_company(
    trainer: AbstractTrainer, batch: Any, batch_idx: int, record: Record, further: Sequence[ValidationMetrics]
) -> None:
    """Runs the step only for its collectives: what it logs and counts is thrown away."""
    trainer.is_padding_batch = True
    try:
        aside = Record(prefix=record.prefix, needs_weight=record.needs_weight)
        with trainer._records.inside(aside), ExitStack() as contexts:
            for metrics in further:
                contexts.enter_context(metrics.padding())
            trainer._window.validation_step(batch, batch_idx)
    finally:
        trainer.is_padding_batch = False


def in_step(
    trainer: AbstractTrainer,
    batches: ValidationBatches,
    max_batches: int | None,
    coordinator: Coordinator | None = None,
) -> Iterator[tuple[Any, bool]]:
    """This rank's batches, then padding; an exchange before each batch, so that no rank waits in a forward for data."""
    source, batch = iter(batches), None
    needs_company = trainer.world.world_size > 1 and trainer._parallel.forward_communicates
    for count in itertools.count():
        fresh = _NOTHING
        if count != max_batches:
            fetch = partial(next, source, _NOTHING)
            fresh = fetch() if coordinator is None else coordinator.signals.wait_for_data(fetch)
        if not _some_rank_has_one(trainer, coordinator, fresh is not _NOTHING):
            if count == 0 and max_batches != 0:
                is_prediction = isinstance(trainer._records.current, NoRecord)
                purpose = "loader to predict" if is_prediction else "validation loader"
                loader = f"{purpose} {trainer.val_name!r}" if trainer.val_name else purpose
                trainer.warn_once(
                    f"no batch: {loader}",
                    f"the {loader} gave no batch on any rank, so nothing comes of it. Check its dataset, "
                    "batch_size and drop_last.",
                )
            return
        if fresh is not _NOTHING:
            batch = fresh
        elif not needs_company:
            continue
        elif count == 0:
            batch = _any_batch(trainer, batches)
        yield batch, fresh is _NOTHING


def _some_rank_has_one(trainer: AbstractTrainer, coordinator: Coordinator | None, has_batch: bool) -> bool:
    if coordinator is not None:
        return coordinator.go_on(has_batch=has_batch)
    flags = trainer._coordinator.count_batches(Flags(short=not has_batch))
    return flags.short < trainer.world.world_size


def _any_batch(trainer: AbstractTrainer, batches: ValidationBatches) -> Any:
    batch = batches.any_batch()
    if batch is None:
        raise DataError(
            f"rank {trainer.world.rank} has no validation batch while others do, and the sharded forward "
            "needs all ranks. "
            "Give every rank at least one batch, or use a DistributedDataLoader."
        )
    return batch
