"""What a run and a checkpoint must have in common, and in what their configs differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dream_trainer.checkpoint.manifest import Manifest
from dream_trainer.config.serialize import difference, to_dict, with_later_fields
from dream_trainer.errors import CheckpointError, DamagedCheckpointError
from dream_trainer.trainer.data_setup import global_batch_size

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

# How to train with what a run cannot take, as the end of a sentence; `words` are those of a branch.
ANOTHER_RUN = (
    "begin another run from the checkpoint: a new experiment name, resume=<path of the checkpoint> and "
    "branch=BranchParameters({words})"
)
# Fields that say where files lie and how this start begins: no difference between the runs.
_OF_ONE_START = (
    "runs_dir:",
    "checkpoint_parameters.directory:",
    "checkpoint_parameters.resume:",
    "checkpoint_parameters.branch.",
)


def changed_fields(manifest: Manifest, trainer: AbstractTrainer) -> list[str]:
    """Fields of the config that the checkpoint's run had otherwise, as `name: old -> new`."""
    lines = difference(with_later_fields(manifest.config, trainer.config), to_dict(trainer.config))
    return [line for line in lines if not line.startswith(_OF_ONE_START)]


@contextmanager
def naming_what_changed(manifest: Manifest, trainer: AbstractTrainer) -> Iterator[None]:
    """What does not fit is often what the config builds otherwise."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        changed = changed_fields(manifest, trainer)
        if not changed:
            raise
        raise CheckpointError(f"{error} The config differs from the checkpoint's: {'; '.join(changed)}.") from error


def refuse_other_run(trainer: AbstractTrainer, shared: dict[str, Any], path: Path, *, is_own: bool) -> None:
    """Raises CheckpointError for a checkpoint of another seed or global batch; `is_own` if the run itself wrote it."""
    of_this_run = {"seed": trainer.config.seed, "global_batch_size": global_batch_size(trainer)}
    for name, value in of_this_run.items():
        if shared[name] != value:
            raise CheckpointError(
                f"{path} was written with {name}={shared[name]}, and this run has {value}: the samples of each step "
                f"would no longer be the same. Set {name}={shared[name]}, or {_other_way(trainer, name, value, is_own)}"
            )


def _other_way(trainer: AbstractTrainer, name: str, value: Any, is_own: bool) -> str:
    if not is_own:
        return 'let this run have data of its own: branch=BranchParameters(data="new").'
    other = f"{trainer.experiment}-{name.replace('_', '-')}-{value}"
    to_begin = ANOTHER_RUN.format(words='data="new"')
    return f"take another name, such as experiment={other!r}: {to_begin}."
