"""The complete example of the API page, and the one without a class, as they stand, under torchrun and alone."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401  # sets an environment variable, which the examples' import would do inside a test

from dream_trainer import TrainingParameters
from tests.examples.launch import ROOT, run_script

EXAMPLE, SIMPLE = ROOT / "examples" / "api_example.py", ROOT / "examples" / "simple.py"


def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    said = run_script(EXAMPLE, cwd=tmp_path, n_processes=2)
    # 1024 samples, 10 times, in global batches of 32 x 4 x 2 ranks
    assert said.count("40 optimizer steps, 10240 samples") == 1


def test_the_example_validates_each_epoch_and_learns() -> None:
    example = runpy.run_path(str(EXAMPLE))
    found: list[dict[str, float]] = []

    class Watched(example["MyTrainer"]):
        def post_val_epoch(self, metrics: dict[str, float]) -> None:
            found.append(metrics)

    parameters = TrainingParameters(n_epochs=10, train_batch_size=32, gradient_accumulation_steps=4)
    config: Any = example["MyConfig"](project="p", group="g", experiment="e", training_parameters=parameters)
    with Watched(config) as trainer:
        trainer.fit()
    assert len(found) == 10
    assert found[-1]["val/val_accuracy"] > 0.85
    assert found[-1]["val/val_loss"] < 0.5 * found[0]["val/val_loss"]


def check(said: str, first_line: str) -> None:
    assert said.count(first_line) == 1
    (accuracy,) = re.findall(r"the best epoch's accuracy: (0\.\d+)", said)
    assert float(accuracy) > 0.88


@pytest.mark.slow
def test_the_example_learns_on_two_ranks(tmp_path: Path) -> None:
    check(run_script(SIMPLE, cwd=tmp_path, n_processes=2), "epoch 1/15  step 20/300  train/loss ")


def test_it_learns_alone_and_started_again_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SIMPLE), run_name="__main__")
    said = capsys.readouterr().out
    check(said, "epoch 1/15  step 40/600  train/loss ")
    runpy.run_path(str(SIMPLE), run_name="__main__")
    assert capsys.readouterr().out == said[said.index("the best epoch's") :]
