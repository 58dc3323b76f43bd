"""How the parameter groups of `fully_shard` end a backward when ranks do not use the same parameters in it.

A group reduces its gradients in its backward, and only those that are there: ranks that used other parameters would add
up what does not belong together. So a sharded group brings zeros for what its rank did not use. A group of replicas
reduces nothing by itself: a rank may leave whole blocks out, and the order of collectives must not hang on that. Its
gradients stay this rank's own until `step` averages them (`dream_trainer.trainer.step.gradients`).

Groups inside of blocks that are run again, and backwards that are one for their gradients, are here too.

This file uses private names of PyTorch, as pytorch.py does; `tests/trainer/test_uneven_use.py` and
`tests/compat/test_fully_shard.py` exercise them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from dream_trainer.compat.gradient_hooks import after_accumulation, changes_gradients
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.errors import StepError

if TYPE_CHECKING:
    from dream_trainer.compat.local_gradients import LocalGradients


_NOTHING = nullcontext()


def unseen_by_checkpoints() -> AbstractContextManager[None]:
    """Inside, selective checkpointing takes no note of operations.

    In a block that it runs again, what `fully_shard` wraps gathers in one run and finds its parameters gathered in
    another. PyTorch counts all operations, and from 2.13 on wants equally many.
    """
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
    """The state of a module that may be inside of a block that is run again, where it is the root of what runs."""

    def _root_pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        with unseen_by_checkpoints():
            return super()._root_pre_forward(*args, **kwargs)


class DifferentiableGroup(FSDPParamGroup):
    """A group whose gradients may be differentiated again, as penalties on gradients are.

    The graph of such a gradient refers to the gathered parameters, so these stay gathered until the step.
    """

    _local_gradients: LocalGradients

    def unshard(self, async_op: bool = False) -> None:
        """As in PyTorch."""
        with unseen_by_checkpoints():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """As in PyTorch."""
        with unseen_by_checkpoints():
            super().wait_for_unshard()

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch."""
        with unseen_by_checkpoints():
            return super().pre_forward(*args, **kwargs)

    def post_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch."""
        with unseen_by_checkpoints():
            return super().post_forward(*args, **kwargs)

    def pre_backward(self, *args: Any, **kwargs: Any) -> None:
        """As in PyTorch; also notes a backward that keeps its graph."""
        if torch.is_grad_enabled():  # in a backward, only under `create_graph=True`
            self._local_gradients.graphs[self] = None
            self.reshard_after_backward = False
        super().pre_backward(*args, **kwargs)

    def hold(self) -> None:
        """Gathers what a forward has released since; a collective."""
        self.unshard()
        self.wait_for_unshard()

    def let_go(self) -> None:
        """Reshards after backwards again: the graphs are not used any more."""
        self.reshard_after_backward = True


class SharedGroup(DifferentiableGroup):
    """A group whose parameters are sharded over ranks."""

    _number: int  # among the groups

    def unshard(self, async_op: bool = False) -> None:
        """As in PyTorch; also notes the all-gather, if there is one."""
        if self._all_gather_result is None and not self.is_unsharded:
            self._local_gradients.note_collective(2 * self._number)
        own_time = self._local_gradients.own_time
        own_time.enter_collective()
        super().unshard(async_op)
        own_time.leave_collective()

    def wait_for_unshard(self) -> None:
        """As in PyTorch; what it waits is no work of this rank's."""
        own_time = self._local_gradients.own_time
        own_time.enter_collective()
        super().wait_for_unshard()
        own_time.leave_collective()

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch; also notes that the group ran."""
        self._local_gradients.ran.add(id(self))
        return super().pre_forward(*args, **kwargs)

    def post_backward(self, *unused: Any) -> None:
        """As in PyTorch, with zeros for the parameters that this rank's loss does not depend on."""
        gathered = self._gathered()
        # One that never ran has nothing to keep, where PyTorch would ask for it.
        if not gathered or (self.reduce_grads and not any(p.requires_grad for p in gathered)):
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
        self._local_gradients.own_time.enter_collective()
        super().post_backward()
        self._local_gradients.own_time.leave_collective()

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
            if has_sums and gathered.grad is not None and parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = gathered.grad.to(parameter.reduce_dtype)
                gathered.grad = None

    def keeps_gradients(self) -> bool:
        """Whether gradients of this rank wait for their reduction."""
        accumulated = any(p.unsharded_accumulated_grad is not None for p in self.fsdp_params)
        return (
            accumulated or self._partial_reduce_output is not None or any(p.grad is not None for p in self._gathered())
        )

    def drop_gradients(self) -> None:
        """Drops the gradients that wait for their reduction."""
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
        with torch.no_grad():
            for parameter in self.fsdp_params:
                self._keep(parameter)
        if self.reshard_after_backward:
            self.reshard()

    def _keep(self, parameter: Any) -> None:
        gathered, sharded = vars(parameter).get("_unsharded_param"), parameter.sharded_param
        if gathered is None or gathered.grad is None:
            return
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
    if changes_gradients(parameter.sharded_param):
        raise StepError(
            f"{parameter._param_fqn} has a hook on its gradient, by register_hook. The parameters that fully_shard "
            "manages, sharded ones and those of models with tensor_parallel, never call it. Change its grad, which is "
            "this rank's part, in pre_optimizer_step, or by register_post_accumulate_grad_hook in configure_optimizers."
        )


def watch_gradients(module: FSDPModule, local_gradients: LocalGradients) -> None:
    """Makes the group of `fully_shard(module)` end its backwards as above, and registers it in `local_gradients`."""
    state = module._get_fsdp_state()
    state.__class__ = UnseenState
    group = state._fsdp_param_group
    if group is None:
        return
    is_whole = isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size == 1
    group.__class__ = WholeGroup if is_whole else SharedGroup
    shared = cast("SharedGroup", group)
    shared._local_gradients, shared._number = local_gradients, len(set(local_gradients.shared.values()))
    for parameter in group.fsdp_params:
        if not is_whole:
            local_gradients.shared[id(parameter.sharded_param)] = group


def is_shared(module: FSDPModule) -> bool:
    """Whether the parameters that `fully_shard(module)` manages are sharded over ranks."""
    return isinstance(module._get_fsdp_state()._fsdp_param_group, SharedGroup)


def parameters_of(module: FSDPModule) -> list[torch.nn.Parameter]:
    """The parameters that `fully_shard(module)` manages, this rank's shares."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [parameter.sharded_param for parameter in group.fsdp_params]


def gathers_of(module: FSDPModule) -> int:
    """How often a micro-batch gathers them: for forward, and for backward where they were given back."""
    group = module._get_fsdp_state()._fsdp_param_group
    return 2 if group is not None and group._reshard_after_forward else 1


def gathered_dtype(parameter: torch.nn.Parameter) -> torch.dtype | None:
    """The type in which it crosses ranks where it has one of its own: float8, if torchao gathers it."""
    torchao, local = sys.modules.get("torchao.float8.fsdp_utils"), local_tensor(parameter)
    if torchao is None or not isinstance(local, torchao.WeightWithDynamicFloat8CastTensor):
        return None
    weight: Any = local
    return cast("torch.dtype", weight._dtype)


def reduce_in_own_groups(model: torch.nn.Module) -> list[ProcessGroup]:
    """Has the shards of gradients in `model`, which is sharded, cross ranks in groups of their own; returns these.

    A collective, from PyTorch 2.13 on.
    """
    cast("FSDPModule", model).set_separate_reduce_scatter_group()
    groups: dict[ProcessGroup, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                groups[group._reduce_scatter_process_group] = None
    return list(groups)


def gather_in_symmetric_memory(model: torch.nn.Module) -> None:
    """Has what `model`, which is sharded, gathers lie in symmetric memory, from PyTorch 2.13 on."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_symm_mem_for_comm()


def reduce_what_waits(
    modules: Sequence[FSDPModule], parameters: Sequence[torch.nn.Parameter], local_gradients: LocalGradients
) -> None:
    """Reduces now the gradients among `parameters` that no backward has reduced; a collective, if there are any.

    There are some if a model had no part in the window's last micro-batch, in which gradients are reduced.

    Args:
        modules: All that `fully_shard` wrapped, also what is around those that have parameters.
        parameters: Of an optimizer.
        local_gradients: What waits.
    """
    groups = {local_gradients.shared.get(id(p)) for p in parameters} & local_gradients.waiting
    if not groups:
        return
    for module in modules:
        state = module._get_fsdp_state()
        if state._is_root and any(other._fsdp_param_group in groups for other in state._state_ctx.all_states):
            module.set_is_last_backward(True)  # which `as_one_backward` may have left otherwise
            _end_backward(state)


@contextmanager
def as_one_backward(modules: Sequence[FSDPModule], *, reduces: bool) -> Iterator[None]:
    """Inside, backwards leave `modules` gathered and their gradients where they are; the end is that of them all.

    Args:
        modules: The outermost that `fully_shard` wrapped of what the backwards go through.
        reduces: Whether gradients are reduced at the end, a collective, and parameters given back.
    """
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


def _end_backward(root: Any) -> None:
    context = root._state_ctx
    if vars(context).get("manual_backward_finalization_active", False) is None:
        # From PyTorch 2.15 on a backward says who ends it before it does, and here is none.
        context.manual_backward_finalization_active = False
    root._root_post_backward_final_callback()
