"""Activation checkpointing in place: a module's forward is run again in backward instead of keeping what it computed.

Non-reentrant checkpointing as in `torch.utils.checkpoint`; the selective form keeps the outputs of the operations that
are expensive to compute (Korthikanti et al., 2022, arXiv:2205.05198, at the level of operations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dream_trainer.compat.generator_bytes import PythonState, python_state, set_python_state
from dream_trainer.compat.operations import operation
from dream_trainer.compat.pytorch import function_modes
from dream_trainer.modules.class_change import Changed, change_class
from dream_trainer.modules.mixture_of_experts import MoE


class Recomputed(Changed):
    """Keeps the inputs of its forward, and computes the rest again in backward."""

    _contexts: Any = None  # makes the pair of contexts of selective checkpointing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, checkpointed where a backward can follow."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if self._contexts is not None:
            kwargs["context_fn"] = self._contexts
        # A compiled one is traced once for both runs.
        forward = super().forward if torch.compiler.is_compiling() else as_frozen_as_now(super().forward, self)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def as_frozen_as_now(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """`forward`, whenever it runs, with the parameters of `module` as frozen as they are now.

    A loss may be computed while a model is `frozen` and go backward afterwards: what is computed again there would give
    it gradients, and would not fit what the first run kept. Batch norm's statistics move, and experts' tokens are
    counted, in the first run alone.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    modes = function_modes()  # backward runs without
    python = python_state()  # of torch's it is kept already
    has_run = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        changed = [(parameter, required) for parameter, required in flags if parameter.requires_grad is not required]
        for parameter, required in changed:
            parameter.requires_grad_(required)
        again = _again(module, modes, python) if has_run else nullcontext()
        has_run = True
        try:
            with again:
                return forward(*args, **kwargs)
        finally:
            for parameter, required in changed:
                parameter.requires_grad_(not required)

    return run


@contextmanager
def _again(module: nn.Module, modes: Sequence[Any], python: PythonState) -> Iterator[None]:
    """What the second run is in: the modes of the first that are not on, as in a backward, where none are; and Python's
    random numbers of the first, such as skip whole layers.
    """
    before = python_state()
    set_python_state(python)
    try:
        with counts_at_rest(module), ExitStack() as stack:
            for mode in modes[len(function_modes()) :]:
                stack.enter_context(mode)
            yield
    finally:
        set_python_state(before)


@contextmanager
def counts_at_rest(module: nn.Module) -> Iterator[None]:
    """Inside, a forward of `module` leaves batch norms' statistics and experts' counts as they are."""
    norms = [part for part in module.modules() if isinstance(part, _NORMS)]
    mixtures = [part for part in module.modules() if isinstance(part, MoE)]
    with statistics_at_rest(norms), loads_at_rest(mixtures):
        yield


_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@contextmanager
def statistics_at_rest(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the running statistics of `norms` stay as they are; their outputs are the same.

    By their settings, and not by putting copies back: the selective form counts every operation.
    """
    before = [(norm, norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    for norm in norms:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, count


@contextmanager
def loads_at_rest(mixtures: Sequence[MoE]) -> Iterator[None]:
    """Inside, forwards of `mixtures` count no tokens; their operations are the same."""
    for mixture in mixtures:
        mixture.counts_tokens = 0
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.counts_tokens = 1


def recompute(module: nn.Module, keep: Sequence[str] = ()) -> None:
    """Makes `module` recompute its activations in backward.

    Args:
        module: Any but one whose forward has side effects, such as counting its calls.
        keep: Operations whose outputs are kept, such as `"aten.mm.default"`; none recomputes everything.

    Raises:
        ValueError: PyTorch has no operation of a given name.
    """
    if isinstance(module, Recomputed):
        return
    contexts = None
    if keep:
        operations = [op for name in keep if (op := operation(name)) is not None]
        contexts = staticmethod(partial(create_selective_checkpoint_contexts, operations))
    change_class(module, Recomputed, key=tuple(keep), _contexts=contexts)
