"""What is exported is read by the safetensors library and torch.load as it was in the model, whole or not at all."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import api
from tests.checkpoint.states import assert_same_bits, flip, outcome, save
from tests.weights.weight_cases import Net
from tests.worlds import gloo_group, run_world


def expected_of(model: nn.Module) -> dict[str, Tensor]:
    """What a file of the model holds: its state without the second name of the tied weight."""
    return {name: value for name, value in model.state_dict().items() if name != "head.weight"}


def saved(root: Path, models: dict[str, nn.Module], *, ema: dict[str, Tensor] | None = None, **shared: Any) -> Path:
    given = {"extra_state": {name: {} for name in models}, **shared}
    optimizer = {"optimizers.optimizer.net.wide.exp_avg": torch.ones(2)}
    return save(root / "checkpoints", 3, tensors=api.model_tensors(models) | optimizer | (ema or {}), shared=given)


def read_directory(directory: Path) -> dict[str, Tensor]:
    """As transformers does: by the index if there is one."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        content = load_file(directory / file)
        assert {name for name, at in weight_map.items() if at == file} == content.keys()
        tensors |= content
    return tensors


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def checkpoint(tmp_path: Path, model: Net) -> Path:
    return saved(tmp_path / "run", {"net": model})


def test_every_dtype_is_read_back_bit_for_bit_and_aligned(tmp_path: Path) -> None:
    tensors = {}
    for index, dtype in enumerate(api.DTYPE_NAMES):
        count = 3 + index % 3
        low = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
        tensors[f"t.{dtype}"] = low.view(dtype).reshape(count, 1)
    tensors |= {"scalar": torch.tensor(7), "empty": torch.zeros(0, 4), "transposed": torch.arange(6.0).view(2, 3).T}
    specs = api.file_order({name: api.TensorSpec(tuple(value.shape), value.dtype) for name, value in tensors.items()})
    api.write_safetensors(tmp_path / "all", specs, tensors.__getitem__)
    with safe_open(tmp_path / "all", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_same_bits(load_file(tmp_path / "all"), tensors)
    content = (tmp_path / "all").read_bytes()
    header_length = int.from_bytes(content[:8], "little")
    assert header_length % 8 == 0
    for name, entry in json.loads(content[8 : 8 + header_length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % tensors[name].element_size() == 0


def test_a_dtype_that_the_format_lacks_is_named_before_anything_is_written(tmp_path: Path) -> None:
    tensors = {"models.net.phase": torch.zeros(2, dtype=torch.complex128), "models.net.weight": torch.zeros(2)}
    path = save(tmp_path / "run" / "checkpoints", 1, tensors=tensors)
    with pytest.raises(api.CheckpointError, match=r"safetensors cannot store phase \(torch\.complex128\)"):
        api.export_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    api.export_checkpoint(path, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["phase"].dtype == torch.complex128


def test_a_small_model_is_one_file(tmp_path: Path, model: Net, checkpoint: Path) -> None:
    out = tmp_path / "new" / "out"
    assert api.export_checkpoint(checkpoint, out) == [out / "model.safetensors"]
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert_same_bits(read_directory(out), expected_of(model))
    restored = Net()
    missing, unexpected = restored.load_state_dict(read_directory(out), strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert torch.equal(restored.head.weight, model.embed.weight)


def test_a_large_model_is_numbered_files_and_an_index(tmp_path: Path, model: Net, checkpoint: Path) -> None:
    out = tmp_path / "out"
    assert set(api.export_checkpoint(checkpoint, out, max_shard_size=300)) == set(out.iterdir())
    shards = sorted(out.glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert [path.name for path in shards] == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert_same_bits(read_directory(out), expected_of(model))
    for shard in shards:
        content = load_file(shard)
        assert sum(value.nbytes for value in content.values()) <= 300 or len(content) == 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected_of(model).values())


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt", "net.pth"])
def test_one_file_may_be_asked_for_by_name(tmp_path: Path, model: Net, checkpoint: Path, name: str) -> None:
    out = tmp_path / "out" / name
    assert api.export_checkpoint(checkpoint, out, max_shard_size=300) == [out]
    assert [path.name for path in out.parent.iterdir()] == [name]
    found = load_file(out) if name.endswith("safetensors") else torch.load(out, weights_only=True)
    assert_same_bits(found, expected_of(model))


def test_floating_point_is_cast_and_the_rest_is_not(tmp_path: Path, model: Net, checkpoint: Path) -> None:
    expected = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in expected_of(model).items()
    }
    for out in (tmp_path / "out", tmp_path / "out.pt"):
        api.export_checkpoint(checkpoint, out, dtype=torch.bfloat16)
    assert_same_bits(read_directory(tmp_path / "out"), expected)
    assert_same_bits(torch.load(tmp_path / "out.pt", weights_only=True), expected)
    with pytest.raises(api.ConfigError, match=r"torch\.int8 is not a floating-point type"):
        api.export_checkpoint(checkpoint, tmp_path / "other", dtype=torch.int8)


def test_the_config_goes_with_the_weights_and_tells_their_dtype(tmp_path: Path, model: Net) -> None:
    config = {"model_type": "gpt", "torch_dtype": "float32", "layers": (1, 2), "kind": torch.float16}
    path = saved(tmp_path / "run", {"net": model}, model_configs={"net": config, "other": {"no": 1}})
    plain = tmp_path / "plain"
    assert api.export_checkpoint(path, plain) == [plain / "model.safetensors", plain / "config.json"]
    told = {"model_type": "gpt", "torch_dtype": "float32", "layers": [1, 2], "kind": "float16"}
    assert json.loads((plain / "config.json").read_text()) == told
    api.export_checkpoint(path, tmp_path / "cast", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "cast" / "config.json").read_text()) == {**told, "torch_dtype": "bfloat16"}


def test_of_several_models_one_is_named(tmp_path: Path, model: Net) -> None:
    other = nn.Linear(2, 2)
    path = saved(tmp_path / "run", {"nets.0": model, "nets.1": other})
    with pytest.raises(api.CheckpointError, match=r"exactly one model. It has 'nets\.0', 'nets\.1'. Name one"):
        api.export_checkpoint(path, tmp_path / "out")
    with pytest.raises(api.CheckpointError, match=r"has no model 'nets'. It has 'nets\.0', 'nets\.1'"):
        api.export_checkpoint(path, tmp_path / "out", model="nets")
    api.export_checkpoint(path, tmp_path / "out", model="nets.1")
    assert_same_bits(read_directory(tmp_path / "out"), dict(other.state_dict()))


def test_ema_weights_are_the_averaged_ones_with_the_models_buffers(tmp_path: Path, model: Net) -> None:
    averaged = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    ema = {f"callbacks.EMA.0.net.{name}": value for name, value in averaged.items()}
    ema |= {f"callbacks.EMA.1.net.{name}": value + 1 for name, value in averaged.items()}
    path = saved(tmp_path / "run", {"net": model}, ema=ema)
    api.export_checkpoint(path, tmp_path / "first", weights="ema")
    api.export_checkpoint(path, tmp_path / "second", weights="ema.1")
    buffers = {name: value for name, value in expected_of(model).items() if name not in averaged}
    assert set(buffers) == {
        "empty",
        *(f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert_same_bits(read_directory(tmp_path / "first"), averaged | buffers)
    assert_same_bits(read_directory(tmp_path / "second"), {n: v + 1 for n, v in averaged.items()} | buffers)
    with pytest.raises(
        api.CheckpointError, match=r'no EMA of model \'net\' for weights="ema\.2". It has EMA callbacks 0, 1'
    ):
        api.export_checkpoint(path, tmp_path / "third", weights="ema.2")


def test_names_are_changed_by_pattern(tmp_path: Path, model: Net, checkpoint: Path) -> None:
    api.export_checkpoint(checkpoint, tmp_path / "out", renames={r"^blocks\.(\d+)": r"layers.\1", "^": "model."})
    expected = {f"model.{name.replace('blocks.', 'layers.')}": value for name, value in expected_of(model).items()}
    assert_same_bits(read_directory(tmp_path / "out"), expected)
    api.export_checkpoint(checkpoint, tmp_path / "blocks", renames={r"^(?!blocks).*": "", "^blocks.": ""})
    assert read_directory(tmp_path / "blocks").keys() == model.blocks.state_dict().keys()
    with pytest.raises(api.CheckpointError, match="of both"):
        api.export_checkpoint(checkpoint, tmp_path / "none", renames={r"\d": ""})
    with pytest.raises(api.ConfigError, match="not a regular expression"):
        api.export_checkpoint(checkpoint, tmp_path / "none", renames={"(": ""})


def test_a_flipped_byte_in_a_shard_ends_it_and_leaves_nothing(tmp_path: Path, checkpoint: Path) -> None:
    flip(checkpoint / "__0_0.distcp")
    with pytest.raises(api.CheckpointError, match=r"__0_0\.distcp is damaged"):
        api.export_checkpoint(checkpoint, tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []


def test_an_existing_export_is_replaced_only_on_demand(tmp_path: Path, model: Net, checkpoint: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "file.pt"
    for target in (out, file):
        api.export_checkpoint(checkpoint, target, max_shard_size=300)
        with pytest.raises(api.CheckpointError, match="exists already"):
            api.export_checkpoint(checkpoint, target)
        api.export_checkpoint(checkpoint, target, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", "file.pt"}
    (tmp_path / "empty").mkdir()
    api.export_checkpoint(checkpoint, tmp_path / "empty")
    assert_same_bits(read_directory(tmp_path / "empty"), expected_of(model))


def test_what_no_export_wrote_is_never_removed(tmp_path: Path, model: Net, checkpoint: Path) -> None:
    out = tmp_path / "out"
    api.export_checkpoint(checkpoint, out, max_shard_size=300)
    for name in ("tokenizer.json", "config.json"):  # this model has no config
        (out / name).write_text("mine")
    for _ in range(2):
        api.export_checkpoint(checkpoint, out, overwrite=True)
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (out / "tokenizer.json").read_text() == (out / "config.json").read_text() == "mine"
    assert_same_bits(read_directory(out), expected_of(model))
    with pytest.raises(api.CheckpointError, match="exists already"):
        api.export_checkpoint(checkpoint, out)
    (out / "folder").mkdir()
    with pytest.raises(api.CheckpointError, match="contains the directories folder, which no export wrote"):
        api.export_checkpoint(checkpoint, out, overwrite=True)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(api.CheckpointError, match="is a file"):
        api.export_checkpoint(checkpoint, tmp_path / "notes", overwrite=True)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(api.CheckpointError, match="is a directory"):
        api.export_checkpoint(checkpoint, tmp_path / "folder.pt", overwrite=True)


@pytest.mark.pitfall(40)
@pytest.mark.parametrize("where", [".", "export", "step_00000009", "step_00000003", "step_00000003/hf", "w.pt"])
def test_a_runs_checkpoints_are_no_place_for_an_export(checkpoint: Path, where: str) -> None:
    before = {path.name for path in checkpoint.parent.iterdir()}
    with pytest.raises(api.CheckpointError, match="belongs to a run's checkpoints"):
        api.export_checkpoint(checkpoint, checkpoint.parent / where, overwrite=True)
    assert {path.name for path in checkpoint.parent.iterdir()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["out", "out.safetensors", "out.pt"])
def test_a_full_disk_is_an_error_and_the_earlier_export_stays(small_disk: Path, name: str) -> None:
    small, large = nn.Linear(4, 4), nn.Linear(200, 200)
    api.export_model(small, small_disk / name, world=api.Ranks.alone())
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    with pytest.raises(api.CheckpointError, match="No space left on device"):
        api.export_model(large, small_disk / name, world=api.Ranks.alone(), overwrite=True)
    assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
    assert [path.name for path in small_disk.iterdir()] == [name]


# -- memory

MEASURE = """
import sys
from pathlib import Path
import torch
from dream_trainer.weights.export import export_checkpoint

def peak_kib():
    # Not ru_maxrss, which a process inherits from the one that started it.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

small, large, out = map(Path, sys.argv[1:])
export_checkpoint(small, out.with_stem("small"))
before = peak_kib()
export_checkpoint(large, out, max_shard_size="100MB")
print(peak_kib() - before, torch.distributed.is_initialized())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_holds_a_tensor_at_a_time_and_not_the_model(tmp_path: Path) -> None:
    def checkpoint_of(count: int, name: str) -> Path:
        tensors = {f"models.net.{index}": torch.full((512, 1024), float(index)) for index in range(count)}
        return save(tmp_path / name, 1, tensors=tensors)

    def growth_mib(out: Path) -> float:
        arguments = [sys.executable, "-c", MEASURE, str(small), str(large), str(out)]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=True)
        grown_kib, has_group = ended.stdout.split()
        assert has_group == "False"
        return int(grown_kib) / 1024

    small, large = checkpoint_of(2, "s"), checkpoint_of(150, "l")  # 2 MiB each
    assert growth_mib(tmp_path / "large") < 40
    assert growth_mib(tmp_path / "large.pt") > 250  # what holding all of it looks like
    found = read_directory(tmp_path / "large")
    assert len(found) == 150
    assert all(bool((value == int(name)).all()) for name, value in found.items())


@gloo_group()
def _export_sharded(directory: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world, root = api.Ranks.of_default_group(), Path(directory)
    torch.manual_seed(0)
    model = Net()
    if world.is_main:
        torch.save(expected_of(model), root / "truth.pt")
    fully_shard(model, mesh=init_device_mesh("cpu", (world.world_size,)))
    written = api.export_model(model, root / "out", world=world, max_shard_size=300)
    api.export_model(model, root / "out.pt", world=world, renames={"^": "m."}, dtype=torch.float64)
    save(root / "run" / "checkpoints", 1, tensors=api.model_tensors({"net": model}), world=world)
    other = nn.Linear(2, 2) if world.is_main else nn.Linear(3, 3)
    failures = {
        "exists": outcome(lambda: api.export_model(model, root / "out", world=world)),
        "size": outcome(lambda: api.export_model(model, root / "new", world=world, max_shard_size="x")),
        "full": outcome(lambda: api.export_model(model, Path("/dev/full/out"), world=world)),
        "midway": outcome(lambda: _export_failing_midway(model, root / "half", world)),
        "different": outcome(lambda: api.export_model(other, root / "different", world=world)),
    }
    dist.barrier()
    return {"written": [path.name for path in written], "failures": failures}


def _export_failing_midway(model: nn.Module, out: Path, world: api.Ranks) -> None:
    """A limit on file sizes stands in for a full disk: rank 0 fails at the second file's bytes."""
    import resource
    import signal

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        api.export_model(model, out, world=world)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_sharded_model_is_gathered_and_failures_are_every_ranks(tmp_path: Path) -> None:
    first, second = run_world(_export_sharded, 2, str(tmp_path))
    truth = torch.load(tmp_path / "truth.pt", weights_only=True)
    assert_same_bits(read_directory(tmp_path / "out"), truth)
    assert_same_bits(
        torch.load(tmp_path / "out.pt", weights_only=True),
        {f"m.{name}": value.double() if value.is_floating_point() else value for name, value in truth.items()},
    )
    assert first == second
    assert first["written"][-1] == "model.safetensors.index.json"
    failures = first["failures"]
    assert "out exists already" in failures["exists"]
    assert "'x' is not a size" in failures["size"]
    assert "/dev/full" in failures["full"]
    assert "File too large" in failures["midway"]
    assert "ranks have different tensors" in failures["different"]
    assert {path.name for path in tmp_path.iterdir()} == {"truth.pt", "out", "out.pt", "run"}
    # And the checkpoint of two ranks is put together by one process.
    api.export_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000001", tmp_path / "stored")
    assert_same_bits(read_directory(tmp_path / "stored"), truth)
