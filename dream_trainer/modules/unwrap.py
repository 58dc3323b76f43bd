"""The plain module inside the wrappers that change names."""

from __future__ import annotations

import torch.nn as nn


def unwrap(model: nn.Module) -> nn.Module:
    """Takes `torch.compile`, DistributedDataParallel, DataParallel and AveragedModel off, however nested."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel

    from dream_trainer.compat.compiler import compiled_original

    while True:
        original = compiled_original(model)
        if original is not None:
            model = original
        elif isinstance(model, DistributedDataParallel | DataParallel | AveragedModel):
            model = model.module
        else:
            return model
