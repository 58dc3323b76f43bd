import pytest

from tests.api import RankBatchSampler, Sharding, epoch_order, sample_seed


@pytest.mark.parametrize(("length", "size"), [(7, 2), (7, 3), (2, 3), (1, 4), (13, 3), (12, 4)])
def test_the_last_chunk_is_split_to_sizes_that_differ_by_at_most_one(length: int, size: int) -> None:
    ranks = []
    for rank in range(size):
        sampler = RankBatchSampler(length, Sharding(2, rank, size), seed=5, shuffle=False)
        sampler.next_pass = 2, 0, length
        ranks.append([indices for _, indices in sampler])
    assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(length))
    chunks = -(-length // (2 * size))
    last_sizes = [len(rank[chunks - 1]) if len(rank) == chunks else 0 for rank in ranks]
    assert max(last_sizes) - min(last_sizes) <= 1


def test_an_order_holds_every_sample_once_and_differs_by_epoch_and_seed() -> None:
    orders = [epoch_order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_sample_seeds_differ_in_each_of_their_numbers() -> None:
    seeds = {sample_seed(seed, epoch, index) for seed in range(5) for epoch in range(-1, 5) for index in range(100)}
    assert len(seeds) == 5 * 6 * 100
    assert all(0 <= seed < 2**64 for seed in seeds)
