"""What a test may change in the process of a rank that serves others after it: put back, or the rank ends."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo import convert_frame
from torch.nn.modules import module as nn_module

# Whose functions, classes and methods tests replace.
PATCHED = {
    *("builtins", "gc", "os", "random", "shutil", "signal", "socket", "tempfile", "threading", "time"),
    *("torch", "torch.autograd", "torch.cuda", "torch.distributed", "torch.distributed.checkpoint"),
    *("torch.distributed.distributed_c10d", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor", "torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.optim"),
    *("torch.utils.checkpoint", "torch.utils.data"),
}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
PLAIN = (bool, int, float, str, types.NoneType)
# They only grow: classes made of others, and what stands in for generators.
CACHES = {"_classes", "_stand_ins"}


class StateOfRank:
    """The state of this process at the moment when it is made."""

    def __init__(self) -> None:
        self._names: dict[str, list[tuple[Any, str, Any]]] = {}
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._states: list[Any] = []  # of a process, each in one object, which has nothing of its own yet
        self._containers: list[tuple[str, Any, int]] = []
        self._learn_modules()
        self._threads = set(threading.enumerate())
        self._settings = _settings()
        self._signals = [(number, signal.getsignal(number)) for number in SIGNALS]
        self._loggers = [(log, log.level, log.propagate, list(log.handlers)) for log in _loggers()]
        self._filters, self._path, self._umask = list(warnings.filters), list(sys.path), _umask()
        self._hooks = (sys.excepthook, threading.excepthook)
        self._torch_state, self._numpy_state = torch.get_rng_state(), np.random.get_state()

    def restore(self) -> bool:
        """Puts back what can be; whether all is as it was."""
        if self._has_changed():
            return False
        for names, name, value in self._plain:
            names[name] = value
        for state in self._states:
            vars(state).clear()
        for number, handler in self._signals:
            signal.signal(number, handler)
        for log, log.level, log.propagate, handlers in self._loggers:
            log.handlers[:] = handlers
        warnings.filters[:], sys.path[:] = self._filters, self._path  # type: ignore[index]
        sys.excepthook, threading.excepthook = self._hooks  # a process group sets the first
        torch.set_rng_state(self._torch_state)
        np.random.set_state(self._numpy_state)
        random.seed()
        os.umask(self._umask)
        for name in [name for name in sys.modules if name.split(".")[0] == "tests" and name not in OWN]:
            del sys.modules[name]  # with what they have collected
        gc.collect()
        self._learn_modules()
        return True

    def _has_changed(self) -> bool:
        return (
            dist.is_initialized()
            or bool(multiprocessing.active_children())
            or any(thread not in self._threads for thread in threading.enumerate())
            or _settings() != self._settings
            or any(_is_replaced(*each) for owner in self._names.values() for each in owner)
            or any(len(container) != length for name, container, length in self._containers if name not in CACHES)
        )

    def _learn_modules(self) -> None:
        for name in [name for name in sys.modules if name in PATCHED or name.split(".")[0] == "dream_trainer"]:
            if name not in self._names:
                self._names[name] = list(_callables(sys.modules[name]))
                if name.startswith("dream_trainer"):
                    self._learn_values(vars(sys.modules[name]))

    def _learn_values(self, names: dict[str, Any]) -> None:
        for name, value in names.items():
            if name.startswith("__"):
                continue
            if isinstance(value, PLAIN):
                self._plain.append((names, name, value))
            elif type(value) in (dict, list, set):
                self._containers.append((name, value, len(value)))
            elif type(value).__module__ == names["__name__"] and getattr(value, "__dict__", None) == {}:
                self._states.append(value)


def _callables(module: Any) -> Iterator[tuple[Any, str, Any]]:
    for name, value in list(vars(module).items()):
        if issubclass(type(value), CALLABLE):
            yield vars(module), name, value
        if issubclass(type(value), type) and _is_of(module.__name__, value.__module__):
            for attribute, of_class in list(vars(value).items()):
                if isinstance(of_class, (*CALLABLE, *PLAIN)) and not attribute.startswith("_abc"):
                    yield vars(value), attribute, of_class


def _is_replaced(names: Any, name: str, value: Any) -> bool:
    found = names.get(name)
    return found is not value and not getattr(found, "hooked", False)  # an optimizer's first object wraps its `step`


def _is_of(module: str, home: str) -> bool:
    """Whether a class that `module` names is the module's; PyTorch's packages name those of their files."""
    return home.startswith(module) if module in PATCHED else home == module


def torch_settings() -> dict[str, object]:
    """The global settings that a test may change by PyTorch's own functions."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "grad enabled": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def _settings() -> tuple[object, ...]:
    return (
        *torch_settings().values(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        convert_frame.FRAME_COUNTER,  # a rank that has compiled does not serve again
        *(len(hooks) for name, hooks in vars(nn_module).items() if name.startswith("_global") and "hooks" in name),
        *(len(vars(base)) for base in (torch.Tensor, torch.nn.Module)),  # what hides a method of a base is new there
        gc.isenabled(),
        gc.get_threshold(),
    )


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in (None, "dream_trainer", "torch")]


def _umask() -> int:
    os.umask(now := os.umask(0o022))
    return now


OWN = {"tests", "tests.worlds", "tests.kept_ranks", "tests.preloaded"}
