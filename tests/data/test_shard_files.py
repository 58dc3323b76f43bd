"""Files of samples by number, beside their own libraries; what is damaged is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset

from tests import api
from tests.data.lane_truth import write_tar
from tests.data.reading import Job, open_ranks

ROWS = [{"text": f"row {i} ä", "n": i} for i in range(25)]


def json_lines(directory: Path) -> api.JsonLines:
    for number, first in enumerate((0, 10, 20)):
        lines = [json.dumps(row, ensure_ascii=False) for row in ROWS[first : first + 10]]
        (directory / f"{number}.jsonl").write_text("\n\n".join(lines))
    return api.JsonLines(directory)


def parquet_rows(directory: Path) -> api.ParquetRows:
    for number, first in enumerate((0, 10, 20)):
        parquet.write_table(pa.Table.from_pylist(ROWS[first : first + 10]), directory / f"{number}.parquet", 3)
    return api.ParquetRows(directory, kept_groups=2)


def tar_samples(directory: Path) -> api.TarSamples:
    for number, first in enumerate((0, 10, 20)):
        parts = [(row["n"], part, json.dumps(value)) for row in ROWS[first : first + 10] for part, value in row.items()]
        write_tar(directory / f"{number}.tar", {f"some/{n:03d}.{part}.json": text.encode() for n, part, text in parts})
    return api.TarSamples(directory)


def as_row(sample: dict[str, Any]) -> dict[str, Any]:
    if "__key__" not in sample:
        return sample
    row = {name: json.loads(sample[f"{name}.json"]) for name in ("text", "n")}
    assert sample["__key__"] == f"some/{row['n']:03d}"
    return row


@pytest.mark.parametrize("make", [json_lines, parquet_rows, tar_samples])
def test_samples_come_by_number_in_any_order_and_in_workers(make: Any, tmp_path: Path) -> None:
    data: api.ShardFiles = make(tmp_path)
    assert len(data) == 25
    for index in (24, 0, 9, 10, 3, 19, 20):
        assert as_row(data[index]) == ROWS[index]
    for index in (-1, 25):
        with pytest.raises(IndexError):
            data[index]
    for workers in (0, 2):
        loader = api.DistributedDataLoader(
            data, 5, num_workers=workers, collate_fn=list, **({"multiprocessing_context": "fork"} if workers else {})
        )
        assert [as_row(sample) for batch in loader for sample in batch] == ROWS


def test_what_is_missing_or_damaged_is_named_at_opening_or_at_its_sample(tmp_path: Path) -> None:
    lines = json_lines(tmp_path)
    parquet_rows(tmp_path)
    tar_samples(tmp_path)
    for kind, suffix in ((api.JsonLines, "jsonl"), (api.ParquetRows, "parquet"), (api.TarSamples, "tar")):
        with pytest.raises(api.DataError, match=f"there is no file .*none.{suffix}"):
            kind(tmp_path / f"none.{suffix}")
        (tmp_path / suffix).mkdir()
        with pytest.raises(api.DataError, match=rf"has no files of \.{suffix}"):
            kind(tmp_path / suffix)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(api.DataError, match="there is no sample in"):
        api.JsonLines(tmp_path / "empty.jsonl")
    cut = tmp_path / "1.parquet"
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(api.DataError, match=r"1\.parquet is not a whole Parquet file"):
        api.ParquetRows(tmp_path)
    with pytest.raises(api.DataError, match=r"0\.parquet has no columns \['body'\]"):
        api.ParquetRows(tmp_path / "0.parquet", ["body"])
    cut = tmp_path / "1.tar"
    cut.write_bytes(cut.read_bytes()[:5000])
    with pytest.raises(api.DataError, match=r"1\.tar"):
        api.TarSamples(tmp_path)
    (tmp_path / "1.jsonl").write_text('{"text": 1}\n{"tex')
    lines = api.JsonLines(tmp_path / "1.jsonl")
    with pytest.raises(api.DataError, match=r"sample 1 of .*1\.jsonl cannot be read: JSONDecodeError"):
        lines[1]


def test_a_row_group_is_read_once_while_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = parquet_rows(tmp_path)
    read: list[int] = []
    whole = parquet.ParquetFile.read_row_group

    def counted(self: Any, group: int, **options: Any) -> Any:
        read.append(group)
        return whole(self, group, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    for index in (0, 3, 1, 4, 2, 6, 0, 3):
        data[index]
    assert read == [0, 1, 2, 1]  # two are kept, the one longest unused goes


def test_hugging_face_datasets_are_sources_as_they_are(tmp_path: Path) -> None:
    dataset = Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "saved")
    mixture = api.Mixture({"hf": Dataset.load_from_disk(tmp_path / "saved"), "lines": json_lines(tmp_path)})
    steps = []
    for layout in ((1, 1, 0), (2, 1, 2)):
        job = Job(open_ranks(lambda: mixture, layout, 4))
        steps.append([[number for batch in batches for number in batch["n"].tolist()] for batches in job.read(30)])
        job.close()
    assert steps[0] == steps[1]
    assert {number for step in steps[0] for number in step} == set(range(25))


def test_measured_lengths_make_a_source_of_tokens() -> None:
    data = [[1] * (i % 7 + 1) for i in range(30)]
    lengths = api.measure_lengths(data)
    assert lengths.tolist() == [len(sample) for sample in data]
    assert api.measure_lengths([{"t": sample} for sample in data], length=lambda sample: len(sample["t"])).tolist() == (
        lengths.tolist()
    )
    assert api.measure_lengths([{"tokens": sample, "weights": sample} for sample in data]).tolist() == lengths.tolist()
    named = [{"input_ids": sample} for sample in data]
    assert api.measure_lengths(named, field="input_ids", num_workers=1).tolist() == lengths.tolist()
    with pytest.raises(
        api.DataError,
        match=r"sample 0 of list: DataError: no 'tokens', but \['input_ids'\]\. Name the token ids in field=",
    ):
        api.measure_lengths(named)
    mixture = api.Mixture({"data": api.WithLengths(data, lengths)}, unit="tokens")
    mixture.begin(0, None)
    assert mixture.lengths(0, 60).tolist() == [len(mixture[position]) for position in range(60)]
    with pytest.raises(api.DataError, match=r"shape \(29,\) for 30 samples"):
        api.WithLengths(data, np.ones(29))


def test_tars_read_by_number_have_the_samples_of_tars_read_in_sequence(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    names = ["./x/a.b.TXT", "./x/a.cls", "README", "x/.hidden", "__meta__", "y/a.txt", "a.txt"]
    write_tar(path, dict.fromkeys(names, b""))
    samples = api.TarSamples(path)
    assert [samples[number] for number in range(len(samples))] == list(api.WebDatasetShards([path]).open(0))
    write_tar(path, dict.fromkeys(["a.txt", "a.TXT"], b""))
    with pytest.raises(api.DataError, match=r"two files 'a\.TXT' in one sample"):
        api.TarSamples(path)
