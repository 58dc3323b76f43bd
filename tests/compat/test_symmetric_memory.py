"""What overlaps products with collectives in compiled code, by PyTorch's own slow forms of it."""

import pytest
import torch
import torch.distributed as dist

from tests.api import options_of_overlap, why_memory_is_not_shared


def test_a_mode_is_kept_beside_the_overlap() -> None:
    assert set(options_of_overlap(None)) < set(options_of_overlap("max-autotune-no-cudagraphs"))


def test_the_compiler_knows_the_option() -> None:
    torch.compile(torch.sin, options=options_of_overlap(None))
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(torch.sin, options={"_micro_pipeline": True})


def test_the_cpu_shares_no_memory(group_of_one: None) -> None:
    assert why_memory_is_not_shared(dist.group.WORLD, torch.device("cpu")) == "the device is 'cpu'"
