"""From which checkpoint a run continues. Rank 0 looks and chooses; all ranks load the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.nn as nn

from dream_trainer.checkpoint.files import local_path, recover_replaced, step_directories
from dream_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest, list_checkpoints, verify_all_but_shards
from dream_trainer.checkpoint.retention import best_checkpoint
from dream_trainer.config.checkpoint_parameters import CheckpointParameters
from dream_trainer.distributed.outcomes import on_all_ranks
from dream_trainer.distributed.ranks import Ranks
from dream_trainer.errors import CheckpointError, ConfigError, DamagedCheckpointError
from dream_trainer.weights.load import load_weights

logger = logging.getLogger("dream_trainer")

Load = Callable[[Manifest], None]


def resume(root: Path, parameters: CheckpointParameters, world: Ranks, load: Load) -> bool:
    """Loads what `parameters.resume` asks for; every rank calls it.

    Args:
        root: Directory of the run's checkpoints.
        parameters: `resume`, `best_metric` and `best_mode` count.
        world: The ranks.
        load: Gives a checkpoint's state back to the trainer; a collective. Checksums of tensors are compared there.

    Returns:
        Whether there was something to resume.

    Raises:
        CheckpointError: What was asked for is not there, damaged, or of another run; the same on every rank.
        ConfigError: `resume=None`, and the directory has checkpoints.
    """
    if world.is_main:
        recover_replaced(root)
    asked = parameters.resume
    if asked is None:
        _refuse_used_directory(root, world)
        return False
    if asked in ("auto", "latest"):
        return _load_newest(root, world, load, is_required=asked == "latest")
    if asked == "best":
        path = _chosen(root, world, lambda checkpoints: _path_of_best(checkpoints, root, parameters))
    elif isinstance(asked, int):
        path = _chosen(root, world, lambda checkpoints: _path_of_step(checkpoints, root, asked))
    else:
        path = local_path(asked)
        if not world.broadcast_object(path.exists()):
            raise CheckpointError(
                f'resume={asked!r} is neither "auto", "latest", "best" nor a step, and there is no such path.'
            )
    load(verify_all_but_shards(path, world=world))
    return True


def _load_newest(root: Path, world: Ranks, load: Load, *, is_required: bool) -> bool:
    """Loads the newest complete checkpoint, and warns of the damaged ones that it skips."""
    paths = [path for _, path in step_directories(root)] if world.is_main else []
    candidates = world.broadcast_object(paths)
    for path in reversed(candidates):
        try:
            load(verify_all_but_shards(path, world=world))
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
    if is_required:
        raise CheckpointError(f'resume="latest", but {root} has no checkpoint. Use "auto" to start one.')
    return False


def _chosen(root: Path, world: Ranks, choose: Callable[[list[Manifest]], Path]) -> Path:
    chosen = on_all_ranks(
        world, "choose what to resume", lambda: choose(list_checkpoints(root)) if world.is_main else None
    )
    path: Path = world.broadcast_object(chosen)
    return path


def _path_of_best(checkpoints: list[Manifest], root: Path, parameters: CheckpointParameters) -> Path:
    metric = parameters.best_metric or ""
    best = best_checkpoint(checkpoints, metric, parameters.best_mode)
    if best is None:
        raise CheckpointError(
            f'resume="best", but none of the {len(checkpoints)} checkpoints in {root} has a value of {metric!r}. '
            "A checkpoint has the metrics of a validation at its own step."
        )
    return best.path


def _path_of_step(checkpoints: list[Manifest], root: Path, step: int) -> Path:
    by_step = {manifest.step: manifest.path for manifest in checkpoints}
    if step not in by_step:
        raise CheckpointError(f"{root} has no whole checkpoint of step {step}. There are {sorted(by_step)}.")
    return by_step[step]


def _refuse_used_directory(root: Path, world: Ranks) -> None:
    count = world.broadcast_object(len(step_directories(root)) if world.is_main else 0)
    if count:
        raise ConfigError(
            f"resume=None starts from step 0, but {root} has {count} checkpoints of an earlier run. "
            'Use another experiment name, resume="auto", or move them away.'
        )


def load_initial_weights(models: Mapping[str, nn.Module], parameters: CheckpointParameters, world: Ranks) -> None:
    """Loads `parameters.init_from` into the models, if it is set; every rank calls it.

    Raises:
        ConfigError: There are several models, and `init_from` is not a checkpoint of ours that has each under its name.
        CheckpointError: The weights are not there, damaged, or do not fit.
    """
    if parameters.init_from is None:
        return
    path = local_path(parameters.init_from)
    if len(models) > 1 and not (path / MANIFEST_NAME).exists():
        raise ConfigError(
            f"init_from={parameters.init_from!r} does not say which of the models {sorted(models)} it is for. "
            "Call load_weights for each in load_pretrained."
        )
    for name, model in models.items():
        load_weights(
            model,
            path,
            model_name=name if len(models) > 1 else None,
            renames=parameters.init_renames,
            strict=parameters.init_strict,
            world=world,
        )
