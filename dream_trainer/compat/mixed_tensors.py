"""DTensors and plain tensors in one operation, as a fused optimizer has them where some parameters are split."""

from __future__ import annotations

from contextlib import AbstractContextManager


def plain_beside_dtensors() -> AbstractContextManager[None]:
    """Inside, an operation over lists of both kinds takes each plain tensor as it is, one that all ranks have.

    `torch.distributed.tensor.experimental.implicit_replication` (PyTorch 2.11 to 2.15), which may move.
    """
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()
