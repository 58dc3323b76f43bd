"""How worker processes of a loader begin: surely, and signals to the whole job do not end them before it has saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from dream_trainer.compat.forked_start import sure_to_start
from dream_trainer.data.sampler import KeyedDataset
from dream_trainer.distributed.signals import TERMINATING, outlive_job, starting_workers


def as_it_is(batch: Any) -> Any:
    return batch


_OPTIONS = ("num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context", "timeout", "worker_init_fn")


def worker_options(loader: Any) -> dict[str, Any]:
    """A loader's worker options, as arguments of a DataLoader."""
    return {name: getattr(loader, name) for name in _OPTIONS}


def worker_loader(dataset: Any, loader: Any, generator: torch.Generator, **options: Any) -> DataLoader[Any]:
    """A torch DataLoader over `dataset`, which yields batches, with the worker options of `loader`."""
    return DataLoader(dataset, collate_fn=as_it_is, generator=generator, **worker_options(loader) | options)


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """A pass over the loader, whose workers outlive a signal to the whole job from their fork on."""
    with workers_start(loader):
        return iter(loader)


@contextmanager
def workers_start(loader: object, seed: int | None = None) -> Iterator[None]:
    """Workers that a torch `DataLoader` starts inside do start, outlive signals to the whole job, and have the seed."""
    if not isinstance(loader, DataLoader):
        yield
        return
    options: dict[str, Any] = {}
    with ExitStack() as stack:
        if loader.num_workers > 0:
            options["worker_init_fn"] = partial(begin_worker, loader.worker_init_fn)
            options["multiprocessing_context"] = sure_to_start(loader.multiprocessing_context)
            stack.enter_context(starting_workers())
        if seed is not None and loader.generator is None:
            options["generator"] = torch.Generator().manual_seed(seed)
        for name, value in options.items():
            stack.callback(setattr, loader, name, getattr(loader, name))
            setattr(loader, name, value)
        yield


def begin_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Makes `get_worker_info().dataset` the user's dataset again, then runs the user's `worker_init_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in TERMINATING:
        signal.signal(number, outlive_job)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, KeyedDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # a frozen dataclass
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def _end_with_parent() -> None:
    """Ends this process with its parent, whose connections it holds open: PyTorch's workers only look every 5 s."""
    parent = parent_process()
    if parent is not None and wait([parent.sentinel]):
        os._exit(1)
