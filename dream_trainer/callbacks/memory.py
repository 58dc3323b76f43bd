"""Memory: a run's memory on its devices and hosts, with a snapshot when it runs out. GarbageCollection: Python's
collector on a schedule, so that ranks do not wait for one another's pauses."""

from __future__ import annotations

import gc
import resource
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.compat.pytorch import local_tensor, record_memory_history, write_memory_snapshot
from dream_trainer.config.parameter_class import NonNegativeInt, PositiveInt, check_fields
from dream_trainer.errors import HookError
from dream_trainer.events.callback import Callback, LoggingCallback
from dream_trainer.nested import leaves
from dream_trainer.screen import format_bytes, print_table, show
from dream_trainer.trainer.abstract import AbstractTrainer

GIB = 2.0**30

Bytes = Counter[torch.dtype]  # bytes by the dtype of the tensors that take them


@dataclass(eq=False, repr=False)
class Memory(LoggingCallback):
    """Logs memory of the rank that needs most, in GiB, under `memory/`:

    - `resident`, `peak_resident`: the process's host memory, now and at its peak so far
    - `peak_allocated`, `peak_reserved`: on a CUDA device, the peaks so far: of tensors, and of PyTorch's reservation
    - `fragmentation`: share of reserved memory that lies between tensors and cannot be returned
    - `alloc_retries`: how often PyTorch had to empty its cache to find room; slow, and a last warning
    - `allocated`, `reserved`: on MPS, which keeps no peaks

    Once all optimizers have stepped twice, rank 0 prints how much of it parameters, gradients and optimizer state take.
    When a device runs out of memory, each rank that did writes a snapshot (see `snapshot`) before the run ends.

    Args:
        every_n_steps: Optimizer steps between two measurements. Each takes some 100 microseconds and waits for nothing.
        history: Number of allocations and releases in a CUDA device's snapshot, with their stacks. 0 records none, so
            the snapshot shows allocations without their origin. Recording costs some microseconds per allocation.
        name: First part of the metrics' names.
    """

    every_n_steps: PositiveInt = 50
    _: KW_ONLY
    history: NonNegativeInt = 0
    name: str = "memory"

    def __post_init__(self) -> None:
        super().__init__(self.name)
        check_fields(self, Memory)
        self._trainer: AbstractTrainer | None = None

    def snapshot(self) -> Path:
        """Writes this rank's memory as it is now into `<run_dir>/memory`; any rank may call it, at any time.

        Returns:
            A text file with the numbers and, on CUDA, PyTorch's summary. There a `.pickle` next to it shows every
            allocation in https://pytorch.org/memory_viz.

        Raises:
            HookError: The trainer has not launched yet.
        """
        trainer = self._trainer
        if trainer is None:
            raise HookError("snapshot() needs a trainer that has launched. Call it in fit() or after it.")
        device = trainer.world.device
        directory = trainer.run_dir / "memory"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"step_{trainer.global_step:08d}_rank_{trainer.world.rank}.txt"
        text = "".join(f"{name}: {value:.4g}\n" for name, value in memory_numbers(device).items())
        if device.type == "cuda":
            text += torch.cuda.memory_summary(device)
            write_memory_snapshot(path.with_suffix(".pickle"))
        path.write_text(text)
        return path

    def post_launch(self, trainer: AbstractTrainer) -> None:
        self._trainer, self._is_reported = trainer, False
        self._gradients: dict[Optimizer, Bytes] = {}
        if self.history and trainer.world.device.type == "cuda":
            record_memory_history(self.history)

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Counts the gradients of the first steps; they are gone when `step` returns."""
        if trainer.world.is_main and not self._is_reported:
            self._gradients[optimizer] = _bytes_of(p.grad for group in optimizer.param_groups for p in group["params"])

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        # The peak of the first step does not include optimizer state.
        if not self._is_reported and self._gradients and all(trainer.times_stepped(o) > 1 for o in self._gradients):
            _print_parts(trainer, sum(self._gradients.values(), Counter()))
            self._is_reported = True
        if trainer.global_step % self.every_n_steps == 0:
            for name, value in memory_numbers(trainer.world.device).items():
                trainer.log(f"{self.name}/{name}", value, weight=1.0, reduce="max")

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        # CUDA has a class of its own for it, the CPU and MPS raise a RuntimeError.
        words = ("can't allocate memory", "not enough memory", "MPS backend out of memory")
        is_told = isinstance(exc, RuntimeError) and any(word in str(exc) for word in words)
        if self._trainer is not None and (is_told or isinstance(exc, torch.OutOfMemoryError | MemoryError)):
            show(f"[rank {trainer.world.rank}] out of memory: see {self.snapshot()}", sys.stderr)

    def teardown(self, trainer: AbstractTrainer) -> None:
        if self.history and trainer.world.device.type == "cuda":
            record_memory_history(0)


def _bytes_of(values: Iterable[Any]) -> Bytes:
    """This rank's bytes of the tensors in `values`, however nested; each tensor counts once."""
    tensors = {id(leaf): leaf for value in values for leaf in leaves(value) if isinstance(leaf, Tensor)}
    n_bytes: Bytes = Counter()
    for tensor in tensors.values():
        n_bytes[tensor.dtype] += local_tensor(tensor).numel() * tensor.element_size()
    return n_bytes


def _print_parts(trainer: AbstractTrainer, gradients: Bytes) -> None:
    models, optimizers = trainer.named_models().values(), trainer.named_optimizers().values()
    parts = {
        "parameters": _bytes_of(tensor for model in models for tensor in (*model.parameters(), *model.buffers())),
        "gradients": gradients,
        "optimizer state": _bytes_of(state for optimizer in optimizers for state in optimizer.state.values()),
    }
    rows = []
    for part, n_bytes in parts.items():  # `2.00 GiB float32, 3.00 MiB bfloat16`
        kinds = [f"{format_bytes(n)} {str(dtype).removeprefix('torch.')}" for dtype, n in n_bytes.most_common() if n]
        rows.append((part, ", ".join(kinds) or "none"))
    world = trainer.world
    if world.device.type == "cuda" and world.parameter_device == world.device:
        rest = torch.cuda.max_memory_allocated(world.device) - sum(n_bytes.total() for n_bytes in parts.values())
        rows.append(("all else at the peak", format_bytes(rest)))
    print_table(f"memory of rank 0 by step {trainer.global_step}", ("part", "bytes"), rows)


def memory_numbers(device: torch.device) -> dict[str, float]:
    """This process's memory now, by the names that `Memory` logs; in GiB, except shares and counts."""
    numbers = {}
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            numbers["resident"] = int(statm.read().split()[1]) * resource.getpagesize() / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    numbers["peak_resident"] = peak * (1 if sys.platform == "darwin" else 1024) / GIB
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        numbers["peak_allocated"] = stats.get("allocated_bytes.all.peak", 0) / GIB
        numbers["peak_reserved"] = stats.get("reserved_bytes.all.peak", 0) / GIB
        numbers["fragmentation"] = stats.get("inactive_split_bytes.all.current", 0) / reserved if reserved else 0.0
        numbers["alloc_retries"] = float(stats.get("num_alloc_retries", 0))
    elif device.type == "mps":
        numbers["allocated"] = torch.mps.current_allocated_memory() / GIB
        numbers["reserved"] = torch.mps.driver_allocated_memory() / GIB
    return numbers


@dataclass(eq=False, repr=False)
class GarbageCollection(Callback):
    """Turns automatic garbage collection off while training and collects at chosen steps, the same on all ranks.

    Objects that exist when training starts, or that survive the first collection, are left out from then on
    (`gc.freeze`). When training ends, in any way, the collector's settings are restored.

    Args:
        every_n_steps: Optimizer steps between collections of the two young generations, which are quick; the first
            one of each `fit` is of everything.
        full_every_n_steps: Optimizer steps between collections of everything: only these free cycles that have lived
            long.
    """

    every_n_steps: PositiveInt = 50
    full_every_n_steps: PositiveInt = 1000

    def __post_init__(self) -> None:
        check_fields(self, GarbageCollection)
        self._turned_off = self._has_frozen = False

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        gc.collect()
        self._turned_off |= gc.isenabled()
        self._has_frozen |= gc.get_freeze_count() == 0
        gc.disable()
        gc.freeze()
        self._is_first = True

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        step = trainer.global_step
        if step % self.full_every_n_steps == 0:
            gc.collect()
        elif step % self.every_n_steps == 0 and self._is_first:
            gc.collect()
            gc.freeze()
            self._is_first = False
        elif step % self.every_n_steps == 0:
            gc.collect(1)

    def post_fit(self, trainer: AbstractTrainer) -> None:
        self._restore()

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._turned_off:
            gc.enable()
        self._turned_off = self._has_frozen = False
