"""The llama example on every mesh learns what one process learns, to rounding. `tools/parity.sh` prints the matrix."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.launch import ROOT, imported, metric, run_script

FEW_STEPS = 4


@pytest.fixture(scope="module")
def parity() -> Iterator[Any]:
    with imported("tools.parity") as module:
        yield module


def spanning(cell: Any) -> list[Any]:
    """Few cells, of two ranks but for one, in which every axis and every option appears, most of them together."""
    return [
        cell(1, 2, 2, accumulation=2, recompute="selective", loss_parallel=True, tied=True, backend="aot_eager"),
        cell(2, accumulation=2, recompute="full", odd_parts=True, dtype="float32"),
        cell(recompute="full", cp=2, attention="ulysses", packed=True),
        cell(1, 2, 1, recompute="selective", ep=2, tied=True, experts=True),
        cell(pp=2, schedule="ZBVZeroBubble", layers=4, packed=True, weighted=False),
    ]


def train_few_steps(cells: list[Any], directory: str) -> Any:
    """On a rank: what differs by more than rounding does so from the first steps on."""
    with imported("tools.parity") as module:
        module.N_STEPS = FEW_STEPS
        return module.train_cells(cells, directory)


@pytest.mark.pitfall(21)
@pytest.mark.timeout(3600)
def test_each_mesh_learns_what_one_process_does(parity: Any, all_cases: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = parity.all_cells() if all_cases else spanning(parity.Cell)
    if not all_cases:
        monkeypatch.setattr(parity, "train_cells", train_few_steps)
    found = parity.run_cells(cells)
    assert len(found) == len(cells)
    missed = {cell: miss for cell, (miss, _) in found.items() if not miss.is_parity(cell.dtype)}
    assert not missed


def test_the_matrix_has_every_mesh_of_up_to_eight_processes_and_every_option(parity: Any) -> None:
    cells = parity.all_cells()
    assert len(cells) == len(set(cells))
    plain = [cell for cell in cells if cell == parity.Cell(*cell[:5])]
    assert len({cell[:3] for cell in plain}) == 1 + 3 + 6 + 10
    assert len({cell[:5] for cell in plain}) >= 20 * 2 * 2
    shared = {cell.mesh for cell in cells if cell.cp > 1 and cell.ep == cell.pp == 1}
    assert len(shared) == 3 + 3 * 2 + 6  # cp 2, 4 and 8 with what is left for the other three
    assert {cell.mesh for cell in cells if cell.cp > 1 and cell.ep == cell.pp == 1 and cell.packed} == shared
    three = {cell.mesh[2:] for cell in cells if min(cell.cp, cell.tp, cell.ep) > 1 and cell.pp == 1}
    assert len(three) >= 4  # ranks that share sequences, layers and experts
    assert {(1, *mesh, 1, 1, ep) for mesh, ep in (((8, 1), 8), ((1, 8), 4), ((2, 4), 2))} <= {c.mesh for c in cells}


def test_a_cell_that_is_off_by_more_than_rounding_is_a_miss(parity: Any) -> None:
    def record(loss: float = 1.0, norm: float = 1.0, weight: float = 1.0, start: float = 1.0) -> dict[str, Any]:
        return {
            "losses": [(step, loss, 2) for step in range(parity.N_STEPS)],
            "norms": [norm],
            "weights": {"w": torch.tensor([0.0, weight])},
            "start": {"w": torch.tensor(start)},
        }

    off = 1 + 3e-10
    ranks = [record(), record()]
    assert parity.compare(ranks, record()).is_parity()
    assert parity.compare(ranks, record(loss=1 + 1e-11, norm=1 - 1e-11)).is_parity()
    for other in (record(loss=off), record(norm=off), record(weight=1 + 1e-6), record(start=1 + 1e-6)):
        assert not parity.compare(ranks, other).is_parity()
        assert not parity.compare([record(), other], record()).is_parity()


@pytest.mark.slow
def test_a_split_model_writes_text_and_exports_what_it_learned(tmp_path: Path) -> None:
    """By the command line, as a reader would: config alone divides the work."""
    common = (
        "--model tiny --seq-len 16 --training-parameters.max-steps 2 --training-parameters.val-every-n-steps 2 "
        "--logger-parameters.log-every-n-steps 1 --sample-tokens 7 --dtype float64 --device-parameters.device cpu"
    ).split()
    export, stages = ["--export-to", "learned"], "--device-parameters.pipeline-parallel 2".split()
    split = "--device-parameters.tensor-parallel 2 --tensor-parallel-parameters.loss-parallel".split()
    texts, losses = [], []
    for name, n_processes, more in (
        ("one", 1, export),
        ("two", 2, [*split, *export]),
        ("stages", 2, [*stages, *export]),
        ("four", 4, [*split, *stages]),
    ):
        (tmp_path / name).mkdir()
        printed = run_script(
            ROOT / "examples/llama/train.py", *common, *more, cwd=tmp_path / name, n_processes=n_processes
        )
        texts.append(printed.split("The model writes:")[1])
        (run,) = (tmp_path / name).glob("runs/examples/llama/*")
        losses.append([loss for key in ("train/loss", "val/loss") for loss in metric(run, key).values()])
    assert len(set(texts)) == 1
    assert len(losses[0]) == 3
    assert all(found == pytest.approx(losses[0], rel=1e-9) for found in losses)

    from safetensors.torch import load_file

    alone, *others = (load_file(tmp_path / name / "learned/model.safetensors") for name in ("one", "two", "stages"))
    for together in others:
        assert alone.keys() == together.keys()
        for key, weight in alone.items():
            torch.testing.assert_close(together[key], weight, rtol=1e-9, atol=1e-9)
