"""Products that run in pieces beside the collectives of sequence parallelism train as whole ones do."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import dream_trainer as dt
from dream_trainer.compat import async_collectives
from tests.api import ConfigError
from tests.overlap import overlap_on_the_cpu
from tests.trainer.arithmetic import Case, reference
from tests.trainer.test_tensor_parallel import Cell, Config, Trained, config_of, weights_of
from tests.worlds import run_world

CELL = Cell(2, "sequence", Case(accumulation=2, weighted=True, clip=0.05, optimizer="adamw"))


def overlapping() -> Config:
    config = config_of(CELL)
    return replace(
        config,
        device_parameters=replace(config.device_parameters, compile=True),
        compile_parameters=dt.CompileParameters(async_tensor_parallel=True),
    )


def test_an_overlap_without_compiled_blocks_is_refused() -> None:
    config = replace(
        config_of(Cell(1, "layers", Case())), compile_parameters=dt.CompileParameters(async_tensor_parallel=True)
    )
    refusal = pytest.raises(ConfigError, match=r"of compiled blocks. Set device_parameters.compile=True")
    with refusal, Trained(config) as trainer:
        trainer.fit()


def trained() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patches, overlap_on_the_cpu() as calls:
        patches.setattr(async_collectives, "why_memory_is_not_shared", lambda group, device: None)
        with Trained(overlapping()) as trainer:
            trainer.fit()
            return {"norms": trainer.norms, "weights": weights_of(trainer.model), "calls": dict(calls)}


@pytest.mark.slow
def test_products_in_pieces_train_as_whole_ones_do() -> None:
    expected = reference(CELL.case)
    for result in run_world(trained, 2):
        assert min(result["calls"].values()) > 0
        assert len(result["calls"]) == 2
        assert result["norms"] == pytest.approx([float(norm) for norm in expected["norms"]], rel=1e-9)
        for name, weight in expected["weights"].items():
            own = result["weights"][name.removeprefix("model.")]
            torch.testing.assert_close(own, weight, rtol=1e-9, atol=1e-9, msg=name)
