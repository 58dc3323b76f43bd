"""One S3 server for each file of tests, emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from tests.api import open_store
from tests.stores.servers import BUCKET, Server, environment


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, empty but for a bucket; this process, and those that it starts, speak to it."""
    for name, value in environment(running.url).items():
        monkeypatch.setenv(name, value)
    requests.post(f"{running.url}/moto-api/reset", timeout=10)
    open_store.cache_clear()
    open_store("s3").mkdir(BUCKET)
    running.requests.clear()
    yield running
    running.throttled, running.refuses, running.ignores_conditions = 0, False, False
    running.before = lambda method, path: None
    running.start()
    open_store.cache_clear()


@pytest.fixture
def url(s3: Server) -> str:
    """A place in the store."""
    return f"s3://{BUCKET}/runs"
