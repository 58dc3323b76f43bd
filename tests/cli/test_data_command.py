"""`dream-trainer data tokenize`: text of every kind in, the same token files out whatever happened on the way."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.api import DataError, TokenFile, main

TEXTS = ["one", "zwölf", "", "a longer text\nof two lines"]


def written(output: Path) -> list[str]:
    documents = [document.tolist() for document in TokenFile(output)]
    assert all(document[-1] == 256 for document in documents)
    return [bytes(document[:-1]).decode() for document in documents]


def contents(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(output.iterdir())}


def json_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "parquet", "hf"])
def test_documents_of_every_kind_are_written(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = str(tmp_path / f"*.{kind}")
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (tmp_path / f"{number}.txt").write_text(text)
    elif kind == "jsonl":
        json_lines(tmp_path / "a.jsonl", TEXTS)
    elif kind == "jsonl.gz":
        with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    else:
        from datasets import Dataset

        dataset = Dataset.from_dict({"text": TEXTS})
        if kind == "parquet":
            dataset.to_parquet(tmp_path / "a.parquet")
        else:
            dataset.save_to_disk(tmp_path / "saved")
            given = f"hf:{tmp_path / 'saved'}"
    assert main(["data", "tokenize", given, "--output", str(tmp_path / "out")]) == 0
    assert written(tmp_path / "out") == TEXTS
    said = capsys.readouterr().out
    assert "4 documents, 39 tokens; tokens of a document: mean 10, median 6, longest 27. Vocabulary: 257" in said


def test_workers_and_a_second_call_change_nothing(tmp_path: Path) -> None:
    for number in range(4):
        json_lines(tmp_path / f"{number}.jsonl", [f"{number} {i}" for i in range(50)], "content")
    arguments = ["data", "tokenize", str(tmp_path / "*.jsonl"), "--field", "content", "--output"]
    assert main([*arguments, str(tmp_path / "one")]) == 0
    assert main([*arguments, str(tmp_path / "two"), "--workers", "2"]) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "one").glob("shard*")}
    (tmp_path / "one" / "shard-00002.json").unlink()
    assert main([*arguments, str(tmp_path / "one")]) == 0
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "one").glob("shard*")}
    assert {file.name.split(".")[0] for file in after if after[file] != before[file]} == {"shard-00002"}
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_after_a_kill_finished_shards_are_kept_and_the_rest_is_made(tmp_path: Path) -> None:
    for number in range(6):
        json_lines(tmp_path / f"{number}.jsonl", [f"{number} {i} " * 50 for i in range(8000)])
    arguments = ["data", "tokenize", str(tmp_path / "*.jsonl"), "--output"]
    output = tmp_path / "out"
    program = "import sys; from dream_trainer.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments, str(output)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (output / "shard-00000.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = {file: file.stat().st_mtime_ns for file in output.glob("*.json")}
    assert 1 <= len(finished) < 6
    assert main([*arguments, str(output)]) == 0
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    assert written(output) == [f"{number} {i} " * 50 for number in range(6) for i in range(8000)]
    assert not list(output.glob("*.part"))


def test_a_directory_without_all_its_shards_is_refused(tmp_path: Path) -> None:
    for number in range(5):
        json_lines(tmp_path / f"{number}.jsonl", TEXTS)
    output = tmp_path / "out"
    arguments = ["data", "tokenize", str(tmp_path / "*.jsonl"), "--output", str(output)]
    assert main(arguments) == 0
    (output / "shard-00002.json").unlink()  # as a killed call leaves it
    with pytest.raises(DataError, match="out has 4 of 5 shards: shard-00002 is missing"):
        TokenFile(output)
    for file in [*output.glob("shard-00002.*"), *output.glob("shard-00004.*")]:
        file.unlink()
    with pytest.raises(DataError, match="has 3 of 5 shards: shard-00002, shard-00004 are missing"):
        TokenFile(output)
    assert len(TokenFile(output / "shard-00001.bin")) == 4
    assert main(arguments) == 0
    assert written(output) == TEXTS * 5


def test_a_tokenizer_of_a_file_is_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "one": 1, "two": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    json_lines(tmp_path / "a.jsonl", ["one two", "two three"])
    arguments = ["data", "tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "words.json")]
    assert main([*arguments, "--end", "<end>", "--output", str(tmp_path / "out")]) == 0
    tokens = TokenFile(tmp_path / "out")
    assert [document.tolist() for document in tokens] == [[1, 2, 0], [2, 3, 0]]
    assert tokens.vocabulary_size == 4


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none", None, "there is no file"),
        ("a.jsonl", b'{"text": "fine"}\n{"body": 1}\n', "line 2 of {path}"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": {"a": 1}}\n', "line 2 of {path} has {{'a': 1}} as its 'text'"),
        ("a.txt", b"\xff\xfe", "is no text in UTF-8"),
        ("a.parquet", b"PAR1 or not", "a.parquet has no whole column 'text'"),
        ("a.jsonl", b"", "there is no document in {path}"),
        (".", None, "is a directory. Give a pattern of its files"),
    ],
)
def test_what_cannot_be_read_is_named(
    name: str, content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["data", "tokenize", str(path), "--output", str(tmp_path / "out")]) == 1
    assert says.format(path=path) in " ".join(capsys.readouterr().err.split())
