"""Random generators go on as if nothing had happened."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.api import CheckpointError, random_state, read_rank, set_random_state
from tests.checkpoint.states import save

CPU = torch.device("cpu")


def draws() -> list[float]:
    # gauss, standard_normal and randn each keep a second draw in hand, which is part of the state.
    return [
        *(random.random(), random.gauss(0, 1)),
        *(float(np.random.rand()), float(np.random.standard_normal())),
        *(torch.rand(()).item(), *torch.randn(3).tolist(), float(torch.randperm(10)[0])),
    ]


@pytest.mark.pitfall(32)
def test_the_draws_after_a_restore_are_those_after_the_save(tmp_path: Path) -> None:
    for seed in (0, 1234):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        draws()
        state, tensors = random_state(CPU)
        path = save(tmp_path, seed, rank_state={"random": state}, rank_tensors=tensors)
        expected = draws() + draws()
        saved, saved_tensors = read_rank(path, 0)
        set_random_state(saved["random"], saved_tensors, CPU)
        assert draws() + draws() == expected


def test_the_state_of_another_kind_of_device_is_an_error_and_sets_nothing() -> None:
    state, tensors = random_state(CPU)
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"\['cpu', 'cuda'\], and this rank draws on \['cpu'\]"):
        set_random_state(state, {**tensors, "random.cuda": tensors["random.cpu"]}, CPU)
    assert torch.equal(torch.get_rng_state(), before)
