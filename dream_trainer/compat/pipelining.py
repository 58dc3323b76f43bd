"""PyTorch's pipeline schedules, which decide the order of micro-batches and sends, over our stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage, schedules

from dream_trainer.compat.pytorch import after_accumulation, local_tensor, with_local

_OWN_OF_A_COPY = ("_parameters", "_buffers", "_modules")
"""Attributes that `shallow_copy` does not share with the module; nor does it share the compiled call."""

_ALL_HAVE_GRADIENTS = torch.__version__ < "2.13"
"""Whether PyTorch sends back a gradient of whatever a stage is given, which has to be a float then (2.11)."""
_FLOATS = {2: torch.float16, 4: torch.float32, 8: torch.float64}  # by the bytes of a number


class ScheduledStage(PipelineStage):
    """A stage that calls `run` with what the stage before gives and a micro-batch's number, and reduces nothing."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[tuple[Any, ...], int], Any],
        *,
        place: tuple[int, int],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        device: torch.device,
        group: dist.ProcessGroup,
        backward_context: AbstractContextManager[Any] | None = None,
        may_split: Callable[[], bool] = lambda: True,
    ) -> None:
        # With known shapes, PyTorch need not run another forward and backward to find them.
        received = map(_as_sent, inputs) if place[0] > 0 else inputs
        args = {"input_args": tuple(received), "output_args": tuple(map(_as_sent, outputs))}
        super().__init__(_Weights(module), *place, device, group=group, **args)  # type: ignore[arg-type]
        self._run, self._inputs = run, tuple(inputs)
        self._micro_batch, self._may_split = 0, may_split
        self._backward_context = nullcontext() if backward_context is None else backward_context

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if _ALL_HAVE_GRADIENTS and not self.is_first:
            args = tuple([_as_given(arg, like) for arg, like in zip(args, self._inputs, strict=True)])
        output = self._run(args, self._micro_batch)
        return output if self.is_last else tuple([_as_sent(part.contiguous()) for part in as_tuple(output)])

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Skips PyTorch 2.11's comparison of outputs with the expected ones, which refuses a loss in another type."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """PyTorch 2.11 would have a rank with neighbouring stages send to itself, which gloo cannot."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], *args: Any, **more: Any
    ) -> Any:
        """Sends contiguous gradients, and computes all of a backward that must not be split with the inputs."""
        if backward_type == "weight" and bwd_kwargs["param_groups"] is None:  # which had theirs with the inputs
            return (), None
        is_split = (
            backward_type == "input"
            and self._may_split()
            and _part_once(bwd_kwargs["stage_output"], bwd_kwargs["input_values"])
        )
        if backward_type == "input" and not is_split:
            is_loss = bwd_kwargs["output_grads"] is None  # a single tensor in a whole backward
            of = bwd_kwargs | ({"stage_output": bwd_kwargs["stage_output"][0]} if is_loss else {})
            gradients, _ = self.backward_maybe_with_nosync("full", of, *args, **more)
            bwd_kwargs["stage_output"] = ()  # whose graph would be kept until the weights' turn
            return gradients, None
        if is_split:  # which detaches outputs in place, and cannot those that are views
            outputs = bwd_kwargs["stage_output"]
            bwd_kwargs["stage_output"] = tuple([part.clone() if part._is_view() else part for part in outputs])
        of = _of_those_with_gradients(bwd_kwargs) if backward_type == "input" and _ALL_HAVE_GRADIENTS else bwd_kwargs
        with self._backward_context, _own_gradients(bwd_kwargs["param_groups"] if backward_type == "weight" else []):
            gradients, groups = super().backward_maybe_with_nosync(backward_type, of, *args, **more)
        if _ALL_HAVE_GRADIENTS and backward_type != "weight" and not self.is_first:
            gradients = _of_all(gradients, of["input_values"])
        return tuple([None if g is None else g.contiguous() for g in gradients]), groups


class _Weights(nn.Module):
    """The parameters of a stage, and none of its modules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of = (module,)  # which is not seen in a tuple

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._of[0].parameters(recurse)


def _as_sent(tensor: Tensor) -> Tensor:
    """A tensor as it is sent between stages: integers as the bits of floats, if all tensors have gradients."""
    if not _ALL_HAVE_GRADIENTS or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.view(_FLOATS[tensor.itemsize]) if tensor.itemsize in _FLOATS else tensor.to(torch.float16)


def _as_given(received: Tensor, like: Tensor) -> Tensor:
    """The tensor that `_as_sent` was given, one like `like`."""
    if like.requires_grad:
        return received
    received.requires_grad_(False)
    if received.dtype == like.dtype:
        return received
    return received.view(like.dtype) if like.itemsize in _FLOATS else received.to(like.dtype)


def _part_once(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether all that needs a gradient and no input is used once, by what leads from `outputs` to one of `inputs`."""
    ends = {get_gradient_edge(value).node for value in inputs if value.requires_grad}
    roots = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(users)
    while waiting:
        node = waiting.pop()
        for following, _ in () if node in ends else node.next_functions:
            if following is not None:
                if following not in users:
                    waiting.append(following)
                users.setdefault(following, []).append(node)
    leading: set[Node] = set()
    waiting = [end for end in ends if end in users]
    while waiting:
        node = waiting.pop()
        if node not in leading:
            leading.add(node)
            waiting += users[node]
    used_once = all(len(by) == 1 for node, by in users.items() if node not in leading)
    return used_once and leading.issuperset(roots)


@contextmanager
def _own_gradients(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Gives each weight its own gradient tensor: PyTorch shares some tensors, and would add to them for each weight."""
    weights = [node.variable for group in groups for node in group["params"]]
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    yield
    for weight, gradient in zip(weights, before, strict=True):
        if gradient is not None:
            if weight.grad is not None:
                gradient += weight.grad
            weight.grad = gradient
        elif weight.grad is not None:
            # In separate memory; `clone` of a partial DTensor would sum it over ranks.
            weight.grad = with_local(weight.grad, local_tensor(weight.grad).clone())
    after_accumulation(weights)


def _of_those_with_gradients(of: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a backward without outputs that need no gradient; PyTorch 2.11 would use those too."""
    if of["output_grads"] is None:  # the loss
        return of
    pairs = [pair for pair in zip(of["stage_output"], of["output_grads"], strict=True) if pair[0].requires_grad]
    return of | {"stage_output": [output for output, _ in pairs], "output_grads": [gradient for _, gradient in pairs]}


def _of_all(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A gradient of each input, from those of all or of those that need one; 0 where there is none."""
    found = iter(gradients)
    has_place = [len(gradients) == len(inputs) or value.requires_grad for value in inputs]
    of_inputs = [next(found) if has else None for has in has_place]
    pairs = zip(of_inputs, inputs, strict=True)
    return tuple([torch.zeros_like(value) if gradient is None else gradient for gradient, value in pairs])


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """A stage's output as the next stage's arguments."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def new_schedule(name: str, stages: Sequence[ScheduledStage], microbatches: int) -> Callable[[bool, bool], None]:
    """A schedule of `stages`, to be called with whether this rank has the first stage and the last."""
    kind: Any = schedules.get_schedule_class(name)
    own: Any = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else list(stages)
    # Without `scale_grads` gradients add up; by default all that are there would be divided after each batch.
    schedule = kind(own, microbatches, loss_fn=lambda loss, number: loss, scale_grads=False)
    numbers = torch.arange(microbatches)

    def run(has_first: bool, has_last: bool) -> None:
        target = numbers if has_last else None
        try:
            schedule.step(*((numbers,) if has_first else ()), target=target, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None or "ailed to run " not in str(error):
                raise
            # PyTorch's own lists shapes first, and says at the end what was the matter.
            raise error.__cause__ from error.__cause__.__cause__

    return run


def ranks_of_stages(name: str, n_ranks: int, stages_per_rank: int) -> list[int]:
    """Which rank of a pipeline has each stage: one after the other, from the first again, or back from the last."""
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return [*range(n_ranks), *reversed(range(n_ranks))]
    return list(range(n_ranks)) * stages_per_rank


def shallow_copy(module: nn.Module) -> nn.Module:
    """Another module with the same parts; removing some of them does not change the original."""
    copied = object.__new__(type(module))  # `copy.copy` would call the constructor of what `fully_shard` wrapped
    vars(copied).update(_shared(module))
    for kind in _OWN_OF_A_COPY:
        vars(copied)[kind] = dict(vars(module)[kind])
    return copied


def refresh_copy(copied: nn.Module, module: nn.Module) -> None:
    """Updates a `shallow_copy` of `module`, including its remaining parameters, to the present state of `module`."""
    vars(copied).update(_shared(module))
    for name, parameter in copied._parameters.items():
        if parameter is not None:
            copied._parameters[name] = module._parameters[name]


def _shared(module: nn.Module) -> dict[str, Any]:
    own = (*_OWN_OF_A_COPY, "_compiled_call_impl")
    return {key: value for key, value in vars(module).items() if key not in own}


class _Held(NamedTuple):
    """What is sent stays until the schedule drops the work, which the fake group does not hold it in."""

    tensors: list[Tensor]

    def wait(self) -> None: ...


def sent_is_held() -> AbstractContextManager[object]:
    """Inside, stages of a pipeline hold what they send as long as real ones do."""
    send = schedules._batch_p2p

    def batch_p2p(messages: list[dist.P2POp], *args: Any, **kwargs: Any) -> list[Any]:
        sent = [message.tensor for message in messages if message.op is dist.isend]
        return [*send(messages, *args, **kwargs), _Held(sent)]

    return patch.object(schedules, "_batch_p2p", batch_p2p)
