"""The pipeline of a model whose stages lie on several ranks: a batch's micro-batches through it, there and back.

In training PyTorch's schedules say which micro-batch a stage computes next, and send what crosses the ranks. They want
to know beforehand what that looks like, so the first batch of each shape sends one micro-batch ahead. Without
gradients micro-batches go from stage to stage as they are, of any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from dream_trainer.compat.pipelining import ScheduledStage, as_tuple, new_schedule
from dream_trainer.data.nested import concatenated, map_tensors
from dream_trainer.distributed.seeds import hash_seed, preserved_random_state, seed_device
from dream_trainer.errors import DataError, HookError, StepError
from dream_trainer.modules.class_change import Changed, change_class
from dream_trainer.trainer.micro_batches import cut, rows_of, shapes_of
from dream_trainer.trainer.stage_check import StageCheck

if TYPE_CHECKING:
    import torch.distributed as dist

    from dream_trainer.distributed.world import World
    from dream_trainer.trainer.step.accumulation import Weight

LossFunction = Callable[[Any, Any], Tensor]
_KEPT_SCHEDULES = 8
_HEADER = 64  # numbers that say what a message has: how many tensors, and of each dtype, dimensions and sizes
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


class StagePlace(NamedTuple):
    """What this rank has of a pipeline.

    Attributes:
        number: Of its stage, 0-based.
        stages: Number of all stages.
        check: What compares them with the whole model.
    """

    number: int
    stages: int
    check: StageCheck


class Pipelined(Changed):
    """A model of which this rank has a stage. Called without gradients, it is the whole model, on all ranks at once."""

    _pipeline: Pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline.is_running:
            return super().__call__(*args, **kwargs)
        return self._pipeline.call((args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's stage."""
        return super().forward(*args, **kwargs)


class _Built(NamedTuple):
    """A schedule for batches of one shape, and its stage."""

    stage: ScheduledStage
    run: Callable[[bool, bool], None]


class Pipeline:
    """Runs a model whose stages lie on the ranks of a pipeline. Each of them calls each method, with the same batch.

    Args:
        model: This rank's stage; its class changes in place, and it is called as the whole model from then on.
        stage: Which one.
        world: The ranks.
        schedule: Name of the order of micro-batches.
        microbatches: Their number in training.
        warn: Called with what users should know.

    Attributes:
        is_running: Whether a call of the model is one of its stage.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: StagePlace,
        world: World,
        *,
        schedule: str,
        microbatches: int,
        warn: Callable[[str], None],
    ) -> None:
        group = world.pipeline_group()
        assert group is not None  # there are several stages
        self._group: dist.ProcessGroup = group
        self._model, self._stage, self._world, self._schedule = model, stage, world, schedule
        self._microbatches = microbatches
        self._is_first, self._is_last = stage.number == 0, stage.number == stage.stages - 1
        self._check: StageCheck | None = stage.check
        self._warn = warn
        self._built: dict[Any, _Built] = {}
        self._inputs: list[Any] = []
        self._targets: list[Any] = []
        self._shares: list[Weight] = []
        self._losses: list[Tensor] = []
        self._loss_fn: LossFunction | None = None
        self.is_running = False
        change_class(model, Pipelined)
        model._pipeline = self  # type: ignore[assignment]

    # -- training

    def refuse_uneven(self, inputs: Any) -> None:
        """Refuses a batch that cannot be cut into equal micro-batches; all ranks do.

        Raises:
            DataError: It cannot.
        """
        rows, n = rows_of(inputs), self._microbatches
        if rows == 0 or rows % n:
            raise DataError(
                f"a batch of {rows} samples cannot be cut into microbatches={n} of one size. Use batches of a multiple "
                f"of {n} samples, with drop_last=True, or another microbatches in pipeline_parallel_parameters."
            )

    def weights(self, targets: Any, inputs: Any, weight: Callable[[Any], Weight]) -> list[Weight]:
        """Of each micro-batch in training, by its targets."""
        return [weight(part) for part in cut(targets, self._microbatches, rows_of(inputs))]

    def train(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, weights: list[Weight] | None, *, reduces: bool
    ) -> Tensor:
        """Adds up the gradients of a batch; returns its loss, 0-dim float64, the same on all ranks.

        Args:
            inputs: Of the model, in whole.
            targets: Of the loss, in whole.
            loss_fn: Gives the mean loss of a micro-batch's outputs and targets, on the last stage.
            weights: Of each micro-batch; gradients are of the sum of losses times weights. None: of their mean.
            reduces: Whether gradients of shards are reduced over data-parallel ranks now.
        """
        n = self._microbatches
        built = self._built_for(inputs)
        rows = rows_of(inputs)
        self._inputs, self._targets = cut(inputs, n, rows), cut(targets, n, rows)
        self._shares = [1 / n] * n if weights is None else weights
        self._loss_fn, self._losses = loss_fn, []
        built.stage.reduces = reduces
        with self._running():
            built.run(self._is_first, self._is_last)
        loss = torch.stack(self._losses).sum() if self._is_last else None
        self._inputs, self._targets, self._losses, self._loss_fn = [], [], [], None
        loss = self._shared_loss(loss)
        return loss if weights is None else loss / _sum(weights)

    def _run_stage(self, args: tuple[Any, ...]) -> Any:
        """What a stage computes of a micro-batch: what the next one needs, or its share of the loss."""
        if not self._is_first:
            output = self._model(*args)
        else:
            positional, named = self._inputs[int(args[0])]
            output = self._model(*positional, **named)
        if not self._is_last:
            return output
        assert self._loss_fn is not None  # while it is running
        place = len(self._losses)  # micro-batches come to the last stage in order
        loss = _checked(self._loss_fn(output, self._targets[place])) * self._shares[place]
        self._losses.append(loss.detach().double())
        return loss

    def _built_for(self, inputs: Any) -> _Built:
        """The schedule for batches like this one."""
        key = shapes_of(inputs)
        built = self._built.pop(key, None)
        if built is None:
            built = self._build(inputs)
            while len(self._built) >= _KEPT_SCHEDULES:  # each has room for what it receives
                del self._built[next(iter(self._built))]
        self._built[key] = built
        return built

    def _build(self, inputs: Any) -> _Built:
        if self._check is not None:
            self._check.run(cut(inputs, self._microbatches, rows_of(inputs))[0], self._warn)
            self._check = None
        seen: dict[str, tuple[Tensor, ...]] = {}
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        # A run that goes on from here finds out anew: the random numbers of its batches are not to depend on that.
        with preserved_random_state(self._world.device), torch.enable_grad(), self._running():
            for _ in self._forward(cut(inputs, self._microbatches, rows_of(inputs))[:1], seen):
                pass
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        stage = ScheduledStage(
            self._model,
            self._run_stage,
            place=(self._stage.number, self._stage.stages),
            inputs=seen["inputs"] if not self._is_first else [torch.arange(1)],
            outputs=seen["outputs"] if not self._is_last else [torch.empty(())],
            device=self._world.device,
            group=self._group,
        )
        return _Built(stage, new_schedule(self._schedule, [stage], self._microbatches))

    # -- without gradients

    def evaluate(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, weight: Callable[[Any], Weight] | None
    ) -> Tensor:
        """The loss of a batch of any size, as `train` returns it, without gradients.

        Args:
            inputs: Of the model, in whole.
            targets: Of the loss, in whole.
            loss_fn: As for `train`.
            weight: That of a micro-batch, of its targets; None: its samples.
        """
        rows = rows_of(inputs)
        parts = min(self._microbatches, rows)
        target_parts = cut(targets, parts, rows)
        sizes = [rows // parts + (number < rows % parts) for number in range(parts)]
        shares: list[Weight] = list(sizes) if weight is None else [weight(part) for part in target_parts]
        losses: list[Tensor] = []
        with torch.no_grad(), self._running():
            for number, output in enumerate(self._forward(cut(inputs, parts, rows))):
                losses.append(_checked(loss_fn(output, target_parts[number])).double() * shares[number])
        return self._shared_loss(torch.stack(losses).sum() if losses else None) / _sum(shares)

    def call(self, inputs: Any) -> Any:
        """The outputs of the whole model, on each rank of the pipeline.

        Raises:
            StepError: Gradients are enabled, and nobody would have the graph.
        """
        if torch.is_grad_enabled():
            raise StepError(
                f"the model was called under pipeline_parallel={self._stage.stages}, with gradients, where each rank "
                "has some of its layers. In training_step call self.forward_backward(model, inputs, targets, loss_fn, "
                "weight=...); elsewhere call the model under torch.no_grad(), on all ranks."
            )
        self._world.refuse_if_forbidden()
        rows = rows_of(inputs)
        with self._running():
            parts = cut(inputs, min(self._microbatches, rows), rows) if rows else [inputs]
            outputs = list(self._forward(parts))
        joined = concatenated(outputs, _refuse_uneven) if len(outputs) > 1 else None
        return self._share(outputs[0] if len(outputs) == 1 else joined)

    def _forward(self, parts: list[Any], seen: dict[str, tuple[Tensor, ...]] | None = None) -> Iterator[Any]:
        """Runs this rank's stage over micro-batches; the last stage's outputs. Notes what goes in and out in `seen`."""
        sent: list[tuple[Any, Tensor]] = []
        for positional, named in parts:
            args, kwargs = (positional, named) if self._is_first else (self._receive(), {})
            output = self._model(*args, **kwargs)
            if seen is not None:
                seen["inputs"] = () if self._is_first else _like(args)
                seen["outputs"] = () if self._is_last else _like(as_tuple(output))
            if self._is_last:
                yield output
            else:
                sent += self._send(as_tuple(output))
        for work, _ in sent:
            work.wait()

    # -- between ranks

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Inside, the model is its stage, and draws random numbers of its own: other layers must not get the same.

        What steps draw themselves has to be equal on all ranks of a pipeline, so it is as if each batch drew once.
        """
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        with preserved_random_state(self._world.device):
            seed_device(hash_seed(b"stage", drawn, self._stage.number), self._world.device)
            self.is_running = True
            try:
                yield
            finally:
                self.is_running = False

    def _rank_of(self, stage: int) -> int:
        import torch.distributed as dist

        return dist.get_global_rank(self._group, stage)

    def _send(self, tensors: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
        """Sends to the next stage what it does not know the shape of; each message, and what it may need until sent."""
        import torch.distributed as dist

        header = [len(tensors)]
        for tensor in tensors:
            header += [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.ndim, *tensor.shape]
        if len(header) > _HEADER:
            raise HookError(f"a stage gave {len(tensors)} tensors to the next one, more than fit in a message.")
        numbers = torch.tensor(header + [0] * (_HEADER - len(header)), device=self._world.device)
        messages = [numbers, *(tensor.detach().contiguous() for tensor in tensors)]
        to = self._rank_of(self._stage.number + 1)
        return [(dist.isend(message, to, group=self._group), message) for message in messages]

    def _receive(self) -> tuple[Tensor, ...]:
        import torch.distributed as dist

        source, device = self._rank_of(self._stage.number - 1), self._world.device
        numbers = torch.empty(_HEADER, dtype=torch.int64, device=device)
        dist.recv(numbers, source, group=self._group)
        count, *rest = numbers.tolist()
        received = []
        for _ in range(count):
            dtype, needs_gradient, ndim, *rest = rest
            sizes, rest = rest[:ndim], rest[ndim:]
            tensor = torch.empty(sizes, dtype=_DTYPES[dtype], device=device)
            dist.recv(tensor, source, group=self._group)
            received.append(tensor.requires_grad_(bool(needs_gradient)))
        return tuple(received)

    def _shared_loss(self, loss: Tensor | None) -> Tensor:
        """The last stage's, on all ranks."""
        import torch.distributed as dist

        if loss is None:
            loss = torch.zeros((), dtype=torch.float64, device=self._world.device)
        dist.broadcast(loss, self._rank_of(self._stage.stages - 1), group=self._group)
        return loss

    def _share(self, outputs: Any) -> Any:
        """The last stage's, on all ranks."""
        import torch.distributed as dist

        source, device = self._rank_of(self._stage.stages - 1), self._world.device
        form = [map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), outputs)]
        dist.broadcast_object_list(form, source, group=self._group, device=device)

        def shared(tensor: Tensor) -> Tensor:
            tensor = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.contiguous()
            dist.broadcast(tensor, source, group=self._group)
            return tensor

        return map_tensors(shared, outputs if self._is_last else form[0])


def _like(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors that say only what others look like."""
    return tuple([torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad) for t in tensors])


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise StepError(f"loss_fn gave {what}, and forward_backward needs a scalar tensor: the mean of a micro-batch.")
    return loss.reshape(())


def _sum(weights: list[Weight]) -> Weight:
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    return total


def _refuse_uneven(shapes: list[Any]) -> None:
    raise DataError(f"micro-batches have outputs that are not of one shape: {shapes}. Give outputs of one shape.")
