"""One S3 server for each file of tests, emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores.servers import BUCKET, Server, pointing_at, running_server


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def s3(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, empty but for a bucket; this process speaks to it."""
    with pointing_at(running, monkeypatch):
        yield running


@pytest.fixture
def url(s3: Server) -> str:
    """A place in the store."""
    return f"s3://{BUCKET}/runs"
