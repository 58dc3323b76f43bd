"""Every damage is found before it is used, and named: file and fault."""

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import api
from tests.checkpoint.states import flip, read_all, save, some_tensors

FILES = [".metadata", "__0_0.distcp", "shared.json", "rank_00000.json", "rank_00000.safetensors"]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path, 1)
    return save(tmp_path, 2, shared={"a": 1}, rank_state={"b": 2}, rank_tensors={"c": torch.ones(3)})


@pytest.mark.parametrize("damage", [truncate, lengthen, empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_size_or_none_hides_it(path: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(path / name)
    with pytest.raises(api.DamagedCheckpointError, match=re.escape(str(path / name))):
        api.read_manifest(path)
    assert [manifest.step for manifest in api.list_checkpoints(path.parent)] == [1]


@pytest.mark.pitfall(68)
@pytest.mark.parametrize("at", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_wherever_it_is(path: Path, name: str, at: float) -> None:
    flip(path / name, at)
    fault = rf"{re.escape(str(path / name))} is damaged: its checksum"
    with pytest.raises(api.DamagedCheckpointError, match=fault):
        api.verify_checkpoint(path, world=api.Ranks.alone())
    with pytest.raises(api.DamagedCheckpointError, match=fault):
        read_all(path)


@pytest.mark.pitfall(68)
def test_any_byte_of_a_shard_that_is_changed_is_damage_whatever_pytorch_makes_of_it(path: Path) -> None:
    shard = path / "__0_0.distcp"
    whole = shard.read_bytes()
    for index in range(0, len(whole), 11):
        changed = bytearray(whole)
        changed[index] ^= 0xFF
        shard.write_bytes(changed)
        with pytest.raises(api.DamagedCheckpointError, match=rf"{re.escape(str(shard))} is damaged: its checksum"):
            api.load_tensors(path, some_tensors(), world=api.Ranks.alone())


@pytest.mark.parametrize("name", FILES)
def test_all_files_but_the_shards_can_be_verified_without_reading_those(path: Path, name: str) -> None:
    assert api.verify_checkpoint(path, world=api.Ranks.alone(), shards=False).step == 2
    flip(path / name)
    if name.endswith(".distcp"):
        assert api.verify_checkpoint(path, world=api.Ranks.alone(), shards=False).step == 2
    else:
        with pytest.raises(api.DamagedCheckpointError, match=re.escape(str(path / name))):
            api.verify_checkpoint(path, world=api.Ranks.alone(), shards=False)


def test_what_the_machine_refuses_is_no_damage(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(api.CheckpointError, match="Too many open files") as raised:
            api.read_manifest(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(raised.value, api.DamagedCheckpointError)


def test_a_manifest_that_is_missing_empty_or_no_json_is_named(path: Path) -> None:
    manifest = path / "manifest.json"
    for content in (b"", b"{", b"[]", b"{}", b"\xff\xfe", manifest.read_bytes()[:-30]):
        manifest.write_bytes(content)
        with pytest.raises(api.DamagedCheckpointError, match=re.escape(str(manifest))):
            api.read_manifest(path)
    manifest.unlink()
    with pytest.raises(api.DamagedCheckpointError, match=r"manifest\.json is missing"):
        api.read_manifest(path)


def test_any_character_of_a_manifest_that_is_changed_is_noticed(path: Path) -> None:
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    for index in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[index] ^= 1
        manifest.write_bytes(changed)
        with pytest.raises(api.DamagedCheckpointError):
            api.read_manifest(path)
