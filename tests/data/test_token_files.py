"""Token files: what was written is read, in any process; what is damaged is named."""

import json
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.api import DataError, TokenFile, TokenFileWriter

DOCUMENTS = [[5, 6, 7], [], [8], list(range(200)), [65_535]]


def write(path: Path, documents: list[list[int]] = DOCUMENTS, vocabulary_size: int = 65_536) -> Path:
    with TokenFileWriter(path, vocabulary_size) as writer:
        for document in documents:
            writer.add(document)
    return path


@pytest.mark.parametrize(("vocabulary_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_documents_come_back(tmp_path: Path, vocabulary_size: int, dtype: str) -> None:
    path = write(tmp_path / "a.bin", vocabulary_size=vocabulary_size)
    tokens = TokenFile(path)
    assert [document.tolist() for document in tokens] == DOCUMENTS
    assert tokens[0].dtype == dtype
    assert tokens.lengths.tolist() == [3, 0, 1, 200, 1]
    assert (len(tokens), tokens.num_tokens, tokens.vocabulary_size) == (5, 205, vocabulary_size)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", "a.index.npy", "a.json"]


def test_a_directory_is_all_its_shards_by_name(tmp_path: Path) -> None:
    write(tmp_path / "b.bin", [[1], [2, 3]])
    write(tmp_path / "a.bin", [[4]])
    write(tmp_path / "c.bin", [[7], [8, 9]])
    (tmp_path / "other.json").write_text("[]")
    tokens = TokenFile(tmp_path)
    assert [document.tolist() for document in tokens] == [[4], [1], [2, 3], [7], [8, 9]]
    assert tokens.lengths.tolist() == [1, 1, 2, 1, 2]
    for index in (-1, 5):
        with pytest.raises(IndexError, match=f"document {index} of 5"):
            tokens[index]


def test_it_travels_to_workers_as_its_path(tmp_path: Path) -> None:
    tokens = TokenFile(write(tmp_path / "a.bin"))
    assert tokens[3].tolist() == DOCUMENTS[3]
    assert len(pickle.dumps(tokens)) < 500
    loader = DataLoader(tokens, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [document.tolist() for document in loader] == DOCUMENTS


def test_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [list(range(1000))] * 20_000)
    tracemalloc.start()
    assert TokenFile(path)[19_999][-1] == 999
    assert tracemalloc.get_traced_memory()[1] < 2**20 < path.stat().st_size
    tracemalloc.stop()


def test_an_exception_leaves_no_shard(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="document 1 has token ids from 3 to 300, and vocabulary_size=256"):
        write(tmp_path / "a.bin", [[1], [3, 300]], 256)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_whole_is_named(tmp_path: Path) -> None:
    def damaged(name: str, change: str, content: bytes | None) -> Path:
        path = write(tmp_path / name / "a.bin")
        file = path.with_suffix(change)
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        return path

    header = json.loads(write(tmp_path / "whole" / "a.bin").with_suffix(".json").read_text())
    cases: list[tuple[str, bytes | None, str]] = [
        (".bin", None, r"there is no token file .*a\.bin"),
        (".bin", b"x" * 100, r"a\.bin has 100 bytes, and 205 tokens of uint16 take 410"),
        (".json", None, r"a\.bin has no header in a\.json"),
        (".json", b"{}", r"a\.bin has no header in a\.json"),
        (".json", json.dumps(header | {"version": 9}).encode(), r"a\.json is of version 9"),
        (".index.npy", None, r"a\.index\.npy is not a whole \.npy file: .*No such file"),
        (".index.npy", b"\x93NUMPY", r"a\.index\.npy is not a whole \.npy file"),
    ]
    for number, (change, content, message) in enumerate(cases):
        with pytest.raises(DataError, match=message):
            TokenFile(damaged(str(number), change, content))
    np.save(tmp_path / "whole" / "a.index.npy", np.array([0, 3, 3, 4, 204, 9]))
    with pytest.raises(DataError, match=r"a\.index\.npy does not belong to a\.bin, which has 205 tokens"):
        TokenFile(tmp_path / "whole")
    np.save(tmp_path / "whole" / "a.index.npy", np.array([0, 9, 3, 4, 204, 205]))
    with pytest.raises(DataError, match="is damaged: documents begin before"):
        TokenFile(tmp_path / "whole")[0]
    for path, message in ((tmp_path / "none.bin", "there is no token file"), (tmp_path, "has no token files")):
        with pytest.raises(DataError, match=message):
            TokenFile(path)


def test_one_shard_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a.bin", 10) as first:
        first.add([1, 2])
        with pytest.raises(DataError, match=r"a\.bin is being written by another process"):
            write(tmp_path / "a.bin", [[3]], 10)
        first.add([4])
    assert [document.tolist() for document in TokenFile(tmp_path / "a.bin")] == [[1, 2], [4]]
    (tmp_path / "b.bin.part").write_bytes(b"left by one that was killed")
    assert [document.tolist() for document in TokenFile(write(tmp_path / "b.bin", [[3]], 10))] == [[3]]
