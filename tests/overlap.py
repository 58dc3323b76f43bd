"""Async tensor parallelism on the CPU: PyTorch's own slow forms of the operations, which count how often they ran."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def overlap_on_the_cpu() -> Iterator[Counter[str]]:
    """Until it ends, the compiler fuses as on GPUs that share memory; how often each operation was called."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    calls: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")

    def counted(name: str, operation: Any) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return operation(*args, **kwargs)

        library.impl(name, run, "CPU")

    counted("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback)
    counted("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback)
    with pytest.MonkeyPatch.context() as patches, symmetric_memory._test_mode():
        patches.setattr(torch.distributed, "is_nccl_available", lambda: True)
        try:
            yield calls
        finally:
            library._destroy()
