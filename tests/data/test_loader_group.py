"""Several training loaders as one: against plain loops, on any layout, from any place."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests import api
from tests.data import reading
from tests.data.lane_truth import LiveLines
from tests.data.reading import Layout, open_stream, read_in_parts

TEXT, IMAGES = 8, 4
"""Samples of each in one step, over all ranks."""
LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
"""(ranks, accumulation)"""
Steps = list[dict[str, list[int]]]


def numbers(length: int, first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + length))


def ours(ranks: int, accumulation: int, text: int = 40, images: int = 12, **options: Any) -> dict[str, Any]:
    """Five steps of text and three of images, unless told otherwise."""
    parts = ranks * accumulation
    return {
        "text": api.DistributedDataLoader(numbers(text), TEXT // parts, **options),
        "images": api.DistributedDataLoader(numbers(images, 1000), IMAGES // parts, **options),
    }


def open_streams(loader: Any, ranks: int, accumulation: int) -> list[api.TrainStream]:
    return [open_stream(loader, accumulation, rank=rank, size=ranks) for rank in range(ranks)]


def samples_in(batches: Iterable[Any]) -> dict[str, list[int]]:
    """The samples of each loader in the batches of a step, sorted."""
    found: dict[str, list[int]] = {}
    for batch in batches:
        for name, (samples,) in batch.items() if isinstance(batch, dict) else [batch]:
            found.setdefault(name, []).extend(samples.tolist())
    return {name: sorted(samples) for name, samples in found.items()}


Job = partial(reading.Job, form=samples_in)


def read(streams: list[api.TrainStream], passes: int) -> list[Steps]:
    job, found = Job(streams), list[Steps]()
    while len(found) < passes:
        of_pass: Steps = []
        while not of_pass or not job.is_pass_over:
            of_pass += job.steps(1)
        found.append(of_pass)
    return found


def steps_by_hand(length: int, size: int, first: int = 0) -> list[list[int]]:
    return [list(range(first + at, first + at + size)) for at in range(0, length - size + 1, size)]


TEXT_STEPS, IMAGE_STEPS = steps_by_hand(40, TEXT), steps_by_hand(12, IMAGES, 1000)


@pytest.mark.parametrize(("ranks", "accumulation"), LAYOUTS)
@pytest.mark.parametrize("end", ["shortest", "longest", "cycle"])
def test_a_group_is_read_as_plain_loops_would(ranks: int, accumulation: int, end: Any) -> None:
    streams = open_streams(api.LoaderGroup(ours(ranks, accumulation), end=end), ranks, accumulation)
    if end == "cycle":
        found = [Job(streams).steps(11)]
        wanted = [list(islice(zip(cycle(TEXT_STEPS), cycle(IMAGE_STEPS), strict=False), 11))]
        assert streams[0].steps_per_epoch is None
    else:
        # Each goes round by itself; a pass is one round of the longest, or the shortest.
        pairs = zip(cycle(TEXT_STEPS), cycle(IMAGE_STEPS), strict=False)
        wanted = [list(islice(pairs, 3 if end == "shortest" else 5)) for _ in range(4)]
        found = read(streams, 4)
        assert streams[0].steps_per_epoch == len(wanted[0])
    assert found == [[{"text": text, "images": images} for text, images in one] for one in wanted]


@pytest.mark.parametrize(("ranks", "accumulation"), LAYOUTS)
def test_loaders_take_turns_by_steps(ranks: int, accumulation: int) -> None:
    def by_hand(steps: int) -> list[Steps]:
        text, images = cycle(TEXT_STEPS), cycle(IMAGE_STEPS)
        take = {"text": lambda: {"text": next(text)}, "images": lambda: {"images": next(images)}}
        return [[take[name]() for name in islice(cycle(["text", "images", "text"]), steps)] for _ in range(3)]

    loaders = ours(ranks, accumulation)
    ratio = {"text": 2, "images": 1}
    assert api.turns(ratio) == ["text", "images", "text"]
    shortest = open_streams(api.AlternatingLoaders(loaders, ratio, end="shortest"), ranks, accumulation)
    longest = open_streams(api.AlternatingLoaders(loaders, ratio, end="longest"), ranks, accumulation)
    # Text has none left at its sixth turn, the ninth of all; images at their fourth, the eleventh.
    assert (shortest[0].steps_per_epoch, longest[0].steps_per_epoch) == (8, 10)
    assert read(shortest, 3) == by_hand(8)
    assert read(longest, 3) == by_hand(10)


class Live:
    """A loader of another kind with a state, which it hands out as it is."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[Any]:
        while self.state["next"] < self.length:
            number = self.state["next"]
            self.state["next"] += 1
            yield (torch.arange(2) + 2 * number,)
        self.state["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Plain:
    """A loader of another kind without a state or a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield (torch.arange(2) + 2 * number + 500,)


def mixture(seed: int) -> api.DistributedDataLoader:
    sources = {"a": numbers(30, 2000), "b": numbers(20, 3000)}
    return api.DistributedDataLoader(api.Mixture(sources, {"a": 2, "b": 1}, seed=seed, num_samples=32), 4)


KINDS = {
    "ours": lambda: ours(1, 2, shuffle=True),
    "mixtures": lambda: {"text": mixture(1), "images": mixture(2)},
    "others": lambda: {"live": Live(15), "plain": Plain(23), "text": ours(1, 2)["text"]},
}
GROUPS = {
    "shortest": lambda loaders: api.LoaderGroup(loaders, end="shortest"),
    "longest": api.LoaderGroup,
    "cycle": lambda loaders: api.LoaderGroup(loaders, end="cycle"),
    "turns": lambda loaders: api.AlternatingLoaders(loaders, {name: at + 1 for at, name in enumerate(loaders)}),
    "turns to the shortest": lambda loaders: api.AlternatingLoaders(loaders, end="shortest"),
    "endless turns": lambda loaders: api.AlternatingLoaders(loaders, end="cycle"),
}


def samples_of(batch: Any) -> int:
    """Also of a batch that comes with its loader's name."""
    return len(batch[0] if isinstance(batch[0], torch.Tensor) else batch[1][0])


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: samples.tolist() for name, (samples,) in batch.items()}
    return batch[0], batch[1][0].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_goes_on_from_any_step_twice_in_a_row(kind: str, group: str) -> None:
    def opened() -> reading.Job:
        loader = GROUPS[group](KINDS[kind]())
        streams = [open_stream(loader, 2, batch_size=api.SampleCount(samples_of))]
        return reading.Job(streams, lambda batches: list(map(plain, batches)))

    wanted = opened().steps(24)
    assert len({str(step) for step in wanted}) > 8
    for first in range(20):
        job = opened()
        assert job.steps(first) == wanted[:first]
        for at in (first, first + 2):
            saved = job.saved()
            job = opened()
            job.go_on(saved)
            assert job.saved() == saved, "a checkpoint right after the resume"
            assert job.steps(2) == wanted[at : at + 2], (first, at)


@pytest.mark.parametrize("group", [api.LoaderGroup, api.AlternatingLoaders])
def test_the_layout_may_change_on_the_way(group: Any) -> None:
    def job(layout: Layout) -> reading.Job:
        ranks, accumulation, _ = layout
        return Job(open_streams(group(ours(ranks, accumulation, shuffle=True)), ranks, accumulation))

    parts = [((1, 2, 0), 3), ((2, 1, 0), 3), ((4, 1, 0), 3), ((2, 2, 0), 3), ((1, 1, 0), 3)]
    assert read_in_parts(job, parts) == job((1, 1, 0)).steps(15)


def test_a_stream_in_a_group_goes_on_on_other_ranks() -> None:
    def job(layout: Layout) -> reading.Job:
        ranks = layout[0]
        shards = api.IterableShards(LiveLines, list(enumerate([30, 20, 25, 30])))
        stream = api.StreamLoader(shards, 8 // ranks, lanes=4, collate_fn=lambda samples: (torch.tensor(samples),))
        group = api.AlternatingLoaders({"lines": stream, "images": ours(ranks, 1)["images"]})
        return Job(open_streams(group, ranks, 1))

    whole = job((1, 1, 0))
    assert read_in_parts(job, [((ranks, 1, 0), 3) for ranks in (1, 2, 4, 2, 1)]) == whole.steps(15)
    assert whole.position.epoch == 0, "the stream repeats, so that the group has no end"


def test_loaders_of_one_length_have_orders_of_their_own() -> None:
    dataset = numbers(16)
    loaders = {name: DataLoader(dataset, batch_size=16, shuffle=True) for name in ("one", "other")}
    (window,) = [open_streams(loaders, 1, 1)[0].next_window()]
    (batch,) = window.batches
    assert batch["one"][0].tolist() != batch["other"][0].tolist()


def test_what_fills_no_step_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    loaders = {"text": api.DistributedDataLoader(numbers(21), 4, drop_last=False), "lists": [numbers(2)[:]] * 3}
    (steps,) = read(open_streams(api.LoaderGroup(loaders, end="shortest"), 1, 2), 1)
    assert len(steps) == 1
    assert "last 5 samples of each epoch of the training loader 'text'" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: api.LoaderGroup({}), "no loaders"),
        (lambda: api.LoaderGroup([*ours(1, 1).values()]), "no loaders"),  # type: ignore[arg-type]
        (
            lambda: api.LoaderGroup(dict.fromkeys(["one", "other"], ours(1, 1)["text"])),
            "'one' and 'other' read the same DistributedDataLoader",
        ),
        (lambda: api.AlternatingLoaders({"text": [1]}, {"txt": 1}), "'txt'.*for each of the loaders \\['text'\\]"),
        (lambda: api.AlternatingLoaders({"text": [1]}, {"text": 0}), "'text': 0} is not a whole number"),
        (lambda: open_stream({"text": [], "images": [numbers(2)[:]]}), "'text': .*0 batches"),
        (
            lambda: open_stream({"text": api.DistributedDataLoader(numbers(3), 4)}),
            "'text': .*3 samples, fewer than one global batch",
        ),
        (lambda: open_stream({"text": [numbers(2)[:]]}, 2), "'text': .*has 1 batches, fewer than one step of 2"),
        (lambda: open_stream({"text": Plain(4)}, size=2), "'text': .*cannot be dealt to dp_size=2"),
        (lambda: open_stream({"text": api.PerRankLoader([1, 2])}, size=2), "different numbers of batches of 'text'"),
    ],
)
def test_loaders_that_cannot_work_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(api.DataError, match=message):
        make()


def test_a_loader_that_fails_is_named_with_its_error() -> None:
    def broken() -> Iterator[Any]:
        yield (torch.ones(2),)
        raise OSError("the disk is gone")

    class Broken:
        def __iter__(self) -> Iterator[Any]:
            return broken()

    stream = open_stream({"good": Plain(4), "bad": Broken()})
    stream.next_window()
    with pytest.raises(OSError, match="the disk is gone") as caught:
        stream.next_window()
    assert "in the training loader 'bad'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (lambda: api.LoaderGroup({"text": ours(1, 1)["text"]}), r"loaders \['text', 'images'\], not \['text'\]"),
        (lambda: api.LoaderGroup(ours(1, 1), end="shortest"), "read by .*longest.*now by .*shortest"),
        (lambda: api.AlternatingLoaders(ours(1, 1)), "read by .*LoaderGroup.*now by .*AlternatingLoaders"),
        (lambda: api.LoaderGroup(ours(1, 1, text=48)), "'text': .*40 training samples, and the dataset now has 48"),
        (lambda: ours(1, 1)["text"], r"loaders \['text', 'images'\], not over one loader"),
    ],
)
def test_other_loaders_do_not_go_on(now: Any, message: str) -> None:
    stream = open_stream(ours(1, 1))
    window = stream.next_window()
    list(window.batches)
    state = stream.state_at(window.end)

    def go_on() -> None:
        other = open_stream(now())
        other.seek(window.end, None, state=state, is_pass_over=False)
        other.next_window()

    with pytest.raises(api.DataError, match=message):
        go_on()


def test_a_run_over_one_loader_does_not_go_on_with_several() -> None:
    stream = open_stream(ours(1, 1))
    with pytest.raises(api.DataError, match=r"one training loader, not over \['text', 'images'\]"):
        stream.seek(api.DataPosition(0, 8, 1), None, is_pass_over=False, state=None)


def test_another_number_of_ranks_is_refused_where_only_a_loader_knows_its_place() -> None:
    stream = open_stream({"plain": Plain(9)})
    window = stream.next_window()
    state = stream.state_at(window.end)
    with pytest.raises(api.DataError, match="only the training loader 'plain' itself knows"):
        stream.seek(window.end, None, state=state, is_pass_over=False)
