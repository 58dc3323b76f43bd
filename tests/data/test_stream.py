from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.api import DataError, DataPosition, DistributedDataLoader, Mixture, epoch_order
from tests.data.reading import Job, Layout, open_ranks, open_stream, read_in_parts
from tests.data.samples import BrokenDataset, CountingDataset, DrawingDataset, global_states, rows

SEED = 11
GLOBAL_BATCH = 12
LAYOUTS = [(1, 1, 0), (1, 3, 0), (1, 4, 0), (2, 1, 0), (2, 3, 0), (3, 1, 0), (3, 4, 0), (4, 1, 0), (4, 3, 0)]
"""(ranks, accumulation, workers), of which the first two divide the global batch."""


def open_job(layout: Layout, length: int = 40, **options: Any) -> Job:
    """Over so many samples; a step is its samples in global order."""
    options |= {"seed": SEED, "shuffle": True}
    streams = open_ranks(lambda: DrawingDataset(length), layout, GLOBAL_BATCH, **options)
    return Job(streams, lambda batches: [row for batch in batches for row in rows(batch)])


@pytest.fixture(scope="module")
def reference() -> list[list[tuple[float, ...]]]:
    """Two epochs on one rank without accumulation or workers."""
    return open_job((1, 1, 0)).steps(6)


def test_step_s_of_an_epoch_consumes_the_sth_global_batch_of_its_order(reference: list) -> None:
    for epoch in (0, 1):
        order = epoch_order(SEED, epoch, 40).tolist()
        for step in range(3):
            indices = [row[0] for row in reference[epoch * 3 + step]]
            assert indices == order[step * 12 : (step + 1) * 12]


@pytest.mark.pitfall(11)
def test_epochs_have_different_orders_and_samples_different_draws(reference: list) -> None:
    assert [row[0] for row in reference[0]] != [row[0] for row in reference[3]]
    draws = [row[column] for step in reference for row in step for column in (1, 2, 3)]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *((layout, {}) for layout in LAYOUTS),
        ((2, 3, 1), {}),
        ((2, 3, 2), {}),
        ((2, 3, 2), {"persistent_workers": True}),
        ((1, 1, 1), {"multiprocessing_context": "spawn"}),
    ],
)
def test_samples_and_draws_do_not_depend_on_world_accumulation_or_workers(
    layout: Layout, options: dict[str, Any], reference: list
) -> None:
    job = open_job(layout, **options)
    assert job.steps(6) == reference
    job.close()


@pytest.mark.pitfall(33)
@pytest.mark.pitfall(34)
@pytest.mark.parametrize("stop_after", range(7))
def test_a_run_resumed_at_any_window_elsewhere_reads_the_rest_unchanged(stop_after: int, reference: list) -> None:
    ranks, accumulation, _ = LAYOUTS[-1 - stop_after]
    after = ranks, accumulation, 2 if stop_after == 4 else 0
    assert read_in_parts(open_job, [(LAYOUTS[stop_after], stop_after), (after, 6 - stop_after)]) == reference


@pytest.mark.pitfall(34)
def test_resuming_loads_no_sample_that_was_consumed() -> None:
    data = CountingDataset(100)
    stream = open_stream(DistributedDataLoader(data, 5), 2)
    stream.seek(DataPosition(0, 80, 16), None, is_pass_over=False, state=None)
    list(stream.next_window().batches)
    assert data.loaded == list(range(80, 90))


@pytest.mark.pitfall(8)
def test_a_pass_loads_exactly_what_it_trains_and_a_window_only_when_it_is_iterated() -> None:
    data = CountingDataset(11)
    stream = open_stream(DistributedDataLoader(data, 2), 2)
    window = stream.next_window()
    assert data.loaded == []
    list(window.batches)
    assert data.loaded == [0, 1, 2, 3]
    while (window := stream.next_window()) is not None:
        list(window.batches)
    assert data.loaded == list(range(8))


def ragged_steps(length: int, batch_size: int, world: int, accumulation: int) -> list[tuple[list[list[int]], bool]]:
    """Each step: per rank the sizes of its micro-batches, and whether it says that it is uneven. Checks that no sample
    repeats."""
    layout, data = (world, accumulation, 0), TensorDataset(torch.arange(length))
    streams = open_ranks(lambda: data, layout, batch_size * world * accumulation, drop_last=False)
    steps, seen = [], []
    while (first := streams[0].next_window()) is not None:
        windows = [first] + [stream.next_window() for stream in streams[1:]]
        batches = [[batch.tolist() for (batch,) in window.batches] for window in windows if window is not None]
        seen += [index for rank in batches for batch in rank for index in batch]
        assert first.samples == sum(len(batch) for rank in batches for batch in rank)
        assert all(window is not None and window.size == len(batches[0]) for window in windows)
        steps.append(([[len(batch) for batch in rank] for rank in batches], first.is_uneven))
    assert len(seen) == len(set(seen))
    return steps


@pytest.mark.pitfall(13)
def test_on_ranks_a_kept_tail_is_split_evenly_or_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert ragged_steps(13, 4, 2, 1) == [([[4], [4]], False), ([[3], [2]], True)]
    assert ragged_steps(14, 2, 3, 2) == [([[2, 2]] * 3, False)]  # 2 samples are too few for 3 ranks
    assert ragged_steps(15, 2, 3, 1) == [([[2]] * 3, False), ([[2]] * 3, False), ([[1]] * 3, False)]
    assert ragged_steps(6, 2, 2, 2) == [([[2, 1], [2, 1]], True)]
    assert ["last 2 samples of each epoch are dropped" in record.message for record in caplog.records] == [True]


def test_a_plain_loaders_tail_is_trained_on_one_rank_and_dropped_on_several(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(TensorDataset(torch.arange(11)), 2)
    streams = [open_stream(loader, rank=rank, size=size) for rank, size in ((0, 1), (0, 2), (1, 2))]
    assert [stream.steps_per_epoch for stream in streams] == [6, 2, 2]
    assert ["last 3 samples" in record.message for record in caplog.records] == [True]


@pytest.mark.pitfall(10)
def test_too_little_data_for_one_window_is_an_error_with_its_numbers() -> None:
    with pytest.raises(
        DataError, match=r"7 samples, fewer than one global batch of 12 \(batch_size=2 x dp_size=2 x accumulation=3\)"
    ):
        open_job((2, 3, 0), length=7)
    with pytest.raises(DataError, match=r"7 samples.*drop_last=False"):
        open_stream(DataLoader(DrawingDataset(7), 4), size=2)
    with pytest.raises(DataError, match="1 samples, fewer than dp_size=2"):
        ragged_steps(1, 4, 2, 1)


@pytest.mark.pitfall(32)
@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_the_global_generators_untouched(workers: int) -> None:
    before = global_states()
    job = open_job((1, 3, workers))
    job.steps(6)
    job.close()
    assert global_states() == before


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_while_loading_reaches_the_caller_as_it_is(workers: int) -> None:
    stream = open_stream(DistributedDataLoader(BrokenDataset(), 4, num_workers=workers), 2)
    with pytest.raises(KeyError, match="sample 5 is damaged"):
        list(stream.next_window().batches)
    stream.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_workers_in_a_window(persistent: bool, own_children: Callable[[], set[BaseProcess]]) -> None:
    (stream,) = open_job((1, 3, 2), persistent_workers=persistent).streams
    next(iter(stream.next_window().batches))
    assert len(own_children()) == 2
    stream.close()
    assert not own_children()
    stream.seek(DataPosition(0, 0, 0), None, is_pass_over=False, state=None)
    assert len(list(stream.next_window().batches)) == 3
    stream.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_workers_of_a_finished_pass_are_gone(ordered: bool, own_children: Callable[[], set[BaseProcess]]) -> None:
    dataset = DrawingDataset(12)
    source = Mixture({"only": dataset}, num_samples=12) if ordered else dataset
    (stream,) = open_ranks(lambda: source, (1, 1, 1), 12)
    assert len(list(stream.next_window().batches)) == 1
    assert stream.next_window() is None
    assert not own_children()
