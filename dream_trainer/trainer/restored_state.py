"""What a checkpoint contains, given back to the trainer's parts, on any mesh and number of ranks.

Tensors first, then what all ranks hold alike, then what each rank holds of its own; random states are the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dream_trainer.checkpoint.digests import refuse_other_weights
from dream_trainer.checkpoint.loading import load_tensors, read_rank, read_shared, tensor_metadata
from dream_trainer.checkpoint.manifest import Manifest
from dream_trainer.checkpoint.metric_state import load_metric_state
from dream_trainer.checkpoint.model_state import (
    ModelForm,
    load_model_extra_state,
    load_rank_buffers,
    model_extra_state,
    model_tensors,
    parameter_fqns,
    take_shapes,
)
from dream_trainer.checkpoint.optimizer_state import OPTIMIZER_PREFIX, RANK_PREFIX, has_own_of_ranks, of_one_stage
from dream_trainer.checkpoint.restored_optimizer import prepare_optimizer_state
from dream_trainer.config.checkpoint_parameters import ALL_KEPT, BranchParameters
from dream_trainer.data.foreign import EpochAware
from dream_trainer.distributed.ranks import on_all_ranks
from dream_trainer.distributed.seeds import hash_seed, seed_everything, set_random_state
from dream_trainer.errors import CheckpointError
from dream_trainer.trainer.counters import Counters
from dream_trainer.trainer.resume import naming_what_changed, refuse_other_run
from dream_trainer.trainer.saved_state import CALLBACK_PREFIX, kept_name, numbered, restore_callbacks
from dream_trainer.weights.adapter_config import refuse_other_adapters

if TYPE_CHECKING:
    from dream_trainer.trainer.runtime import Runtime

logger = logging.getLogger("dream_trainer")


def restore(runtime: Runtime, manifest: Manifest, form: ModelForm, begins: BranchParameters | None = None) -> None:
    """Restores a checkpoint's state on any mesh and world size; a collective.

    `begins` says what goes along from another run's checkpoint. At another layout ranks are seeded again."""
    path, world, branch = manifest.path, runtime.world, begins or ALL_KEPT
    load = partial(on_all_ranks, world, f"load {path}")
    shared: dict[str, Any] = load(lambda: read_shared(path))
    if branch.data == "keep":
        refuse_other_run(runtime, shared, path, is_own=begins is None)
    runtime.rates.refuse(shared, branch)
    workers = _saved_workers(path, shared, world.workers, branch)
    models = runtime.registry.models()
    fqns = parameter_fqns(models)
    refuse_other_adapters(path, models, shared.get("adapters"), world=world)
    left_out, model_form = shared.get("left_out", {}), shared.get("model_form", {})
    reshaped = form.reshaped(models, model_form)
    if left_out:
        refuse_other_weights(path, models, left_out, world=world)

    finishing: list[Callable[[], None]] = []

    def prepare() -> dict[str, Any]:
        metadata = tensor_metadata(path)
        take_shapes(models, reshaped, {name: shape for name, (shape, _) in metadata.items()})
        own = {name: tensor for name, tensor in model_tensors(models).items() if name not in left_out}
        tensors = runtime.rounds.tensors_to_load(own, metadata.keys(), is_own=begins is None)
        saved, optimizers = shared["optimizers"], runtime.registry.optimizers()
        if branch.optimizer == "new":
            optimizers = {}
        elif (kept := {kept_name(name, worker) for name in optimizers for worker in range(workers)}) != set(saved):
            raise CheckpointError(f"it has optimizers {sorted(saved)}, and this trainer {sorted(kept)}.")
        with_options, own_of_rank = branch.optimizer == "keep", None
        if manifest.world_size == world.world_size and any(map(has_own_of_ranks, saved.values())):
            own_of_rank = read_rank(path, world.rank)[0].get("optimizers", {})
        for name, optimizer in optimizers.items():
            name = kept_name(name, world.worker if workers > 1 else 0)
            values = saved[name] if world.stages == 1 else of_one_stage(saved[name], set(fqns.values()))
            prepared = prepare_optimizer_state(
                name, optimizer, fqns, values, metadata, with_options=with_options, own=own_of_rank, rank=world.rank
            )
            tensors |= prepared.tensors
            finishing.append(prepared.finish)
        for _, prefix, callback in numbered(runtime.config.callbacks):
            callback_tensors = {prefix + name: tensor for name, tensor in callback.checkpoint_tensors().items()}
            if any(name in metadata for name in callback_tensors):
                tensors |= callback_tensors
        return tensors

    of_another_run = ["workers.", "local_sgd."] if begins is not None else []
    of_optimizers = [OPTIMIZER_PREFIX] if branch.optimizer == "new" else []
    with naming_what_changed(manifest, runtime):
        tensors = load(prepare)
        replaced = [name for name in model_tensors(models) if name not in tensors]  # by what each worker has of its own
        optional = (CALLBACK_PREFIX, RANK_PREFIX, *of_optimizers, *of_another_run, *replaced)
        load_tensors(path, tensors, world=world, optional_prefix=optional)
    load(lambda: [finish() for finish in finishing])
    load(lambda: _restore_shared(runtime, shared, tensor_metadata(path), begins))
    if branch.counters == "keep":
        form.restore(models, model_form, world)
    same_layout = _data_layout(manifest.mesh_shape) == _data_layout(world.mesh_shape._asdict())
    data = shared.get("data")
    load(lambda: _restore_rank(runtime, manifest, data, branch, reshaped, same_layout=same_layout))
    if branch.counters == "keep":
        load(lambda: _restore_metrics(runtime, manifest, same_layout=same_layout))


def _saved_workers(path: Path, shared: dict[str, Any], workers: int, branch: BranchParameters) -> int:
    """How many workers (LocalSGDMixin) wrote the checkpoint; from the state of one, each goes on."""
    saved: int = shared.get("workers", 1)
    if saved not in (1, workers) and branch.optimizer != "new":
        raise CheckpointError(
            f"{path} was written by workers={saved}, whose optimizers have states of their own (LocalSGDMixin), and "
            f"this run has {workers}. Use the same number, or begin another experiment from its average with "
            "CheckpointParameters(init_from=<its path>)."
        )
    return saved


def _data_layout(mesh: dict[str, int]) -> tuple[int, ...]:
    """What decides which rank has which data and random state: not how parameters are sharded."""
    return mesh["pp"], mesh["dp_replicate"] * mesh["dp_shard"], mesh["cp"], mesh["tp"]


def _restore_shared(
    runtime: Runtime, shared: dict[str, Any], names: Collection[str], begins: BranchParameters | None
) -> None:
    branch = begins or ALL_KEPT
    runtime.progress.load_state_dict(_progress(shared["progress"], branch))
    if branch.optimizer != "new":
        runtime.accumulation.load_loss_scale_state(shared.get("loss_scale"))
    extra_state = shared["extra_state"]
    if runtime.world.stages > 1:
        own = model_extra_state(runtime.registry.models())
        extra_state = {name: {f: v for f, v in extra_state[name].items() if f in own[name]} for name in own}
    load_model_extra_state(runtime.registry.models(), extra_state)
    warned, kept = runtime.rates.restore(shared, branch, runtime.progress.tokens_seen)
    runtime.origin.kept_options = [one._asdict() for one in kept]
    if runtime.world.is_main:
        for line in warned:
            logger.warning("%s", line)
    restore_callbacks(runtime, shared["callbacks"], names, begins)
    if branch.counters == "keep":
        runtime.hooks._load_mixin_state(shared["mixins"])
    runtime.hooks.load_state_dict(shared["user"])


def _progress(saved: dict[str, Any], branch: BranchParameters) -> dict[str, Any]:
    """The counters to begin from; the position in the data is one of them, and has a word of its own."""
    fresh = Counters().state_dict()
    counters = saved if branch.counters == "keep" else fresh
    position = saved if branch.data == "keep" else fresh
    of_data = ("data", "is_pass_over", "loader_was_replaced")
    of_epoch = ("batch_idx", "epoch_steps") if branch.data == "new" else ()  # its data begin anew, so it does
    return counters | {name: position[name] for name in (*of_data, *of_epoch) if name in position}


def _say_if_the_data_changed(runtime: Runtime) -> None:
    """Between two passes it may; in the middle of one the stream refuses it."""
    stream, before = runtime.data.stream, runtime.progress.data.length
    if stream is None or stream.reader is None or not runtime.progress.is_pass_over:
        return
    dataset = stream.reader.loader.dataset
    if before not in (None, stream.length) and not isinstance(dataset, EpochAware) and runtime.world.is_main:
        logger.warning(
            "the training dataset has %d samples, and had %d in the last pass of the checkpoint: further passes, and "
            "total_steps=%s, are counted by what it has now.",
            stream.length,
            before,
            runtime.state.total_steps,
        )


def _restore_metrics(runtime: Runtime, manifest: Manifest, *, same_layout: bool) -> None:
    """Metrics that training updates: each rank loads its own; at another layout those of former ranks are divided."""
    metrics, world = runtime.registry.metrics(), runtime.world
    if not metrics:
        return
    former_ranks = _every_nth_rank(manifest, manifest.mesh_shape["tp"])[world.data_rank :: world.data_size]
    states_of_ranks = [read_rank(manifest.path, rank) for rank in ([world.rank] if same_layout else former_ranks)]
    lost = load_metric_state(metrics, [(state.get("metrics", {}), tensors) for state, tensors in states_of_ranks])
    if lost:
        logger.warning("the checkpoint's state of the metrics %s does not fit here; they start from zero.", lost)


def _every_nth_rank(manifest: Manifest, n: int) -> list[int]:
    """One of each `n` neighbouring ranks of the run that wrote the checkpoint."""
    mesh = manifest.mesh_shape
    return list(range(0, mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"], n))


def _united_state(runtime: Runtime, manifest: Manifest) -> dict[str, Any] | None:
    """This rank's place in data that each rank read a part of, in another layout than the checkpoint's."""
    stream = runtime.data.stream
    if stream is None or not stream.resumes_from_all_ranks:
        return None
    same_samples = manifest.mesh_shape["cp"] * manifest.mesh_shape["tp"]
    ranks = _every_nth_rank(manifest, same_samples)
    return stream.united([read_rank(manifest.path, rank)[0].get("data") for rank in ranks])


def _restore_rank(
    runtime: Runtime,
    manifest: Manifest,
    data: dict[str, Any] | None,
    branch: BranchParameters,
    reshaped: Collection[str],
    *,
    same_layout: bool,
) -> None:
    world, progress, path = runtime.world, runtime.progress, manifest.path
    state: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if same_layout:
        state, tensors = read_rank(path, world.rank)
        load_rank_buffers(runtime.registry.models(), tensors, reshaped)
        runtime.hooks.load_rank_state_dict(state["user"])
    if branch.data == "new":
        return  # the order and the generators are those of a run that starts
    same_device = f"random.{world.device.type}" in tensors
    if not same_device and world.is_main:
        logger.warning(
            "resumed at another layout or device than the checkpoint's: weights and optimizers are exact, and samples "
            "come in the same order, but for loaders of your own and the short tail of a plain DataLoader, which "
            "several ranks drop; random layers go on from a new seed."
        )
    rank_state = state.get("data") if same_layout else _united_state(runtime, manifest)
    runtime.data.feed.seek(progress.data, rank_state, is_pass_over=progress.is_pass_over, state=data)
    _say_if_the_data_changed(runtime)
    # Last, so that nothing above draws from the generators.
    if same_device:
        set_random_state(state["random"], tensors, world.device)
    else:
        seed_everything(hash_seed(b"resumed", runtime.config.seed, progress.global_step, world.data_rank))
