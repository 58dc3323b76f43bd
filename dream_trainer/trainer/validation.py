"""The validation loop: exact means over ragged data, and training left exactly as it was. A rank that ran out of
batches repeats its last one with weight 0, only where the forward runs collectives."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from dream_trainer.data.stream import ValidationBatches
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_device
from dream_trainer.errors import DataError, HookError
from dream_trainer.loggers.buffer import NoRecord, Record
from dream_trainer.modules.forward_state import in_evaluation
from dream_trainer.modules.metrics import MetricStates
from dream_trainer.modules.precision import float32_products
from dream_trainer.trainer.event_table import notify
from dream_trainer.trainer.rank_differences import agreed_metrics, warn_of_different_buffers
from dream_trainer.trainer.runtime import Runtime

_NOTHING = object()


def validate(
    runtime: Runtime, loaders: dict[str, ValidationBatches], max_batches: int | None, *, hears_signals: bool
) -> dict[str, float]:
    """Runs `validation_step` over `loaders` and returns exact metrics, named `val/...` and `val/<loader>/...`."""
    metrics: dict[str, float] = {}
    with validation_mode(runtime), runtime.hooks._validation_context():
        if runtime.log is not None:
            runtime.log.validation_started(is_training=runtime.session.is_training)
        warn_of_different_buffers(runtime)
        notify(runtime, "pre_val_epoch")
        for name, batches in loaders.items():
            runtime.state.val_name = name
            prefix = f"val/{name}/" if name else "val/"
            metered = runtime.validation_metrics
            if metered is not None:
                metered.start_loader()
            media = None if runtime.state.is_sanity_validation else runtime.records.validation_media
            record = Record(prefix=prefix, media=media, needs_weight=runtime.world.divided_samples)
            with runtime.records.inside(record), runtime.parallel.whole():
                in_order = in_step(runtime, batches, max_batches, hears_signals=hears_signals)
                _run_loader(runtime, batches, in_order, record)
            of_loader: dict[str, float] = {}
            of_metrics = [] if metered is None else metered.values()
            for name, value in (*record.metrics.reduce(runtime.world).items(), *of_metrics):
                name = prefix + name.removeprefix("val/")
                if name in of_loader:
                    runtime.warn_once(
                        f"twice {name}",
                        f"{name!r} is logged twice, by validation_step and a metric or by two metrics, and the last "
                        "value counts. Return it under another name, or give each collection a different prefix.",
                    )
                of_loader[name] = value
            metrics |= of_loader
    return agreed_metrics(runtime.world, metrics)


@contextmanager
def validation_mode(runtime: Runtime) -> Iterator[None]:
    """Inside: eval mode, no gradients, and separate random numbers. At the end everything is restored, in any case."""
    runtime.state.training = False
    began, seconds_before = time.monotonic(), runtime.window.validation_seconds
    is_sanity, records = runtime.state.is_sanity_validation, runtime.records
    where = "a sanity validation" if is_sanity else "predict or before a validation's loaders"
    nowhere = NoRecord(where, runtime.warn_once, None if is_sanity else records.validation_media)
    try:
        with (
            records.inside(nowhere),
            torch.no_grad(),
            preserved_random_state(runtime.world.device),
            float32_products(runtime.config.device_parameters, runtime.world.device, runtime.warn_once),
            in_evaluation(runtime.registry.models().values()),
            ExitStack() as contexts,
        ):
            seed_device(hash_seed(b"validation", runtime.config.seed, runtime.world.data_rank), runtime.world.device)
            runtime.parallel.forget_whole()
            for callback in runtime.config.callbacks.in_order():
                if runtime.world.is_main or not callback.main_process_only:
                    contexts.enter_context(callback.validation_context(runtime.hooks))
            yield
    finally:
        runtime.parallel.reshard()
        runtime.parallel.forget_whole()
        runtime.state.training, runtime.state.is_padding_batch, runtime.state.val_name = True, False, ""
        if runtime.session.is_training and not is_sanity:
            runtime.window.validation_seconds = seconds_before + time.monotonic() - began


def _run_loader(
    runtime: Runtime, source: ValidationBatches, batches: Iterable[tuple[Any, bool]], record: Record
) -> None:
    count, batch_size = runtime.data.count, source.batch_size
    before, after = runtime.events["pre_val_batch"], runtime.events["post_val_batch"]
    for batch_idx, (batch, is_padding) in enumerate(batches):
        moved = runtime.hooks.move_batch(batch, runtime.world.device)
        if is_padding:
            # runs the step only for its collectives: what it logs and counts is thrown away, and metrics are put back
            runtime.state.is_padding_batch = True
            aside = Record(prefix=record.prefix, needs_weight=record.needs_weight)
            states = MetricStates(list(runtime.registry.metrics(also_private=True).values()))
            try:
                with runtime.records.inside(aside):
                    runtime.window.validation_step(moved, batch_idx)
            finally:
                states.put_back()
            runtime.state.is_padding_batch = False  # as at the end of a validation, however that ends
            continue
        dealt = source.samples_in(batch_idx) if count.own is None else None
        record.weight = count(batch, batch_size) if dealt is None else dealt
        for listener in before:
            listener(moved, batch_idx)
        result, weight = _result_and_weight(runtime.window.validation_step(moved, batch_idx), record)
        record.metrics.add_result(result, weight)
        for listener in after:
            listener(result, batch_idx)


def _result_and_weight(returned: Any, record: Record) -> tuple[dict[str, Any], Any]:
    """A step's result: values to log, and their weight, or the batch's size without one."""
    if record.needs_weight and isinstance(returned, dict) and returned:
        raise HookError(
            f"validation_step returned values without their weight, under {record.needs_weight}, and ranks have "
            "different numbers of labels in their parts of a sequence. Return such a dict and the number of labels: "
            '{"loss": loss}, count.'
        )
    result, weight = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, record.weight)
    if not isinstance(result, dict):
        raise HookError(
            f"validation_step returned {type(returned).__name__}. Return a dict of values to log, {{}} for none; or "
            "such a dict and the weight of its values."
        )
    return result, weight


def in_step(
    runtime: Runtime, batches: ValidationBatches, max_batches: int | None, *, hears_signals: bool
) -> Iterator[tuple[Any, bool]]:
    """This rank's batches, then padding; an exchange before each batch, so that no rank waits in a forward for data."""
    source, batch, coordinator = iter(batches), None, runtime.coordinator
    needs_company = runtime.world.world_size > 1 and runtime.parallel.forward_communicates
    for count in itertools.count():
        fresh = _NOTHING
        if count != max_batches:
            fetch = partial(next, source, _NOTHING)
            fresh = coordinator.signals.wait_for_data(fetch) if hears_signals else fetch()
        if not coordinator.go_on(has_batch=fresh is not _NOTHING, hears_signals=hears_signals):
            if count == 0 and max_batches != 0:
                purpose = "loader to predict" if isinstance(runtime.records.current, NoRecord) else "validation loader"
                loader = f"{purpose} {runtime.state.val_name!r}" if runtime.state.val_name else purpose
                runtime.warn_once(
                    f"no batch: {loader}",
                    f"the {loader} gave no batch on any rank. Check its dataset, batch_size and drop_last.",
                )
            return
        if fresh is not _NOTHING:
            batch = fresh
        elif not needs_company:
            continue
        elif count == 0 and (batch := batches.any_batch()) is None:
            raise DataError(
                f"rank {runtime.world.rank} has no validation batch while others do, and the sharded forward needs all "
                "ranks. Give every rank at least one batch, or use a DistributedDataLoader."
            )
        yield batch, fresh is _NOTHING
