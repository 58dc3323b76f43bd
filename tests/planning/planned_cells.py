"""Cells of the parity matrix, planned in one process and measured on real ranks."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor

from dream_trainer.planning.planned_trainer import PlannedTrainer, RankJob, RankPlan
from dream_trainer.planning.planner import plan_ranks
from dream_trainer.testing.program import Program, in_place_of
from dream_trainer.trainer.abstract import built_instead
from tools.parity import ParityTrainer, config_of
from tools.parity_cells import Cell


@dataclass(frozen=True, kw_only=True)
class ProgramOfCell(Program):
    cell: Cell

    def make(self) -> Any:
        return ParityTrainer(config_of(self.cell))


class MeasuredTrainer(PlannedTrainer):
    """On real ranks, with values."""

    __module__ = PlannedTrainer.__module__  # a user's class may not replace these methods
    found: ClassVar[list[RankPlan]]

    def _done(self, plan: RankPlan) -> None:
        self.found.append(plan)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def _without_values(self) -> Any:
        return nullcontext()

    def _join_world(self, *args: Any) -> Any:
        return cast(Any, super(PlannedTrainer, self))._join_world(*args)

    def _run_stage(self, *args: Any) -> None:
        cast(Any, super(PlannedTrainer, self))._run_stage(*args)


def measured(cells: Sequence[Cell], directory: str) -> list[RankPlan]:
    """What this rank held and sent in the second step of each cell."""
    os.chdir(directory)
    found: list[RankPlan] = []
    kind = partial(in_place_of, kind=MeasuredTrainer, found=found, _scratch=directory)
    for cell in cells:
        token = built_instead.set(kind)
        trainer = ParityTrainer(config_of(cell))
        built_instead.reset(token)
        trainer.fit()
        trainer.close()
    return found


def planned(cells: Sequence[Cell], directory: str) -> list[dict[int, RankPlan]]:
    """The plans of the first and the last rank of each cell."""
    os.chdir(directory)
    programs = [ProgramOfCell(name="make", cell=cell) for cell in cells]
    return [plan_ranks(RankJob(program=each, world_size=each.cell.world_size)) for each in programs]
