"""Shards of gradients that cross ranks in a group of their own are the same to the bit."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

import dream_trainer as dt
from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.errors import ConfigError
from tests.trainer.small import Samples, Sharded, make_config, weights
from tests.worlds import run_world


def on_ranks(directory: str) -> list[dict[str, Any]]:
    """Without and with it, as two copies on two ranks each."""
    os.chdir(directory)
    found = []
    for separate in (False, True):
        config = make_config(
            max_steps=3, devices=dt.DeviceParameters(device="cpu", dp_replicate=2), gradient_clip_val=0.5
        )
        config = dataclasses.replace(config, fsdp_parameters=dt.FSDPParameters(separate_reduce_group=separate))
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
def test_weights_are_the_same_and_each_copy_reduces_in_a_group_of_its_own(tmp_path: Any) -> None:
    for rank, (plain, found) in enumerate(run_world(on_ranks, 4, str(tmp_path))):
        assert found["losses"] == plain["losses"]
        assert all(torch.equal(found["weights"][name], value) for name, value in plain["weights"].items())
        assert plain["collectives"] == []
        assert found["collectives"][0] >= 3 * 3  # two blocks and the rest, in each step
        assert found["ranks"] == [[0, 1] if rank < 2 else [2, 3]]


def test_an_older_pytorch_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(ConfigError, match="separate_reduce_group=True needs PyTorch 2.13, and this is 2.11.0"):
        dt.FSDPParameters(separate_reduce_group=True)
