"""The undisturbed run that each fault is held against, and hosts."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.faults.job import Job
from tests.faults.kills import SECONDS_OF_A_RUN, outcome
from tests.faults.namespaces import Hosts, can_make_hosts
from tests.faults.ranks import Attempt


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """How the job ends that nobody disturbs, by its number of ranks and its mesh.

    It saves synchronously and has no workers, hosts or local checkpoints, which are to change nothing.
    """

    @cache
    def of(ranks: int, **mesh: int) -> dict[str, Any]:
        directory = tmp_path_factory.mktemp("straight")
        saves = {"save_every_n_steps": 2, "async_save": False}
        with Attempt(Job(ranks=ranks, checkpoint=saves, devices=mesh), directory) as attempt:
            assert attempt.wait(SECONDS_OF_A_RUN) == [0] * ranks, attempt.report()
        return outcome(directory)

    return of


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts on this machine."""
    if not can_make_hosts():
        pytest.skip("needs root, iproute2 and network namespaces")
    with Hosts(2) as hosts:
        yield hosts
