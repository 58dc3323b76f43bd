"""Cells of the parity matrix, planned in one process and measured on real ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dream_trainer.planning.planned_trainer import MeasuredTrainer, RankJob, RankPlan
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


def measured(cells: Sequence[Cell], directory: str) -> list[RankPlan]:
    """What this rank held and sent in the second step of each cell."""
    os.chdir(directory)
    found: list[RankPlan] = []
    kind = partial(in_place_of, kind=MeasuredTrainer, _done=found.append, _scratch=directory)
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
