"""A run of the llama example that is stopped after every few steps and goes on in another cell of the parity matrix."""

import dataclasses
import itertools
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dream_trainer as dt
from tests.trainer.resumable import after_each_look_at_saves, state_tensors
from tests.worlds import run_world
from tools.parity import Miss, ParityTrainer, compare, config_of, weights
from tools.parity_cells import Cell

STEPS = 4


class Hop(NamedTuple):
    """A part of a run, in one cell."""

    cell: Cell
    until: int
    """Optimizer step after which it ends, counted from the run's start."""


def hops(chain: Sequence[Cell]) -> list[Hop]:
    """`STEPS` steps in each of `chain`; the cells that train one thing are one run."""
    done: dict[Cell, int] = {}
    found = []
    for cell in chain:
        kind = cell.alone()
        done[kind] = done.get(kind, 0) + STEPS
        found.append(Hop(cell, done[kind]))
    return found


class ChainTrainer(ParityTrainer):
    """Stops after a step, and records what it loaded, what it passed and what it left."""

    def __init__(self, config: Any, until: int) -> None:
        super().__init__(config)
        self.until = until
        self.loaded: dict[str, Any] = {}
        self.passed: list[dict[str, Any]] = []

    def post_setup(self) -> None:
        after_each_look_at_saves(self, self._ask_for_stop)

    def _ask_for_stop(self) -> None:
        if self.global_step == self.until:
            self.request_stop("the hop ends here")

    def on_load(self, path: Path) -> None:
        self.loaded = state_tensors(self)

    def post_train_step(self) -> None:
        if self.global_step % STEPS == 0:
            self.passed.append(weights(self))


def train(hop: Hop, total: int, experiment: str) -> dict[str, Any]:
    """Trains one hop of a run of `total` steps, from its last checkpoint if there is one, on this rank."""
    config = config_of(hop.cell)
    training = dataclasses.replace(config.training_parameters, max_steps=total)
    config = dataclasses.replace(
        config,
        experiment=f"{experiment} {'tied' * hop.cell.tied}{'experts' * hop.cell.experts}",
        training_parameters=training,
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None),
    )
    with ChainTrainer(config, hop.until) as trainer:
        trainer.fit()
        found = {
            "start": trainer.start,
            "loaded": trainer.loaded,
            "losses": trainer.losses,
            "norms": trainer.norms,
            "passed": trainer.passed,
            "left": state_tensors(trainer),
        }
    return found


def train_hops(parts: Sequence[Hop], total: int) -> list[dict[str, Any]]:
    """Trains hops of one world size, one after the other, on this rank."""
    return [train(hop, total, "chain") for hop in parts]


def as_rank(parts: Sequence[Hop], total: int, directory: str) -> list[dict[str, Any]]:
    """The same, in a process of its own."""
    os.chdir(directory)
    # As in tools/parity.py: both are right and change nothing.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return train_hops(parts, total)


class Link(NamedTuple):
    """What a hop did."""

    hop: Hop
    ranks: tuple[dict[str, Any], ...]
    miss: Miss
    """How far it is from the run that was never stopped, over its own steps."""


def run_chain(chain: Sequence[Cell], directory: Path, timeout: float = 300.0) -> list[Link]:
    """Trains `chain`, a world for every row of cells of one size, and in one process what it is compared with.

    Args:
        chain: The cells, in order.
        directory: The working directory, where checkpoints are handed from one to the next.
        timeout: Seconds for each cell, of which a world may have many.
    """
    parts = hops(chain)
    totals = {hop.cell.alone(): hop.until for hop in parts}
    total = max(totals.values())
    alone = {kind: train(Hop(kind, until), total, "straight") for kind, until in totals.items()}
    links = []
    for world_size, row in itertools.groupby(parts, key=lambda hop: hop.cell.world_size):
        together = list(row)
        if world_size == 1:
            by_rank = [train_hops(together, total)]
        else:
            by_rank = run_world(as_rank, world_size, together, total, str(directory), timeout=timeout * len(together))
        for hop, ranks in zip(together, zip(*by_rank, strict=True), strict=True):
            links.append(Link(hop, ranks, compare(ranks_of(ranks), same_steps(alone[hop.cell.alone()], hop.until))))
    return links


def ranks_of(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `compare` wants them."""
    return [rank | {"weights": rank["passed"][-1]} for rank in ranks]


def same_steps(alone: dict[str, Any], until: int) -> dict[str, Any]:
    """The part of a straight run that a hop which ends at `until` repeats."""
    first = until - STEPS
    return {
        "start": alone["start"],
        "losses": [entry for entry in alone["losses"] if first <= entry[0] < until],
        "norms": alone["norms"][first:until],
        "weights": alone["passed"][until // STEPS - 1],
    }
