"""What of another run's checkpoint goes along into a run that begins from it, in words."""

from __future__ import annotations

from typing import Literal, get_args

from dream_trainer.checks import check_choice
from dream_trainer.config.parameter_class import parameters

OptimizerWord = Literal["keep", "moments", "new"]
ScheduleWord = Literal["keep", "extend", "new"]
Word = Literal["keep", "new"]


@parameters
class BranchParameters:
    """What goes along from the checkpoint that `resume=<path>` names, besides the weights; by default all of it.

    Raises:
        ConfigError: A word is not known.
    """

    optimizer: OptimizerWord = "keep"
    """"keep": state and options, so that the checkpoint's learning rate, weight decay and betas go on; "moments": the
    state, such as Adam's moments, under the options of this config: so a new learning rate holds; "new": neither."""
    schedule: ScheduleWord = "keep"
    """"keep": the schedule goes on at its step, in the form that this config gives it; "extend": the same, but where a
    longer run stretches it, the rate stays where it was until the longer form has come down to it; "new": the schedule
    begins at its first step."""
    counters: Word = "keep"
    """Whether steps, epochs, samples, tokens, time, best values and the history go on, or begin at zero."""
    data: Word = "keep"
    """Whether the order of the data and the random states go on where they were, or begin anew, from this config's
    seed."""

    def __post_init__(self) -> None:
        check_choice("branch.optimizer", self.optimizer, get_args(OptimizerWord))
        check_choice("branch.schedule", self.schedule, get_args(ScheduleWord))
        check_choice("branch.counters", self.counters, get_args(Word))
        check_choice("branch.data", self.data, get_args(Word))


ALL_KEPT = BranchParameters()
"""A plain resume."""
