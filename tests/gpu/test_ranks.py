"""Ranks over NCCL, as far as one GPU goes: one rank of a process group, and parameters that lie on the host."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import dream_trainer as dt
from tests.api import ConfigError, all_gather_flat, local_tensors, set_group_timeout
from tests.gpu.test_training import Fits, config, four_losses, losses_by_hand
from tests.trainer.arithmetic import fill
from tests.worlds import run_world

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    fill(model)
    return model


def step(model: nn.Module, device: torch.device) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    loss: Tensor = model(torch.ones(4, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model(torch.ones(4, 8, device=device)).square().mean().item()


def mesh_of_one(device: torch.device) -> DeviceMesh:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    return init_device_mesh(device.type, (1,))


def one_rank(device: torch.device) -> dict[str, object]:
    mesh = mesh_of_one(device)
    set_group_timeout(mesh.get_group(), timedelta(seconds=60))
    gathered, own = torch.zeros(3, device=device), torch.arange(3.0, device=device)
    all_gather_flat(gathered, own, mesh.get_group())
    offloaded = fully_shard(network(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"))
    found: dict[str, object] = {
        "gathered": gathered.tolist(),
        "offloaded": step(offloaded, device),
        "plain": step(network().to(device), device),
    }
    offloaded.reshard()
    found["places"] = {shard.device.type for shard in local_tensors(list(offloaded.parameters()))}
    dist.destroy_process_group()
    return found


def test_a_rank_alone_gathers_and_steps_what_is_offloaded(device: torch.device) -> None:
    (found,) = run_world(one_rank, 1, device)
    assert found["gathered"] == [0, 1, 2]
    assert found["offloaded"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["places"] == {"cpu"}


def test_one_rank_as_torchrun_starts_it_trains_as_a_process_does(device: torch.device) -> None:
    (found,) = run_world(four_losses, 1, device, False)
    torch.testing.assert_close(torch.tensor(found), losses_by_hand(device, 4).cpu(), rtol=1e-4, atol=1e-4)


def test_offload_on_one_device_is_refused_and_says_why(cuda: torch.device) -> None:
    trainer = Fits(config(cuda, steps=1, cpu_offload=True))
    with trainer, pytest.raises(ConfigError, match="from two ranks on"):
        trainer.fit()


def test_a_cuda_device_is_chosen_where_there_is_one(cuda: torch.device) -> None:
    settings = config(cuda, steps=1)
    settings.device_parameters = dt.DeviceParameters()
    with Fits(settings) as trainer:
        trainer.fit()
        assert trainer.world.device == cuda


def one_rank_draws(device: torch.device) -> dict[str, list[float]]:
    """What dropout of a DTensor gives after the trainer's own mesh was laid, and of a plain tensor."""
    from dream_trainer.compat.pytorch import keep_own_generators

    mesh = mesh_of_one(device)
    torch.manual_seed(5)
    keep_own_generators(mesh)
    told: list[int] = []
    broadcast, dist.broadcast = dist.broadcast, lambda *_, **__: told.append(1)
    try:
        ones = distribute_tensor(torch.ones(256, device=device), mesh, [Replicate()], src_data_rank=None)
        by_dtensor = nn.functional.dropout(ones).to_local().tolist()
    finally:
        dist.broadcast = broadcast
    torch.manual_seed(5)
    plain = nn.functional.dropout(torch.ones(256, device=device)).tolist()
    dist.destroy_process_group()
    return {"by a DTensor": by_dtensor, "plain": plain, "broadcasts": [float(len(told))]}


def test_dtensors_draw_from_their_ranks_own_generator_and_ask_no_other_rank(device: torch.device) -> None:
    (found,) = run_world(one_rank_draws, 1, device)
    assert found["by a DTensor"] == found["plain"]
    assert found["broadcasts"] == [0.0]
