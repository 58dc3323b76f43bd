"""Copies between host and device that nobody waits for: batches, snapshots of checkpoints, random state."""

from __future__ import annotations

import pytest
import torch

from dream_trainer.checkpoint.random_state import random_state, set_random_state
from dream_trainer.checkpoint.staging import HostCopies
from dream_trainer.data.nested import to_device

pytestmark = pytest.mark.gpu


def test_a_snapshots_update_waits_for_the_copies_and_a_forward_does_not(device: torch.device) -> None:
    weight, statistic = torch.ones(1 << 24, device=device), torch.ones(1 << 10, device=device)
    copies = HostCopies(device)
    copies.warm({"weight": weight, "statistic": statistic})
    for value in (1.0, 2.0, 3.0):
        weight.fill_(value)
        statistic.fill_(value)
        found = copies.copy({"weight": weight, "statistic": statistic}, at_once=("statistic",))
        statistic.zero_()  # as a forward does, which does not wait
        copies.wait_before_update()
        weight.zero_()
        copies.wait()
        assert found["weight"].is_pinned() == (device.type == "cuda")
        assert found["weight"].eq(value).all()
        assert found["statistic"].eq(value).all()


def test_the_devices_generator_goes_on_after_a_restore(device: torch.device) -> None:
    state, tensors = random_state(device)
    expected = torch.randn(8, device=device).tolist()
    set_random_state(state, tensors, device)
    assert torch.randn(8, device=device).tolist() == expected


def test_a_batch_of_ordinary_memory_reaches_the_device_without_a_wait(cuda: torch.device) -> None:
    batch = {"x": torch.arange(1 << 20), "pinned": torch.arange(1 << 20).pin_memory(), "name": "a"}
    to_device(batch, cuda)  # the first allocates
    torch.cuda.set_sync_debug_mode("error")
    moved = to_device(batch, cuda)
    torch.cuda.set_sync_debug_mode("default")
    batch["x"].zero_()  # the host's memory is the user's again
    assert moved["x"].device == cuda
    assert torch.equal(moved["x"].cpu(), torch.arange(1 << 20))
    assert torch.equal(moved["pinned"].cpu(), torch.arange(1 << 20))
