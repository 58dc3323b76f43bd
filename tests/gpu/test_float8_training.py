"""Float8 by the products of a CUDA device, compiled; emulated in a rehearsal."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests.gpu.test_training import Fits, config, losses_by_hand
from tests.worlds import run_world

pytestmark = pytest.mark.gpu


class Float8Fits(Fits):
    def model_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.children())[:2]


def float8_losses(device: torch.device, recipe: str, directory: str) -> list[float]:
    """In a process of its own, since the compiler leaves threads behind."""
    from torchao.float8.float8_linear import Float8Linear

    os.chdir(directory)
    settings = config(device, steps=4, compile=True, precision="bf16", float8=recipe)
    settings.float8_parameters = dt.Float8Parameters(emulate=device.type != "cuda")
    if device.type != "cuda":
        settings.compile_parameters = dt.CompileParameters(backend="aot_eager")
    with Float8Fits(settings) as trainer:
        trainer.fit()
        assert isinstance(trainer.model[0].linear, Float8Linear)
        return torch.stack(trainer.losses).tolist()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_float8_is_as_near_to_float32_as_bf16_is(recipe: str, device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    (found,) = run_world(float8_losses, 1, device, recipe, str(tmp_path))
    torch.testing.assert_close(torch.tensor(found), losses_by_hand(device, 4).cpu(), rtol=1e-1, atol=1e-3)
