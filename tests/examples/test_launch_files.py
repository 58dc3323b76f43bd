"""The launch files, as far as a machine without a cluster can tell: examples/launch/slurm.sh runs with commands
that stand in for SLURM's, under which a real torchrun trains, is interrupted, and goes on;
examples/launch/kubernetes.yaml says what it must."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dream_trainer as dt
from dream_trainer.data.loader import DistributedDataLoader
from tests.trainer.small import ROOT, Batch, Samples, Sharded, make_config

LAUNCH = ROOT / "examples/launch"
STEPS = 400

# What each command of SLURM does here. srun becomes torchrun, so that the script's child is what srun stands for.
COMMANDS = {
    "srun": 'echo "$$" > torchrun.pid; echo "$*" >> srun.log; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; echo other-node; else echo "$*" >> scontrol.log; fi',
    "scancel": 'echo "$*" >> scancel.log; kill -TERM "$(cat torchrun.pid)"',
}


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


def train() -> None:
    config = make_config(max_steps=STEPS, n_epochs=10_000)
    config.checkpoint_parameters = dt.CheckpointParameters(save_every_n_epochs=None)
    with Launched(config, DistributedDataLoader(Samples(64), 2)) as trainer:
        trainer.fit()


@contextmanager
def batch_script(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """The script as SLURM's batch shell runs it on a job's first node, for 2 ranks of `train`."""
    (directory / "bin").mkdir(exist_ok=True)
    for name, text in COMMANDS.items():
        command = directory / "bin" / name
        command.write_text(f"#!/bin/bash\n{text}\n")
        command.chmod(0o755)
    (directory / "train.py").write_text("from tests.examples.test_launch_files import train; train()")
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "1",
        "NPROC_PER_NODE": "2",
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
            os.kill(int((directory / "torchrun.pid").read_text()), signal.SIGTERM)
            process.communicate(timeout=60)


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not file.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints that were written."""
    return sorted(int(path.name[5:]) for path in directory.glob("runs/*/*/*/checkpoints/step_*"))


@pytest.mark.slow
def test_before_the_time_limit_slurm_sh_lets_all_ranks_save_queues_itself_and_goes_on_from_there(
    tmp_path: Path,
) -> None:
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


def test_kubernetes_yaml_names_its_pods_bears_evictions_and_leaves_time_to_save() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = job["metadata"]["name"]
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy demands it
    ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert {"type": "DisruptionTarget"} in ignored[0]["onPodConditions"]
    assert ignored[1]["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [128 + signal.SIGTERM],
    }
    command = container["command"]
    assert command[0] == "torchrun"  # itself the first process, which gets SIGTERM
    assert f"--nnodes={spec['completions']}" in command
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in command
    assert any(part.startswith(f"--rdzv-endpoint={name}-0.{pod['subdomain']}:") for part in command)
    assert (ROOT / command[-1]).exists()
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert 30 < int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["runs"] == f"{container['workingDir']}/runs"
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_the_arguments_given_to_torchrun_are_known_to_it() -> None:
    from torch.distributed.run import parse_args

    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    job = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))[1]
    arguments = parse_args(job["spec"]["template"]["spec"]["containers"][0]["command"][1:])
    assert arguments.training_script == "examples/gpt/train.py"
    assert arguments.rdzv_conf == "read_timeout=300,join_timeout=1800"
