"""State over a `pre_epoch` that is called again where a run goes on in the middle of an epoch.

`pre_epoch` sets up what no checkpoint has, and often what one has, too: that state and random generators stay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dream_trainer.checkpoint.model_state import model_buffers, take_shapes
from dream_trainer.distributed.seeds import random_state, set_random_state
from dream_trainer.trainer.event_table import anyone_listens, listening_callbacks

if TYPE_CHECKING:
    from dream_trainer.trainer.runtime import Runtime


@contextmanager
def keeping_state(runtime: Runtime) -> Iterator[None]:
    """Inside, `pre_epoch` is called; afterwards what checkpoints have, buffers and random generators are as before."""
    if not anyone_listens(runtime, "pre_epoch"):
        yield
        return
    hooks, device, models = runtime.hooks, runtime.world.device, runtime.registry.models()
    callbacks = listening_callbacks(runtime, "pre_epoch")
    shared, of_rank = copy.deepcopy(hooks.state_dict()), copy.deepcopy(hooks.rank_state_dict())
    of_callbacks = [copy.deepcopy(callback.state_dict()) for callback in callbacks]
    tensors = [{name: t.detach().clone() for name, t in one.checkpoint_tensors().items()} for one in callbacks]
    buffers = {name: buffer.detach().clone() for name, buffer in model_buffers(models).items()}
    random = random_state(device)
    yield
    set_random_state(*random, device)
    take_shapes(models, buffers, {name: value.shape for name, value in buffers.items()})
    with torch.no_grad():
        for name, buffer in model_buffers(models).items():
            if name in buffers:
                buffer.copy_(buffers[name])
        for callback, former in zip(callbacks, tensors, strict=True):
            for name, tensor in callback.checkpoint_tensors().items():
                if name in former:
                    tensor.detach().copy_(former[name])
    for callback, state in zip(callbacks, of_callbacks, strict=True):
        if state:
            callback.load_state_dict(state)
    if shared:
        hooks.load_state_dict(shared)
    if of_rank:
        hooks.load_rank_state_dict(of_rank)
