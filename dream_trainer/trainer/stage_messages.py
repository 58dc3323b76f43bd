"""What crosses the ranks of a pipeline beside a schedule: from stage to stage without gradients, and from the last to
all.

DTensors that tensor parallelism splits cross as each rank's part, to the rank that has the same part there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dream_trainer.errors import HookError
from dream_trainer.nested import leaves, map_tensors

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from dream_trainer.distributed.world import World

Message = tuple["dist.Work", Tensor]
"""On its way, with what it sends."""

_HEADER = 64  # numbers that say what a message has: how many tensors, and of each its kind, dimensions and sizes
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
PLAIN, WHOLE = -2, -1
"""How a tensor lies on the ranks that share a layer: not at all, or as a DTensor that each has; else along which of its
dimensions they split it."""


class StageMessages:
    """Messages between the ranks of a pipeline."""

    def __init__(self, world: World, last: int) -> None:
        group = world.pipeline_group()
        assert group is not None  # there are several stages
        assert world.mesh is not None
        self.group: dist.ProcessGroup = group
        self._device, self._last = world.device, last
        self._is_last = world.stage_rank == last
        self._layer_mesh: DeviceMesh = world.mesh["tp"]

    def parts(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This rank's parts of what a stage gives, with gradients, as plain tensors."""
        return tuple([tensor if layout_of(tensor) == PLAIN else tensor.to_local() for tensor in tensors])  # type: ignore[attr-defined]

    def joined(self, parts: tuple[Tensor, ...], layouts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What the parts are of, with gradients: DTensors where they were."""
        return tuple([self._of_layout(part, layout) for part, layout in zip(parts, layouts, strict=True)])

    def _of_layout(self, part: Tensor, layout: int) -> Tensor:
        if layout == PLAIN:
            return part
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = Replicate() if layout == WHOLE else Shard(layout)
        return DTensor.from_local(part, self._layer_mesh, [placement], run_check=False)

    def send(self, tensors: tuple[Tensor, ...], rank: int) -> list[Message]:
        """Sends a stage what it does not know the shape of; the messages are to be waited for."""
        import torch.distributed as dist

        header = [len(tensors)]
        for tensor, part in zip(tensors, self.parts(tensors), strict=True):
            header += [_DTYPES.index(part.dtype), int(tensor.requires_grad), layout_of(tensor), part.ndim, *part.shape]
        if len(header) > _HEADER:
            raise HookError(f"a stage gave {len(tensors)} tensors to the next one, more than fit in a message.")
        numbers = torch.tensor(header + [0] * (_HEADER - len(header)), device=self._device)
        messages = [numbers, *(part.detach().contiguous() for part in self.parts(tensors))]
        to = dist.get_global_rank(self.group, rank)
        sent: list[Message] = []
        for message in messages:
            work = dist.isend(message, to, group=self.group)
            assert work is not None  # this rank is of the group
            sent.append((work, message))
        return sent

    def receive(self, rank: int) -> tuple[Tensor, ...]:
        """What `send` sends on another rank."""
        import torch.distributed as dist

        source = dist.get_global_rank(self.group, rank)
        numbers = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
        dist.recv(numbers, source, group=self.group)
        count, *rest = numbers.tolist()
        received = []
        for _ in range(count):
            dtype, needs_gradient, layout, ndim, *rest = rest
            sizes, rest = rest[:ndim], rest[ndim:]
            part = torch.empty(sizes, dtype=_DTYPES[dtype], device=self._device)
            dist.recv(part, source, group=self.group)
            received.append(self._of_layout(part.requires_grad_(bool(needs_gradient)), layout))
        return tuple(received)

    def shared_loss(self, loss: Tensor | None) -> Tensor:
        """The last stage's, 0-dim float64, on all ranks; the others give None."""
        import torch.distributed as dist

        if loss is None:
            loss = torch.zeros((), dtype=torch.float64, device=self._device)
        dist.broadcast(loss, dist.get_global_rank(self.group, self._last), group=self.group)
        return loss

    def shared_outputs(self, outputs: Any) -> Any:
        """The last stage's, on all ranks; those of others do not count."""
        import torch.distributed as dist

        source = dist.get_global_rank(self.group, self._last)
        layouts = [layout_of(leaf) for leaf in leaves(outputs) if isinstance(leaf, Tensor)]
        parts = map_tensors(lambda tensor: self.parts((tensor,))[0], outputs)
        form = [map_tensors(lambda part: torch.empty_like(part, device="meta"), parts), layouts]
        dist.broadcast_object_list(form, source, group=self.group, device=self._device)
        remaining = iter(form[1])

        def shared(part: Tensor) -> Tensor:
            part = torch.empty_like(part, device=self._device) if part.is_meta else part.contiguous()
            dist.broadcast(part, source, group=self.group)
            return self._of_layout(part, next(remaining))

        return map_tensors(shared, parts if self._is_last else form[0])


def layout_of(tensor: Tensor) -> int:
    """How `tensor` lies on the ranks that share a layer.

    Raises:
        HookError: It is a DTensor of which no rank has a part that would do.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
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
