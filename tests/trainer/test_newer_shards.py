"""Newer ways of `fully_shard`: a group of their own for shards of gradients, and memory that GPUs share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import Samples, Sharded, make_config, run_ranks, weights
from tests.worlds import run_world


def on_ranks() -> list[dict[str, Any]]:
    """Without and with it, as two copies on two ranks each."""
    found = []
    for separate in (False, True):
        config = make_config(
            max_steps=3, devices=dt.DeviceParameters(device="cpu", dp_replicate=2), gradient_clip_val=0.5
        )
        config = dataclasses.replace(
            config, fsdp_parameters=dt.FSDPParameters(min_group_mib=0, separate_reduce_group=separate)
        )
        with Sharded(config, DistributedDataLoader(Samples(24), 2)) as trainer:
            trainer.fit()
            groups = trainer.world.further_groups
            found.append(
                {
                    "weights": weights(trainer.model),
                    "losses": trainer.losses,
                    "collectives": [group._get_sequence_number_for_group() for group in groups],
                    "ranks": [torch.distributed.get_process_group_ranks(group) for group in groups],
                }
            )
    return found


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch has it from 2.13 on")
def test_weights_are_the_same_and_each_copy_reduces_in_a_group_of_its_own() -> None:
    for rank, (plain, found) in enumerate(run_world(on_ranks, 4)):
        assert found["losses"] == plain["losses"]
        assert all(torch.equal(found["weights"][name], value) for name, value in plain["weights"].items())
        assert plain["collectives"] == []
        assert found["collectives"][0] >= 3 * 3  # two blocks and the rest, in each step
        assert found["ranks"] == [[0, 1] if rank < 2 else [2, 3]]


def in_shared_memory() -> None:
    parameters = dt.FSDPParameters(symmetric_memory=True)
    config = dataclasses.replace(
        make_config(max_steps=1, devices=dt.DeviceParameters(device="cpu")), fsdp_parameters=parameters
    )
    Sharded(config, DistributedDataLoader(Samples(24), 2)).fit()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch has it from 2.13 on")
def test_memory_that_devices_cannot_share_is_refused_on_all_ranks(tmp_path: Path) -> None:
    code = "from tests.trainer.test_newer_shards import in_shared_memory; in_shared_memory()"
    for status, text in run_ranks(code, 2, tmp_path):
        assert status == 1
        assert (
            "fsdp_parameters.symmetric_memory=True: the device is 'cpu'. It needs GPUs that read each other's" in text
        )


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch has it from 2.13 on")
def test_pytorch_has_what_asks_for_shared_memory() -> None:
    from torch.distributed.fsdp import FSDPModule

    assert callable(FSDPModule.set_symm_mem_for_comm)
