"""What of a stream cannot be exact, or is broken: refused or skipped by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import api
from tests.data.lane_truth import Job, LiveLines, open_lanes, read_in_parts, write_tar
from tests.data.reading import open_validation

LIVE = api.IterableShards(LiveLines, [(shard, 20) for shard in range(8)])
SHORT = api.IterableShards(LiveLines, [(shard, 1) for shard in range(4)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (3, 8, 4, None, None),
            "dp_size=4 data-parallel ranks .3 shards, global batch 8.* Use 1 or 2 ranks.* different shards",
        ),
        ((8, 8, 1, 5, None), "lanes=5 is not a divisor of the global batch of 8 .* Use 1, 2, 4 or 8"),
        ((8, 8, 4, 2, None), "lanes=2 cannot be dealt .* dp_size=4 .* Use 1 or 2 ranks, or lanes=4 or 8 in a new"),
        ((8, 8, 1, 4, 3), "lanes=4 with turns=3 needs 12 shards, and the source has 8. Use turns from 1 to 2"),
    ],
)
def test_numbers_that_do_not_fit_are_named_with_those_that_do(arguments: tuple, message: str) -> None:
    with pytest.raises(api.DataError, match=message):
        api.lane_plan(*arguments)


class Forgetful(LiveLines):
    """Yields from a buffer that its state leaves out."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 2:
                yield buffer.pop(0)
        yield from buffer


class Stateless:
    def __init__(self, item: Any) -> None:
        self.item = item

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Failing(LiveLines):
    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            if sample == 2012:
                raise OSError("the disk is gone")
            yield sample


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (Forgetful, "does not come back to where it was by its own state.*the transforms Shuffle and Map"),
        (Stateless, "Stateless cannot tell its position in its shard.*state_dict"),
        (Failing, r"sample 12 of shard \(2, 20\) cannot be read: OSError: the disk is gone"),
    ],
)
def test_a_source_that_forgets_or_fails_is_named(reader: type, message: str, workers: int) -> None:
    source = api.IterableShards(reader, [(shard, 20) for shard in range(4)])
    (stream,) = open_lanes(source, (1, 1, workers), lanes=4)
    with pytest.raises(api.DataError, match=message):
        read_all(stream, 20)
    stream.close()


def test_an_empty_shard_is_named_and_so_is_a_lane_of_which_nothing_is_kept() -> None:
    source = api.IterableShards(LiveLines, [(0, 5), (1, 0)])
    with pytest.raises(api.DataError, match=r"shard \(1, 0\) is empty. Leave it out"):
        Job(open_lanes(source, (1, 1, 0))).steps(1)
    with pytest.raises(api.DataError, match=r"lane 0 yielded no sample .*shard \(0, 20\).*Check the filters"):
        Job(open_lanes(LIVE, (1, 1, 0), transforms=[api.Filter(lambda sample: sample > 1000)])).steps(1)


def shuffled_stream() -> Any:
    import datasets

    numbers = datasets.IterableDataset.from_generator(lambda: ({"n": n} for n in range(100)))
    return numbers.shuffle(seed=1, buffer_size=10)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("there is no file .*gone.tar", lambda: api.WebDatasetShards([Path("gone.tar")])),
        ("has 0 shards", lambda: api.StreamLoader(api.IterableShards(LiveLines, []), 2)),
        (
            "does not come back to where it was by its own state",
            lambda: next(iter(api.StreamLoader(shuffled_stream(), 2))),
        ),
        ("A StreamLoader is for training", lambda: open_validation(api.StreamLoader(LIVE, 2))),
        ("made for several ranks already", lambda: api.PerRankLoader(api.StreamLoader(LIVE, 2))),
        (
            "not one whole step of all lanes: lane 0 has 1 of the 2 samples",
            lambda: Job(open_lanes(SHORT, (1, 1, 0), repeat=False)).steps(1),
        ),
    ],
)
def test_sources_streams_and_sizes_that_cannot_work_are_refused(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(api.DataError, match=message):
        make()


@pytest.mark.parametrize("damage", ["header", "cut in a file", "cut between files", "zipped", "empty"])
def test_a_damaged_tar_is_an_error_and_not_a_shorter_one(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    write_tar(path, {f"{number}.txt": b"x" * 600 for number in range(9)})
    whole = path.read_bytes()
    member = 512 + 1024
    if damage == "header":
        path.write_bytes(whole[: 5 * member] + b"?" * 512 + whole[5 * member + 512 :])
    elif damage == "cut in a file":
        path.write_bytes(whole[: 5 * member + 700])
    elif damage == "cut between files":
        path.write_bytes(whole[: 5 * member])
    else:
        path.write_bytes(b"\x1f\x8b" + b"z" * 2000 if damage == "zipped" else b"")
    (stream,) = open_lanes(api.WebDatasetShards([path]), (1, 1, 0), global_batch=1)
    with pytest.raises(api.DataError, match=r"0\.tar"):
        read_all(stream, 9)


def test_webdataset_samples_are_those_of_the_package(tmp_path: Path) -> None:
    import webdataset

    files = {
        "a/b.c/1.TXT": b"1",
        "a/b.c/1.seg.png": b"2",
        "__meta__": b"3",
        "a/2.txt": b"4",
        ".hidden": b"5",
        "a/none": b"6",
    }
    files |= {"x" * 150 + f"/{number}.{kind}": b"7" for number in (1, 2) for kind in ("a", "b")}
    write_tar(tmp_path / "0.tar", files)
    expected = [
        {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(str(tmp_path / "0.tar"), shardshuffle=False)
    ]
    found = list(api.WebDatasetShards(tmp_path).open(0))
    assert found == expected
    assert len(found) == 4


def fails_at_three(sample: int) -> int:
    if sample % 10 == 3:
        raise ValueError("damaged")
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_is_named(workers: int) -> None:
    (stream,) = open_lanes(LIVE, (1, 1, workers), lanes=4, transforms=[api.Map(fails_at_three)])
    with pytest.raises(
        api.DataError, match=r"sample 3 of shard \(0, 20\): ValueError: damaged.*lane 0, and max_skipped=0"
    ):
        read_all(stream, 9)
    stream.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_sample_is_named_and_counted(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"lanes": 4, "turns": 1, "transforms": [api.Shuffle(7), api.Map(fails_at_three)]}
    (stream,) = open_lanes(LIVE, (1, 1, workers), max_skipped=9, **options)
    samples = [sample for step in Job([stream]).steps(9) for sample in step]
    stream.close()
    assert len(samples) == 72
    assert all(sample % 10 != 3 for sample in samples)
    assert len(set(samples)) == 72
    assert stream.skipped == {0: 2, 1: 2, 2: 2, 3: 2}
    assert stream.numbers_at(api.DataPosition(0, 72, 9)) == {f"data/lane_{lane}/skipped": 2.0 for lane in range(4)}
    assert caplog.text.count("skipped sample 3 of shard (2, 20): ValueError: damaged") == 1


def test_skipping_has_a_limit_of_each_lane_that_a_resume_keeps() -> None:
    options: dict[str, Any] = {"lanes": 4, "turns": 1, "transforms": [api.Map(fails_at_three)]}
    with pytest.raises(api.DataError, match=r"sample 13 of shard \(0, 20\).*2 samples would be skipped in lane 0.*=1"):
        read_in_parts(lambda: LIVE, [((1, 1, 0), 9)], max_skipped=1, **options)
    with pytest.raises(api.DataError, match="max_skipped=1"):
        read_in_parts(lambda: LIVE, [((1, 1, 0), 4), ((2, 2, 0), 1), ((1, 1, 0), 9)], max_skipped=1, **options)
    assert len(read_in_parts(lambda: LIVE, [((1, 1, 0), 4), ((2, 2, 0), 1), ((4, 1, 0), 3)], max_skipped=2, **options))


def read_all(stream: Any, steps: int) -> None:
    for _ in range(steps):
        stream.next_window()


def test_a_stream_that_changed_is_refused_in_its_middle() -> None:
    job = Job(open_lanes(LIVE, (1, 1, 0), lanes=4, turns=1))
    job.steps(3)
    position, state, _ = job.ends[0]
    fewer = api.IterableShards(LiveLines, [(shard, 20) for shard in range(7)])
    for source, options, message in [
        (fewer, {"lanes": 4, "turns": 1}, "shards: 8 then, 7 now"),
        (LIVE, {"lanes": 8}, "lanes: 4 then, 8 now"),
        (
            LIVE,
            {"lanes": 4, "turns": 1, "transforms": [api.Shuffle(4)]},
            r"transforms: \[\] then, \['Shuffle\(window=4\)'\]",
        ),
    ]:
        (stream,) = open_lanes(source, (1, 1, 0), **options)
        with pytest.raises(api.DataError, match=message):
            stream.seek(position, state, is_pass_over=False, state=None)
    (stream,) = open_lanes(LIVE, (1, 1, 0), lanes=4, turns=1)
    with pytest.raises(api.DataError, match=r"states of lanes \[0, 1, 2, 3\] are not known"):
        stream.seek(position, None, is_pass_over=False, state=None)


def test_tensors_in_a_state_are_kept_by_value() -> None:
    source = api.IterableShards(WithGenerator, range(4))
    options: dict[str, Any] = {"lanes": 4, "transforms": [api.Shuffle(3)]}
    expected = read_in_parts(lambda: source, [((1, 1, 0), 12)], **options)
    job = Job(open_lanes(source, (1, 2, 2), **options))
    found = job.steps(7)
    position, state, _ = job.ends[0]
    job.streams[0].seek(position, state, is_pass_over=False, state=None)
    found += job.steps(5)
    job.close()
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]


class WithGenerator:
    """Draws from a generator of its own, whose state it keeps as a tensor."""

    def __init__(self, shard: int) -> None:
        self.generator = torch.Generator().manual_seed(shard)
        self.left = 30

    def __iter__(self) -> Iterator[float]:
        while self.left:
            self.left -= 1
            yield torch.rand((), generator=self.generator).item()

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]
        self.generator.set_state(state["generator"])
