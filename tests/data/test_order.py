from __future__ import annotations

import torch

from dream_trainer.data.sampler import epoch_order, sample_seed


def test_an_order_holds_every_sample_once_and_differs_by_epoch_and_seed() -> None:
    orders = [epoch_order(seed, epoch, 50, True) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_an_order_is_the_same_whenever_it_is_asked_for_and_draws_from_no_global_generator() -> None:
    before = torch.get_rng_state()
    first = epoch_order(3, 7, 20, True)
    torch.rand(5)
    assert torch.equal(first, epoch_order(3, 7, 20, True))
    torch.set_rng_state(before)
    epoch_order(3, 7, 20, True)
    assert torch.equal(before, torch.get_rng_state())


def test_without_shuffling_the_order_is_the_datasets_own() -> None:
    assert epoch_order(3, 7, 4, False).tolist() == [0, 1, 2, 3]


def test_sample_seeds_differ_in_each_of_their_numbers() -> None:
    seeds = {sample_seed(seed, epoch, index) for seed in range(5) for epoch in range(-1, 5) for index in range(100)}
    assert len(seeds) == 5 * 6 * 100
    assert all(0 <= seed < 2**64 for seed in seeds)
