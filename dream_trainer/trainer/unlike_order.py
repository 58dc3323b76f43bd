"""What is said where ranks did not do the same in the same order, found before the next step or save."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from dream_trainer.errors import StepError

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer


def refuse_unlike_order(trainer: AbstractTrainer) -> NoReturn:
    """Raises StepError; all ranks call it, once they know.

    Args:
        trainer: Its ranks ran blocks of a sharded model in different orders, or its stages stepped other optimizers.
    """
    step = trainer.global_step
    if trainer.world.stages > 1:
        stages = (
            f"by step {step} the stages of the pipeline have called step() for other optimizers than each other, or in "
            "another order, so that norms were mixed up; no checkpoint has that. Call it for the same optimizers on "
            "every rank, in the same order; where a stage has nothing of one, that has an empty group."
        )
        if trainer.world.parameter_shape.dp_shard > 1:
            stages += " Or the ranks of a stage have run its blocks in different orders: run the same on each."
        raise StepError(stages)
    raise StepError(
        f"by step {step} the ranks have run blocks of a sharded model in different orders, or "
        "backward through different ones, so that what they gathered and reduced was mixed up; no checkpoint has "
        "that. Run the same blocks on every rank, in the same order, and let the loss depend on each (add "
        "0 * output.sum() of one that is not wanted); or keep the model whole on each rank (dp_shard=1)."
    )
