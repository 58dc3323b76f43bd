"""Tests of what only a CUDA device shows. On the CPU, with `--on-cpu`, those that ask for `cuda` are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The device under test; the CPU in a rehearsal."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    """The CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def ranks_are_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA cannot be copied into a forked rank, and packages such as torchao start it as they are imported."""
    if torch.cuda.is_available():
        monkeypatch.setattr("tests.worlds.start_method", "spawn")


@pytest.fixture(autouse=True)
def waiting_is_allowed_again() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
