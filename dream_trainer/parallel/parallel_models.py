"""A trainer's models on several ranks: which gradients are reduced, when, and counts of forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dream_trainer.compat.pytorch import begin_root, whole_parameters
from dream_trainer.errors import StepError
from dream_trainer.gradient_state import GradientState
from dream_trainer.nested import leaves
from dream_trainer.parallel.sharded_model import ShardedModel
from dream_trainer.parallel.sharding import ARE_GATHERED, fsdp_modules, outermost_fsdp_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from dream_trainer.compat.touched_shards import TouchableShards
    from dream_trainer.distributed.world import World
    from dream_trainer.parallel.axis import Parallelism
    from dream_trainer.parallel.joined_buffers import JoinedBuffers
    from dream_trainer.parallel.verify import Verification

_NOTHING = nullcontext()
_OF_MIXED = ("mixed torch.Tensor and DTensor", "of TensorWrapper")  # the latter of PyTorch 2.11


class ParallelModels:
    """The sharded and replicated parts of the models. Until `watch`, and in one process, there are none."""

    def __init__(self) -> None:
        self.gradients = GradientState()  # of this rank's backwards
        self.axes: tuple[Parallelism, ...] = ()  # in the order they change modules
        self.after_steps: list[Callable[[], None]] = []  # what modules change by all ranks' forwards; collectives
        self.buffers: JoinedBuffers | None = None  # the models' buffers; None until setup
        self._policy = ""
        self._wrapped: list[FSDPModule] = []
        self._touchable: TouchableShards | None = None
        self.changes_in_steps = False  # whether steps use other parameter objects than the code between steps
        self._shared: list[FSDPModule] = []  # those whose parameters each rank keeps a share of
        self._world: World | None = None
        self.stages: dict[nn.Module, Any] = {}  # of models that are cut: the `Stages` of parallel/pipeline.py
        self.verification: Verification | None = None  # of the first training step
        self.whole_in_steps: list[ShardedModel] = []  # the models that are sharded between steps only
        self._optimizers = WholeOptimizers(list)
        self._whole_of: dict[int, nn.Parameter] = {}
        self._is_whole = self._is_fresh = False

    def shard(self, model: nn.Module, mesh: DeviceMesh, check: Callable[[], object]) -> None:
        """Shards `model`, on any device, so that it is whole in steps; `watch` follows once it is real."""
        self.whole_in_steps.append(ShardedModel(model, mesh, check, self.gradients.own_time))
        self.changes_in_steps = True

    def watch(
        self, models: Iterable[nn.Module], world: World, sync_policy: str, optimizers: Callable[[], Iterable[Optimizer]]
    ) -> None:
        """From now on knows of the gradients of `models`, some of them wrapped by `fully_shard`."""
        from dream_trainer.compat.fully_shard import watch_gradients
        from dream_trainer.compat.touched_shards import TouchableShards

        touchable = TouchableShards(world.meet, in_stages=world.stages > 1)
        self._world, self._policy = world, sync_policy
        models = list(models)
        self._wrapped = [module for model in models for module in fsdp_modules(model)]
        for model in models:
            for module in outermost_fsdp_modules(model):
                begin_root(module)
        for module in self._wrapped:
            if watch_gradients(module, self.gradients, touchable):
                self._shared.append(module)
        if self._wrapped:
            self._touchable, self.changes_in_steps = touchable, True
        self._optimizers = WholeOptimizers(optimizers)
        for sharded in self.whole_in_steps:
            sharded.connect()
            self.gradients.shard_of |= sharded.shard_of
            self._whole_of |= sharded.whole_of

    @property
    def forward_communicates(self) -> bool:
        """Whether a forward runs collectives, so that all ranks must run the same number of forwards."""
        return bool(self._shared or self.gradients.parts)

    def sync_gradients(self, enabled: bool) -> None:
        """Whether the next backward reduces gradients over the data-parallel ranks."""
        for module in self._shared:
            if self._policy == "no_sync":
                module.set_requires_gradient_sync(enabled, recurse=False)
            elif self._policy == "defer_all_reduce":
                module.set_requires_all_reduce(enabled, recurse=False)

    def join_buffers(self) -> None:
        """Makes buffers equal on all ranks by their policies, and runs `after_steps`; a collective."""
        world = self._world
        if self.buffers is not None and world is not None and (group := world.averaging_group()) is not None:
            self.buffers.join(world, group)
        for change in self.after_steps:
            change()

    def active_axes(self, config: Any) -> list[Parallelism]:
        return [axis for axis in self.axes if axis.is_on(config)]

    @contextmanager
    def gathered(self, *models: nn.Module) -> Iterator[None]:
        """Inside, `models` have full copies of their parameters on each rank, and forwards gather nothing."""
        with self.whole(), torch.no_grad(), ExitStack() as stack:
            for model in models:
                if model not in ARE_GATHERED:
                    ARE_GATHERED.add(model)
                    stack.callback(ARE_GATHERED.discard, model)
                for module in fsdp_modules(model):
                    stack.enter_context(whole_parameters(module))
                stack.callback(model.register_load_state_dict_pre_hook(_refuse_to_load).remove)
                for axis in self.axes:
                    stack.enter_context(axis.whole(model))
            yield

    def end_backward(self) -> None:
        """After a backward: ends it where code reads parameters outside their blocks; a collective there."""
        if self._touchable is not None:
            from dream_trainer.compat.fully_shard import end_backward

            end_backward(self.gradients.groups)

    def reduce_what_waits(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduces gradients of `parameters` that no backward of the window has reduced; a collective."""
        from dream_trainer.compat.fully_shard import reduce_what_waits

        if self._touchable is not None:
            self._touchable.let_go()
        reduce_what_waits(parameters, self.gradients)

    def reshard(self) -> None:
        for module in self._wrapped:
            module.reshard()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, no parameter is gathered, and none is gathered for being read."""
        self.reshard()
        if self._touchable is None or not self._is_whole:
            yield
            return
        self._touchable.let_touch(False)
        yield
        self._touchable.let_touch(True)

    # -- inside steps: small models are whole, and parameters of large ones can be touched

    @contextmanager
    def whole(self, *, stays_fresh: bool = False) -> Iterator[None]:
        """Inside, small sharded models and their optimizers have whole, plain parameters; a collective on all ranks."""
        if not self.changes_in_steps or self._is_whole:
            yield
            return
        if not self._is_fresh:
            self._gather(())
        self._enter()
        try:
            yield
        except RuntimeError as error:
            if self._touchable is not None and any(words in str(error) for words in _OF_MIXED):
                raise StepError(
                    "an operation got both a shard of a parameter and a plain tensor. torch.func cannot transform a "
                    "function of a large model's parameters: use dp_shard=1, or fsdp_parameters.min_group_mib above "
                    "its size. A layer of a tensor-parallel plan that gave the shard needs use_local_output=True."
                ) from error
            raise
        finally:
            if self._is_whole:  # else an exception left `shards`
                self._leave()
            self._is_fresh &= stays_fresh

    @contextmanager
    def shards(self, optimizers: Sequence[Optimizer], *, others_may_change: bool) -> Iterator[None]:
        """Within `whole`: inside, parameters are shards and have their part of the gradients."""
        if not self._is_whole or not self.whole_in_steps:
            yield
            return
        self._leave()
        for sharded in self.whole_in_steps:
            sharded.begin_step()
        others_changed, self._is_fresh = others_may_change or not self._is_fresh, False
        yield
        for sharded in self.whole_in_steps:
            sharded.end_step()
        changed = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._gather(changed, all_models=others_changed)
        self._enter()

    def as_values(self, optimizers: Sequence[Optimizer], *, someone_listens: bool) -> AbstractContextManager[None]:
        """Inside, user optimizers and listeners can read the values of shards, and may assign to their `data`."""
        has_own = any(not type(one).__module__.startswith(("torch.optim.", "dream_trainer.")) for one in optimizers)
        if not self.changes_in_steps or not (has_own or someone_listens):
            return _NOTHING
        from dream_trainer.compat.touched_shards import as_values

        return as_values(optimizers)

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Inside, also within `whole`, parameters are shards, for code that reads or writes these; a collective."""
        if not self._is_whole:
            yield
            self._is_fresh = False
            return
        self._leave()
        self._is_fresh = False
        yield
        self._gather(())
        self._enter()

    def write_back(self) -> None:
        """Within `whole`: gives the shards what was written to the whole parameters, for code that reads shards."""
        if self._is_whole:
            for sharded in self.whole_in_steps:
                sharded.write_back()

    @contextmanager
    def configuring_optimizers(self) -> Iterator[None]:
        """Inside, optimizers are built, and lists of parameters hold those of steps; a collective on all ranks."""
        made_of_whole = MadeOfWhole(self._whole_of.values())
        touchable, self._touchable = self._touchable, None
        with self.whole(), made_of_whole if self.whole_in_steps else _NOTHING:
            yield
        self._touchable = touchable
        shards, parts = self.gradients.shard_of, {}
        for tensor, parameter in made_of_whole.made:
            sharded = next(one for one in self.whole_in_steps if id(parameter) in one.shard_of)
            parts[id(tensor)] = sharded.part_of(parameter, tensor)
        self._optimizers.adopt(shards, parts)

    def forget_whole(self) -> None:
        """Code that may change shards has run: the next `whole` gathers them."""
        self._is_fresh = False

    def drop_gradients(self) -> None:
        self.gradients.drop_what_waits()
        for sharded in self.whole_in_steps:
            sharded.drop_gradients()

    def _gather(self, stepped: Sequence[nn.Parameter], *, all_models: bool = True) -> None:
        ids = {id(parameter) for parameter in stepped}
        for sharded in self.whole_in_steps:
            is_stepped = not ids.isdisjoint(sharded.whole_of)
            if is_stepped or all_models:
                sharded.gather(after_step=is_stepped)

    def _enter(self) -> None:
        for sharded in self.whole_in_steps:
            sharded.enter()
        if self.whole_in_steps:
            self._optimizers.exchange(self._whole_of)
        if self._touchable is not None:
            self._touchable.let_touch(True)
        self._is_whole = self._is_fresh = True

    def _leave(self) -> None:
        if self.gradients.saved is not None:
            self.gradients.saved.leave_all()
        if self._touchable is not None:
            self._touchable.let_touch(False)
        if self.whole_in_steps:
            self._optimizers.exchange(self.gradients.shard_of)
        for sharded in self.whole_in_steps:
            self._is_fresh &= sharded.leave()
        self._is_whole = False


def _refuse_to_load(*_: Any) -> None:
    raise StepError(
        "load_state_dict() was called inside gathered(), whose weights are copies that are gone at its end. Call it "
        "outside, with sharded values, or use load_weights in load_pretrained()."
    )


class MadeOfWhole(TorchFunctionMode):
    """Inside, notes which tensors are made of whole parameters with the same layout: copies, or zeros."""

    def __init__(self, whole: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._origins = {id(parameter): parameter for parameter in whole}
        self.made: list[tuple[Tensor, nn.Parameter]] = []  # each such tensor, with the parameter that it is made of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        origins = [self._origins[id(value)] for value in leaves(args) if id(value) in self._origins]
        for value in leaves(result) if origins else ():
            if isinstance(value, Tensor) and id(value) not in self._origins:
                origin = next((one for one in origins if one.shape == value.shape), None)
                if origin is not None:
                    self._origins[id(value)] = origin
                    self.made.append((value, origin))
        return result


class WholeOptimizers:
    """Optimizers of parameters that are shards between steps. `configure_optimizers` runs with whole parameters, and
    `Optimizer.step` with shards: they are swapped in groups, in the keys of `state`, and in an optimizer's attributes.
    Tensors that a constructor made from whole parameters (copies of weights, or state) are cut."""

    def __init__(self, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        self._optimizers = optimizers
        self._attributes: list[tuple[Optimizer, str]] = []

    def exchange(self, others: Mapping[int, Tensor]) -> None:
        """Exchanges parameters; lists and dicts stay the same objects."""
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["params"][:] = [others.get(id(p), p) for p in group["params"]]
            for parameter in [p for p in optimizer.state if id(p) in others]:
                optimizer.state[others[id(parameter)]] = optimizer.state.pop(parameter)
        for optimizer, name in self._attributes:
            setattr(optimizer, name, _exchanged(vars(optimizer)[name], others, set()))

    def adopt(self, shards: Mapping[int, Tensor], parts: Mapping[int, Tensor]) -> None:
        """Looks through optimizers that are new, after an exchange."""
        self._attributes = []
        for optimizer in self._optimizers():
            _exchanged(optimizer.state, parts, set())
            for name, value in list(vars(optimizer).items()):
                if name not in ("param_groups", "state", "defaults"):
                    met: set[int] = set()
                    setattr(optimizer, name, _exchanged(value, {**shards, **parts}, met))
                    if not met.isdisjoint(shards):
                        self._attributes.append((optimizer, name))


def _exchanged(value: Any, others: Mapping[int, Tensor], met: set[int]) -> Any:
    """`value`, changed in place except for tensors and tuples; adds to `met` the ids of all other values in it."""
    is_new = id(value) not in met
    met.add(id(value))
    if id(value) in others:
        return others[id(value)]
    if type(value) is tuple:
        return tuple(_exchanged(one, others, met) for one in value)
    if isinstance(value, list) and is_new:
        value[:] = [_exchanged(one, others, met) for one in value]
    elif isinstance(value, dict) and is_new:
        for key, one in list(value.items()):
            new = _exchanged(key, others, met)
            if new is not key:
                del value[key]
            value[new] = _exchanged(one, others, met)
    elif isinstance(value, Optimizer) and is_new:
        _exchanged(vars(value), others, met)
    return value
