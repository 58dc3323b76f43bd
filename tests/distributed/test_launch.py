"""What ranks were not told of one another is said before any of them waits."""

import pytest

import dream_trainer as dt
from dream_trainer.distributed import world
from tests.api import ConfigError


@pytest.mark.parametrize("port", ["0", "70000", "http", ""])
def test_a_port_that_no_rank_could_be_met_at_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world._launches, "count", world._launches.count)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"MASTER_PORT='{port}' is no port that ranks could meet at"):
        world.World(dt.DeviceParameters(device="cpu"), shard_by_default=False)
