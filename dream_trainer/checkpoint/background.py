"""A thread that writes, and copies of the snapshot in the host's memory: training continues during a save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dream_trainer.compat.pytorch import local_tensor, with_local

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a task in a thread that ends with the task. The interpreter waits for it before it exits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: Future[T] | None = None

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def has_failed(self) -> bool:
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def start(self, task: Callable[[], T]) -> None:
        """Starts `task`. The last one's outcome must have been collected."""
        if self._running is not None:
            raise RuntimeError(f"{self._name}: a task is running, or its outcome was not collected.")
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._running = thread.submit(task)
        thread.shutdown(wait=False)

    def collect(self) -> T | None:
        """Waits for the task and returns what it returned, or raises what it raised; None if there is none."""
        if self._running is None:
            return None
        wait([self._running])
        ended, self._running = self._running, None
        return ended.result()


_WITH_STREAMS = ("cuda", "xpu")


class HostCopies:
    """Memory of the host that every save reuses, one snapshot at a time. On devices copies have their own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self._stream = torch.Stream(device) if device.type in _WITH_STREAMS else None
        self._copied: torch.Event | None = None
        self._delays_update: torch.Event | None = None  # the same, until an update has waited for it

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates memory for tensors of these shapes, so that the first save takes no longer than later ones."""
        for name, tensor in tensors.items():
            self._memory_for(name, local_tensor(tensor)).zero_()

    def copy(self, tensors: Mapping[str, Tensor], *, at_once: Collection[str]) -> dict[str, Tensor]:
        """Copies this rank's part of `tensors`. Until `wait_before_update` nothing may change the originals; those in
        `at_once`, which a forward may change, are copied in order with the device's other work."""
        later = [name for name, tensor in tensors.items() if tensor.device == self._device and name not in at_once]
        copies: dict[str, Tensor] = {}
        for name in tensors if self._stream is None else tensors.keys() - later:
            copies[name] = self._copy(name, tensors[name], non_blocking=self._stream is not None)
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                for name in later:
                    copies[name] = self._copy(name, tensors[name], non_blocking=True)
                self._copied = self._delays_update = self._stream.record_event()
        return copies

    def wait_before_update(self) -> None:
        """Right before parameters change in place: the device first finishes copying them. The host does not wait."""
        copied, self._delays_update = self._delays_update, None
        if copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, name: str, tensor: Tensor, *, non_blocking: bool) -> Tensor:
        local = local_tensor(tensor).detach()
        copy = self._memory_for(name, local)
        copy.copy_(local, non_blocking=non_blocking)
        return with_local(tensor, copy)

    def _memory_for(self, name: str, local: Tensor) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.shape != local.shape or memory.dtype != local.dtype:
            memory = torch.empty(
                local.shape, dtype=local.dtype, device="cpu", pin_memory=local.device.type in _WITH_STREAMS
            )
            self._memory[name] = memory
        return memory
