"""The named phases of a save, and what can befall a process that passes one: a kill, a delay, a full disk.

The product knows nothing of this. The training script replaces one function of the product in its own process, once,
before training. Every name is looked up when it is replaced, so one that was renamed is an error and no kill that never
comes.
"""

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """A function, and whether the phase is before or after it."""

    module: str
    name: str
    after: bool = False


PHASES = {
    "after staging": Place("dream_trainer.checkpoint.store", "write_checkpoint"),
    "before its own shard": Place("torch.distributed.checkpoint.filesystem", "FileSystemWriter.write_data"),
    "after the first shard": Place(
        "torch.distributed.checkpoint.filesystem", "FileSystemWriter.write_data", after=True
    ),
    "before the manifest": Place("dream_trainer.checkpoint.store", "encode_manifest"),
    "before the rename": Place("dream_trainer.checkpoint.files", "publish"),
    "after the rename": Place("dream_trainer.checkpoint.files", "publish", after=True),
    "in the midst of retention": Place("dream_trainer.checkpoint.files", "discard"),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to whom when a rank passes a phase."""

    phase: str
    does: str = "kill"
    """"kill": SIGKILL to `victims`; "sleep": for `seconds`; "fill": after `seconds`, by when the other ranks have
    written, the disk that holds `path`."""
    rank: int = 0
    """Whose passing counts. Rank 0 alone writes the manifest, renames and retires."""
    calls: tuple[int, ...] = (1,)
    """At which of its calls, counted from 1 over the life of a process."""
    victims: tuple[int, ...] = (0,)
    seconds: float = 0.0
    path: str = ""


def arm(fault: Fault, rank: int, directory: Path) -> None:
    """Makes `fault` happen in this process, if it is the one that passes."""
    if rank != fault.rank:
        return
    if fault.phase == "in the midst of retention":
        _arm_removal(fault, directory)
        return
    place = PHASES[fault.phase]
    _replace(place, lambda original: _wrapped(original, place, fault, directory))


def _wrapped(original: Callable[..., Any], place: Place, fault: Fault, directory: Path) -> Callable[..., Any]:
    passed = 0

    def wrapper(*args: Any, **options: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed not in fault.calls:
            return original(*args, **options)
        if not place.after:
            strike(fault, directory)
            return original(*args, **options)
        result = original(*args, **options)
        strike(fault, directory)
        return result

    return wrapper


def _arm_removal(fault: Fault, directory: Path) -> None:
    """Strikes when half of the files of a checkpoint that is let go are removed."""
    discarded, is_discarding = 0, False

    def discarding(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal discarded, is_discarding
            discarded, is_discarding = discarded + 1, True
            try:
                return original(*args, **options)
            finally:
                is_discarding = False

        return wrapper

    def removing(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Path, *args: Any, **options: Any) -> Any:
            if is_discarding and discarded in fault.calls:
                files = sorted(path.iterdir())
                for file in files[: len(files) // 2]:
                    file.unlink()
                strike(fault, directory)
            return original(path, *args, **options)

        return wrapper

    _replace(PHASES[fault.phase], discarding)
    _replace(Place("dream_trainer.checkpoint.files", "remove_tree"), removing)


def strike(fault: Fault, directory: Path) -> None:
    """Does it."""
    (directory / "struck").touch()
    if fault.does in ("sleep", "fill"):
        time.sleep(fault.seconds)
        if fault.does == "fill":
            fill(Path(fault.path))
        return
    if fault.does != "kill":
        raise ValueError(f"does={fault.does!r} is not known here.")
    for victim in sorted(fault.victims, key=lambda rank: rank == fault.rank):  # itself last
        os.kill(int((directory / f"rank_{victim}.pid").read_text()), signal.SIGKILL)
    if fault.rank in fault.victims:
        time.sleep(60)  # the kill is on its way


def fill(path: Path) -> None:
    """Writes the file `path` until the disk is full to the last page."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _replace(place: Place, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function in its own module, and in every module that imported it by name."""
    owner: Any = importlib.import_module(place.module)
    *path, name = place.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    replacement = wrap(original)
    setattr(owner, name, replacement)
    if path:
        return
    for key, module in list(sys.modules.items()):
        if key.startswith("dream_trainer.") and vars(module).get(name) is original:
            setattr(module, name, replacement)
