import pytest

from tests.api import RankBatchSampler, Sharding


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
