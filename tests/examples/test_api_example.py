"""The complete example of the API page, as it stands, alone and under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.launch import ROOT, run_script

EXAMPLE = ROOT / "examples" / "api_example.py"


@pytest.mark.parametrize("n_processes", [1, 2])
def test_the_api_example_trains_and_validates(n_processes: int, tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    # The example prints its steps; validations are counted from outside, as a subclass would.
    probe.write_text(PROBE.format(examples=str(EXAMPLE.parent)))
    said = run_script(probe, cwd=tmp_path, n_processes=n_processes)
    steps = 80 if n_processes == 1 else 40  # 1024 samples in global batches of 32 x 4 x ranks, 10 epochs
    assert f"{steps} optimizer steps, 10240 samples" in said
    assert "10 validations" in said
    accuracy = float(said.split("accuracy ")[1].split()[0])
    assert accuracy > 0.85


PROBE = """
import sys
sys.path.insert(0, {examples!r})
import api_example
from dream_trainer import TrainingParameters

class Watched(api_example.MyTrainer):
    seen = []

    def post_val_epoch(self, metrics):
        self.seen.append(metrics["val/val_accuracy"])

if __name__ == "__main__":
    config = api_example.MyConfig(
        project="p", group="g", experiment="e",
        training_parameters=TrainingParameters(n_epochs=10, train_batch_size=32, gradient_accumulation_steps=4),
    )
    with Watched(config) as trainer:
        trainer.fit()
        if trainer.world.is_main:
            print(f"{{trainer.global_step}} optimizer steps, {{trainer.samples_seen}} samples")
            print(f"{{len(trainer.seen)}} validations, accuracy {{trainer.seen[-1]}}")
"""


@pytest.mark.parametrize("n_processes", [1, 2])
def test_the_api_example_runs_as_a_script(n_processes: int, tmp_path: Path) -> None:
    said = run_script(EXAMPLE, cwd=tmp_path, n_processes=n_processes)
    assert f"{80 // n_processes} optimizer steps, 10240 samples" in said
    assert said.count("optimizer steps") == 1
