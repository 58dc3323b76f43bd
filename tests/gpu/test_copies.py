"""Copies between host and device that nobody waits for: batches, snapshots of checkpoints, random state."""

import pytest
import torch

from tests.api import HostCopies, on_device, random_state, set_random_state, to_device

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


def test_micro_batches_copied_beside_the_computation_are_what_the_loader_gave(device: torch.device) -> None:
    """With products that take the device longer than the copies, and memory that is used again at once."""
    host = [torch.full((1 << 18,), float(number)) for number in range(12)]
    weight = torch.randn(1024, 1024, device=device)
    found = []
    for window in (host[:6], host[6:]):
        aside = torch.Stream(device) if device.type == "cuda" else None
        for batch in on_device(window, to_device, device, aside):
            for _ in range(20 if device.type == "cuda" else 1):
                weight = torch.tanh(weight @ weight)
            found.append(batch.double().sum() + 0 * weight.sum())
            del batch
    assert [total.item() for total in found] == [number * (1 << 18) for number in range(12)]


def test_one_further_batch_is_on_the_device_and_no_more(cuda: torch.device) -> None:
    size = 1 << 24
    host = [torch.zeros(size // 4).pin_memory() for _ in range(6)]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in on_device(host, to_device, cuda, torch.Stream(cuda)):
        del batch
    assert torch.cuda.max_memory_allocated() - before == 2 * size
