"""A checkpoint that was made to run code on loading is refused, and runs none: one is planted in every kind of file.

The attacker is thorough: sizes and checksums in the manifest are made to fit.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dream_trainer.checkpoint import typed_json
from tests import api
from tests.checkpoint.states import (
    Plant,
    assert_same_bits,
    place_tensors,
    plant_shard,
    read_all,
    save,
    some_tensors,
)

pytestmark = pytest.mark.pitfall(43)


def by_way_of_an_allowed_module(trace: Path, protocol: int = 4) -> bytes:
    """A pickle that asks DCP's own metadata module, which imports `os`, for `os.mkdir`."""
    module, name, path = b"torch.distributed.checkpoint.metadata", b"os.mkdir", str(trace).encode()
    text = lambda value: b"\x8c" + bytes([len(value)]) + value  # noqa: E731
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(path) + b"\x85R."


def written_manifest(path: Path) -> api.Manifest:
    """The manifest as it stands, whatever has become of the files."""
    body = typed_json.loads((path / "manifest.json").read_text())
    files = {name: api.FileEntry(**entry) for name, entry in body["files"].items()}
    return api.Manifest(
        path=path, **{key: value for key, value in body.items() if key not in ("xxh3", "files")}, files=files
    )


def reseal(path: Path) -> None:
    """Makes the manifest fit the files as they are now."""
    manifest = written_manifest(path)
    entries = {}
    for name in manifest.files:
        size, xxh3 = api.checksum(path / name)
        entries[name] = api.FileEntry(size=size, xxh3=xxh3)
    (path / "manifest.json").write_bytes(api.encode_manifest(replace(manifest, files=entries)))
    api.verify_checkpoint(path, world=api.Ranks.alone())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoints", 1, rank_tensors={"c": torch.ones(3)})


def metadata_payload(trace: Path) -> bytes:
    return pickle.dumps(Plant(trace))


def metadata_hidden_payload(trace: Path) -> bytes:
    return pickle.dumps(dcp.Metadata({}, planner_data=Plant(trace), storage_data={}))


@pytest.mark.parametrize(
    "make", [metadata_payload, metadata_hidden_payload, by_way_of_an_allowed_module], ids=lambda make: make.__name__
)
def test_code_in_the_metadata_is_refused_by_name(path: Path, make: Callable[[Path], bytes], tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (path / ".metadata").write_bytes(make(trace))
    reseal(path)
    for read in (api.tensor_metadata, read_all):
        with pytest.raises(api.DamagedCheckpointError, match=r"\.metadata asks for \S*mkdir"):
            read(path)
    assert not trace.exists()
    pickle.loads(make(trace))
    assert trace.exists()  # the payload works


def test_code_in_a_shard_is_refused(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    plant_shard(path / "__0_0.distcp", Plant(trace))
    reseal(path)
    with pytest.raises(api.DamagedCheckpointError, match=r"__0_0\.distcp asks for \S*mkdir"):
        api.load_tensors(path, some_tensors(), world=api.Ranks.alone())
    assert not trace.exists()
    torch.load(path / "__0_0.distcp", weights_only=False)
    assert trace.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_entry_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    dcp.save({"w": torch.ones(1), "x": Plant(trace)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(api.DamagedCheckpointError, match="which is not a tensor"):
        api.parse_metadata((tmp_path / "dcp" / ".metadata").read_bytes(), tmp_path / "dcp" / ".metadata")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["shared.json", "rank_00000.json", "rank_00000.safetensors", "manifest.json"])
def test_pickles_in_place_of_the_other_files_are_not_run(path: Path, name: str, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (path / name).write_bytes(pickle.dumps(Plant(trace)))
    if name != "manifest.json":
        reseal(path)
    with pytest.raises(api.DamagedCheckpointError, match=name.replace(".", r"\.")):
        read_all(path)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "sub/file"])
def test_a_manifest_cannot_lead_out_of_its_directory(path: Path, name: str) -> None:
    manifest = api.read_manifest(path)
    outside = {**manifest.files, name: api.FileEntry(size=1, xxh3="0")}
    (path / "manifest.json").write_bytes(api.encode_manifest(replace(manifest, files=outside)))
    with pytest.raises(api.DamagedCheckpointError, match="is not a file of its directory"):
        api.read_manifest(path)


def test_metadata_cannot_lead_out_of_the_directory(path: Path) -> None:
    place_tensors(path, relative_path="../../outside")
    reseal(path)
    with pytest.raises(api.DamagedCheckpointError, match="has no file"):
        api.load_tensors(path, some_tensors(), world=api.Ranks.alone())


def test_tensors_of_every_type_that_models_use_are_read(tmp_path: Path) -> None:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    others = (torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
    written = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (*floats, *others, torch.int64)}
    path = save(tmp_path, 1, tensors=written)
    read = {name: torch.zeros_like(value) for name, value in written.items()}
    api.load_tensors(path, read, world=api.Ranks.alone())
    assert_same_bits(read, written)
