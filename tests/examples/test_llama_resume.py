"""A checkpoint from any cell of the parity matrix resumes in any other, as if the run had never been stopped."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.launch import imported


def spanning(cell: Any) -> list[Any]:
    """From one process by shards, split layers, shared sequences, stages and replicas of these back to one; tied ends,
    and mixtures whose experts ranks share."""
    return [
        cell(),
        cell(tied=True),
        cell(1, 2, 1, accumulation=2),
        cell(1, 2, 1, tied=True),
        cell(1, 1, 2),
        cell(1, 1, 2, sequence_parallel=False, loss_parallel=True, tied=True),
        cell(2, 1, 1, experts=True, ep=2),
        cell(pp=2, recompute="full"),
        cell(cp=2),
        cell(pp=2, experts=True, accumulation=2),
        cell(2, 1, 2, recompute="full"),
        cell(1, 4, 1, experts=True, ep=2),
        cell(1, 2, 1, pp=2, schedule="GPipe"),
        cell(recompute="selective"),
        cell(accumulation=2, tied=True),
        cell(experts=True),
    ]


def whole(cell: Any) -> list[Any]:
    """Every mesh of up to 8 processes after one of another kind, up and down twice, with every option."""
    meshes = [
        *[(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (1, 1, 4), (1, 4, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)],
        *[(8, 1, 1), (1, 1, 8), (2, 4, 1), (2, 2, 2), (1, 8, 1), (4, 1, 2), (1, 4, 2), (2, 1, 4), (4, 2, 1), (1, 2, 4)],
        *[(1, 1, 1), (2, 1, 2), (1, 4, 1), (1, 1, 2), (2, 1, 1), (1, 1, 1)],
    ]
    ways = [(1, "none"), (2, "full"), (2, "none"), (1, "selective"), (1, "full"), (2, "selective")]
    untied = [cell(*mesh, *ways[i % len(ways)], loss_parallel=i % 3 == 0) for i, mesh in enumerate(meshes)]
    tied = [
        cell(*mesh, *ways[(i + 1) % len(ways)], loss_parallel=mesh[2] > 1, tied=True) for i, mesh in enumerate(meshes)
    ]
    plain = [part for pair in zip(untied, tied, strict=True) for part in pair]
    further = [{"cp": 2}, {"pp": 2}, {"cp": 4, "attention": "ulysses"}, {"pp": 2, "schedule": "GPipe"}, {"cp": 2}]
    further += [{"pp": 2, "dp_shard": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "dp_replicate": 4}, {"cp": 8}, {}]
    mixtures = [{"dp_replicate": 2, "ep": 2}, {"pp": 2}, {"dp_shard": 4, "ep": 4}, {"dp_replicate": 4, "ep": 2}]
    mixtures += [
        {"pp": 2, "dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 4, "ep": 2},
        {"cp": 2, "dp_shard": 4, "ep": 4},
    ]
    return [*plain, *(cell(**way) for way in further), *(cell(**way, experts=True) for way in (*mixtures, {}))]


@pytest.mark.slow
@pytest.mark.pitfall(24)
@pytest.mark.timeout(3600)
def test_a_run_that_goes_on_in_another_cell_again_and_again_learns_as_if_never_stopped(
    all_cases: bool, tmp_path: Path
) -> None:
    with imported("tests.examples.llama_chain") as chain:
        cells = whole(chain.Cell) if all_cases else spanning(chain.Cell)
        links = chain.run_chain(cells, tmp_path)
    assert [link.hop.cell for link in links] == cells
    missed = {link.hop: link.miss for link in links if not link.miss.is_parity()}
    assert not missed
    for kind in {cell.alone() for cell in cells}:
        run = [link for link in links if link.hop.cell.alone() == kind]
        assert all(rank["loaded"] == {} for rank in run[0].ranks)
        for before, after in itertools.pairwise(run):
            assert_same_bits(united(after.ranks, "loaded"), united(before.ranks, "left"))


def united(ranks: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    """All ranks' tensors by name, the stages of a pipeline together; equal where two ranks have one. Without the tables
    of rotary positions, which later stages have in their blocks alone."""
    whole: dict[str, Any] = {}
    for rank in ranks:
        for name, tensor in ((name, tensor) for name, tensor in rank[what].items() if "rope." not in name):
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Parameters, buffers and the optimizer's state, whole."""
    assert found.keys() == expected.keys()
    assert {"exp_avg", "exp_avg_sq", "step"} <= {name.rpartition(".")[2] for name in found}
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
