"""What a rank keeps and sends in a step of the llama example, counted: for comparison with the formulas of the docs."""

import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from dream_trainer.trainer.step import gradients as step_gradients
from tests.worlds import run_world
from tools.parity import ParityTrainer, config_of
from tools.parity_cells import Cell


class Cost(NamedTuple):
    """Bytes of a rank, of the second step."""

    weights: int
    gradients: int
    moments: int
    kept: int
    """What forward has made and left for backward, when the loss is computed."""
    sent: float
    """As if every collective were a ring."""
    in_flight: int
    """Micro-batches that went through a block and have not come back, at most."""
    peak: int
    """Of all that lives at once."""


class Counted(TorchDispatchMode):
    """What is sent, and the storages that operations have made and that still live."""

    def __init__(self, n_ranks: int) -> None:
        super().__init__()
        self.n, self.sent, self.made = n_ranks, 0.0, WeakIdKeyDictionary()
        self.alive: dict[int, weakref.ref[Any]] = {}
        self.looks, self.peak = False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, share = str(func).rpartition(".")[0], (self.n - 1) / self.n
        match name:
            case "c10d.allreduce_":
                self.sent += 2 * share * sum(tensor.nbytes for tensor in args[0])
            case "c10d._allgather_base_":
                self.sent += (self.n - 1) * args[1].nbytes
            case "c10d._reduce_scatter_base_" | "c10d.alltoall_base_":
                self.sent += share * args[1].nbytes
            case "_c10d_functional.all_reduce":
                self.sent += 2 * share * args[0].nbytes
            case "_c10d_functional.all_gather_into_tensor":
                self.sent += (self.n - 1) * args[0].nbytes
            case "_c10d_functional.reduce_scatter_tensor":
                self.sent += share * args[0].nbytes
        result = func(*args, **kwargs or {})
        made = result if isinstance(result, tuple | list) else (result,)
        for tensor in made:
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self.made[tensor.untyped_storage()] = True
        self.add(made)
        return result

    def begin(self) -> None:
        """From now on counts what is sent, and what is made."""
        self.sent, self.made = 0.0, WeakIdKeyDictionary()

    def add(self, tensors: Sequence[Any]) -> None:
        """Knows what they lie in, as long as it lives, and looks how much lives now."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = local(tensor).untyped_storage()
                self.alive.setdefault(id(storage), weakref.ref(storage, partial(self._remove, id(storage))))
        if not self.looks:
            return
        storages = [reference() for reference in list(self.alive.values())]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in storages if storage is not None))

    def _remove(self, number: int, reference: Any) -> None:
        self.alive.pop(number, None)

    def living(self, besides: Sequence[Tensor]) -> int:
        """Bytes of them, but for what `besides` lie in, once threads of gloo have let go of what they sent."""
        others = {local(tensor).untyped_storage().data_ptr() for tensor in besides}
        found = [self._living(others)]
        while len(found) < 25 or len(set(found[-25:])) > 1:
            time.sleep(0.02)
            found.append(self._living(others))
        return found[-1]

    def _living(self, others: set[int]) -> int:
        storages: dict[int, int] = {}
        for storage in self.made:
            with suppress(RuntimeError):  # its memory is gone
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(size for at, size in storages.items() if at not in others)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors if tensor.ndim)


class CostTrainer(ParityTrainer):
    """Counts in the last micro-batch of its second step, and of the one after it what lives at most."""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.in_flight = self.most_in_flight = 0
        self.counted = Counted(self.world.world_size)
        self.counted.add(list(self.model.parameters()))
        self.kept: int | None = None
        self.peaks: list[int] = []
        if self.world.stages > 1:
            next(iter(self.model.layers)).register_forward_pre_hook(self.enter)

    def enter(self, block: Any, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            inputs[0].register_hook(self.leave)

    def leave(self, gradient: Tensor) -> None:
        self.in_flight -= 1

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.kept == 0:
            self.kept = self.counted.living(list(self.model.parameters()))
        return super().mean_loss(logits, targets)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        if self.is_accumulating_gradients or self.global_step == 0:
            with self.counted:
                return super().training_step(batch, batch_idx)
        self.counted.looks, self.counted.peak = True, 0
        if self.global_step == 1:
            self.count(batch)
        else:
            with self.counted:
                super().training_step(batch, batch_idx)
        self.counted.looks = False
        self.peaks.append(self.counted.peak)
        if len(self.peaks) == 2:  # by threads of gloo that have not let go yet some may be larger
            self.cost = self.cost._replace(peak=min(self.peaks))
            self.request_stop("it is counted")
        return {}

    def count(self, batch: tuple[Tensor, ...]) -> None:
        """Trains, and counts all but the peak."""
        self.in_flight = self.most_in_flight = self.kept = 0  # the first batch sends a micro-batch ahead
        self.counted.begin()
        with self.counted:
            self.loss(batch)
            gradients = bytes_of([p.grad for p in self.model.parameters() if p.grad is not None])
            self.step(self.model, self.optimizer, self.scheduler)
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        of_parameters = bytes_of(list(self.model.parameters()))
        sent, in_flight = self.counted.sent, self.most_in_flight
        self.cost = Cost(of_parameters, gradients, bytes_of(moments), self.kept or 0, sent, in_flight, peak=0)


def count(cells: Sequence[Cell], directory: str) -> list[Cost]:
    os.chdir(directory)
    found = []
    step_gradients.BUCKET_BYTES = 2**15  # so that no bucket is most of what lives
    for cell in cells:
        config = config_of(cell)
        if cell.dp_shard > 1:  # by default gradients are whole between micro-batches
            training = replace(config.training_parameters, sync_policy="reduce_scatter_each")
            config = replace(config, training_parameters=training)
        with CostTrainer(config) as trainer:
            trainer.fit()
            found.append(trainer.cost)
    return found


def costs(cells: Sequence[Cell], directory: str) -> dict[Cell, list[Cost]]:
    """By cell, of each rank; they have as many."""
    by_rank = run_world(count, cells[0].world_size, list(cells), directory, timeout=600.0)
    return dict(zip(cells, zip(*by_rank, strict=True), strict=True))  # type: ignore[arg-type]
