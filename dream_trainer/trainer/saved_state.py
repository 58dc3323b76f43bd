"""Everything that a checkpoint contains of a trainer: `snapshot` collects it from its owners, `restore` gives it back.
It is shared by all ranks, of one rank (random states, differing tensors), or tensors, sharded as they are. They are
restored on any mesh: tensors first, then state that all ranks share, then each rank's own state; random states are the
last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor, nn

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.manifest import Manifest
from dream_trainer.checkpoint.model_state import (
    ModelForm,
    frozen_digests,
    load_metric_state,
    load_model_extra_state,
    load_rank_buffers,
    metric_state,
    model_buffers,
    model_configs,
    model_extra_state,
    model_parameters,
    model_tensors,
    parameter_fqns,
    rank_buffers,
    refuse_other_weights,
    take_shapes,
)
from dream_trainer.checkpoint.optimizer_state import (
    OPTIMIZER_PREFIX,
    RANK_PREFIX,
    has_own_of_ranks,
    of_all_stages,
    of_one_stage,
    optimizer_state,
    prepare_optimizer_state,
)
from dream_trainer.checkpoint.saver import HostCopies
from dream_trainer.checkpoint.store import Snapshot, load_tensors, read_rank, read_shared, tensor_metadata
from dream_trainer.config.checkpoint_parameters import ALL_KEPT, BranchParameters
from dream_trainer.config.serialize import to_dict
from dream_trainer.data.foreign import EpochAware
from dream_trainer.distributed.ranks import on_all_ranks
from dream_trainer.distributed.seeds import hash_seed, random_state, seed_everything, set_random_state
from dream_trainer.distributed.world import World
from dream_trainer.errors import CheckpointError
from dream_trainer.modules.metrics import updates
from dream_trainer.screen import logger
from dream_trainer.trainer.data_setup import global_batch_size
from dream_trainer.trainer.rank_differences import warn_of_different_buffers, warn_of_different_state
from dream_trainer.trainer.resume import naming_what_changed, refuse_other_run
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.state_registry import CALLBACK_PREFIX, REGISTERED_PREFIX
from dream_trainer.weights.adapters import refuse_other_adapters, whole_adapters
from dream_trainer.weights.load import origin_of


def snapshot(
    runtime: Runtime,
    form: ModelForm,
    frozen: Mapping[str, str] | None,
    metrics: dict[str, float],
    copies: HostCopies | None,
) -> Snapshot:
    """The trainer's complete state at this moment; a collective. Tensors are copied to `copies`, if given."""
    world, models = runtime.world, runtime.registry.models()
    tensors, optimizers, own_of_optimizers = _tensors(runtime)
    left_out = _left_out(models, frozen, world) if frozen is not None else {}
    own = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    tensors = runtime.rounds.tensors_to_save(own)
    extra_state = _from_all_stages(model_extra_state(models), world)
    adapters, model_form = whole_adapters(models, world), form.state(models, world)

    def serialise() -> tuple[bytes, bytes, dict[str, Tensor], dict[str, str]]:
        shared = {
            "data": runtime.data.feed.state_at(runtime.progress.data),
            "global_batch_size": global_batch_size(runtime),
            "seed": runtime.config.seed,
            "workers": world.workers,
            "optimizers": optimizers,
            "extra_state": extra_state,
            "left_out": left_out,
            "model_form": model_form,
            "model_configs": model_configs(models),
            "adapters": {name: asdict(of_one) for name, of_one in adapters.items()},
        } | (plain := runtime.state_registry.plain())
        random, tensors_of_rank = random_state(world.device)
        metrics_of_training = {name: one for name, one in runtime.registry.metrics().items() if updates(one)}
        if runtime.validation_metrics is not None:
            metrics_of_training = runtime.validation_metrics.only_of_training(metrics_of_training)
        metric_states, metric_tensors, unsaved = metric_state(metrics_of_training)
        if unsaved:
            runtime.warn_once("metrics", f"the state of {unsaved} is not only tensors, and is not in checkpoints.")
        rank_state = {
            "random": random,
            "data": runtime.data.feed.rank_state,
            "metrics": metric_states,
            **runtime.state_registry.of_rank(),
        } | ({"optimizers": own_of_optimizers} if own_of_optimizers else {})
        tensors_of_rank |= metric_tensors
        texts = typed_json.dumps(shared).encode(), typed_json.dumps(rank_state).encode()
        digests = _digests(runtime, plain) if world.world_size > 1 else {}
        return *texts, tensors_of_rank, digests

    step = runtime.progress.global_step
    shared, rank_state, random_tensors, digests = on_all_ranks(world, f"save step {step}", serialise)
    warn_of_different_state(runtime, digests)
    warn_of_different_buffers(runtime)
    differing_tensors = {name: tensor.clone() for name, tensor in rank_buffers(models, world=world).items()}
    if copies is not None:
        made_for_this = {name for name, tensor in tensors.items() if own.get(name) is not tensor}  # temporary
        tensors = copies.copy(tensors, at_once=model_buffers(models).keys() | made_for_this)
    return Snapshot(
        step=step,
        tensors=tensors,
        shared=shared,
        rank_state=rank_state,
        rank_tensors=random_tensors | differing_tensors,
        description={
            "epoch": runtime.progress.current_epoch,
            "samples_seen": runtime.progress.samples_seen,
            "mesh_shape": world.mesh_shape._asdict(),
            "config": to_dict(runtime.config),
            "metrics": dict(metrics),
            "parent": runtime.parent,
        },
    )


def _tensors(runtime: Runtime) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Tensors for DCP, the rest of the optimizers' state, and this rank's own part of that; a collective."""
    models = runtime.registry.models()
    tensors, fqns = model_tensors(models), parameter_fqns(models)
    optimizers: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, optimizer in runtime.registry.optimizers().items():
        name = kept_name(name, runtime.world.worker)
        state = optimizer_state(name, optimizer, fqns, world=runtime.world)
        tensors, own, optimizers[name] = tensors | state.tensors, own | state.own, state.values
    if runtime.world.stages > 1:
        of_ranks = runtime.world.all_gather_object(optimizers)
        optimizers = {name: of_all_stages([of_rank[name] for of_rank in of_ranks]) for name in optimizers}
    if runtime.world.workers > 1:
        of_ranks = runtime.world.all_gather_object(optimizers)
        optimizers = {name: values for of_rank in of_ranks for name, values in of_rank.items()}
    return tensors | runtime.state_registry.tensors(), optimizers, own


def _from_all_stages(known: dict[str, dict[str, Any]], world: World) -> dict[str, dict[str, Any]]:
    """What each stage only knows of its own modules, under equal names; a collective where there are several."""
    of_ranks = world.all_gather_object(known) if world.stages > 1 else [known]
    return {name: {key: value for of_rank in of_ranks for key, value in of_rank[name].items()} for name in known}


def kept_name(optimizer: str, worker: int) -> str:
    """Name of an optimizer's state in a checkpoint; each worker has a separate one."""
    return optimizer if worker == 0 else f"workers.{worker}.{optimizer}"


def _left_out(models: Mapping[str, nn.Module], frozen: Mapping[str, str], world: World) -> dict[str, dict[str, str]]:
    """What is still frozen and has the values of the setup, whose digests `frozen` has; a collective."""
    now = frozen_digests(models, world)
    about = {name: {"digest": digest} for name, digest in now.items() if frozen.get(name) == digest}
    for name, parameter in model_parameters(models).items():
        origin = origin_of(parameter) if name in about else None
        if origin is not None:
            about[name] |= origin._asdict()
    return _from_all_stages(about, world)


def tensors_to_save(runtime: Runtime, frozen: Mapping[str, str] | None) -> dict[str, Tensor]:
    """The tensors of a save after the first step; a collective."""
    tensors, _, _ = _tensors(runtime)
    return {name: tensor for name, tensor in tensors.items() if name not in (frozen or {})}


def _digests(runtime: Runtime, plain: Mapping[str, Any]) -> dict[str, str]:
    """Of the state that is only saved from rank 0, keyed by its source."""
    parts = {"state_dict()": plain["user"]}
    parts |= {f"register_state({name!r})": state for name, state in plain["mixins"].items()}
    parts |= {f"{one['class']}.state_dict()": one["state"] for one in plain["callbacks"]}
    parts |= {f"the schedule {name}": state for name, state in plain["schedulers"].items()}
    for name, optimizer in runtime.registry.optimizers().items():
        parts[f"learning rates of {name}"] = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    return {name: hashlib.sha256(typed_json.dumps(value).encode()).hexdigest() for name, value in parts.items()}


def check(runtime: Runtime, *, saves: bool) -> None:
    """Finds state that cannot be saved before the first step, and not after hours of training; a collective."""
    typed_json.dumps(runtime.state_registry.plain() | {"rank": runtime.state_registry.of_rank()})
    if saves:
        _tensors(runtime)


def restore(runtime: Runtime, manifest: Manifest, form: ModelForm, begins: BranchParameters | None = None) -> None:
    """Restores a checkpoint's state on any mesh and world size; a collective. `begins` says what is taken over from
    another run's checkpoint. At another layout ranks are seeded again."""
    path, world, branch = manifest.path, runtime.world, begins or ALL_KEPT
    load = partial(on_all_ranks, world, f"load {path}")
    shared: dict[str, Any] = load(lambda: read_shared(path))
    if branch.data == "keep":
        refuse_other_run(runtime, shared, path, is_own=begins is None)
    runtime.rates.refuse(shared, branch)
    workers: int = shared.get("workers", 1)  # that wrote it; all can resume from that of one
    if workers not in (1, world.workers) and branch.optimizer != "new":
        raise CheckpointError(
            f"{path} was written by workers={workers}, whose optimizers have separate states, and this "
            f"run has {world.workers}. Use the same number, or begin another experiment from its average with "
            "CheckpointParameters(init_from=<its path>)."
        )
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
            allocated, finish = prepare_optimizer_state(
                name, optimizer, fqns, values, metadata, with_options=with_options, own=own_of_rank, rank=world.rank
            )
            tensors |= allocated
            finishing.append(finish)
        return tensors | runtime.state_registry.tensors(metadata)

    of_another_run = ["workers.", "local_sgd."] if begins is not None else []
    of_optimizers = [OPTIMIZER_PREFIX] if branch.optimizer == "new" else []
    with naming_what_changed(manifest, runtime):
        tensors = load(prepare)
        replaced = [name for name in model_tensors(models) if name not in tensors]  # by each worker's own tensors
        optional = (CALLBACK_PREFIX, REGISTERED_PREFIX, RANK_PREFIX, *of_optimizers, *of_another_run, *replaced)
        load_tensors(path, tensors, world=world, optional_prefix=optional)
    load(lambda: [finish() for finish in finishing])
    extra_state = shared["extra_state"]
    if world.stages > 1:
        own = model_extra_state(models)
        extra_state = {name: {fqn: v for fqn, v in extra_state[name].items() if fqn in own[name]} for name in own}
    load(lambda: load_model_extra_state(models, extra_state))
    load(lambda: runtime.state_registry.load(shared, tensor_metadata(path), branch, is_own=begins is None))
    if branch.counters == "keep":
        form.restore(models, model_form, world)
    same_layout = _data_layout(manifest.mesh_shape) == _data_layout(world.mesh_shape._asdict())
    load(lambda: _restore_rank(runtime, manifest, shared.get("data"), branch, reshaped, same_layout=same_layout))
    if branch.counters == "keep":
        load(lambda: _restore_metrics(runtime, manifest, same_layout=same_layout))


def _data_layout(mesh: dict[str, int]) -> tuple[int, ...]:
    """The mesh sizes that assign data and random state to ranks; sharding of parameters does not matter."""
    return mesh["pp"], mesh["dp_replicate"] * mesh["dp_shard"], mesh["cp"], mesh["tp"]


def _say_if_the_data_changed(runtime: Runtime) -> None:
    """Between two passes it may; in the middle of one the stream refuses it."""
    stream, before = runtime.data.stream, runtime.progress.data.length
    if stream is None or stream.reader is None or not runtime.progress.is_pass_over or not runtime.world.is_main:
        return
    if before not in (None, stream.length) and not isinstance(stream.reader.loader.dataset, EpochAware):
        logger.warning("the training dataset has %d samples, and had %d in the last pass.", stream.length, before)


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
    mesh = manifest.mesh_shape
    return list(range(0, mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"], n))


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
        runtime.state_registry.load_of_rank(state)
    if branch.data == "new":
        return  # the order and the generators are those of a run that starts
    same_device = f"random.{world.device.type}" in tensors
    if not same_device and world.is_main:
        logger.warning(
            "resumed at another layout or device than the checkpoint's: weights and optimizers are exact, and samples "
            "come in the same order, except from your own loaders and the short tail of a plain DataLoader, which "
            "several ranks drop. Random layers continue from a new seed."
        )
    rank_state, stream = state.get("data"), runtime.data.stream
    if not same_layout and stream is not None and stream.resumes_from_all_ranks:  # each read a part of the data
        former_ranks = _every_nth_rank(manifest, manifest.mesh_shape["cp"] * manifest.mesh_shape["tp"])
        rank_state = stream.united([read_rank(path, rank)[0].get("data") for rank in former_ranks])
    runtime.data.feed.seek(progress.data, rank_state, is_pass_over=progress.is_pass_over, state=data)
    _say_if_the_data_changed(runtime)
    # Last, so that nothing above draws from the generators.
    if same_device:
        set_random_state(state["random"], tensors, world.device)
    else:
        seed_everything(hash_seed(b"resumed", runtime.config.seed, progress.global_step, world.data_rank))
