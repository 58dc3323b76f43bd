"""The pipeline of a model whose stages lie on several ranks: a batch's micro-batches through it, there and back.
PyTorch's schedules want to know shapes beforehand, so the first batch of each shape sends one micro-batch ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dream_trainer.compat.fully_shard import as_one_backward, with_dtype
from dream_trainer.compat.pipelining import ScheduledStage, as_tuple, new_schedule, refresh_copy
from dream_trainer.compat.pytorch import is_dtensor, write_count
from dream_trainer.distributed.ranks import refuse_differences
from dream_trainer.distributed.seeds import numbers_of_place, preserved_random_state
from dream_trainer.distributed.world import World
from dream_trainer.errors import ConfigError, DataError, HookError, StepError
from dream_trainer.modules.class_change import Changed, change_class
from dream_trainer.modules.forward_state import ForwardState
from dream_trainer.nested import concatenated, leaves, map_tensors
from dream_trainer.parallel.micro_batches import cut, digest, even_parts, rows_of, shapes_of
from dream_trainer.parallel.mixture_of_experts import without_exchange
from dream_trainer.parallel.pipeline_stages import Apart, view_of
from dream_trainer.parallel.plain_run import without_value
from dream_trainer.parallel.sharding import fsdp_modules, outermost_fsdp_modules

Weight = Tensor | float
LossFunction = Callable[[Any, Any], Tensor]
RunStage = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
Schedule = Callable[[bool, bool], None]  # is called with whether this rank has the first stage, and the last
_KEPT_SCHEDULES = 8


class Stages(NamedTuple):
    names: list[list[str]]  # of each stage's parts
    ranks: list[int]  # which rank of the pipeline has it
    kept_blocks: list[nn.Module]  # the repeated blocks of this rank


class Pipelined(Changed):
    """A model that this rank has a stage of. A call without gradients runs the whole model, on all ranks at once."""

    _pipeline: Pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline.is_running:
            return super().__call__(*args, **kwargs)
        return self._pipeline.call((args, kwargs))


class _Seen(NamedTuple):
    """Tensors like this rank's parts of those that a stage gets and gives."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layouts: tuple[int, ...]
    changed: tuple[bool, ...]


@dataclass(eq=False, repr=False)
class Pipeline:
    """Runs a model whose stages lie on the ranks of a pipeline. All ranks call each method, with the same batch."""

    model: nn.Module
    stages: Stages
    world: World
    name: str
    schedule: str
    microbatches: int
    most_without_gradients: int
    backward_context: AbstractContextManager[Any] | None
    output_dtype: torch.dtype | None
    aside: Callable[[], AbstractContextManager[Any]]
    beside: Mapping[nn.Module, Pipeline]
    splits_backwards: bool
    whole: Sequence[nn.Module]  # models that each rank has; where one is trained, a loss's backward is not split
    verify: Callable[..., None] | None = None
    is_running = False  # whether a call of the model is one of its stage

    def __post_init__(self) -> None:
        model, stages, world = self.model, self.stages, self.world
        self.messages = StageMessages(world, stages.ranks[-1])
        self.ranks, self.last = stages.ranks, len(stages.ranks) - 1
        own = [number for number, rank in enumerate(stages.ranks) if rank == world.stage_rank]
        self.own = {own[0]: model} if len(own) == 1 else {n: view_of(model, stages.names[n]) for n in own}
        # Stages on one rank each copy the non-block modules; this keeps the copies in sync.
        self._copies = [
            (part, original)
            for stage in self.own.values()
            for name, part in stage.named_modules()
            if part is not (original := model.get_submodule(name))
        ]
        self.wrapped = outermost_fsdp_modules(model)
        # A copy has the parameters of its original as they were, and not what is gathered in their place.
        has_own = {id(original) for copied, original in self._copies if list(copied.parameters(recurse=False))}
        self._gathered_first = [module for module in fsdp_modules(model) if id(module) in has_own]
        self._is_compared = False
        self._built: dict[Any, Schedule] = {}
        self._inputs: list[Any] = []
        self._targets: list[Any] = []
        self._shares: list[Weight] = []
        self._losses: list[Tensor] = []
        self._loss_fn: LossFunction | None = None
        self._scaled: Callable[[Tensor], Tensor] | None = None
        change_class(model, Pipelined)
        model._pipeline = self  # type: ignore[assignment]

    def refuse_inside_another(self) -> None:
        """Refuses a collective call from inside the loss of another pipelined model."""
        for running in [pipeline for pipeline in self.beside.values() if pipeline.is_running]:
            raise StepError(
                f"{self.name}, which is cut into stages by pipeline_parallel={self.world.stages}, was called in a loss "
                f"or layer of {running.name}, which only some ranks compute. Put both into one module, have "
                "pipeline_stages return None for it, or call it before, under torch.no_grad(), and pass its outputs "
                "as targets."
            )

    # -- training

    def accept(self, inputs: Any, targets: Any, weight: Callable[[Any], Weight] | None) -> list[Weight] | None:
        """Weights of a batch's micro-batches, by their targets; the first batch is compared between ranks, on all."""
        # A graph would continue beyond the first or last stage.
        if any(leaf.requires_grad for leaf in leaves((inputs, targets)) if isinstance(leaf, Tensor)):
            raise StepError(
                f"forward_backward of {self.name} was given inputs or targets that need gradients, as another model's "
                f"outputs do, under pipeline_parallel={self.world.stages}, but gradients only pass from stage to "
                "stage. Put both models into one module, or detach() inputs that this loss should not train."
            )
        rows, n = rows_of(inputs), self.microbatches
        if rows == 0 or rows % n:
            raise DataError(
                f"a batch of {rows} samples cannot be cut into microbatches={n} of one size. Use batches of a multiple "
                f"of {n} samples, with drop_last=True, or another microbatches in pipeline_parallel_parameters."
            )
        weights = None if weight is None else [weight(part) for part in cut(targets, n, rows)]
        if not self._is_compared:
            numbers = None if weights is None else [torch.tensor(float(share)) for share in weights]
            refuse_differences(
                self.world,
                {"a batch": digest((inputs, targets)), "weights of its micro-batches": digest(numbers)},
                "The ranks of a pipeline (pipeline_parallel) need the same ones. Make the loader independent of the "
                "rank, since the trainer deals dataset and sampler to dp_rank of dp_size; and weight= of "
                "forward_backward a function that only uses targets.",
                among=self.world.rank % (self.world.world_size // self.world.stages),
            )
            self._is_compared = True
        return weights

    def train(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFunction,
        weights: list[Weight] | None,
        *,
        scaled: Callable[[Tensor], Tensor] | None,
        reduces: bool,
    ) -> Tensor:
        """Adds up the gradients of a batch; returns its loss, 0-dim float64, the same on all ranks."""
        n = self.microbatches
        key, rows = shapes_of(inputs), rows_of(inputs)
        self._built[key] = run = self._built.pop(key, None) or self._build(inputs)
        if len(self._built) > _KEPT_SCHEDULES:  # each has room for what it receives
            del self._built[next(iter(self._built))]
        self._inputs, self._targets = cut(inputs, n, rows), cut(targets, n, rows)
        self._shares = [1 / n] * n if weights is None else weights
        self._loss_fn, self._losses, self._scaled = loss_fn, [], scaled
        with self.running(), as_one_backward(self.wrapped, reduces=reduces):
            run(0 in self.own, self.last in self.own)
        loss = torch.stack(self._losses).sum() if self._losses else None
        self._inputs, self._targets, self._losses, self._loss_fn, self._scaled = [], [], [], None, None
        loss = self.messages.shared_loss(loss)
        return loss if weights is None else _mean(loss, weights)

    def _run_stage(self, stage: int, like: _Seen, args: tuple[Any, ...], place: int) -> Any:
        """Runs a stage on a micro-batch: returns the next stage's inputs, or the micro-batch's share of the loss."""
        positional, named = self._inputs[place] if stage == 0 else (self.messages.joined(args, like.layouts), {})
        if any(like.changed):  # autograd forbids in-place changes of inputs that need gradients
            given = zip(positional, like.changed, strict=True)
            positional = tuple([value.clone() if is_changed else value for value, is_changed in given])
        output = self.output(stage, positional, named)
        if stage < self.last:
            parts = self.messages.parts(as_tuple(output))
            if any(now.requires_grad and not then.requires_grad for now, then in zip(parts, like.outputs, strict=True)):
                raise StepError(  # the next stage has no buffer to send it back
                    f"the outputs of stage {stage} of {self.name} need gradients, and did not in the first batch of "
                    "this shape. Unfreeze layers before the first batch, or train them from the start at a rate of 0."
                )
            return parts
        assert self._loss_fn is not None  # while it is running
        loss = _checked(self._loss_fn(output, self._targets[place])) * self._shares[place]
        self._losses.append(loss.detach().double())
        return loss if self._scaled is None else self._scaled(loss)

    def _may_split(self, stage: int) -> bool:
        """Whether the backward of a micro-batch may be one for inputs and one for the weights of a stage."""
        if not self.splits_backwards or stage < self.last:
            return self.splits_backwards
        return not any(parameter.requires_grad for model in self.whole for parameter in model.parameters())

    def output(self, stage: int, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        output = self.own[stage](*positional, **named)
        return output if stage < self.last else with_dtype(output, self.output_dtype)

    def _build(self, inputs: Any) -> Schedule:
        first = cut(inputs, self.microbatches, rows_of(inputs))[:1]
        if self.verify is not None:
            verify, self.verify = self.verify, None
            verify(Apart(self), *first[0])
        seen: dict[int, _Seen] = {}

        def note(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args = args if number == 0 else tuple([value.clone() for value in args])
            output = self.output(number, args, kwargs)
            seen[number] = self._like(number, args, output)
            return output

        # A resumed run measures this again, so its batches' random numbers must not depend on it.
        # Expert-parallel ranks may have different shapes, and then not all of them are here.
        ahead = map_tensors(torch.clone, first)  # a stage may change what it is given
        with (
            ForwardState([self.model]),
            preserved_random_state(self.world.device),
            torch.enable_grad(),
            without_exchange(self.model),
            self.running(),
        ):
            for _ in self.forward(ahead, note):
                pass
        stages = [
            ScheduledStage(
                self.own[number],
                partial(self._run_stage, number, like),
                place=(number, len(self.ranks)),
                inputs=like.inputs,
                outputs=like.outputs,
                device=self.world.device,
                group=self.messages.group,
                backward_context=self.backward_context,
                may_split=partial(self._may_split, number),
            )
            for number, like in seen.items()
        ]
        try:
            with self.aside():
                return new_schedule(self.schedule, stages, self.microbatches)
        except ValueError as error:
            raise ConfigError(
                f"schedule={self.schedule!r} cannot run microbatches={self.microbatches} through {len(self.ranks)} "
                f"stages on {max(self.ranks) + 1} ranks: {error}"
            ) from error

    # -- without gradients

    def evaluate(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, weight: Callable[[Any], Weight] | None
    ) -> Tensor:
        """The loss of a batch of any size, as `train` returns it, without gradients."""
        rows = rows_of(inputs)
        parts = min(self.most_without_gradients, rows)
        target_parts = cut(targets, parts, rows)
        shares: list[Weight] = [*even_parts(rows, parts)] if weight is None else [weight(part) for part in target_parts]
        losses: list[Tensor] = []
        with torch.no_grad(), self.running():
            for number, output in enumerate(self.forward(cut(inputs, parts, rows))):
                losses.append(_checked(loss_fn(output, target_parts[number])).double() * shares[number])
        return _mean(self.messages.shared_loss(torch.stack(losses).sum() if losses else None), shares)

    def call(self, inputs: Any) -> Any:
        """The outputs of the whole model, on each rank of the pipeline."""
        self.refuse_inside_another()
        if torch.is_grad_enabled():
            raise StepError(
                f"the model was called under pipeline_parallel={self.world.stages}, with gradients, but each rank only "
                "has some of its layers. In training_step call self.forward_backward(model, inputs, targets, loss_fn, "
                "weight=...); elsewhere call the model under torch.no_grad(), on all ranks."
            )
        self.world.refuse_if_forbidden()
        rows = rows_of(inputs)
        with self.running():
            parts = cut(inputs, min(self.most_without_gradients, rows), rows) if rows else [inputs]
            outputs = list(self.forward(parts))
        return self.messages.shared_outputs(outputs[0] if len(outputs) == 1 else concatenated(outputs, _refuse_uneven))

    def forward(self, parts: list[Any], run: RunStage | None = None) -> Iterator[Any]:
        """Runs this rank's stages over micro-batches, by `run` with their numbers; the last one's outputs."""
        run = run or self.output
        sent: list[Message] = []
        stayed: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # for a stage of this rank that follows another
        for number in self.own:
            for place, (positional, named) in enumerate(parts):
                args, kwargs = positional, named
                if number > 0:
                    before = self.ranks[number - 1]
                    is_here = before == self.world.stage_rank
                    args, kwargs = stayed.pop((number, place)) if is_here else self.messages.receive(before), {}
                output = run(number, args, kwargs)
                if number == self.last:
                    yield output
                elif self.ranks[number + 1] == self.world.stage_rank:
                    stayed[number + 1, place] = as_tuple(output)
                else:
                    sent += self.messages.send(as_tuple(output), self.ranks[number + 1])
        for work, _ in sent:
            work.wait()

    def _like(self, number: int, args: tuple[Any, ...], output: Any) -> _Seen:
        is_last = number == self.last
        outputs = (torch.empty(()),) if is_last else tuple(map(without_value, self.messages.parts(as_tuple(output))))
        if number == 0:
            return _Seen((torch.zeros(1, dtype=torch.int64),), outputs, (), ())
        changed = tuple([write_count(value) > 0 for value in args])
        return _Seen(
            tuple(map(without_value, self.messages.parts(args))), outputs, tuple(map(layout_of, args)), changed
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the model is its stage, with its own random numbers, so that stages draw different ones."""
        with numbers_of_place(b"stage", self.world.stage_rank, self.world.device):
            for module in self._gathered_first:
                module.unshard()
            for copied, original in self._copies:
                refresh_copy(copied, original)
            self.is_running = True
            try:
                yield
            finally:
                self.is_running = False


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise StepError(f"loss_fn gave {what}, and forward_backward needs a scalar tensor: the mean of a micro-batch.")
    return (loss.full_tensor() if is_dtensor(loss) else loss).reshape(())


def _mean(total: Tensor, weights: list[Weight]) -> Tensor:
    """`total` over the sum of `weights`; as it is where that is 0, and so there is nothing to be the mean of."""
    weight = sum(weights[1:], start=weights[0])
    if isinstance(weight, Tensor):
        return total / weight.masked_fill(weight == 0, 1)
    return total / (weight or 1)


def _refuse_uneven(shapes: list[Any]) -> None:
    raise DataError(f"micro-batches have outputs that are not of one shape: {shapes}. Give outputs of one shape.")


Message = tuple["dist.Work", Tensor]  # in flight, with the sent tensor

_HEADER = 64  # numbers that describe a message: its number of tensors, and each one's kind, dimensions and sizes
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
PLAIN, WHOLE = -2, -1  # layouts of no DTensor, and of one that each rank has; others are the dimension that is split


class StageMessages:
    """Transfers outside a schedule: from stage to stage without gradients, and from the last to all. DTensors that
    tensor parallelism splits are sent as each rank's part, to the rank that has the same part there."""

    def __init__(self, world: World, last: int) -> None:
        group = world.stage_group()
        assert group is not None  # there are several stages
        assert world.mesh is not None
        self.group: dist.ProcessGroup = group
        self._world, self._device, self.last = world, world.device, last
        self._layer_mesh: DeviceMesh = world.mesh["tp"]

    def parts(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This rank's parts of a stage's outputs, with gradients, as plain tensors."""
        return tuple([tensor if layout_of(tensor) == PLAIN else tensor.to_local() for tensor in tensors])  # type: ignore[attr-defined]

    def joined(self, parts: tuple[Tensor, ...], layouts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The tensors that the parts belong to, with gradients: plain ones or DTensors, as before `parts`."""
        return tuple([self._of_layout(part, layout) for part, layout in zip(parts, layouts, strict=True)])

    def _of_layout(self, part: Tensor, layout: int) -> Tensor:
        if layout == PLAIN:
            return part
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = Replicate() if layout == WHOLE else Shard(layout)
        return DTensor.from_local(part, self._layer_mesh, [placement], run_check=False)

    def send(self, tensors: tuple[Tensor, ...], rank: int) -> list[Message]:
        """Sends a stage what it does not know the shape of; the messages are to be waited for."""
        header = [len(tensors)]
        for tensor, part in zip(tensors, self.parts(tensors), strict=True):
            header += [_DTYPES.index(part.dtype), int(tensor.requires_grad), layout_of(tensor), part.ndim, *part.shape]
        if len(header) > _HEADER:
            raise HookError(f"a stage gave {len(tensors)} tensors to the next one, more than fit in a message.")
        sent = [self._world.send_numbers(header + [0] * (_HEADER - len(header)), rank, self.group)]
        for message in [part.detach().contiguous() for part in self.parts(tensors)]:
            work = dist.isend(message, group=self.group, group_dst=rank)
            assert work is not None  # this rank is of the group
            sent.append((work, message))
        return sent

    def receive(self, rank: int) -> tuple[Tensor, ...]:
        count, *rest = self._world.receive_numbers(_HEADER, rank, self.group)
        received = []
        for _ in range(count):
            dtype, needs_gradient, layout, ndim, *rest = rest
            sizes, rest = rest[:ndim], rest[ndim:]
            part = torch.empty(sizes, dtype=_DTYPES[dtype], device=self._device)
            dist.recv(part, group=self.group, group_src=rank)
            received.append(self._of_layout(part.requires_grad_(bool(needs_gradient)), layout))
        return tuple(received)

    def shared_loss(self, loss: Tensor | None) -> Tensor:
        """The last stage's, 0-dim float64, on all ranks; the others give None."""
        if loss is None:
            loss = torch.zeros((), dtype=torch.float64, device=self._device)
        dist.broadcast(loss, group=self.group, group_src=self.last)
        return loss

    def shared_outputs(self, outputs: Any) -> Any:
        """The last stage's outputs, on all ranks; other stages' outputs are ignored."""
        layouts = [layout_of(leaf) for leaf in leaves(outputs) if isinstance(leaf, Tensor)]
        parts = map_tensors(lambda tensor: self.parts((tensor,))[0], outputs)
        form = [map_tensors(lambda part: torch.empty_like(part, device="meta"), parts), layouts]
        dist.broadcast_object_list(form, group=self.group, group_src=self.last, device=self._device)
        remaining = iter(form[1])

        def shared(part: Tensor) -> Tensor:
            part = torch.empty_like(part, device=self._device) if part.is_meta else part.contiguous()
            dist.broadcast(part, group=self.group, group_src=self.last)
            return self._of_layout(part, next(remaining))

        return map_tensors(shared, parts if self._world.stage_rank == self.last else form[0])


def layout_of(tensor: Tensor) -> int:
    if not is_dtensor(tensor):
        return PLAIN
    (placement,) = tensor.placements
    if placement.is_replicate():
        return WHOLE
    for dim in range(tensor.ndim):
        if placement.is_shard(dim):
            return dim
    raise HookError(
        f"a stage gave a DTensor with the placement {placement}, which is still to be summed over the ranks of a "
        "layer. Have the plan of tensor parallelism reduce it: output_layouts=Replicate() or Shard(dim)."
    )
