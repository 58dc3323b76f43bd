"""What lanes yield, read by plain Python in one process, and sources over which it is compared."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dream_trainer.data.lane_stream import LaneStream, StreamLoader
from dream_trainer.data.sources.stream_sources import IterableShards, WebDatasetShards
from dream_trainer.data.stream import train_stream
from tests.data import reading
from tests.data.reading import Layout

GLOBAL_BATCH = 8
LAYOUTS = [(1, 1, 0), (2, 2, 2), (4, 1, 0), (1, 4, 2), (2, 1, 0), (4, 2, 2)]
"""(ranks, accumulation, workers)"""
KINDS = ["live", "hugging face", "webdataset"]


class LiveLines:
    """The numbers of one shard; its state is the dict that it goes on with, handed out as it is."""

    def __init__(self, item: tuple[int, int]) -> None:
        self.shard, self.length = item
        self.state = {"next": 0, "seen": []}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < self.length:
            self.state["next"] += 1
            self.state["seen"].append(self.state["next"])
            yield 1000 * self.shard + self.state["next"] - 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def lengths(shards: int, most: int = 23) -> list[int]:
    """Samples of each shard: all different, some shorter than a block."""
    return [most - 2 * (shard % 5) for shard in range(shards)]


def identity(sample: Any) -> int:
    """The number of a sample of any of the sources: 1000 x shard + index."""
    if isinstance(sample, int):
        return sample
    return int(sample["n"]) if "n" in sample else int(sample["txt"])


def make_source(kind: str, directory: Path, counts: Sequence[int]) -> Any:
    """A source of shards with so many samples each."""
    if kind == "live":
        return IterableShards(LiveLines, list(enumerate(counts)))
    if kind == "webdataset":
        if not any(directory.glob("*.tar")):
            write_tars(directory, counts)
        return WebDatasetShards(directory)
    import datasets

    files = [directory / f"{shard:03}.jsonl" for shard in range(len(counts))]
    for shard, file in enumerate(files):
        if not file.exists():
            file.write_text("".join(json.dumps({"n": 1000 * shard + index}) + "\n" for index in range(counts[shard])))
    names = [str(file) for file in files]
    return datasets.load_dataset(
        "json", data_files=names, split="train", streaming=True, cache_dir=str(directory / "cache")
    )


def write_tars(directory: Path, counts: Sequence[int]) -> None:
    import webdataset

    for shard, count in enumerate(counts):
        with webdataset.TarWriter(str(directory / f"{shard:03}.tar")) as writer:
            for index in range(count):
                number = 1000 * shard + index
                writer.write({"__key__": f"{number:06}", "txt": str(number), "x.bin": bytes([index])})


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    """A tar file by Python's own writer."""
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def lane_samples(counts: Sequence[int], lane: int, num_lanes: int, repeat: bool = True) -> Iterator[int]:
    """One lane in file order, in a single process."""
    while True:
        for shard in range(lane, len(counts), num_lanes):
            for index in range(counts[shard]):
                yield 1000 * shard + index
        if not repeat:
            return


def expected_steps(
    counts: Sequence[int],
    steps: int,
    *,
    lanes: int,
    turns: int = 1,
    change: Callable[[Iterator[int]], Iterator[Any]] = iter,
) -> list[list[Any]]:
    """The samples of each step, sorted."""
    readers = [change(lane_samples(counts, lane, lanes * turns)) for lane in range(lanes * turns)]
    found = []
    for step in range(steps):
        of_turn = readers[step % turns * lanes :][:lanes]
        found.append(sorted(next(reader) for reader in of_turn for _ in range(GLOBAL_BATCH // lanes)))
    return found


def open_lanes(
    source: Any, layout: Layout, *, seed: int = 3, global_batch: int = GLOBAL_BATCH, **options: Any
) -> list[LaneStream]:
    """The streams of all ranks."""
    ranks, accumulation, workers = layout
    loader = StreamLoader(
        source,
        global_batch // (ranks * accumulation),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        collate_fn=options.pop("collate_fn", list),
        **options,
    )
    streams = [
        train_stream(loader, accumulation=accumulation, dp_rank=rank, dp_size=ranks, seed=seed) for rank in range(ranks)
    ]
    assert all(isinstance(stream, LaneStream) for stream in streams)
    return streams  # type: ignore[return-value]


Job = partial(reading.Job, form=lambda batches: [sample for batch in batches for sample in batch])


def read_in_parts(source: Callable[[], Any], parts: Sequence[tuple[Layout, int]], **options: Any) -> list[list[Any]]:
    """The samples of steps that are read in several layouts, each from what the one before saved."""
    return reading.read_in_parts(lambda layout: Job(open_lanes(source(), layout, **options)), parts)


def digest(samples: Sequence[Any]) -> str:
    """Of the samples of one step, in any order."""
    return hashlib.sha256("\n".join(sorted(map(repr, samples))).encode()).hexdigest()
