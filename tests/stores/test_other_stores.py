"""The same promises at other servers than moto, as far as they are installed: what each of them may answer otherwise.

SeaweedFS speaks S3's protocol and keeps objects on the disk; fake-gcs-server speaks Google's, and this project's own
server what adlfs says to Azure's. The last two are skipped where the packages that speak to them are not installed.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api import CheckpointError, Ownership, StorePath, open_store
from tests.stores import azure, google
from tests.stores.jobs import train
from tests.stores.seaweed import SeaweedServer
from tests.stores.test_object_store import check_objects
from tests.stores.test_runs import (
    check_another_job_ends_it,
    check_run_without_store,
    run_command,
    same,
    sharded,
    stored_steps,
    waiting,
)
from tests.trainer.arithmetic import same_bits
from tests.worlds import run_world

OtherServer = SeaweedServer | google.GoogleServer | azure.AzureServer

SERVERS: dict[str, Callable[[Path], OtherServer]] = {
    "seaweed": SeaweedServer,
    "google": google.GoogleServer,
    "azure": lambda directory: azure.AzureServer(),
}
MISSING = {"google": google.MISSING, "azure": azure.MISSING}


@pytest.fixture(
    params=[
        pytest.param("seaweed", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.skipif(bool(lacks), reason=f"needs {' and '.join(lacks)}"))
            for name, lacks in MISSING.items()
        ),
    ],
    scope="module",
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherServer]:
    server = SERVERS[request.param](tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture
def url(server: OtherServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place in the store that no other test has; this process, and those that it starts, speak to the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    open_store.cache_clear()
    yield f"{server.url}/{tmp_path.name}"
    server.start()
    open_store.cache_clear()


def test_objects_are_written_once_and_read_back_in_parts(url: str, tmp_path: Path) -> None:
    check_objects(url, tmp_path, (70 << 20) + 12345)  # more than any client sends at once


def test_a_killed_run_goes_on_is_kept_short_and_read_on_other_ranks(url: str, all_cases: bool) -> None:
    phases = ("before the manifest", "between files", "after the manifest")
    for phase in phases if all_cases else phases[:1]:
        assert run_command([sys.executable, "-m", "tests.stores.jobs", url, "6", phase]).returncode != 0
    run = train(url, 8, keep_last=2)
    assert stored_steps(url) == [6, 8]
    assert waiting() == []
    assert same(run, train(None, 8, experiment="straight"))
    two = run_world(sharded, 2, url, 4, "two")
    one = run_world(sharded, 1, url, 4, "two")
    assert same_bits(two[0][0], one[0][0])


def test_a_run_has_one_owner_and_one_manifest_of_a_step(url: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = Ownership(StorePath(url) / "x", tmp_path / "a", renew_seconds=0.2)
    with pytest.raises(CheckpointError, match="another live job"):
        Ownership(StorePath(url) / "x", tmp_path / "b", lease_seconds=3.0)
    first.release()
    check_another_job_ends_it(url, tmp_path)


@pytest.mark.slow  # clients try again for a minute
def test_it_goes_on_while_the_store_is_away(url: str, server: OtherServer, caplog: pytest.LogCaptureFixture) -> None:
    check_run_without_store(url, server, caplog, patience_seconds=120)
    assert {record.name for record in caplog.records if record.levelname == "ERROR"} <= {"dream_trainer"}


def test_a_store_that_ignores_conditions_is_refused(url: str, server: OtherServer, tmp_path: Path) -> None:
    if not isinstance(server, azure.AzureServer):
        pytest.skip("this server honours them")
    server.ignores_conditions = True
    try:
        with pytest.raises(CheckpointError, match="If-None-Match"):
            Ownership(StorePath(url), tmp_path)
    finally:
        server.ignores_conditions = False
    assert list((StorePath(url) / "owners").iterdir()) == []
