"""From the loaders a user returns to the streams the loop pulls from, with the batch arithmetic they imply."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from dream_trainer.config.training_parameters import TrainingParameters, accumulation_steps
from dream_trainer.data.feed import WindowFeed
from dream_trainer.data.loader import PerRankLoader, ShardReader, loader_batch_size
from dream_trainer.data.loader_groups import AlternatingLoaders
from dream_trainer.data.sample_count import SampleCount
from dream_trainer.data.sampler import OrderedDataset, innermost
from dream_trainer.data.stream import ValidationBatches, train_stream, validation_batches
from dream_trainer.data.window import TrainStream
from dream_trainer.distributed.ranks import refuse_differences
from dream_trainer.errors import DataError, HookError
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.rank_differences import agree_on_data
from dream_trainer.trainer.runtime import Runtime


def connect_data(runtime: Runtime) -> None:
    """Calls `configure_dataloaders` and sets the trainer's loaders, stream, accumulation and planned steps."""
    loaders = runtime.hooks.configure_dataloaders()
    if not isinstance(loaders, tuple) or len(loaders) != 2:
        raise HookError(
            f"configure_dataloaders returned {type(loaders).__name__}. Return a pair (train, val); val may be None."
        )
    runtime.state.train_dataloader, val = loaders
    parameters, world, state = runtime.config.training_parameters, runtime.world, runtime.state
    batch_size = loader_batch_size(state.train_dataloader)
    if parameters.global_batch_size is not None and isinstance(state.train_dataloader, AlternatingLoaders):
        sizes = {name: loader_batch_size(one) for name, one in state.train_dataloader.loaders.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(
                f"global_batch_size derives one accumulation, and the batch sizes of the loaders differ: {sizes}. Use "
                "one batch size, or set gradient_accumulation_steps instead."
            )
    size = parameters.train_batch_size
    state.accumulation_steps = accumulation_steps(parameters, batch_size or size, world.dp_size)
    # The user did not ask for the default, so no message says that the loader ignores it.
    is_set = size != TrainingParameters.train_batch_size
    if is_set and batch_size not in (None, size) and parameters.global_batch_size is None:
        unused = f"train_batch_size={size}"
        runtime.warn_once("batch_size", f"the training loader's batch size {batch_size} counts, not {unused}.")
    own_count = None if type(runtime.hooks).batch_size is Hooks.batch_size else runtime.hooks.batch_size
    runtime.data.count = SampleCount(own_count, partial(runtime.warn_once, "samples of a batch"))
    runtime.data.feed = WindowFeed(_open_stream(runtime), world, state.accumulation_steps)
    runtime.data.copy_stream = torch.Stream(world.device) if world.device.type == "cuda" else None
    state.val_dataloaders = _named_validation_loaders(runtime, val)
    runtime.data.validation = {name: batches_to_validate(runtime, one) for name, one in state.val_dataloaders.items()}
    refuse_one_order_for_both(runtime)
    steps_per_pass, steps_per_epoch = agree_on_data(runtime), runtime.schedule.epoch_steps
    state.steps_per_epoch = steps_per_pass if steps_per_epoch is None else steps_per_epoch
    state.total_steps = planned_steps(runtime)


def follow_train_dataloader(runtime: Runtime) -> None:
    """Uses the loader that was assigned to `train_dataloader` since, if any, from the next pass on; a collective."""
    progress, world = runtime.progress, runtime.world
    is_new = runtime.state.train_dataloader is not runtime.data.loader
    refuse_differences(world, {"train_dataloader assigned": is_new}, "Assign it on every rank.")
    if not is_new:
        if progress.loader_was_replaced and not runtime.data.was_replaced:
            raise DataError(
                "this run continued with another training loader than configure_dataloaders returns, and none was "
                "assigned to self.train_dataloader since the resume. Assign it in pre_epoch, whenever it is called, "
                "from self.current_epoch."
            )
        return
    before, now = loader_batch_size(runtime.data.loader), loader_batch_size(runtime.state.train_dataloader)
    if before != now:
        raise DataError(
            f"self.train_dataloader was assigned a loader of batch size {now}, and the run has {before}. Keep the "
            "batch size: steps, limits and learning rates are counted in it."
        )
    stream = _open_stream(runtime)
    refuse_one_order_for_both(runtime)
    agree_on_data(runtime)
    runtime.data.feed.follow(stream, progress.data)
    progress.loader_was_replaced = runtime.data.was_replaced = True


def _open_stream(runtime: Runtime) -> TrainStream:
    stream, count = _stream(runtime, runtime.state.train_dataloader), runtime.config.training_parameters.overfit_batches
    if count:
        batches: list[Any] = []
        known: dict[int, int] = {}
        while len(batches) < count and (window := stream.next_window()) is not None:  # fewer if a pass has fewer
            new = list(window.batches)[: count - len(batches)]
            known |= {id(batch): size for batch, size in zip(new, window.sizes or (), strict=False)}
            batches += new
        stream.close()
        stream = _stream(runtime, PerRankLoader(batches), SampleCount(lambda batch: known[id(batch)]))
    runtime.data.stream, runtime.data.loader = stream, runtime.state.train_dataloader
    return stream


def _stream(runtime: Runtime, loader: Any, count: SampleCount | None = None) -> TrainStream:
    """This rank's stream; a collective: a loader that one rank cannot use is an error on all."""
    world = runtime.world
    stream, told = None, None
    try:
        stream = train_stream(
            loader,
            accumulation=runtime.state.accumulation_steps,
            dp_rank=world.dp_rank,
            dp_size=world.dp_size,
            seed=runtime.config.seed,
            batch_size=runtime.data.count if count is None else count,
            keeps_state=runtime.hooks._saves_checkpoints,
        )
    except DataError as error:
        told = error
    messages = world.all_gather_object(None if told is None else str(told))
    if stream is None or any(messages):
        text = "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(messages) if message)
        raise DataError(messages[0] if len(set(messages)) == 1 else text) from told
    return stream


def batches_to_validate(runtime: Runtime, loader: Any) -> ValidationBatches:
    world = runtime.world
    return validation_batches(loader, dp_rank=world.dp_rank, dp_size=world.dp_size, seed=runtime.config.seed)


def global_batch_size(runtime: Runtime) -> int | None:
    """Samples of one full optimizer step over all ranks; None if the loader has no batch size."""
    batch_size = loader_batch_size(runtime.state.train_dataloader)
    return None if batch_size is None else batch_size * runtime.state.accumulation_steps * runtime.world.dp_size


def planned_steps(runtime: Runtime) -> int | None:
    """Optimizer steps until the first limit that can be foreseen; None if there is none."""
    parameters, batch = runtime.config.training_parameters, global_batch_size(runtime)
    per_epoch = runtime.state.steps_per_epoch
    plans = [parameters.max_steps, 1 if parameters.fast_dev_run else None]
    if parameters.epoch_limit is not None and per_epoch is not None:
        plans.append(parameters.epoch_limit * per_epoch)
    if parameters.max_samples is not None and batch is not None:
        plans.append(-(-parameters.max_samples // batch))
    return min((plan for plan in plans if plan is not None), default=None)


def _named_validation_loaders(runtime: Runtime, val: Any) -> dict[str, Any]:
    has_step = type(runtime.hooks).validation_step is not Hooks.validation_step
    loaders = {} if val is None else dict(val) if isinstance(val, Mapping) else {"": val}
    if has_step and not loaders:
        unused = "validation_step is never called: configure_dataloaders returned no validation loader."
        runtime.warn_once("no-val", unused)
    if loaders and not has_step:
        raise HookError(
            "configure_dataloaders returned a validation loader, but validation_step is not overridden. "
            "Write validation_step, or return (train, None)."
        )
    return loaders


def refuse_one_order_for_both(runtime: Runtime) -> None:
    """Raises if training and validation share one OrderedDataset: each validation would restart it."""
    assert runtime.data.stream is not None  # just opened
    training = [_order_of(part.reader) for part in runtime.data.stream.parts.values()]
    for name, batches in runtime.data.validation.items():
        order = _order_of(batches.reader)
        if order is not None and any(order is other for other in training):
            raise DataError(
                f"the training loader and the validation loader{name and f' {name!r}'} read the same "
                f"{type(order).__name__}, which validation would begin again. Make one for each."
            )


def _order_of(reader: ShardReader | None) -> OrderedDataset | None:
    return None if reader is None or reader.ordered is None else innermost(reader.ordered)
