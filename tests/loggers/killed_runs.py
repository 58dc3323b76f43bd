"""A program for the test beside it: one run in three lives, the first two ended by SIGKILL, with MLflow and Trackio.

Each life is a fork, so that what they import is imported once.
"""

from __future__ import annotations

import os
import signal
import time

import mlflow
import torch
import trackio

import dream_trainer as dt
from tests.trainer.test_logger_mixin import Resumable, make_config

PACKAGES = (mlflow, trackio)


def life(kill_at: int, seconds: float) -> int:
    """Trains 12 steps, saved every 4th, logged every 3rd; killed at a step, `seconds` after it. Returns its status."""

    class Dies(Resumable):
        def post_train_step(self) -> None:
            if self.global_step == kill_at:
                time.sleep(seconds)
                os.kill(os.getpid(), signal.SIGKILL)

        def post_epoch(self) -> None:
            self.log_image("end", torch.zeros(2, 2))

    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    config = make_config(every=3, loggers=("jsonl", "mlflow", "trackio"))
    config.checkpoint_parameters = dt.CheckpointParameters(save_every_n_steps=4, async_save=False)
    with Dies(config) as trainer:
        trainer.fit()
    os._exit(0)


if __name__ == "__main__":
    # Trackio's thread writes every half second: the first life ends before, the second after it has.
    assert [life(7, 0.0), life(11, 1.5), life(-1, 0.0)] == [signal.SIGKILL, signal.SIGKILL, 0]
