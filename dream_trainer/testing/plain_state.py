"""Values that a trainer, its callbacks, data and modules keep in plain attributes, as digests by where they are."""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, timedelta
from enum import Enum
from itertools import count
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dream_trainer.data.lane_stream import StreamLoader
from dream_trainer.data.loader import DistributedDataLoader, training_loaders
from dream_trainer.users_code import is_own

PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, PurePath, date, timedelta, np.generic, count)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DEEPEST = 6
_OF_MODULES = frozenset(vars(nn.Module()))


def hashed(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def tensor_bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class PlainState:
    """Reads the state again and again, and hashes large tensors only if they were written to."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}
        self._is_own: dict[type, bool] = {}
        self._n_modules, self._modules = 0, list[tuple[str, dict[str, Any]]]()

    def read(self, trainer: Any) -> dict[str, Any]:
        """A digest, or one of each entry of a dict, by path."""
        self._found: dict[str, Any] = {}
        models, optimizers = trainer.named_models(), trainer.named_optimizers()
        kept = [*models.values(), *optimizers.values(), *trainer.named_schedulers().values(), trainer, trainer.config]
        # What the framework saves by itself.
        self._seen = {id(each) for each in (*kept, *trainer.named_metrics().values(), *trainer.callbacks)}
        for name, value in vars(trainer).items():
            if not name.startswith("_") or not self._is_ours(name, trainer):
                self._walk(f"self.{name}", value, 0)
        for kind in type(trainer).__mro__:
            if self.is_own(kind):
                self._walk_names(kind.__name__, _data(vars(kind)))
        for callback in trainer.callbacks:
            if self.is_own(type(callback)):
                self._walk_names(type(callback).__name__, vars(callback).items())
        for name, optimizer in optimizers.items():
            if self.is_own(type(optimizer)):
                own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "defaults")}
                self._walk_names(f"self.{name}", ((k, v) for k, v in own.items() if "hook" not in k))
        for name, model in models.items():
            for path, module in model.named_modules():
                if self.is_own(type(module)):
                    own = {k: v for k, v in vars(module).items() if k not in _OF_MODULES and not k.startswith("_")}
                    self._walk_names(f"self.{name}.{path}".rstrip("."), own.items())
        for loader in (*training_loaders(trainer.train_dataloader).values(), *trainer.val_dataloaders.values()):
            self._walk("the loader", loader, 0)
        for file, names in self._own_modules():
            self._walk_names(f"{file.rpartition('/')[2]} (global)", _data(names), ": ")
        return self._found

    def _own_modules(self) -> list[tuple[str, dict[str, Any]]]:
        if len(sys.modules) != self._n_modules:
            self._n_modules = len(sys.modules)
            files = {id(m): (f, vars(m)) for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
            self._modules = [each for each in files.values() if _is_own_file(str(each[0]))]
        return self._modules

    def is_own(self, kind: type) -> bool:
        """Whether a class is of the user's program."""
        if kind not in self._is_own:
            file = vars(sys.modules.get(kind.__module__, object)).get("__file__")
            self._is_own[kind] = isinstance(file, str) and _is_own_file(file)
        return self._is_own[kind]

    def _is_ours(self, name: str, trainer: Any) -> bool:
        return name == "_runtime" or any(
            name.startswith(f"_{kind.__name__}__") for kind in type(trainer).__mro__ if not self.is_own(kind)
        )

    def _walk_names(self, path: str, names: Iterable[tuple[str, Any]], dot: str = ".", depth: int = 1) -> None:
        for name, value in list(names):
            self._walk(f"{path}{dot}{name}", value, depth)

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
                self._walk_names(path, vars(value).items(), depth=depth + 1)
        elif isinstance(value, dict):
            entries = {self.digest(k, 0): self.digest(v, 0) for k, v in list(value.items())}
            self._found[path] = {str(k): v for k, v in entries.items() if k is not None}
        elif (digest := self.digest(value, 0)) is not None:
            self._found[path] = digest

    def _is_open(self, value: Any) -> bool:
        """Whether its attributes are read one by one."""
        kind = type(value)
        of_data = kind.__module__.startswith("torch.utils.data")
        is_object = not isinstance(value, (*PLAIN, *GENERATORS, type, nn.Module, Tensor)) and hasattr(value, "__dict__")
        is_function = kind.__module__ in ("builtins", "functools") or isinstance(value, torch.jit.ScriptFunction)
        return is_object and not is_function and (of_data or self.is_own(kind))

    def digest(self, value: Any, depth: int) -> str | None:
        """A text that is another one if the value is; None for what is no value, such as a function."""
        if depth > DEEPEST:
            return "..."
        if isinstance(value, PLAIN):
            text = repr(value)
            return text if len(text) < 80 else hashed(text.encode())
        if isinstance(value, Tensor):
            return self._digest_of_tensor(value)
        if isinstance(value, np.ndarray):
            return repr(value.tolist()) if value.dtype == object else hashed(np.ascontiguousarray(value).tobytes())
        if isinstance(value, GENERATORS):
            return hashed(pickle.dumps(value))
        if isinstance(value, list | tuple | deque):
            if len(value) > 32 and {*map(type, value)} <= {int, float, str, bool}:
                return hashed(repr(value).encode())
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
        texts = [self.digest(value, depth + 1) or "" for value in values]
        text = f"[{', '.join(texts)}]"
        return text if len(text) < 80 else hashed(text.encode())

    def _digest_of_tensor(self, tensor: Tensor) -> str | None:
        if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
            return None
        known, version, digest = self._tensors.get(id(tensor), (None, 0, ""))
        if known is None or known() is not tensor or version != tensor._version or tensor.nbytes < 4096:
            digest = f"{[*tensor.shape]} {hashed(tensor_bytes(tensor))}"
            self._tensors[id(tensor)] = weakref.ref(tensor), tensor._version, digest
        return digest


def _data(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if not name.startswith("__") and not isinstance(value, type | staticmethod | classmethod | property):
            yield name, value


def _is_own_file(file: str) -> bool:
    return file.startswith("/") and is_own(file)
