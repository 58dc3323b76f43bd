"""What the tests of this folder save: small, quick, and with every kind of content."""

import os
import pickle
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dream_trainer.checkpoint import typed_json
from tests.api import (
    CheckpointError,
    Ranks,
    Snapshot,
    load_tensors,
    read_rank,
    read_shared,
    tensor_metadata,
    write_checkpoint,
)

DESCRIPTION = {"epoch": 1, "samples_seen": 64, "mesh_shape": {"dp_shard": 1}, "config": {"seed": 0}, "metrics": {}}


def some_tensors(fill: float = 1.0) -> dict[str, Tensor]:
    """Two tensors of different types."""
    return {
        "models.net.weight": torch.full((3, 4), float(fill)) + torch.arange(4),
        "models.net.steps": torch.tensor(int(fill)),
    }


def make_snapshot(
    step: int,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    rank_tensors: Mapping[str, Tensor] | None = None,
    description: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A snapshot of whatever is given, the rest filled in."""
    return Snapshot(
        step=step,
        tensors=some_tensors(step) if tensors is None else tensors,
        shared=typed_json.dumps({"step": step} if shared is None else dict(shared)).encode(),
        rank_state=typed_json.dumps({} if rank_state is None else dict(rank_state)).encode(),
        rank_tensors={} if rank_tensors is None else rank_tensors,
        description=DESCRIPTION if description is None else description,
    )


def save(root: Path, step: int, *, world: Ranks | None = None, replace: bool = False, **content: Any) -> Path:
    """Writes a checkpoint of whatever is given to `make_snapshot`, the rest filled in."""
    snapshot = make_snapshot(step, **content)
    return write_checkpoint(root, snapshot, world=Ranks.alone() if world is None else world, replace=replace)


def read_all(path: Path) -> None:
    """Reads all that `save` writes of one rank with `some_tensors`."""
    read_shared(path)
    read_rank(path, 0)
    tensor_metadata(path)
    load_tensors(path, some_tensors(), world=Ranks.alone())


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and for each the same type, shape and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(*(tensor.detach().flatten().view(torch.uint8) for tensor in (found[name], value))), name


class Plant:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


def place_tensors(directory: Path, **place: Any) -> None:
    """Changes where `.metadata` says that the tensors are: their `relative_path`, `offset` or `length`."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for location in metadata.storage_data.values():
        vars(location).update(place)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_shard(shard: Path, plant: Plant) -> None:
    """Makes a shard a pickle that runs code, in which all tensors are said to be."""
    torch.save(plant, shard)
    place_tensors(shard.parent, offset=0, length=shard.stat().st_size)


def outcome(function: Callable[[], object]) -> str:
    """What a checkpoint's error says, after its kind."""
    try:
        function()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def flip(file: Path, at: float = 0.5) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def killed_at(call: int, function: Callable[[], object]) -> bool:
    """Runs `function` in a child that kills itself at its `call`-th file-system call; False if it had fewer."""
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def counted(name: str) -> None:
                original = getattr(os, name)

                def wrapper(*args: object, **kwargs: object) -> object:
                    nonlocal count
                    count += 1
                    if count == call:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*args, **kwargs)

                setattr(os, name, wrapper)

            for name in ("mkdir", "rename", "fsync", "unlink", "rmdir"):
                counted(name)
            function()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
