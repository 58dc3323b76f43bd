"""PyTorch's pipeline schedules over stages of ours; `tests/compat/test_pipelining.py` exercises what is used here.

`torch.distributed.pipelining` is still moving. Of it the schedules are used, which decide the order of micro-batches
and who sends what when, and a stage that runs what it is told: its inputs may be any nested structure, of which the
schedule sees numbers of micro-batches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}

RunStage = Callable[[tuple[Any, ...]], Any]


class ScheduledStage(PipelineStage):
    """A stage that reduces its gradients over data-parallel ranks when it is told to, and not after each batch.

    Args:
        module: The layers.
        run: Runs them with what the stage before gives; of the first stage, with the number of a micro-batch. Of the
            last stage, gives its loss.
        place: Its number and that of all stages.
        inputs: Tensors like its inputs; of the first stage a tensor of one number.
        outputs: Tensors like its outputs.
        device: Where it computes.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        run: RunStage,
        *,
        place: tuple[int, int],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        # What is known in advance needs no further forward and backward, which PyTorch would run to find it out.
        args = {"input_args": tuple(inputs), "output_args": tuple(outputs)}
        super().__init__(module, *place, device, group=group, **args)  # type: ignore[arg-type]
        self._run = run
        self.reduces = True

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers."""
        output = self._run(args)
        return output if self.is_last else tuple([part.contiguous() for part in as_tuple(output)])

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch; what is sent back lies in order."""
        gradients, groups = super().backward_maybe_with_nosync(*args, **kwargs)
        return tuple([None if g is None else g.contiguous() for g in gradients]), groups

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduces shards' gradients, if it is time to."""
        if self.reduces:
            super().perform_reduce_grad(1)


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """What a stage hands on, as the next one's arguments."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def new_schedule(name: str, stages: Sequence[ScheduledStage], microbatches: int) -> Callable[[bool, bool], None]:
    """A schedule of `stages`, to be called with whether this rank has the first stage and the last, whose output is a
    micro-batch's loss.

    Args:
        name: One of `SCHEDULES`.
        stages: Those of this rank.
        microbatches: Their number.
    """
    # Without `scale_grads` gradients add up; by default all that are there would be divided after each batch.
    schedule = SCHEDULES[name](stages[0], microbatches, loss_fn=_the_loss, scale_grads=False)
    numbers = torch.arange(microbatches)

    def run(has_first: bool, has_last: bool) -> None:
        target = numbers if has_last else None
        schedule.step(*((numbers,) if has_first else ()), target=target, return_outputs=False)

    return run


def _the_loss(loss: Tensor, number: Tensor) -> Tensor:
    return loss
