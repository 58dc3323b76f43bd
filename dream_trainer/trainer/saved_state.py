"""Everything that a checkpoint contains of a trainer, collected from its owners; restored_state.py gives it back.

It is shared by all ranks, of one rank (random states, differing tensors), or tensors, sharded as they are.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dream_trainer.checkpoint import typed_json
from dream_trainer.checkpoint.digests import FrozenWeights
from dream_trainer.checkpoint.metric_state import metric_state
from dream_trainer.checkpoint.model_state import (
    ModelForm,
    model_buffers,
    model_configs,
    model_extra_state,
    model_parameters,
    model_tensors,
    parameter_fqns,
    rank_buffers,
)
from dream_trainer.checkpoint.optimizer_state import of_all_stages, optimizer_state
from dream_trainer.checkpoint.snapshot import Snapshot
from dream_trainer.config.checkpoint_parameters import BranchParameters
from dream_trainer.config.serialize import to_dict
from dream_trainer.distributed.ranks import on_all_ranks
from dream_trainer.distributed.seeds import random_state
from dream_trainer.trainer.data_setup import global_batch_size
from dream_trainer.trainer.rank_differences import say_what_only_rank_0_keeps, warn_of_different_buffers
from dream_trainer.weights.adapter_record import origin_of, whole_adapters

if TYPE_CHECKING:
    from dream_trainer.checkpoint.snapshot_writer import HostCopies
    from dream_trainer.distributed.world import World
    from dream_trainer.events.callback import Callback
    from dream_trainer.trainer.runtime import Runtime


def snapshot(
    runtime: Runtime,
    form: ModelForm,
    frozen: FrozenWeights | None,
    metrics: dict[str, float],
    copies: HostCopies | None,
) -> Snapshot:
    """The trainer's complete state at this moment; a collective. Tensors are copied to `copies`, if given."""
    world, models = runtime.world, runtime.registry.models()
    tensors, optimizers, own_of_optimizers = _tensors(runtime)
    left_out = _left_out(models, frozen.unchanged(), world) if frozen is not None else {}
    own = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    tensors = runtime.rounds.tensors_to_save(own)
    mixins = dict(runtime.hooks._mixin_state())
    extra_state = _extra_state(runtime)
    adapters, model_form = whole_adapters(models, world), form.state(models, world)

    def serialise() -> tuple[bytes, bytes, dict[str, Tensor], dict[str, str]]:
        shared = {
            "progress": runtime.progress.state_dict(),
            "data": runtime.data.feed.state_at(runtime.progress.data),
            "global_batch_size": global_batch_size(runtime),
            "seed": runtime.config.seed,
            "workers": world.workers,
            "optimizers": optimizers,
            "mixins": mixins,
            "extra_state": extra_state,
            "left_out": left_out,
            "model_form": model_form,
            "model_configs": model_configs(models),
            "adapters": {name: asdict(of_one) for name, of_one in adapters.items()},
            "loss_scale": runtime.accumulation.loss_scale_state(),
            **runtime.rates.state(),
        } | (given := _given_state(runtime))
        random, tensors_of_rank = random_state(world.device)
        metric_states, metric_tensors, unsaved = metric_state(runtime.hooks._metrics_of_training())
        if unsaved:
            runtime.warn_once("metrics", f"the state of {unsaved} is not only tensors, and is not in checkpoints.")
        rank_state = {
            "random": random,
            "data": runtime.data.feed.rank_state,
            "metrics": metric_states,
            "user": runtime.hooks.rank_state_dict(),
        } | ({"optimizers": own_of_optimizers} if own_of_optimizers else {})
        tensors_of_rank |= metric_tensors
        texts = typed_json.dumps(shared).encode(), typed_json.dumps(rank_state).encode()
        return *texts, tensors_of_rank, _digests(runtime, mixins, given)

    step = runtime.progress.global_step
    shared, rank_state, random_tensors, digests = on_all_ranks(world, f"save step {step}", serialise)
    say_what_only_rank_0_keeps(runtime, digests)
    warn_of_different_buffers(runtime)
    differing_tensors = {name: tensor.clone() for name, tensor in rank_buffers(models, world=world).items()}
    if copies is not None:
        made_for_this = {name for name, tensor in tensors.items() if own.get(name) is not tensor}  # nobody keeps them
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
            "parent": runtime.origin.parent,
        },
    )


def _tensors(runtime: Runtime) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """What DCP writes, the rest of the optimizers' state, and what of that is this rank's own; a collective."""
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
        optimizers = {
            name: values for one in runtime.world.all_gather_object(optimizers) for name, values in one.items()
        }
    for _, prefix, callback in numbered(runtime.config.callbacks):
        tensors |= {prefix + name: tensor for name, tensor in callback.checkpoint_tensors().items()}
    return tensors, optimizers, own


def _extra_state(runtime: Runtime) -> dict[str, dict[str, Any]]:
    """That of all stages' modules; a collective where there are several."""
    extra_state = model_extra_state(runtime.registry.models())
    if runtime.world.stages == 1:
        return extra_state
    of_ranks = runtime.world.all_gather_object(extra_state)
    return {name: {fqn: v for of_rank in of_ranks for fqn, v in of_rank[name].items()} for name in extra_state}


def kept_name(optimizer: str, worker: int) -> str:
    """Under which name a checkpoint has an optimizer's state; each worker (LocalSGDMixin) has one of its own."""
    return optimizer if worker == 0 else f"workers.{worker}.{optimizer}"


def _left_out(models: Mapping[str, nn.Module], digests: Mapping[str, str], world: World) -> dict[str, dict[str, str]]:
    """What a checkpoint has instead of each of these parameters."""
    about = {name: {"digest": digest} for name, digest in digests.items()}
    for name, parameter in model_parameters(models).items():
        origin = origin_of(parameter) if name in about else None
        if origin is not None:
            about[name] |= origin._asdict()
    if world.stages > 1:  # each knows of its own
        for of_rank in world.all_gather_object(about):
            about = {name: known | about[name] for name, known in of_rank.items()}
    return about


def warm(runtime: Runtime, frozen: FrozenWeights | None, copies: HostCopies | None) -> Callable[[], None]:
    """What to run in the background after the first step, to speed up the first save; a collective."""
    everything, _, _ = _tensors(runtime)
    passed_over = frozenset() if frozen is None else frozen.names
    tensors = {name: tensor for name, tensor in everything.items() if name not in passed_over}

    def work() -> None:
        if copies is not None:
            copies.warm(tensors)
        import dream_trainer.checkpoint.dcp_writer  # noqa: F401  # loads a good part of torch.distributed

    return work


def _given_state(runtime: Runtime) -> dict[str, Any]:
    """The state of the user's trainer, callbacks and schedulers, equal on all ranks."""
    return {
        "schedulers": {name: scheduler.state_dict() for name, scheduler in runtime.registry.schedulers().items()},
        "callbacks": [{"class": type(c).__name__, "state": c.state_dict()} for c in runtime.config.callbacks],
        "user": runtime.hooks.state_dict(),
    }


def _digests(runtime: Runtime, mixins: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Of state of which rank 0's is saved, and which the user's code gives or moves, by what it is called."""
    if runtime.world.world_size == 1:
        return {}
    states = {"_mixin_state()": mixins, "state_dict()": given["user"]}
    states |= {f"{one['class']}.state_dict()": one["state"] for one in given["callbacks"]}
    parts = {
        f"{name}[{key!r}]": value
        for name, state in states.items()
        for key, value in (state if isinstance(state, Mapping) else {"all": state}).items()
    }
    parts |= {f"the schedule {name}": state for name, state in given["schedulers"].items()}
    for name, optimizer in runtime.registry.optimizers().items():
        parts[f"learning rates of {name}"] = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    return {name: hashlib.sha256(typed_json.dumps(value).encode()).hexdigest() for name, value in parts.items()}


def check(runtime: Runtime, *, saves: bool) -> None:
    """Finds state that cannot be saved before the first step, and not after hours of training; a collective."""
    state = _given_state(runtime) | {
        "mixins": dict(runtime.hooks._mixin_state()),
        "rank": runtime.hooks.rank_state_dict(),
    }
    typed_json.dumps(state)
    if saves:
        _tensors(runtime)


logger = logging.getLogger("dream_trainer")

CALLBACK_PREFIX = "callbacks."  # tensors of callbacks are named `callbacks.<class>.<number within the class>.<name>`


def numbered(callbacks: Iterable[Callback]) -> Iterator[tuple[str, str, Callback]]:
    """Each callback with its class and the prefix of its tensors: adding or removing one shifts no other class's."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        yield name, f"{CALLBACK_PREFIX}{name}.{counts[name]}.", callback
        counts[name] += 1


def restore_callbacks(
    runtime: Runtime, saved: list[dict[str, Any]], names: Collection[str], begins: BranchParameters | None
) -> None:
    """Matches callbacks by class and by their order within it, so that adding or removing one does not shift others."""
    left = list(saved)
    for class_name, prefix, callback in numbered(runtime.config.callbacks):
        match = next((entry for entry in left if entry["class"] == class_name), None)
        if match is not None:
            left.remove(match)
        lacks_tensors = any(prefix + name not in names for name in callback.checkpoint_tensors())
        if match is None or lacks_tensors:
            if (callback.state_dict() or lacks_tensors) and runtime.world.is_main:
                logger.warning("the checkpoint has no state of callback %s; it starts without any.", class_name)
            continue
        callback.load_state_dict(match["state"])
        if begins is not None:
            callback.begin_branch(new_counters=begins.counters == "new", new_data=begins.data == "new")
    lost = [entry["class"] for entry in left if entry["state"]]
    if lost and runtime.world.is_main:
        logger.warning("the checkpoint has state of callbacks that are no longer there: %s.", ", ".join(lost))
