"""A fused optimizer steps DTensors and plain parameters together, each as if alone."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.api import plain_beside_dtensors
from tests.worlds import run_world


def step_both() -> None:
    dist.init_process_group("gloo")
    values = torch.arange(12.0).view(4, 3)
    alone, plain = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    split = nn.Parameter(distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)]))
    for parameters in ([alone], [plain, split]):
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 2
            with plain_beside_dtensors():
                optimizer.step()
    assert torch.equal(plain, alone)
    assert torch.equal(split.full_tensor(), alone)
    assert not torch.equal(alone, values)
    dist.destroy_process_group()


def test_both_are_stepped_as_one_alone() -> None:
    run_world(step_both, 2)
