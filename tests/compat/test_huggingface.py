from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from tests.api import files_read, shuffles_in_a_buffer


def numbers() -> Iterator[dict[str, int]]:
    for number in range(40):
        yield {"n": number}


@pytest.fixture
def stream() -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(numbers)


def test_a_shuffled_stream_is_known_wherever_it_was_shuffled(stream: datasets.IterableDataset) -> None:
    shuffled = stream.shuffle(seed=0, buffer_size=4)
    for made in (shuffled, shuffled.map(dict).filter(bool).take(9), datasets.concatenate_datasets([stream, shuffled])):
        assert shuffles_in_a_buffer(made)
    for made in (stream, stream.map(dict).filter(bool).skip(3), datasets.interleave_datasets([stream, stream])):
        assert not shuffles_in_a_buffer(made)


def test_the_state_of_a_buffer_loses_samples(stream: datasets.IterableDataset) -> None:
    """Why it is refused; when this fails, the refusal can go."""
    shuffled = stream.shuffle(seed=0, buffer_size=4)
    every = [sample["n"] for sample in shuffled]
    iterator = iter(shuffled)
    for _ in range(20):
        next(iterator)
    state = shuffled.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    again = stream.shuffle(seed=0, buffer_size=4)
    again.load_state_dict(state)
    assert [sample["n"] for sample in again] != every[20:]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_the_file_of_a_shard_is_known_also_behind_a_map(kind: str, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{number}.{kind}") for number in range(3)]
    for file in files:
        rows = datasets.Dataset.from_dict({"n": [1, 2]})
        {"json": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[kind](file)
    dataset = datasets.load_dataset(
        kind, data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    ).map(dict)
    shards = [dataset.shard(num_shards=3, index=number, contiguous=False) for number in range(3)]
    assert [files_read(shard) for shard in shards] == [[file] for file in files]
    assert files_read(datasets.Dataset.from_dict({"n": [1]}).to_iterable_dataset()) == []
