"""Parameter groups of `fully_shard` that code may use in ways that PyTorch does not provide for.

- Ranks may use different parameters in a backward: a sharded group contributes zeros for unused parameters, and
  gradients of replicas stay on this rank until `step` averages them.
- Code may read parameters outside their block (touched_shards.py), which holds their group to the end of the step.
- A graph may need a weight again after it was freed (`SavedWeights`).
- A group may be in a recomputed block, and several backwards may count as one for their gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from dream_trainer.compat.pytorch import after_accumulation, local_tensor, unnoticed_writes, whole_of, write_count
from dream_trainer.compat.touched_shards import TouchableShards
from dream_trainer.errors import StepError
from dream_trainer.gradient_state import GradientState
from dream_trainer.nested import map_tensors

_NOTHING = nullcontext()


def unseen_by_checkpoints() -> AbstractContextManager[None]:
    """Inside, selective checkpointing takes no note of operations: a second run may find parameters gathered."""
    return _NOTHING if _get_current_dispatch_mode() is None else _unseen()


@contextmanager
def _unseen() -> Iterator[None]:
    seeing = []
    while isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        seeing.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(seeing):
            _push_mode(mode)


class UnseenState(FSDPState):
    """The state of a module that may be inside a recomputed block, as the root of the recomputation."""

    def _root_pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        with unseen_by_checkpoints():
            return super()._root_pre_forward(*args, **kwargs)

    # As in PyTorch, also in containers of user classes, which it cannot rebuild.

    def _cast_forward_inputs(self, args: Any, kwargs: Any) -> Any:
        return with_dtype((args, kwargs), self._mp_policy.param_dtype if self._mp_policy.cast_forward_inputs else None)

    def _cast_output_dtype(self, output: Any) -> Any:
        return with_dtype(output, self._mp_policy.output_dtype)


def with_dtype(values: Any, dtype: torch.dtype | None) -> Any:
    """Nested values with their floating-point tensors in `dtype`, if there is one."""
    if dtype is None:
        return values
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def write_rows(parameter: Any, values: Tensor) -> None:
    """Writes this rank's rows of a whole parameter's values to its shard, if they differ."""
    mesh, shard = parameter.mesh_info, parameter._sharded_local_tensor
    parts = torch.chunk(local_tensor(values), mesh.shard_mesh_size, dim=parameter.fsdp_placement.dim)
    if mesh.shard_mesh_rank < len(parts):
        rows = parts[mesh.shard_mesh_rank].to(shard.device)
        with unnoticed_writes([shard]):  # most often nothing has changed
            shard.copy_(torch.where(rows == shard.to(rows.dtype), shard, rows.to(shard.dtype)))


class DifferentiableGroup(FSDPParamGroup):
    """A group whose gradients may be differentiated again; gathered parameters then stay gathered until the step."""

    _local_gradients: GradientState
    _state: FSDPState
    _touchable: TouchableShards
    is_held = False  # for a parameter that was touched outside the group's forward
    ends = False  # a backward, with all the gradients that it gave
    _is_in_saved = _owns_storages = _shows_shards = False
    is_stale = False  # shards were written to since the gathering
    _full: dict[Any, Tensor]  # gathered for code outside the group's forward, in the parameters' own type
    _writes: list[int]  # to gathered parameters, up to their gathering

    def hold_touched(self) -> None:
        """Gathers parameters that code outside the group's forward reads, and keeps them; modules still show shards."""
        self.is_held = True
        self._refresh()
        self.hold()
        self.show("sharded_param")

    def _refresh(self) -> None:
        """Gathers parameters again, in the same memory, if shards were written to."""
        if self.is_stale:
            self.is_stale = False
            super()._to_sharded()  # type: ignore[no-untyped-call]

    def is_in_half_precision(self, parameter: Any) -> bool:
        whole, shard = parameter._unsharded_param, parameter._sharded_local_tensor
        is_cast = whole.dtype != shard.dtype and whole.is_floating_point()
        return is_cast and gathered_dtype(parameter.sharded_param) is None

    def in_full_precision(self, parameter: Any) -> Tensor:
        """The whole parameter in its own type; a collective, if it is not here yet."""
        if parameter not in self._full:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._full[parameter] = whole_of(parameter.sharded_param.detach())
        return self._full[parameter]

    def write_full_precision(self, parameter: Any) -> None:
        with torch.no_grad():
            write_rows(parameter, self._full[parameter])
        self.is_stale = self.is_unsharded

    def let_touch(self) -> None:
        """Makes groups that stay gathered (held, or the root's) show shards again, so that operations are noticed."""
        if self.is_unsharded and self._touchable.may_be_touched and not self._touchable.in_stages:
            self.show("sharded_param")

    def show(self, which: str) -> None:
        """Makes modules show the shards (`sharded_param`), or the gathered parameters (`_unsharded_param`)."""
        self._shows_shards = which == "sharded_param"
        for parameter in self.fsdp_params:
            parameter._setattr_on_modules(getattr(parameter, which))

    def _to_sharded(self) -> None:
        if not self.is_held:  # as when it is asked for a state dict
            super()._to_sharded()  # type: ignore[no-untyped-call]

    def let_touched_go(self) -> None:
        self.is_held = False
        self.write_back(also_unseen=True)
        self._full.clear()

    def _count_writes(self) -> list[int]:
        return [write_count(p._unsharded_param) for p in self.fsdp_params]

    def reshard(self) -> None:
        """Keeps writes to gathered parameters, and does not free held ones."""
        if not self.is_held:
            self.write_back(also_unseen=False)
            for parameter in self.fsdp_params if self.is_unsharded else ():
                self._renew_memory(parameter)
            super().reshard()

    def _renew_memory(self, parameter: Any) -> None:
        """Leaves memory that numpy has, and so cannot be given back, to it."""
        for number, gathered in enumerate(parameter.all_gather_outputs):
            if not gathered.untyped_storage().resizable():
                self._local_gradients.owners.pop(gathered.untyped_storage()._cdata, None)
                parameter.all_gather_outputs[number] = memory = torch.empty_like(gathered)
                whole = local_tensor(parameter._unsharded_param)
                whole.data = memory.as_strided(whole.size(), whole.stride(), whole.storage_offset())
                self._owns_storages = False

    @torch.no_grad()
    def write_back(self, *, also_unseen: bool) -> None:
        """Copies writes to gathered parameters to the shards."""
        if not self.is_unsharded or self.is_stale:
            return
        now = self._count_writes()
        if not also_unseen and now == self._writes:
            return
        for number, parameter in enumerate(self.fsdp_params):
            is_written = now[number] != self._writes[number]
            unseen = also_unseen and not self.is_in_half_precision(parameter)
            if (is_written or unseen) and gathered_dtype(parameter.sharded_param) is None:
                write_rows(parameter, parameter._unsharded_param)
        self._writes = now

    def unshard(self, async_op: bool = False) -> None:
        with unseen_by_checkpoints():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Also records the filled memory, and its values."""
        if self._all_gather_result is None:
            return
        with unseen_by_checkpoints():
            super().wait_for_unshard()
        self._writes = self._count_writes()
        if not self._owns_storages and self.is_unsharded:  # the first gathering makes them
            self._owns_storages = True
            for parameter in self.fsdp_params:
                for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
                    self._local_gradients.owners[tensor.untyped_storage()._cdata] = self

    def gather_again(self) -> None:
        """A backward asks for a gathered parameter that its graph has saved; a collective if it was freed."""
        state, is_gathered = self._state, self.is_unsharded
        if torch._C._current_graph_task_id() == -1:  # code looks into a graph
            self.hold()
        elif not is_gathered or not state._state_ctx.post_backward_final_callback_queued:
            if not is_gathered and self._training_state == TrainingState.PRE_BACKWARD:
                self._training_state = TrainingState.IDLE
            state._pre_backward(cast("Tensor", None))  # as if the gradient of the output had come

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Also has graphs gather again the weights that they save."""
        self._refresh()
        with unseen_by_checkpoints():
            given = super().pre_forward(*args, **kwargs)
        if self._shows_shards:
            self.show("_unsharded_param")
        if not self._is_in_saved:
            self._is_in_saved = self._local_gradients.saved.begin()
        return given

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        """Also for tensors in containers of user classes."""
        given: list[Tensor] = []  # one that is given twice, too: a second run is given its copies, and must not differ

        def note(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                given.append(tensor)
            return tensor

        map_tensors(note, [args, kwargs])
        hooked = iter(super()._register_post_backward_hook(tuple(given), {})[0])
        new_args, new_kwargs = map_tensors(
            lambda tensor: next(hooked) if tensor.requires_grad else tensor, [args, kwargs]
        )
        return new_args, new_kwargs

    def post_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_saved:
            self._is_in_saved = False
            self._local_gradients.saved.end()
        with unseen_by_checkpoints():
            output = super().post_forward(*args, **kwargs)
        self.let_touch()
        return output

    def pre_backward(self, *args: Any, **kwargs: Any) -> None:
        """Also notes a backward that keeps its graph."""
        if torch.is_grad_enabled():  # in a backward, only under `create_graph=True`
            self._local_gradients.graphs[self] = None
            self.reshard_after_backward = False
        super().pre_backward(*args, **kwargs)
        if self._shows_shards and self.is_unsharded:  # recomputation uses gathered parameters
            self.show("_unsharded_param")

    def hold(self) -> None:
        """Gathers parameters that a forward has released since; a collective."""
        self.unshard()
        self.wait_for_unshard()


class SharedGroup(DifferentiableGroup):
    _number: int  # among the groups

    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is None and not self.is_unsharded:
            self._local_gradients.note_collective(2 * self._number)
        with self._local_gradients.own_time:
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Its waiting time does not count as this rank's work."""
        with self._local_gradients.own_time:
            super().wait_for_unshard()

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._local_gradients.ran.add(id(self))
        return super().pre_forward(*args, **kwargs)

    def hold_touched(self) -> None:
        super().hold_touched()
        self._local_gradients.ran.add(id(self))
        self._local_gradients.waiting.add(self)

    def let_touched_go(self) -> None:
        """As at the end of a backward that reduces nothing: gradients wait in the type that they are summed in."""
        super().let_touched_go()
        reduces, self.reduce_grads = self.reduce_grads, False
        super().post_backward()
        self.reduce_grads, self._training_state = reduces, TrainingState.IDLE
        self.reshard()

    def settle(self) -> None:
        """Gradients that came to gathered parameters by no way that ended here wait for the step."""
        if not self.is_held and self.keeps_gradients():
            self._local_gradients.waiting.add(self)

    def post_backward(self, *unused: Any) -> None:
        """Brings zeros for the parameters that this rank's loss does not depend on."""
        if self.is_held and not self.ends:  # backward may come to it in other ways still
            self._training_state = TrainingState.POST_BACKWARD
            return
        gathered = self._gathered()
        # A group that never ran has nothing to keep, although PyTorch would ask for it.
        is_frozen = self.reduce_grads and not any(p.requires_grad for p in gathered)
        if not gathered or (is_frozen and not (self.ends and self.keeps_gradients())):
            # Another optimizer's turn: gradients of an earlier micro-batch are reduced in this group's own turn.
            if self.keeps_gradients():
                self._local_gradients.waiting.add(self)
            self._training_state = TrainingState.POST_BACKWARD
            self.reshard()
            return
        if self.reduce_grads:
            self._bring_zeros()
            self._local_gradients.note_collective(2 * self._number + 1)
        if self.reduce_grads and self.all_reduce_grads:
            self._local_gradients.waiting.discard(self)
        else:
            self._local_gradients.waiting.add(self)
        with self._local_gradients.own_time:
            super().post_backward()

    def _gathered(self) -> list[torch.nn.Parameter]:
        """The gathered parameters that a forward used; a group that never ran has none."""
        return [p._unsharded_param for p in self.fsdp_params if "_unsharded_param" in vars(p)]

    def _bring_zeros(self) -> None:
        # Under mixed precision accumulated sums have another dtype than gradients; a reduction needs one dtype.
        has_sums = any(p.unsharded_accumulated_grad is not None for p in self.fsdp_params)
        for parameter in self.fsdp_params:
            _refuse_hooks(parameter)
            gathered = vars(parameter).get("_unsharded_param")
            if gathered is None:
                continue
            if gathered.grad is not None or parameter.unsharded_accumulated_grad is not None:
                self._local_gradients.used.add(id(parameter.sharded_param))
            elif gathered.requires_grad:
                # From PyTorch 2.15 on gradients are in the dtype that they are reduced in.
                gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)
                self._local_gradients.zeros.add(id(parameter.sharded_param))
            if has_sums and gathered.grad is not None and parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = gathered.grad.to(parameter.reduce_dtype)
                gathered.grad = None

    def keeps_gradients(self) -> bool:
        accumulated = any(p.unsharded_accumulated_grad is not None for p in self.fsdp_params)
        return (
            accumulated or self._partial_reduce_output is not None or any(p.grad is not None for p in self._gathered())
        )

    def drop_gradients(self) -> None:
        self._partial_reduce_output = None
        for parameter in self.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # from PyTorch 2.15 on the gathered parameter's
                parameter.unsharded_accumulated_grad = None
        for gathered in self._gathered():
            gathered.grad = None


class WholeGroup(DifferentiableGroup):
    """A group of replicated parameters. Gradients go from the gathered parameters to the optimizer's, unreduced."""

    def post_backward(self, *unused: Any) -> None:
        """Keeps the gradients, in the dtype of the parameters, and releases the gathered parameters."""
        self._training_state = TrainingState.POST_BACKWARD
        self.settle()
        if self.reshard_after_backward:
            self.reshard()

    def let_touched_go(self) -> None:
        super().let_touched_go()
        self.post_backward()

    @torch.no_grad()
    def settle(self) -> None:
        for parameter in self.fsdp_params:
            gathered, sharded = vars(parameter).get("_unsharded_param"), parameter.sharded_param
            if gathered is None or gathered.grad is None:
                continue
            _refuse_hooks(parameter)
            grad = parameter.unsharded_grad_data.detach().to(sharded.device, sharded.dtype)
            gathered.grad = None
            if sharded.grad is None:
                sharded.grad = parameter.to_sharded_dtensor(grad)
            else:
                local_tensor(sharded.grad).add_(grad)
            after_accumulation([sharded])


def _refuse_hooks(parameter: Any) -> None:
    """Refuses what is never called: backwards go to the gathered parameter, which users do not have."""
    if parameter.sharded_param._backward_hooks:
        raise StepError(
            f"{parameter._param_fqn} has a hook on its gradient, by register_hook. The parameters that fully_shard "
            "manages, sharded ones and those of models with split layers, never call it. Change its grad, which is "
            "this rank's part, in pre_optimizer_step, or by register_post_accumulate_grad_hook in configure_optimizers."
        )


def watch_gradients(module: FSDPModule, local_gradients: GradientState, touchable: TouchableShards) -> bool:
    """Makes the group of `fully_shard(module)` end its backwards as above; returns whether they are shards."""
    state = module._get_fsdp_state()
    state.__class__ = UnseenState
    group = state._fsdp_param_group
    if group is None:
        return False
    is_whole = isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size == 1
    group.__class__ = WholeGroup if is_whole else SharedGroup
    shared = cast("SharedGroup", group)
    shared._local_gradients, shared._number = local_gradients, len(set(local_gradients.sharded.values()))
    shared._state, shared._full, shared._touchable = state, {}, touchable
    if local_gradients.saved is None:
        local_gradients.saved = SavedWeights(local_gradients.owners)
    local_gradients.groups.append(group)
    if not is_whole:
        local_gradients.sharded |= {id(parameter.sharded_param): group for parameter in group.fsdp_params}
    touchable.add(group)
    return not is_whole


def take_note(module: FSDPModule) -> None:
    """Has it look at its parameters, whose tensors are others now."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        parameter.reset_sharded_param()


def gathered_dtype(parameter: torch.nn.Parameter) -> torch.dtype | None:
    """The parameter's own type for the all-gather, if any: float8, if torchao gathers it."""
    torchao = sys.modules.get("torchao.float8.fsdp_utils")
    local: Any = local_tensor(parameter)
    is_float8 = torchao is not None and isinstance(local, torchao.WeightWithDynamicFloat8CastTensor)
    return local._dtype if is_float8 else None


def reduce_what_waits(parameters: Sequence[torch.nn.Parameter], local_gradients: GradientState) -> None:
    """Reduces gradients that no backward has reduced, as of a model that had no part in the last micro-batch."""
    wanted: set[Any] = {local_gradients.sharded.get(id(p)) for p in parameters} & local_gradients.waiting
    groups = [group for group in local_gradients.groups if group in wanted]  # in the order that all ranks have
    for group in groups:
        group.ends = True
        group._state._state_ctx.is_last_backward = True  # which `as_one_backward` may have left otherwise
    _end_backwards(groups)


def end_backward(groups: Iterable[SharedGroup | WholeGroup]) -> None:
    """After a backward: reduces the gradients of held groups; late ones wait for the step."""
    held = [group for group in groups if group.is_held]
    for group in groups:
        group.settle()
        group.ends = group.is_held
        if held:
            group._training_state = TrainingState.IDLE if group.is_held else TrainingState.POST_BACKWARD
    _end_backwards(held)
    for group in groups:
        group.let_touch()


@contextmanager
def as_one_backward(modules: Sequence[FSDPModule], *, reduces: bool) -> Iterator[None]:
    """Inside, backwards leave `modules` gathered and their gradients where they are; the end is that of them all."""
    _reduce_after_backwards(modules, enabled=False)
    yield
    if reduces:
        _reduce_after_backwards(modules, enabled=True)
    # Either way: schedules that compute gradients of weights apart do so behind the end of each backward, and there may
    # be no further batch in the window to find them.
    for state in [module._get_fsdp_state() for module in modules]:
        if state._is_root:  # None until its first forward
            _end_backward(state)


def _reduce_after_backwards(modules: Sequence[FSDPModule], *, enabled: bool) -> None:
    for module in modules:
        module.set_is_last_backward(enabled)
        module.set_reshard_after_backward(enabled)
        module.set_requires_gradient_sync(enabled)


def _end_backwards(groups: Iterable[DifferentiableGroup]) -> None:
    """Ends those of the roots of `groups`, which take what came in them for all."""
    for root in dict.fromkeys(group._state._state_ctx.all_states[0] for group in groups):
        _end_backward(root)
    for group in groups:
        group.ends = False


def _end_backward(root: Any) -> None:
    context = root._state_ctx
    if vars(context).get("manual_backward_finalization_active", False) is None:
        # From PyTorch 2.15 on a backward says who ends it before it does, and here is none.
        context.manual_backward_finalization_active = False
    root._root_post_backward_final_callback()


class SavedWeights(torch.autograd.graph.saved_tensors_hooks):
    """A weight that the graph of a sharded block has saved is gathered again when a backward asks for it: `fully_shard`
    only gathers a block when the gradient of its output comes, which a loss of what it kept lacks."""

    def __init__(self, owners: dict[int, DifferentiableGroup]) -> None:
        self._entered = 0

        def pack(tensor: Tensor) -> tuple[Tensor, DifferentiableGroup | int]:
            group = owners.get(tensor.untyped_storage()._cdata)
            return tensor, tensor._version if group is None else group

        def unpack(packed: tuple[Tensor, DifferentiableGroup | int]) -> Tensor:
            tensor, saved = packed
            if not isinstance(saved, int):
                saved.gather_again()
            elif tensor._version != saved:  # with hooks, PyTorch does not check this itself
                raise StepError(
                    f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place: it is at "
                    f"version {tensor._version} and was saved at {saved}. Use operations that return a new tensor."
                )
            return tensor

        super().__init__(pack, unpack)

    def begin(self) -> bool:
        """Whether they are entered: where others are, as a checkpoint's, these have to see what is saved."""
        wanted = (
            torch.is_grad_enabled()
            and torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # pyright: ignore
            and torch._C._current_graph_task_id() == -1
            and not torch._C._are_functorch_transforms_active()
        )
        if wanted:
            self._entered += 1
            self.__enter__()
        return wanted

    def end(self) -> None:
        self._entered -= 1
        self.__exit__(None, None, None)

    def leave_all(self) -> None:
        while self._entered:
            self.end()
