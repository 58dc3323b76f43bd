"""The bytes of an object store, against a real server of S3's protocol."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.api import CheckpointError, ConfigError, Ownership, StorePath, as_path, without_secrets
from tests.stores.servers import SECRET, Server


def at_once(function: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    """Calls a function in a thread for each argument, and waits for all."""
    threads = [threading.Thread(target=function, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_objects(url: str, directory: Path, n_bytes: int) -> None:
    """One of many creates an object, a large file goes in parts and is read in ranges, keys begin with directories."""
    root = StorePath(url)
    assert not root.exists()
    assert list(root.iterdir()) == []
    won: list[int] = []

    def race(number: int) -> None:
        if (root / "one").create(str(number).encode()):
            won.append(number)

    at_once(race, range(8))
    assert [(root / "one").read_bytes()] == [str(number).encode() for number in won]

    content = os.urandom(n_bytes)
    (directory / "large").write_bytes(content)
    (directory / "empty").touch()
    for name in ("large", "empty"):
        (root / "a" / name).upload(directory / name)
    with (root / "a" / "large").open("rb") as stream:
        assert stream.read(n_bytes + 1) == content
        assert stream.tell() == n_bytes
    with (root / "a" / "large").read_on(20 << 20, (20 << 20) + 1000) as stream:
        assert stream.read(n_bytes) == content[20 << 20 : (20 << 20) + 1000]
    assert (root / "a" / "empty").read_bytes() == b""
    assert sorted((entry.name, entry.is_dir()) for entry in root.iterdir()) == [("a", True), ("one", False)]
    (root / "a").rename(root / "b")
    assert (root / "b").is_dir()
    assert not (root / "a").exists()
    assert (root / "b" / "large").stat().st_size == n_bytes
    (root / "one").remove()
    (root / "one").remove()
    assert list((root / "one").iterdir()) == []
    with pytest.raises(FileNotFoundError, match=f"{root / 'one'} is not there"):
        (root / "one").read_bytes()


def test_objects_are_written_once_and_read_back_in_parts(url: str, tmp_path: Path, s3: Server) -> None:
    check_objects(url, tmp_path, (34 << 20) + 12345)
    assert any("partNumber" in path or method == "POST" for method, path, _ in s3.requests)  # in several parts
    assert not (StorePath(url) / "b" / "large").is_dir()


def test_throttled_requests_are_made_again(url: str, s3: Server) -> None:
    place = StorePath(url) / "x"
    s3.throttled = 2
    place.put(b"x")
    s3.throttled = 2
    assert place.read_bytes() == b"x"
    s3.throttled = 2
    assert place.size() == 1
    s3.throttled = 2
    assert [entry.name for entry in place.parent.iterdir()] == ["x"]
    assert s3.throttled == 0


def test_errors_name_the_address_and_no_secret(url: str, s3: Server) -> None:
    place = StorePath(url) / "x"
    s3.refuses = True
    with pytest.raises(PermissionError, match="s3://bucket/runs/x") as raised:
        place.put(b"x")
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    s3.stop()
    with pytest.raises(OSError, match="s3://bucket/runs/x") as unreachable:
        place.put(b"x")
    assert SECRET not in str(unreachable.value)


def test_secrets_are_taken_out_of_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "abcdefgh")
    said = without_secrets(
        ValueError("GET https://u:p@host/x?sig=Zm9v%3D&se=1 with abcdefgh; X-Amz-Security-Token=FwoG; AccountKey=xyz==")
    )
    for secret in ("Zm9v", "abcdefgh", "u:p", "FwoG", "xyz"):
        assert secret not in said
    assert "host/x" in said


@pytest.mark.parametrize("text", ["s3://key:secret@bucket/x", "s3://bucket/x?versionId=1", "https://bucket/x", "s3://"])
def test_addresses_that_cannot_work_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        as_path(text)
    assert "key:secret" not in str(raised.value)


def test_a_run_belongs_to_one_job(url: str, tmp_path: Path) -> None:
    run, here, there = StorePath(url), tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first = Ownership(run, here, lease_seconds=3.0, renew_seconds=0.2)
    with pytest.raises(CheckpointError, match="another live job"):
        Ownership(run, there, lease_seconds=3.0)
    first.release()
    second = Ownership(run, there, renew_seconds=60.0)  # as one that was killed, which renews no more
    third = Ownership(run, there, renew_seconds=60.0)  # whose directory says that it is gone
    assert second.is_lost()
    assert not third.is_lost()
    fourth = Ownership(run, here, lease_seconds=1.0, renew_seconds=60.0)  # elsewhere it takes a while to know
    assert third.is_lost()
    assert [entry.name for entry in (run / "owners").iterdir()] == ["00000004.json"]
    for owner in (second, third, fourth):
        owner.release()


def test_of_two_jobs_that_start_at_once_one_has_the_run(url: str, tmp_path: Path) -> None:
    owners: list[Ownership] = []
    errors: list[Exception] = []

    def start(name: str) -> None:
        (tmp_path / name).mkdir()
        try:
            owners.append(Ownership(StorePath(url), tmp_path / name, lease_seconds=30.0, renew_seconds=0.2))
        except CheckpointError as error:
            errors.append(error)

    at_once(start, "ab")
    assert (len(owners), len(errors)) == (1, 1)
    owners[0].release()


def test_a_store_that_ignores_conditions_is_refused(url: str, tmp_path: Path, s3: Server) -> None:
    s3.ignores_conditions = True
    with pytest.raises(CheckpointError, match="If-None-Match"):
        Ownership(StorePath(url), tmp_path)
    assert list((StorePath(url) / "owners").iterdir()) == []
