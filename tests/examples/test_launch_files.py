"""examples/launch/slurm.sh, as far as a machine without a cluster can tell: it runs with commands
that stand in for SLURM's, under which a real torchrun trains, is interrupted, and goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.small import ROOT, Batch, Samples, Sharded, make_config

LAUNCH = ROOT / "examples/launch"
STEPS = 400

# What each command of SLURM does here. srun becomes torchrun, so that the script's child is what srun stands for.
COMMANDS = {
    "srun": 'echo "$$" > torchrun.pid; echo "$*" >> srun.log; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; echo other-node; else echo "$*" >> scontrol.log; fi',
    "scancel": 'echo "$*" >> scancel.log; kill -TERM "$(cat torchrun.pid)"',
}
# srun on two nodes, each with a process group of its own; --kill-on-bad-exit ends the other where one fails.
SRUN_ON_TWO_NODES = """
echo "$*" >> srun.log; while [ "${1#--}" != "$1" ]; do shift; done
set -m; "$@" & echo $! > node-0.pid; "$@" & echo $! > node-1.pid
wait -n && wait -n; status=$?
kill -TERM -- -$(cat node-0.pid) -$(cat node-1.pid) 2> /dev/null; wait; exit $status
"""


class Launched(Sharded, dt.CheckpointMixin):
    """Slow, until a file says otherwise; tells when it trains."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if not Path("hurry").exists():
            time.sleep(0.05)
        if self.local_batches == 2:
            Path(f"trains-{self.world.rank}").touch()
        return super().training_step(batch, batch_idx)

    def on_load(self, path: Path) -> None:
        Path(f"resumed-{self.world.rank}").write_text(str(self.global_step))

    def post_fit(self) -> None:
        Path(f"ended-{self.world.rank}").write_text(str(self.global_step))


def train(save_every_n_steps: int | None = None) -> None:
    config = make_config(max_steps=STEPS, n_epochs=10_000)
    config.checkpoint_parameters = dt.CheckpointParameters(
        save_every_n_steps=save_every_n_steps, save_every_n_epochs=None
    )
    with Launched(config, DistributedDataLoader(Samples(64), 2)) as trainer:
        trainer.fit()


@contextmanager
def batch_script(
    directory: Path, *, n_nodes: int = 1, n_restarts: int = 0, save_every_n_steps: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The script as SLURM's batch shell runs it on a job's first node, for 2 ranks of `train`, on 1 or 2 nodes."""
    (directory / "bin").mkdir(exist_ok=True)
    for name, text in (COMMANDS | ({"srun": SRUN_ON_TWO_NODES} if n_nodes == 2 else {})).items():
        command = directory / "bin" / name
        command.write_text(f"#!/bin/bash\n{text}\n")
        command.chmod(0o755)
    (directory / "train.py").write_text(
        f"from tests.examples.test_launch_files import train; train({save_every_n_steps})"
    )
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": str(n_nodes),
        "SLURM_RESTART_COUNT": str(n_restarts),
        "NPROC_PER_NODE": str(2 // n_nodes),
    }
    path = f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", str(LAUNCH / "slurm.sh"), "train.py"],
        cwd=directory,
        env=os.environ | slurm | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for started in (directory / name for name in ("torchrun.pid", "node-0.pid", "node-1.pid")):
                if started.exists():
                    os.kill(int(started.read_text()), signal.SIGTERM)
            process.communicate(timeout=60)


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not file.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    psutil = pytest.importorskip("psutil", reason="psutil knows the children of a process")
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints that were written."""
    return sorted(int(path.name[5:]) for path in directory.glob("runs/*/*/*/checkpoints/step_*"))


@pytest.mark.slow
def test_before_the_time_limit_slurm_sh_lets_ranks_save_queues_itself_and_goes_on(tmp_path: Path) -> None:
    with batch_script(tmp_path) as process:
        wait_for(tmp_path / "trains-1", process)
        process.send_signal(signal.SIGUSR1)
        text = process.communicate(timeout=60)[1]
    assert process.returncode == 1, text
    job = str(os.getpid())
    assert (tmp_path / "scancel.log").read_text() == f"--signal=TERM {job}\n"
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {job}\n"
    (saved,) = steps(tmp_path)
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == [str(saved)] * 2
    assert 0 < saved < STEPS

    (tmp_path / "hurry").touch()
    with batch_script(tmp_path) as process:
        text = process.communicate(timeout=90)[1]
    assert process.returncode == 0, text
    assert [(tmp_path / f"resumed-{rank}").read_text() for rank in range(2)] == [str(saved)] * 2
    assert steps(tmp_path)[-1] == STEPS
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {job}\n"
    assert "--kill-on-bad-exit=1 torchrun --nnodes=1 --nproc-per-node=2" in (tmp_path / "srun.log").read_text()
    assert "--rdzv-endpoint=localhost:" in (tmp_path / "srun.log").read_text()


@pytest.mark.slow
def test_slurm_sh_outlives_a_cancellation_until_all_ranks_have_saved_and_does_not_queue_itself(tmp_path: Path) -> None:
    with batch_script(tmp_path) as process:
        wait_for(tmp_path / "trains-1", process)
        # SLURM tells the script and the nodes; twice, as happens when torchrun's processes are told directly too.
        process.send_signal(signal.SIGTERM)
        torchrun = int((tmp_path / "torchrun.pid").read_text())
        os.kill(torchrun, signal.SIGTERM)
        time.sleep(0.02)
        os.kill(torchrun, signal.SIGTERM)
        text = process.communicate(timeout=60)[1]
    assert process.returncode == 1, text
    (saved,) = steps(tmp_path)
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == [str(saved)] * 2
    assert not (tmp_path / "scontrol.log").exists()


@pytest.mark.slow
def test_after_a_lost_node_slurm_queues_again_and_slurm_sh_goes_on_from_the_newest(tmp_path: Path) -> None:
    with batch_script(tmp_path, n_nodes=2, save_every_n_steps=5) as process:
        for rank in range(2):
            wait_for(tmp_path / f"trains-{rank}", process)
        while len(steps(tmp_path)) < 2:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        # A node without power; then SLURM ends what is left of the job, and the script, on the others.
        torchruns = [int((tmp_path / f"node-{node}.pid").read_text()) for node in range(2)]
        os.kill(torchruns[1], signal.SIGSTOP)  # so that it reaps nobody, and starts nobody
        for pid in (*descendants(torchruns[1]), torchruns[1]):
            os.kill(pid, signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        with suppress(ProcessLookupError):  # --kill-on-bad-exit may have been first
            os.kill(torchruns[0], signal.SIGTERM)
        text = process.communicate(timeout=90)[1]
    assert process.returncode not in (0, None), text
    assert not (tmp_path / "scontrol.log").exists()  # SLURM does that, as --requeue asks
    newest = steps(tmp_path)[-1]
    assert newest < STEPS

    (tmp_path / "hurry").touch()
    with batch_script(tmp_path, n_nodes=2, n_restarts=1, save_every_n_steps=STEPS) as process:
        text = process.communicate(timeout=90)[1]
    assert process.returncode == 0, text
    assert [(tmp_path / f"resumed-{rank}").read_text() for rank in range(2)] == [str(newest)] * 2
    assert steps(tmp_path)[-1] == STEPS
    attempts = re.findall(r"--rdzv-id=(\S+)", (tmp_path / "srun.log").read_text())
    assert attempts == [f"{os.getpid()}-0", f"{os.getpid()}-1"]  # the second does not meet what is left of the first


def test_slurm_sh_is_bash_and_asks_slurm_for_what_its_parts_lean_on() -> None:
    text = (LAUNCH / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", text, re.MULTILINE))
    assert options.keys() >= {"requeue", "nodes", "time"}
    assert options["open-mode"] == "append"
    assert options["ntasks-per-node"] == "1"
    ahead = re.fullmatch(r"B:USR1@(\d+)", options["signal"])
    assert ahead is not None
    saving = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text)
    assert saving is not None
    assert 30 < int(saving[1]) < int(ahead[1])
    # Directives after the first command are ignored by sbatch.
    first = next(i for i, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert all("#SBATCH" not in line for line in text.splitlines()[first:])
