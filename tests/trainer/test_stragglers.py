"""A rank that holds the others up is named with its host and with what it is slow in; equal ranks and single slow steps
are not. Every rank's step takes as long as the slowest's, so wall times would tell nothing."""

import socket
import time
from typing import Any

from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import PerRankLoader, Stragglers
from tests.trainer.small import Batch, Built, batches, run_config, told
from tests.worlds import run_world

SLOW = 0.06
LINES, EVERY = 3, 2
CASES: dict[str, dict[str, Any]] = {
    "data": {"where": "data"},
    "work between the blocks": {"where": "block"},
    "nothing": {"where": None},
    "one step": {"where": "step", "only_step": 5},
}


class Slow(Built, dt.DreamTrainer):
    """Rank 1 sleeps, in its data, before the forward, or in the model between two blocks."""

    def __init__(self, config: Any, where: str | None, only_step: int | None) -> None:
        super().__init__(config)
        self.where, self.only_step = where, only_step

    def sleep_if(self, where: str) -> None:
        if where == self.where and self.world.rank == 1 and self.only_step in (None, self.global_step):
            time.sleep(SLOW)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return PerRankLoader(Sleepy(self)), None

    def loss_of(self, batch: Batch) -> Tensor:
        self.sleep_if("step")
        hidden = batch[0]
        for number, block in enumerate(self.model[0]):
            if number:
                self.sleep_if("block")
            hidden = block(hidden)
        return mse_loss(self.model[1](hidden), batch[1])


class Sleepy:
    def __init__(self, trainer: Slow) -> None:
        self.trainer = trainer

    def __iter__(self) -> Any:
        for batch in batches(24):
            self.trainer.sleep_if("data")
            yield batch


def train_all() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, options in CASES.items():
        config = run_config(
            name.replace(" ", "_"),
            device_parameters=dt.DeviceParameters(device="cpu", dp_shard=2),
            training_parameters=dt.TrainingParameters(max_steps=20, n_epochs=None),
            logger_parameters=dt.LoggerParameters(
                loggers=(), log_every_n_steps=EVERY, straggler_factor=2.0, straggler_lines=LINES
            ),
            checkpoint_parameters=dt.CheckpointParameters(save_at_end=False),
        )
        with told() as lines, Slow(config, options["where"], options.get("only_step")) as trainer:
            trainer.fit()
            assert all(set(line) <= {"step", "epoch", "samples", "time", "train/loss"} for line in trainer.history)
        found[name] = [line for line in lines if "slower than the others" in line]
    return found


def test_the_slow_rank_is_named_once_by_its_host_and_cause_and_nobody_else_is() -> None:
    of_main, of_other = run_world(train_all, 2)
    for name in ("data", "work between the blocks"):
        (line,) = of_main[name]
        assert line.startswith(f"rank 1 on {socket.gethostname()} has been slower than the others for 3 lines")
        assert f"it is slow in its {name.split()[0]}." in line
    for name in ("nothing", "one step"):
        assert of_main[name] == []
    assert not any(of_other.values())


def judge(lines: list[list[float]], factor: float = 1.5, n: int = 3) -> list[str]:
    said: list[str] = []
    parameters = dt.LoggerParameters(straggler_factor=factor, straggler_lines=n)
    stragglers = Stragglers(
        parameters, lambda: ["here"] * 4, lambda: (0, 0.0, 0.0), lambda key, text: said.append(text)
    )
    for work in lines:
        stragglers.hear({"seconds of work": work, "seconds of data": [0.0] * 4})
    return said


def test_it_takes_lines_in_a_row_and_a_rank_is_named_once() -> None:
    slow, equal, nothing = [0.1, 0.1, 0.3, 0.1], [0.1] * 4, [0.0] * 4
    assert judge([slow, slow, equal, slow, slow]) == []
    (said,) = judge([slow, nothing] * 9)  # a save in between
    assert said.startswith("rank 2 on here has been slower")
    assert "works for 300 ms; usual are 0 ms and 100 ms" in said
    assert judge([[0.001, 0.001, 0.015, 0.001]] * 9) == []  # what nobody feels
    (said,) = judge([[0.3, 0.3, 0.1, 0.1]] * 3)
    assert said.startswith("rank 0 on here, rank 1 on here has been slower")
