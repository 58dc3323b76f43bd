"""DeviceParameters: presets shard and replicate what their names say, and a mesh that does not fit is explained."""

import pytest

from dream_trainer.config.device_parameters import DeviceParameters, resolve_mesh
from dream_trainer.errors import ConfigError


def shape(
    parameters: DeviceParameters, world_size: int, *, fsdp: bool = True, per_host: int | None = None
) -> tuple[int, int]:
    mesh = resolve_mesh(parameters, world_size, shard_by_default=fsdp, ranks_per_host=per_host)
    assert (mesh.pp, mesh.cp, mesh.tp) == (1, parameters.context_parallel, parameters.tensor_parallel)
    return mesh.dp_replicate, mesh.dp_shard


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_default_shards_over_all_ranks_with_fsdp_and_replicates_without(world_size: int) -> None:
    assert shape(DeviceParameters(), world_size, fsdp=True) == (1, world_size)
    assert shape(DeviceParameters(), world_size, fsdp=False) == (world_size, 1)


def test_on_several_hosts_the_default_shards_inside_of_each_and_replicates_between_them() -> None:
    assert shape(DeviceParameters(), 16, per_host=8) == (2, 8)
    assert shape(DeviceParameters(), 16, fsdp=False, per_host=8) == (16, 1)
    assert shape(DeviceParameters.fsdp(), 16, per_host=8) == (1, 16)
    assert shape(DeviceParameters(tensor_parallel=2), 16, per_host=8) == (2, 4)
    assert shape(DeviceParameters(tensor_parallel=3), 24, per_host=8) == (1, 8)  # does not divide a host
    assert shape(DeviceParameters(tensor_parallel=8), 32, per_host=4) == (1, 4)  # wider than a host
    assert shape(DeviceParameters(), 7, per_host=4) == (1, 7)  # 4 and 3
    assert shape(DeviceParameters(dp_shard=4), 16, per_host=8) == (4, 4)


def test_ranks_that_share_sequences_leave_the_others_to_data_parallelism() -> None:
    assert shape(DeviceParameters(context_parallel=2), 8) == (1, 4)
    assert shape(DeviceParameters(context_parallel=2, tensor_parallel=2), 8, fsdp=False) == (2, 1)
    assert shape(DeviceParameters(context_parallel=2), 16, per_host=8) == (2, 4)


@pytest.mark.pitfall(22)
def test_presets_do_what_their_names_say() -> None:
    assert shape(DeviceParameters.fsdp(), 4) == (1, 4)
    assert shape(DeviceParameters.ddp(), 4, fsdp=False) == (4, 1)
    assert shape(DeviceParameters.hsdp(dp_shard=2), 8) == (4, 2)
    assert shape(DeviceParameters.hsdp(), 16) == (2, 8)
    given = DeviceParameters.fsdp(precision="bf16", compile=True)
    assert given == DeviceParameters(dp_replicate=1, dp_shard="auto", precision="bf16", compile=True)
    with pytest.raises(TypeError, match="dp_shard"):
        DeviceParameters.fsdp(dp_shard=2)
    with pytest.raises(ConfigError, match="precisio"):
        DeviceParameters.ddp(precisio="bf16")
    assert shape(DeviceParameters.single_device(), 1) == (1, 1)


@pytest.mark.pitfall(22)
def test_presets_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def presets() -> list[DeviceParameters]:
        make = DeviceParameters
        return [make.single_device(), make.ddp(), make.fsdp(), make.hsdp()]

    expected = presets()
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert presets() == expected


def test_auto_takes_the_ranks_that_are_left() -> None:
    assert shape(DeviceParameters(dp_replicate=2), 8) == (2, 4)
    assert shape(DeviceParameters(dp_replicate=4, dp_shard=2), 8) == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        (
            {"dp_shard": 3},
            8,
            r"dp_shard=3 does not divide world_size=8 .* leave 8\)\. Use dp_shard=\"auto\", or 1, 2, 4 or 8\.$",
        ),
        ({"dp_replicate": 2, "dp_shard": 2}, 6, "makes 4 ranks, but world_size=6 .*6 x 1, 3 x 2, 2 x 3 or 1 x 6"),
        ({"context_parallel": 3}, 8, "context_parallel=3 does not divide world_size=8. Use 1, 2, 4 or 8"),
        ({"context_parallel": 4, "tensor_parallel": 2}, 4, r"=4 does not .*=4 \(tp=2 leaves 2\). Use 1 or 2"),
    ],
)
def test_sizes_that_do_not_fit_are_answered_with_others(sizes: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape(DeviceParameters(**sizes), world_size)


@pytest.mark.parametrize("parameters", [DeviceParameters(dp_shard=2), DeviceParameters.fsdp()])
def test_sharding_without_fsdp_mixin_is_an_error_that_names_it(parameters: DeviceParameters) -> None:
    with pytest.raises(ConfigError, match="FSDPMixin"):
        shape(parameters, 2, fsdp=False)
