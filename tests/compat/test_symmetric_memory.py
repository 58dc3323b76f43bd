"""What overlaps products with collectives in compiled code, by PyTorch's own slow forms of it."""

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from tests.api import options_of_overlap, why_memory_is_not_shared
from tests.overlap import overlap_on_the_cpu
from tests.worlds import run_world


def test_a_mode_is_kept_beside_the_overlap() -> None:
    assert set(options_of_overlap(None)) < set(options_of_overlap("max-autotune-no-cudagraphs"))


def test_the_compiler_knows_the_option() -> None:
    torch.compile(torch.sin, options=options_of_overlap(None))
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(torch.sin, options={"_micro_pipeline": True})


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # between two products alone PyTorch finds no place to part


def fused() -> tuple[dict[str, int], str | None]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    stream = Shard(1)
    model = TwoLayers().double()
    down = RowwiseParallel(output_layouts=stream, use_local_output=False)
    parallelize_module(model, mesh, {"up": ColwiseParallel(input_layouts=stream), "down": down})
    model.compile(dynamic=False, options=options_of_overlap(None))
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    with overlap_on_the_cpu() as calls:
        y = model(DTensor.from_local(x, mesh, [stream]))
    whole = DTensor.from_local(x, mesh, [stream]).full_tensor()
    hidden = torch.relu(whole @ model.up.weight.full_tensor().T)
    whole = hidden @ model.down.weight.full_tensor().T
    torch.testing.assert_close(y.full_tensor(), whole, rtol=1e-12, atol=1e-12)
    return dict(calls), why_memory_is_not_shared(mesh.get_group(), torch.device("cpu"))


@pytest.mark.slow
def test_the_compiler_fuses_products_with_collectives() -> None:
    for calls, why_not in run_world(fused, 2):
        assert calls == {"fused_all_gather_matmul": 1, "fused_matmul_reduce_scatter": 1}
        assert why_not == "the device is 'cpu'"
