"""Probe: a callback that records what a run computes, and what its objects keep in plain attributes."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date, timedelta
from enum import Enum
from functools import cache
from itertools import count
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from dream_trainer.compat.pytorch import ValueReads, local_tensor, steps_taken
from dream_trainer.data.lane_stream import StreamLoader
from dream_trainer.data.loader import DistributedDataLoader, loader_batch_size, training_loaders
from dream_trainer.distributed.seeds import hash_seed, seed_cpu
from dream_trainer.errors import is_own as is_own_file
from dream_trainer.events.callback import Callback
from dream_trainer.loggers.buffer import whole
from dream_trainer.nested import leaves
from dream_trainer.parallel.micro_batches import digest, rows_of
from dream_trainer.parallel.mixture_of_experts import MoE
from dream_trainer.parallel.sharding import names_in_whole
from dream_trainer.trainer.mixins.evaluation import EvalMixin
from dream_trainer.trainer.mixins.expert_parallel import ExpertParallelMixin

PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, PurePath, date, timedelta, np.generic, count)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DEEPEST = 6


def hashed(data: bytes | str) -> str:
    return xxhash.xxh3_64_hexdigest(data.encode() if isinstance(data, str) else data)


def is_own(kind: type) -> bool:
    return _is_own_file(vars(sys.modules.get(kind.__module__, object)).get("__file__"))


@cache
def _is_own_file(file: Any) -> bool:
    return isinstance(file, str) and file.startswith("/") and is_own_file(file)


class PlainState:
    """Reads the state again and again, and hashes large tensors only if they were written to."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}

    def read(self, trainer: Any) -> dict[str, Any]:
        """A digest, or one of each entry of a dict, by path."""
        self._found: dict[str, Any] = {}
        models, optimizers = trainer.named_models(), trainer.named_optimizers()
        kept = [*models.values(), *optimizers.values(), *trainer.named_schedulers().values(), trainer, trainer.config]
        # What the framework saves by itself.
        self._seen = {id(each) for each in (*kept, *trainer.named_metrics().values(), *trainer.callbacks)}
        kinds = type(trainer).__mro__
        ours = ("_runtime", *(f"_{kind.__name__}__" for kind in kinds if not is_own(kind)))
        of_torch = ("state", "param_groups", "defaults", "_optimizer_")
        owners: list[tuple[str, Any, tuple[str, ...]]] = [("self", trainer, ours)]
        owners += [(kind.__name__, kind, ("__",)) for kind in kinds]
        owners += [(type(each).__name__, each, ()) for each in trainer.callbacks]
        owners += [(f"self.{name}", optimizer, of_torch) for name, optimizer in optimizers.items()]
        for name, model in models.items():
            owners += [(path, module, ("_",)) for path, module in model.named_modules(prefix=f"self.{name}")]
        for path, owner, left_out in owners:
            if owner is trainer or is_own(owner if isinstance(owner, type) else type(owner)):
                self._walk_names(f"{path}.", vars(owner), int(owner is not trainer), left_out)
        for loader in (*training_loaders(trainer.train_dataloader).values(), *trainer.val_dataloaders.values()):
            self._walk("the loader", loader, 0)
        modules = {id(each): vars(each) for each in [*sys.modules.values()] if isinstance(each, ModuleType)}
        for names in modules.values():
            if _is_own_file(file := names.get("__file__", "")):
                self._walk_names(f"{Path(file).name} (global): ", names, 1, ("__",))
        return self._found

    def _walk_names(self, prefix: str, names: Mapping[str, Any], depth: int, left_out: tuple[str, ...] = ()) -> None:
        for name, value in [*names.items()]:
            if not name.startswith(left_out):
                self._walk(f"{prefix}{name}", value, depth)

    def _walk(self, path: str, value: Any, depth: int) -> None:
        if id(value) in self._seen or (depth == 0 and isinstance(value, nn.Module)):  # a model, or a dict of models
            return
        if isinstance(value, DataLoader | DistributedDataLoader | StreamLoader):
            for name in ("dataset", "source", "sampler", "batch_sampler", "generator", "collate_fn"):
                if (part := vars(value).get(name)) is not None:
                    self._walk(type(part).__name__, part, depth + 1)
        elif self._is_open(value):
            if depth < DEEPEST:
                self._seen.add(id(value))
                self._walk_names(f"{path}.", vars(value), depth + 1)
        elif isinstance(value, dict):
            entries = {self._text_of(k, 0): self._text_of(v, 0) for k, v in list(value.items())}
            self._found[path] = {str(k): v for k, v in entries.items() if k is not None}
        elif (text := self._text_of(value, 0)) is not None:
            self._found[path] = text

    def _is_open(self, value: Any) -> bool:
        """Whether its attributes are read one by one."""
        kind = type(value)
        is_object = not isinstance(value, (*PLAIN, *GENERATORS, type, nn.Module, Tensor)) and hasattr(value, "__dict__")
        return is_object and (is_own(kind) or kind.__module__.startswith("torch.utils.data"))

    def _text_of(self, value: Any, depth: int) -> str | None:
        """A text that is another one if the value is; None for what is no value, such as a function."""
        if depth > DEEPEST:
            return "..."
        if isinstance(value, PLAIN):
            return hashed(repr(value))
        if isinstance(value, Tensor):
            return self._text_of_tensor(value)
        if isinstance(value, np.ndarray):
            return repr(value.tolist()) if value.dtype == object else hashed(np.ascontiguousarray(value).tobytes())
        if isinstance(value, torch.Generator):
            return self._text_of_tensor(value.get_state())  # pickled it has the address of its state
        if isinstance(value, GENERATORS):
            return hashed(pickle.dumps(value))
        if isinstance(value, list | tuple | deque):
            if len(value) > 32 and {*map(type, value)} <= {int, float, str, bool}:
                return hashed(repr(value))
            return self._joined(value, depth)
        if isinstance(value, set | frozenset):
            return self._joined(sorted(map(repr, value)), depth)
        if isinstance(value, Mapping):
            return self._joined([part for item in list(value.items()) for part in item], depth)
        if isinstance(value, nn.Module):
            return self._joined([*value.state_dict().items()], depth)
        if self._is_open(value):
            return self._joined([*vars(value).items()], depth)
        return None

    def _joined(self, values: Iterable[Any], depth: int) -> str:
        return hashed(repr([self._text_of(value, depth + 1) for value in values]))

    def _text_of_tensor(self, tensor: Tensor) -> str | None:
        if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
            return None
        known, version, text = self._tensors.get(id(tensor), (None, 0, ""))
        if known is None or known() is not tensor or version != tensor._version or tensor.nbytes < 4096:
            text = f"{[*tensor.shape]} {digest(tensor)}"
            self._tensors[id(tensor)] = weakref.ref(tensor), tensor._version, text
        return text


SHOWN = 256  # elements of a tensor that are compared by value
NOISE = 16  # perturbation of weights, in units in the last place, to measure the effect of rounding
Values = dict[tuple[int, str, str], Any]  # what a run had, by step, stage and name


@dataclass(frozen=True)
class Summary:
    """A tensor: its bits as a digest, and some of its values."""

    digest: int
    values: Any = field(repr=False)


def summary(tensor: Tensor) -> Summary:
    global_tensor = whole(tensor.detach())
    flat = global_tensor.reshape(-1)
    places = torch.linspace(0, max(0, flat.numel() - 1), min(SHOWN, flat.numel())).long()
    values = torch.view_as_real(flat[places]) if flat.is_complex() else flat[places]
    return Summary(digest(global_tensor), values.double().numpy())


class Probe(Callback):
    """Records a run on this rank; `steps_file` gets a line at each step. `mode` has words: "noise" moves weights by
    rounding after each step, "still" keeps models in evaluation mode, with equal random numbers in micro-batches."""

    order = -1_000_000
    sees_shards = True

    def __init__(self, mode: str, stop_at: int | None, steps_file: Path, failed: Callable[[BaseException], None]):
        self.mode, self.stop_at, self._failed = mode, stop_at, failed
        self._values: Values = {}
        self.record: dict[str, Any] = {"values": self._values, "steps": {}, "validated": [], "is_random": False}
        # After which event an attribute, and a weight or buffer, was another one for the first time, and at which step.
        self.record |= {"changes": {}, "written": {}}
        self._state = PlainState()
        self._now: dict[str, dict[str, Any]] = {"changes": {}, "written": {}}
        self._step: dict[str, Any] = {}
        self._line = os.open(steps_file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._seconds, self._since = 0.0, time.process_time()  # of a step, without what is done here
        self._reads, self._counting = ValueReads(), ExitStack()

    # -- before training

    @override
    def post_setup(self, trainer: Any) -> None:
        self._mark(trainer, "")
        built = {name: summary(p) for name, p in _parameters(trainer)}
        self._values[0, "order", "parameters"] = ", ".join(built)
        self._note(0, "initial weights", built)

    @override
    def pre_fit(self, trainer: Any) -> None:
        self.record |= {"facts": _facts(trainer), "begins": trainer.global_step}
        self._mark(trainer, "pre_fit")
        self.record["start"] = self._now["changes"]
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
            self._step = {"samples": {}, "gradients": {}, "results": [], "seconds_inside": 0.0}
        self._mark(trainer, "pre_train_batch")
        rows = rows_of(batch)
        alike = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == rows]
        samples = tuple(digest([tensor[row] for tensor in alike]) for row in range(rows))
        self._step["samples"][f"micro-batch {len(self._step['samples'])}"] = samples
        if "still" in self.mode:
            for model in trainer.named_models().values():
                model.eval()
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
        self.record["is_random"] |= _random() != self._random
        numbers = {n: v for n, v in result.items() if type(v) in (float, Tensor) and torch.as_tensor(v).numel() == 1}
        self._step["results"].append({name: float(value) for name, value in numbers.items()})
        self._mark(trainer, "training_step")
        self._since = time.process_time()

    @override
    def pre_optimizer_step(self, trainer: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self._stop_clock()
        for owner, name, parameter in _optimized(trainer):
            if owner is optimizer and parameter.grad is not None and name not in self._step["gradients"]:
                self._step["gradients"][name] = summary(parameter.grad)
        self._since = time.process_time()

    @override
    def post_train_step(self, trainer: Any) -> None:
        self._stop_clock()
        step, found = trainer.global_step, self._step
        os.write(self._line, b"step\n")
        self._mark(trainer, "post_train_step")
        for stage in ("samples", "gradients"):
            self._note(step, stage, found.pop(stage))
        self.record["steps"][step], self._step = found | {"seconds": self._seconds}, {}
        for name, optimizer in trainer.named_optimizers().items():
            rates = {f"{name}, group {n}": float(group["lr"]) for n, group in enumerate(optimizer.param_groups)}
            self._note(step, "rates", rates)
        self._note(step, "trained", {name: p.requires_grad for name, p in _parameters(trainer)})
        self._note(step, "weights", {name: summary(p) for name, p in _parameters(trainer)})
        self._note(step, "buffers", {name: summary(buffer) for name, buffer in _buffers(trainer)})
        for optimizer, name, parameter in _optimized(trainer):
            state = optimizer.state.get(parameter, {}).items()
            self._note(step, "optimizer", {f"{name}.{k}": summary(v) for k, v in state if isinstance(v, Tensor)})
        self._move(trainer)
        if step == self.stop_at:
            trainer.request_stop("check")
        self._seconds, self._since = 0.0, time.process_time()

    # -- validation

    @override
    def pre_val_epoch(self, trainer: Any) -> None:
        self._mark(trainer, "pre_val_epoch")

    @override
    def post_val_batch(self, trainer: Any, result: dict[str, Any], batch_idx: int) -> None:
        os.write(self._line, b"validation\n")
        self._mark(trainer, "validation_step")

    @override
    def post_val_epoch(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.record["validated"] += [] if trainer.is_evaluating else [trainer.global_step]
        self.record["metrics"] = dict(metrics)
        self._mark(trainer, "post_val_epoch")
        self._seconds, self._since = 0.0, time.process_time()  # it is no part of the next step

    @override
    def post_epoch(self, trainer: Any) -> None:
        self._mark(trainer, "post_epoch")

    @override
    def on_log(self, trainer: Any, metrics: dict[str, float], step: int) -> None:
        self._note(step, "logged", metrics)

    @override
    def on_exception(self, trainer: Any, exc: BaseException) -> None:
        self._failed(exc)

    @override
    def post_fit(self, trainer: Any) -> None:
        self.record["reads"] = self._reads.count
        self.record["schedules"] = {
            name: (steps_taken(scheduler), trainer.times_stepped(scheduler), trainer.times_stepped(scheduler.optimizer))
            for name, scheduler in trainer.named_schedulers().items()
        }
        self.record["turns"] = {n: trainer.times_stepped(each) for n, each in trainer.named_optimizers().items()}
        self._mark(trainer, "post_fit")
        self.record["end"] = self._now["changes"]

    # -- ours

    def _stop_clock(self) -> None:
        self._seconds += time.process_time() - self._since

    def _note(self, step: int, stage: str, values: Mapping[str, Any]) -> None:
        self._values |= {(step, stage, name): value for name, value in values.items()}

    def _mark(self, trainer: Any, event: str) -> None:
        """Notes what has changed since the last event, but for those of `evaluate`."""
        if trainer.is_evaluating:
            return
        tensors = (*_parameters(trainer), *_buffers(trainer))
        written = {name: digest(local_tensor(tensor)) for name, tensor in tensors}  # of this rank's parts
        before, self._now = self._now, {"changes": self._state.read(trainer), "written": written}
        for kind in self._now if event else ():
            for path, value in self._now[kind].items():
                if before[kind].get(path) != value:
                    self.record[kind].setdefault(path, {}).setdefault(event, trainer.global_step)

    @torch.no_grad()
    def _move(self, trainer: Any) -> None:
        """Moves weights as rounding does, and a little more."""
        if "noise" not in self.mode:
            return
        for _, parameter in _parameters(trainer):
            if parameter.requires_grad and parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=self._generator) * 2.0 - 1
                parameter.mul_(1 + NOISE * torch.finfo(parameter.dtype).eps * signs.to(parameter.dtype))


def _parameters(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    for model_name, model in trainer.named_models().items():
        names = names_in_whole(model)
        for name, parameter in model.named_parameters():
            yield f"{model_name}.{names[name][0] if name in names else name}", parameter


def _buffers(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """Those that ranks are to have alike."""
    as_it_is = [re.compile(pattern) for pattern, policy in trainer.buffer_policies().items() if policy == "as is"]
    for model_name, model in trainer.named_models().items():
        for name, buffer in model.named_buffers():
            if not any(pattern.search(f"{model_name}.{name}") for pattern in as_it_is):
                yield f"{model_name}.{name}", buffer


def _optimized(trainer: Any) -> Iterator[tuple[Optimizer, str, Tensor]]:
    names = {id(parameter): name for name, parameter in _parameters(trainer)}
    for owner, optimizer in trainer.named_optimizers().items():
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            yield optimizer, names.get(id(parameter), f"self.{owner}, parameter {number}"), parameter


def _random() -> Any:
    state, pythons = random.getstate(), random.Random()
    pythons.setstate(state)  # one stream has several states, so its next words are compared
    return (
        torch.get_rng_state().numpy().tobytes(),
        pythons.getrandbits(32 * 624),
        state[-1],
        str(np.random.get_state(legacy=False)),
    )


def _facts(trainer: Any) -> dict[str, Any]:
    """What decides which runs make sense, and where the user's methods are."""
    kind = type(trainer)
    codes = {n: inspect.unwrap(f).__code__ for n, f in inspect.getmembers_static(kind, inspect.isfunction)}
    own = {name: code for name, code in codes.items() if _is_own_file(code.co_filename)}
    dataset = getattr(trainer.train_dataloader, "dataset", None)  # of a loader of any library
    modules = (module for model in trainer.named_models().values() for module in model.modules())
    return {
        "class": kind.__name__,
        "hooks": {name: f"{Path(code.co_filename).name}:{code.co_firstlineno}" for name, code in own.items()},
        "dataset": "the training loader" if dataset is None else type(dataset).__name__,
        "batch_size": loader_batch_size(trainer.train_dataloader),
        "accumulation": trainer.accumulation_steps,
        "steps_per_pass": trainer.steps_per_pass,
        "shards": kind._shards_parameters,
        "saves": kind._saves_checkpoints,
        "ranks": kind._keeps_ranks_equal,
        "evaluates": issubclass(kind, EvalMixin),
        "experts": issubclass(kind, ExpertParallelMixin) and any(isinstance(module, MoE) for module in modules),
        "total_steps": trainer.total_steps,
        "val_batches": sum(len(each) for each in trainer.val_dataloaders.values() if isinstance(each, Sized)),
    }
