"""The whole plan that docs/tensor-parallel.md shows trains as one process does."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.docs.pages import ROOT, blocks
from tests.trainer.arithmetic import full
from tests.trainer.small import run_config
from tests.worlds import run_world


def page() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(ROOT / "docs/tensor-parallel.md"):
        if block.language == "python":
            exec(block.code, namespace)
    return namespace


def train(ranks: int, directory: str) -> list[tuple[list[float], dict[str, torch.Tensor], bool]]:
    """With sequences cut and whole, without dropout, in float64; then a step with dropout."""
    os.chdir(directory)
    shown, results = page(), []
    for sequence_parallel, dropout in ((True, 0.0), (False, 0.0), (True, 0.1)):

        class Shown(shown["GPTTrainer"]):  # type: ignore[misc]
            losses: list[float]

            def configure_models(self) -> None:
                self.model, self.losses = shown["GPT"](dropout=dropout).double(), []  # noqa: B023

            def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
                result: dict[str, Any] = super().training_step(batch, batch_idx)
                self.losses.append(float(result["loss"]))
                return result

        config = run_config(
            device_parameters=dt.DeviceParameters(device="cpu", tensor_parallel=ranks, dp_shard=1),
            tensor_parallel_parameters=dt.TensorParallelParameters(sequence_parallel=sequence_parallel),
            training_parameters=dt.TrainingParameters(max_steps=3, train_batch_size=8),
        )
        with Shown(config) as trainer:
            trainer.fit()
            weights = {name: full(p.detach()).clone() for name, p in trainer.model.named_parameters()}
            results.append((trainer.losses, weights, trainer.model.head.weight is trainer.model.tokens.weight))
    return results


def test_the_whole_plan_trains_on_two_ranks_as_on_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (alone,) = run_world(train, 1, 1, str(tmp_path))
    for ranks in run_world(train, 2, 2, str(tmp_path)):
        for (losses, weights, is_tied), (expected_losses, expected, _) in zip(ranks[:2], alone, strict=False):
            assert is_tied
            assert losses == pytest.approx(expected_losses, rel=1e-10)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9, msg=name)
        # Other places are dropped than in one process, and copies of what is whole stay equal, which steps compare.
        assert ranks[2][0][0] == pytest.approx(alone[2][0][0], rel=0.1)
    assert "does not say whether the tensor_parallel" not in "".join(capfd.readouterr())
