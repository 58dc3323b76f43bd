"""Cells of the parity matrix, planned in one process and measured on real ranks."""

import os
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

from dream_trainer.planning.planned_trainer import MeasuredTrainer
from dream_trainer.planning.planner import plan_ranks
from dream_trainer.planning.rank_plan import RankPlan, plan_of
from dream_trainer.testing.program import Program, in_place_of
from dream_trainer.trainer.abstract import building_instead
from tools.parity import ParityTrainer, config_of
from tools.parity_cells import Cell


def make(cell: Cell) -> Any:
    return ParityTrainer(config_of(cell))


def measured(cells: Sequence[Cell], directory: str) -> list[RankPlan]:
    """What this rank held and sent in the second step of each cell."""
    os.chdir(directory)
    found: list[RankPlan] = []

    def done(trainer: Any, of_step: Any) -> None:
        found.append(plan_of(trainer, of_step))

    kind = partial(in_place_of, kind=MeasuredTrainer, _done=staticmethod(done), _scratch=directory)
    for cell in cells:
        with building_instead(kind):
            trainer = make(cell)
        trainer.fit()
        trainer.close()
    return found


def planned(cells: Sequence[Cell], directory: str) -> list[dict[int, RankPlan]]:
    """The plans of the first and the last rank of each cell."""
    os.chdir(directory)
    return [plan_ranks(Program(pickled=pickle.dumps(partial(make, cell))), cell.world_size)[0] for cell in cells]
