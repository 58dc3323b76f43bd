"""From which checkpoint a run continues. Rank 0 looks and chooses; all ranks load the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dream_trainer.checkpoint.files import recover_replaced
from dream_trainer.checkpoint.manifest import (
    Manifest,
    best_checkpoint,
    find_checkpoint,
    finished_directories,
    list_checkpoints,
    newest_checkpoint,
    verify_checkpoint,
)
from dream_trainer.config.checkpoint_parameters import ALL_KEPT, BranchParameters, CheckpointParameters
from dream_trainer.config.serialize import difference, to_dict, with_later_fields
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.distributed.ranks import Ranks, from_main_rank
from dream_trainer.errors import CheckpointError, ConfigError, DamagedCheckpointError
from dream_trainer.screen import logger
from dream_trainer.stores.store_path import absolute, as_path
from dream_trainer.trainer.data_setup import global_batch_size
from dream_trainer.trainer.resumed_rates import ANOTHER_RUN
from dream_trainer.trainer.runtime import Runtime

Load = Callable[[Manifest, BranchParameters], None]
Nearer = Callable[[Manifest], bool]  # loads a later state than the newest checkpoint, and returns whether there is one


def resume(root: Path, parameters: CheckpointParameters, world: Ranks, load: Load, nearer: Nearer) -> bool:
    """Loads the checkpoint of `parameters.resume`; `nearer` before the newest. Returns whether there was one."""
    if world.is_main:
        recover_replaced(root)
    asked, branch = parameters.resume, parameters.branch
    newest = world.broadcast_object(newest_checkpoint(root) if world.is_main else None)
    path: Path | None = None  # None is the run's newest
    if isinstance(asked, str) and asked not in ("auto", "latest", "best"):
        path = _begin_of_branch(asked, root, branch, newest, world)
    elif branch != ALL_KEPT and (newest is None or newest.parent is None):
        raise ConfigError(
            f"branch={branch} says what to take over from another run's checkpoint, and resume={asked!r} is not the "
            "path of one. Set resume=<its path>."
        )
    elif asked is None:
        count = world.broadcast_object(len(finished_directories(root)) if world.is_main else 0)
        if count:
            raise ConfigError(
                f"resume=None starts from step 0, but {root} has {count} checkpoints of an earlier run. "
                'Use another experiment name, resume="auto", or move them away.'
            )
        return False
    elif asked not in ("auto", "latest"):
        branch = ALL_KEPT
        path = from_main_rank(world, "choose what to resume", lambda: _asked_for(asked, root, parameters))
    if path is not None:
        load(verify_checkpoint(path, world=world, shards=False), branch)
        return True
    if newest is not None and nearer(newest):
        return True
    candidates = world.broadcast_object(finished_directories(root) if world.is_main else [])
    for candidate in reversed(candidates):
        try:
            load(verify_checkpoint(candidate, world=world, shards=False), ALL_KEPT)
        except DamagedCheckpointError as error:
            if world.is_main:
                logger.warning("skipping a damaged checkpoint: %s", error)
            continue
        return True
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {root} is whole; the warnings before say what is wrong with "
            "each. Move them away to start from step 0, or give another run's checkpoint as resume=path."
        )
    if asked != "auto":
        raise CheckpointError(f'resume="latest", but {root} has no checkpoint. Use "auto" to start one.')
    return False


def _begin_of_branch(
    asked: str, root: Path, branch: BranchParameters, newest: Manifest | None, world: Ranks
) -> Path | None:
    """The checkpoint at a path to begin from; None for a run that has begun there already, and has its own newest."""
    place = absolute(as_path(asked))
    parent = newest.parent if newest else None
    if parent and world.broadcast_object(as_path(parent["checkpoint"]).resolve().is_relative_to(place.resolve())):
        if parent["words"] != vars(branch):
            raise ConfigError(
                f"this run began from {parent['checkpoint']} with {parent['words']}, and branch is {vars(branch)} now. "
                "Use another experiment name."
            )
        return None
    if not world.broadcast_object(place.exists()):
        raise CheckpointError(
            f'resume={asked!r} is neither "auto", "latest", "best" nor a step, and there is no such path.'
        )
    path = place
    if (place / "checkpoints").is_dir():
        found = from_main_rank(world, "choose what to resume", lambda: newest_checkpoint(place / "checkpoints"))
        if found is None:
            raise CheckpointError("the run that resume names has no whole checkpoint.")
        path = found.path
    is_own = path.parent.resolve() == root.resolve()
    if newest is not None and not is_own:
        raise ConfigError(
            f"resume={asked!r} is another run's, and {root} has checkpoints up to step {newest.step}, and began "
            f"{'from ' + parent['checkpoint'] if parent else 'at step 0'}. Use another experiment name, or "
            'resume="auto" to continue this one.'
        )
    if branch != ALL_KEPT and is_own:
        raise ConfigError(
            f"branch={branch} is for a run that begins from another one's checkpoint, and {path} is this run's own. "
            "Use another experiment name."
        )
    return path


def _asked_for(asked: int | str, root: Path, parameters: CheckpointParameters) -> Path:
    if asked != "best":
        return find_checkpoint(root, int(asked))
    metric, checkpoints = parameters.best_metric or "", list_checkpoints(root)
    best = best_checkpoint(checkpoints, metric, parameters.known_best_mode())
    if best is None:
        raise CheckpointError(
            f'resume="best", but none of the {len(checkpoints)} checkpoints in {root} has a value of {metric!r}. '
            "A checkpoint has the metrics of a validation at its own step."
        )
    return best.path


# Fields that say where files lie and how this start begins: no difference between the runs.
_OF_ONE_START = (
    "runs_dir:",
    "checkpoint_parameters.directory:",
    "checkpoint_parameters.resume:",
    "checkpoint_parameters.branch.",
)


def changed_fields(manifest: Manifest, config: BaseTrainerConfig) -> list[str]:
    """Fields of the config that the checkpoint's run had otherwise, as `name: old -> new`."""
    lines = difference(with_later_fields(manifest.config, config), to_dict(config))
    return [line for line in lines if not line.startswith(_OF_ONE_START)]


@contextmanager
def naming_what_changed(manifest: Manifest, runtime: Runtime) -> Iterator[None]:
    """Mismatched state often comes from a changed config, so the error lists the changes."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        changed = changed_fields(manifest, runtime.config)
        if not changed:
            raise
        raise CheckpointError(f"{error} The config differs from the checkpoint's: {'; '.join(changed)}.") from error


def refuse_other_run(runtime: Runtime, shared: dict[str, Any], path: Path, *, is_own: bool) -> None:
    """Raises CheckpointError for a checkpoint of another seed or global batch; `is_own` if the run itself wrote it."""
    for name, value in (("seed", runtime.config.seed), ("global_batch_size", global_batch_size(runtime))):
        if shared[name] != value:
            other_way = 'let this run start its own data: branch=BranchParameters(data="new").'
            if is_own:
                other = f"{runtime.config.experiment}-{name.replace('_', '-')}-{value}"
                to_begin = ANOTHER_RUN.format(words='data="new"')
                other_way = f"take another name, such as experiment={other!r}: {to_begin}."
            raise CheckpointError(
                f"{path} was written with {name}={shared[name]}, and this run has {value}: the samples of each step "
                f"would no longer be the same. Set {name}={shared[name]}, or {other_way}"
            )
