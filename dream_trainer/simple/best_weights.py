"""The weights of a run's best validation: which checkpoint has them, and how they come into the model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dream_trainer.callbacks.weight_average import WeightAverage
from dream_trainer.checkpoint.frozen_weights import refuse_other_weights
from dream_trainer.checkpoint.loading import read_shared, tensor_metadata
from dream_trainer.checkpoint.retention import best_checkpoint
from dream_trainer.distributed.outcomes import on_all_ranks
from dream_trainer.errors import CheckpointError
from dream_trainer.trainer.saved_state import CALLBACK_PREFIX, numbered
from dream_trainer.weights.load import load_weights

if TYPE_CHECKING:
    from dream_trainer.checkpoint.manifest import Manifest
    from dream_trainer.simple.objects_trainer import ObjectsTrainer


def best_of(trainer: ObjectsTrainer) -> Manifest:
    """The run's best checkpoint; a warning says where that is not the one of `best`.

    Raises:
        CheckpointError: There is none.
    """
    metric, mode = next(iter(trainer._best_modes().items()), ("", "min"))
    found = best_checkpoint(trainer.checkpoints(), metric, mode)
    if found is None:
        said = f"; {_of_best(trainer, metric)}" if metric in trainer._best_steps else "."
        raise CheckpointError(
            f"there is no best checkpoint: it needs name=, val= and a validation that was saved{said}"
        )
    value = found.metrics[metric]
    if metric in trainer._best_steps and value != trainer.best[metric]:
        trainer.warn_once(
            "another best",
            f"load_best() took step {found.step}, with {metric} {value:.6g}; {_of_best(trainer, metric)}",
        )
    return found


def _of_best(trainer: ObjectsTrainer, metric: str) -> str:
    """Value and step of the best validation, and why this run has no checkpoint of it."""
    step, parent = trainer._best_steps[metric], trainer._recorder.parent
    said = f"the best validation, {trainer.best[metric]:.6g} at step {step}"
    if parent is not None and parent["words"]["counters"] == "keep" and step <= parent["step"]:
        return (
            f"{said}, was of {parent.get('run', 'another run')}, which this run began from at step {parent['step']}: "
            f"{parent['checkpoint']}. load_weights(trainer.model, <its best checkpoint>) loads that."
        )
    return (
        f"{said}, has no checkpoint. checkpoints= saves each best one with save_on_best=True, and keeps it with "
        "keep_best=1."
    )


def take_weights(trainer: ObjectsTrainer, checkpoint: Manifest) -> str:
    """Puts into the model what was validated at a checkpoint, and says which: its "weights", or their "averages"."""
    with trainer.changing_weights():
        load_weights(trainer.model, checkpoint.path, optional=_left_out(trainer, checkpoint), world=trainer.world)
    taken = "weights"
    validated = _averages_validated_at(trainer, checkpoint)
    for _, prefix, callback in numbered(trainer.callbacks):
        if isinstance(callback, WeightAverage) and callback.validate:
            taken = "averages" if callback.load_as_weights(checkpoint.path, prefix) else taken
            validated.pop(prefix, None)
    for name in validated.values():
        trainer.warn_once(
            f"{name} is gone",
            f"load_best() put the model's own weights of step {checkpoint.step} into the model, and what was "
            f"validated there are the averages of {name}, which this trainer does not validate with. Give "
            f"callbacks=[{name}(...)] to load them.",
        )
    return taken


def _left_out(trainer: ObjectsTrainer, checkpoint: Manifest) -> set[str]:
    """Names of the frozen weights that the checkpoint was saved without; a collective, which compares them.

    Raises:
        CheckpointError: The model has others now.
    """
    path, models = checkpoint.path, trainer.named_models()
    left_out = on_all_ranks(trainer.world, f"load {path}", lambda: read_shared(path)).get("left_out", {})
    if not left_out:
        return set()
    refuse_other_weights(path, models, left_out, world=trainer.world)
    (model_name,) = models
    tensors = trainer.model.state_dict(keep_vars=True)
    of_first_names = {id(tensors[name]) for name in tensors if f"models.{model_name}.{name}" in left_out}
    return {name for name, tensor in tensors.items() if id(tensor) in of_first_names}


def _averages_validated_at(trainer: ObjectsTrainer, checkpoint: Manifest) -> dict[str, str]:
    """By the prefix of their tensors, the callbacks whose averages a checkpoint's metrics are of."""
    stored = on_all_ranks(trainer.world, f"load {checkpoint.path}", lambda: tensor_metadata(checkpoint.path))
    counts: Counter[str] = Counter()
    validated = {}
    for record in checkpoint.config["callbacks"]:
        name = str(record["class"]).rpartition(".")[2]
        prefix = f"{CALLBACK_PREFIX}{name}.{counts[name]}."
        counts[name] += 1
        if record.get("validate") is True and any(tensor.startswith(prefix) for tensor in stored):
            validated[prefix] = name
    return validated
