"""examples/launch/ray_train.py: what it makes of its command line, and, where Ray is installed, a run that loses a
worker."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.examples.launch import ROOT, run_script
from tests.examples.test_launch_files import Launched
from tests.trainer.small import Batch, Samples, make_config

STEPS, INTERVAL = 60, 10
RAY_TRAIN = ROOT / "examples/launch/ray_train.py"
SCRIPT = "from tests.examples.test_ray_train import train; train()"


class Watched(Launched):
    """Leaves the number of its process once it has saved."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 2 * INTERVAL + 1:
            Path(f"trains-{self.world.rank}").write_text(str(os.getpid()))
        return super().training_step(batch, batch_idx)


def train() -> None:
    """A run that is named by its argument."""
    config = make_config(max_steps=STEPS, n_epochs=None)
    config.experiment = sys.argv[1]
    config.checkpoint_parameters = dt.CheckpointParameters(save_every_n_steps=INTERVAL)
    with Watched(config, DistributedDataLoader(Samples(64), 2, shuffle=True)) as trainer:
        trainer.fit()


def last_checkpoint(directory: Path, experiment: str) -> Path:
    return directory / f"runs/tests/trainer/{experiment}/checkpoints/step_{STEPS:08d}"


def test_the_number_of_workers_is_asked_for_before_ray_comes_and_the_script_keeps_its_flags(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise SystemExit('imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def says(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, RAY_TRAIN, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        return done.stdout + done.stderr

    assert "--gpu" in says("--help")
    assert "the following arguments are required: --workers" in says("train.py")
    assert says("--workers", "2", "--gpu", "train.py", "--gpu", "--seed", "3") == "imported\n"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray starts the workers")  # importing it changes the environment
def test_a_run_whose_worker_is_killed_is_started_again_by_ray_and_ends_as_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "hurry").touch()
    run_script(script, "torchrun", cwd=tmp_path, n_processes=2)
    (tmp_path / "hurry").unlink()
    for rank in range(2):
        (tmp_path / f"trains-{rank}").unlink()

    # Ray's sockets are in there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_directory:
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": ray_directory,
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": str(tmp_path),
        }
        with (tmp_path / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, RAY_TRAIN, "--workers", "2", "train.py", "ray"],
                cwd=tmp_path,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                deadline = time.monotonic() + 120
                while not (tmp_path / "trains-1").exists() or not (tmp_path / "trains-1").read_text():
                    assert process.poll() is None, (tmp_path / "output.txt").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                os.kill(int((tmp_path / "trains-1").read_text()), signal.SIGKILL)
                (tmp_path / "hurry").touch()
                process.wait(timeout=120)
            finally:
                process.terminate()
                process.wait(timeout=60)
    assert process.returncode == 0, (tmp_path / "output.txt").read_text()
    resumed = {(tmp_path / f"resumed-{rank}").read_text() for rank in range(2)}
    assert resumed in ({str(INTERVAL)}, {str(2 * INTERVAL)})
    compared = subprocess.run(
        [sys.executable, "-m", "dream_trainer", "checkpoints", "diff", "--values"]
        + [str(last_checkpoint(tmp_path, name)) for name in ("torchrun", "ray")],
        capture_output=True,
        text=True,
    )
    counts = re.search(r"(\d+) of (\d+) tensors in both are equal bit for bit", compared.stdout)
    assert counts is not None, compared.stdout + compared.stderr
    assert int(counts[1]) == int(counts[2]) > 0
