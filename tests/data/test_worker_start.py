"""A signal to the whole job that finds a worker just begun leaves it alive while the job saves."""

import os
import signal
from pathlib import Path

from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.api import DistributedDataLoader
from tests.trainer.small import Samples, Spread, fit, make_config
from tests.worlds import run_world


def train(directory: str) -> list[int]:
    """A signal comes to each worker when it has just been forked, and has no handler of its own yet."""
    os.chdir(directory)
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    data, workers = Samples(8), {"num_workers": 2, "multiprocessing_context": "fork"}
    ours = DistributedDataLoader(data, 2, **workers)
    foreign = DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 8, 8), **workers)
    return [fit(Spread(make_config(max_steps=4), loader)).global_step for loader in (ours, foreign)]


def test_a_worker_that_was_just_forked_outlives_a_signal_to_the_whole_job(tmp_path: Path) -> None:
    assert run_world(train, 1, str(tmp_path)) == [[4, 4]]
