"""Probe: a callback that records what a run computes, step by step."""

from __future__ import annotations

import inspect
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from dream_trainer.compat.pytorch import ValueReads, steps_taken
from dream_trainer.data.stream import loader_batch_size
from dream_trainer.distributed.seeds import hash_seed, seed_cpu
from dream_trainer.events.callback import Callback
from dream_trainer.nested import leaves
from dream_trainer.parallel.sharding import names_in_whole
from dream_trainer.testing.plain_state import PlainState, hashed, tensor_bytes

SHOWN = 256
"""Elements of a tensor that are compared by value."""
NOISE = 16
"""Perturbation of weights, in units in the last place, to measure the effect of rounding."""
_NOTHING = np.zeros(0)


class Summary(NamedTuple):
    """A tensor: its bits as a digest, and some of its values."""

    digest: str
    values: Any


def summary(tensor: Tensor) -> Summary:
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    flat = whole.reshape(-1)
    places = torch.linspace(0, max(0, flat.numel() - 1), min(SHOWN, flat.numel())).long()
    values = flat[places] if flat.numel() else flat
    return Summary(hashed(tensor_bytes(whole)), values.double().numpy() if not values.is_complex() else _NOTHING)


class Probe(Callback):
    """Records a run on this rank.

    Args:
        mode: Words. "noise" moves weights by rounding after each step. "still" keeps models in evaluation mode.
            "seeded" gives each micro-batch of a step the same random numbers.
        stop_at: Step after which the run is asked to stop.
        steps_file: A file that gets a line at each step.
        failed: Called with an error that ends the run.
    """

    order = -1_000_000
    sees_shards = True

    def __init__(
        self, mode: str, stop_at: int | None, steps_file: Path, failed: Callable[[BaseException], None]
    ) -> None:
        self._failed = failed
        self.mode, self.stop_at = mode, stop_at
        self.record: dict[str, Any] = {"steps": {}, "logged": {}, "validated": [], "changes": {}, "in_validation": {}}
        self.record["staged"] = False
        self._state = PlainState()
        self._now: dict[str, Any] = {}
        self._step: dict[str, Any] = {}
        self._line = os.open(steps_file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._seconds = 0.0  # of a step, without what is done here
        self._since = time.process_time()
        self._reads, self._counting = ValueReads(), ExitStack()

    # -- before training

    @override
    def post_setup(self, trainer: Any) -> None:
        self._now = self._state.read(trainer)
        self.record["built"] = {name: summary(p) for name, p in _parameters(trainer)}

    @override
    def pre_fit(self, trainer: Any) -> None:
        self.record["facts"] = _facts(trainer)
        self.record["begins"] = trainer.global_step
        self._mark(trainer, "pre_fit")
        self.record["start"] = self._now
        self._left = self._weights(trainer)
        self._generator = torch.Generator().manual_seed(0)
        self._move(trainer)

    # -- steps

    @override
    def pre_epoch(self, trainer: Any) -> None:
        self._mark(trainer, "pre_epoch")

    @override
    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        self._stop_clock()
        os.write(self._line, b"batch\n")
        is_counted = trainer.global_step < 2  # a later step is as the second one
        if not self._step:
            self._reads.count = 0 if is_counted else self._reads.count
            weights = self._weights(trainer)
            moved = [name for name, digest in weights.items() if self._left.get(name, digest) != digest]
            self._step = {"samples": {}, "results": [], "gradients": {}, "is_random": False, "moved": moved}
            self._step["seconds_inside"] = 0.0
        self._mark(trainer, "pre_train_batch")
        self._step["samples"][f"micro-batch {len(self._step['samples'])}"] = tuple(_samples(batch))
        if "still" in self.mode:
            for model in trainer.named_models().values():
                model.eval()
        if "seeded" in self.mode:
            seed_cpu(hash_seed(b"check", trainer.global_step + 1))
        self._random = _random()
        if is_counted:
            self._counting.enter_context(self._reads)
        self._step["seconds_inside"] -= self._seconds
        self._since = time.process_time()

    @override
    def post_train_batch(self, trainer: Any, result: dict[str, Any], batch_idx: int) -> None:
        self._stop_clock()
        self._counting.close()
        self._step["seconds_inside"] += self._seconds
        self._step["is_random"] |= _random() != self._random
        values = {name: _number(value) for name, value in result.items()}
        self._step["results"].append({name: value for name, value in values.items() if value is not None})
        self._mark(trainer, "training_step")
        self._since = time.process_time()

    @override
    def pre_optimizer_step(self, trainer: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self._stop_clock()
        names = {id(p): name for name, p in _parameters(trainer)}
        owner = next(name for name, each in trainer.named_optimizers().items() if each is optimizer)
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter), f"self.{owner}, parameter {number}")
            if parameter.grad is not None and name not in self._step["gradients"]:
                self._step["gradients"][name] = summary(parameter.grad)
        self._since = time.process_time()

    @override
    def post_train_step(self, trainer: Any) -> None:
        self._stop_clock()
        step = trainer.global_step
        os.write(self._line, f"{step}\n".encode())
        self._mark(trainer, "post_train_step")
        self.record["steps"][step], self._step = self._step, {}
        self.record["steps"][step] |= {
            "seconds": self._seconds,
            "rates": _rates(trainer),
            "trained": {name: p.requires_grad for name, p in _parameters(trainer)},
            "weights": {name: summary(p) for name, p in _parameters(trainer)},
            "optimizer": dict(_optimizer_state(trainer)),
            "buffers": {name: summary(buffer) for name, buffer in _buffers(trainer)},
        }
        self._left = self._weights(trainer)
        self._move(trainer)
        if step == self.stop_at:
            trainer.request_stop("check")
        self._seconds, self._since = 0.0, time.process_time()

    # -- validation

    @override
    def pre_val_epoch(self, trainer: Any) -> None:
        if not trainer.is_evaluating:
            self._mark(trainer, "pre_val_epoch")
            self._before = self._values(trainer)

    @override
    def post_val_batch(self, trainer: Any, result: dict[str, Any], batch_idx: int) -> None:
        os.write(self._line, b"validation\n")
        if not trainer.is_evaluating:
            for name, digest in self._values(trainer).items():
                if self._before.get(name, digest) != digest:
                    self.record["in_validation"].setdefault(name, trainer.global_step)
            self._mark(trainer, "validation_step")

    @override
    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        if not trainer.is_evaluating:
            self.record["validated"].append(trainer.global_step)
            self._mark(trainer, "post_val_epoch")

    @override
    def post_epoch(self, trainer: Any) -> None:
        self._mark(trainer, "post_epoch")

    @override
    def on_log(self, trainer: Any, metrics: dict[str, float], step: int) -> None:
        self.record["logged"] |= {(step, name): value for name, value in metrics.items()}

    @override
    def on_exception(self, trainer: Any, exc: BaseException) -> None:
        self._failed(exc)

    @override
    def post_fit(self, trainer: Any) -> None:
        self.finish(trainer)

    def finish(self, trainer: Any) -> None:
        """Takes the state at the run's end, also of one that a signal ends."""
        self.record |= {"reads": self._reads.count, "ends": trainer.global_step}
        self.record["schedules"] = {
            name: (steps_taken(scheduler), trainer.times_stepped(scheduler), trainer.times_stepped(scheduler.optimizer))
            for name, scheduler in trainer.named_schedulers().items()
        }
        self.record["turns"] = {n: trainer.times_stepped(each) for n, each in trainer.named_optimizers().items()}
        self._mark(trainer, "post_fit")
        self.record["end"] = self._now

    # -- ours

    def _stop_clock(self) -> None:
        self._seconds += time.process_time() - self._since

    def _mark(self, trainer: Any, event: str) -> None:
        """Notes which attributes have changed since the last event."""
        before, self._now = self._now, self._state.read(trainer)
        for path, digest in self._now.items():
            if before.get(path) != digest:
                self.record["changes"].setdefault(path, {}).setdefault(event, trainer.global_step)

    def _weights(self, trainer: Any) -> dict[str, str]:
        return {name: summary(parameter).digest for name, parameter in _parameters(trainer)}

    def _values(self, trainer: Any) -> dict[str, str]:
        return self._weights(trainer) | {name: summary(buffer).digest for name, buffer in _buffers(trainer)}

    @torch.no_grad()
    def _move(self, trainer: Any) -> None:
        """Moves weights as rounding does, and a little more."""
        for _, parameter in _parameters(trainer) if "noise" in self.mode else ():
            if parameter.requires_grad and parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=self._generator) * 2.0 - 1
                parameter.mul_(1 + NOISE * torch.finfo(parameter.dtype).eps * signs.to(parameter.dtype))


def _parameters(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    for model_name, model in trainer.named_models().items():
        whole = names_in_whole(model)
        for name, parameter in model.named_parameters():
            yield f"{model_name}.{whole[name][0] if name in whole else name}", parameter


def _buffers(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """Those that ranks are to have alike."""
    as_it_is = [re.compile(pattern) for pattern, policy in trainer.buffer_policies().items() if policy == "as is"]
    for model_name, model in trainer.named_models().items():
        for name, buffer in model.named_buffers():
            if not any(pattern.search(f"{model_name}.{name}") for pattern in as_it_is):
                yield f"{model_name}.{name}", buffer


def _optimizer_state(trainer: Any) -> Iterator[tuple[str, Summary]]:
    names = {id(parameter): name for name, parameter in _parameters(trainer)}
    for owner, optimizer in trainer.named_optimizers().items():
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{owner}: {names.get(id(parameter), number)}.{key}", summary(value)


def _rates(trainer: Any) -> dict[str, float]:
    return {
        f"{name}, group {number}": float(group["lr"])
        for name, optimizer in trainer.named_optimizers().items()
        for number, group in enumerate(optimizer.param_groups)
    }


def _samples(batch: Any) -> Iterator[str]:
    """A digest of each sample of a batch: of the rows of all tensors with the same number of rows as the first."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = len(tensors[0]) if tensors else 0
    alike = [tensor for tensor in tensors if len(tensor) == rows]
    for row in range(rows):
        yield hashed(b"".join(bytes(tensor_bytes(tensor[row])) for tensor in alike))


def _random() -> Any:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state(legacy=False))


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.full_tensor() if isinstance(value, DTensor) else value)
    return float(value) if isinstance(value, int | float) else None


def _facts(trainer: Any) -> dict[str, Any]:
    """What decides which runs make sense, and where the user's methods are."""
    kind = type(trainer)
    hooks: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        for name, method in vars(part).items():
            hooks.pop(name, None)
            if inspect.isfunction(method) and PlainState().is_own(part):
                code = inspect.unwrap(method).__code__
                hooks[name] = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    dataset = getattr(trainer.train_dataloader, "dataset", None)  # of a loader of any library
    return {
        "class": kind.__name__,
        "hooks": hooks,
        "dataset": "the training loader" if dataset is None else type(dataset).__name__,
        "batch_size": loader_batch_size(trainer.train_dataloader),
        "accumulation": trainer.accumulation_steps,
        "steps_per_pass": trainer.steps_per_pass,
        "shards": kind._shards_parameters,
        "saves": kind._saves_checkpoints,
        "ranks": kind._keeps_ranks_equal,
        "tensor": "apply_tensor_parallel" in hooks,
        "context": "cut_batch" in hooks,
        "total_steps": trainer.total_steps,
        "val_batches": sum(len(each) for each in trainer.val_dataloaders.values() if isinstance(each, Sized)),
    }
