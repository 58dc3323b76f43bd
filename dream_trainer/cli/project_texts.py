"""What `dream-trainer new` writes around an example; <NAME> and the like are filled in."""

from __future__ import annotations

IGNORED = "runs/\n__pycache__/\n.pytest_cache/\n"

CONFIG = """\
# What `python train.py --config run.yaml` changes. Whatever `python train.py --help` lists can stand here.
experiment: first
seed: 42
training_parameters:
  num_sanity_val_steps: 0
"""

README = """\
# <NAME>

<ABOUT>

Begun with `dream-trainer new <NAME> --from <TEMPLATE>`; it is all yours now.

```bash
pip install -r requirements.txt
pytest                                      # some seconds of training, alone and on two processes
python train.py --config run.yaml           # on one device
torchrun --nproc-per-node=2 train.py --config run.yaml   # on two: the same samples in each step
python train.py --help                      # everything that the command line can change
```

A run lies in `runs/<NAME>/...`: its numbers in `metrics.jsonl`, its checkpoints, and its picture. The same command
again goes on where it stopped. `dream-trainer plot RUN` draws the curves of one or several runs, and
`dream-trainer checkpoints ls RUN` lists what was saved.

| file | what is in it |
| --- | --- |
| `train.py` | the trainer, its config and the default run |
| `run.yaml` | what a run changes of it |
| `test_train.py` | that it learns, and learns the same on two processes |
| `launch/slurm.sh` | `sbatch launch/slurm.sh train.py --config run.yaml` |
| `launch/kubernetes.yaml` | `kubectl apply -f launch/kubernetes.yaml`, with your image and volume filled in |
| `launch/jobset.yaml` | the same on several nodes |
"""

TEST = '''\
"""train.py learns, alone and on two processes, and both learn the same. Some seconds each, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

METRIC = "<METRIC>"
CHECK = "<CHECK>"
SHARED = "--logger-parameters.log-every-n-steps 1 --device-parameters.device cpu"


def train(n_processes: int, directory: Path) -> list[float]:
    """Runs train.py, which writes into `directory`, and returns METRIC of each step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if n_processes == 2 else []
    done = subprocess.run(
        [sys.executable, *launcher, "train.py", "--config", "run.yaml", *CHECK.split(), *SHARED.split()],
        cwd=Path(__file__).parent,
        env=os.environ | {"DREAM_TRAINER_RUNS": str(directory), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = directory.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line[METRIC] for line in lines if METRIC in line]


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """METRIC of each step, by the number of processes."""
    return {n_processes: train(n_processes, tmp_path_factory.mktemp("runs")) for n_processes in (1, 2)}


@pytest.mark.parametrize("n_processes", [1, 2])
def test_it_learns(values: dict[int, list[float]], n_processes: int) -> None:
    first, last = sum(values[n_processes][:5]), sum(values[n_processes][-5:])
    assert <BETTER>


def test_two_processes_learn_the_same(values: dict[int, list[float]]) -> None:
    # Only rounding differs, which grows from step to step.
    assert values[1][:5] == pytest.approx(values[2][:5], rel=1e-2, abs=1e-3)
'''
