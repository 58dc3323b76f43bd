"""What `describe()` says that crosses the links in a step is what the hosts' interfaces count."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import traffic_job
from tests.faults.namespaces import Hosts, can_make_hosts
from tests.worlds import SERVER, free_port, rank_environment

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root, iproute2 and network namespaces")

MESHES: dict[str, dict[str, Any]] = {
    "hsdp": {"devices": {}},
    "hsdp-accumulated": {"devices": {}, "accumulation": 2},
    "sharded": {"devices": {"dp_replicate": 1, "dp_shard": 4}},
    "replicas": {"devices": {"dp_replicate": 4, "dp_shard": 1}},
    "local": {"devices": {"dp_replicate": 4, "dp_shard": 1}, "local": True},
}


@pytest.mark.parametrize(
    "name", [name if name == "hsdp" else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
)
def test_the_bytes_inside_and_between_hosts_are_those_that_the_interfaces_count(name: str, tmp_path: Path) -> None:
    port = free_port()
    with Hosts(2) as hosts:
        processes = []
        for rank in range(4):
            host, local = divmod(rank, 2)
            environment = rank_environment(rank, 4, port) | {
                "MASTER_ADDR": hosts.address(0),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(host),
                "GROUP_WORLD_SIZE": "2",
            }
            arguments = (environment, hosts.namespace(host), tmp_path, name, MESHES[name])
            processes.append(SERVER.Process(target=traffic_job.run, args=arguments))
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
        assert [process.exitcode for process in processes] == [0] * 4
    for host in range(2):
        found = json.loads((tmp_path / f"{name}-{host}.json").read_text())
        # Headers and acknowledgements come on top, and what the ranks agree by.
        for said, interface in (("between", "eth0"), ("inside", "lo")):
            assert found[said] * 0.99 - 20_000 < found["counted"][interface] < found[said] * 1.06 + 40_000
