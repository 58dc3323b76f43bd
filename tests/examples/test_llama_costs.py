"""The llama example keeps and sends what the formulas of docs/memory-and-traffic.md say, on each axis."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import recompute
from tests.examples.launch import imported

NUMBER = 8  # bytes, of float64
WIDTH, HIDDEN, HEAD, KEY_HEADS, HEADS, VOCABULARY, LENGTH, BATCH = 64, 128, 4, 8, 16, 256, 16, 16
NORMS = 2 * WIDTH
BLOCK = WIDTH * HEAD * (2 * HEADS + 2 * KEY_HEADS) + 3 * WIDTH * HIDDEN + NORMS
PARAMETERS = 9  # of each it is said whether this rank has a gradient
ENDS = 2 * VOCABULARY * WIDTH + WIDTH
EXPERT = 3 * WIDTH * HIDDEN // 2
N_EXPERTS = 8
SPARSE_BLOCK = BLOCK - 3 * WIDTH * HIDDEN + (N_EXPERTS + 1) * EXPERT + N_EXPERTS * WIDTH  # one is for all tokens


@pytest.fixture(scope="module")
def llama_costs() -> Iterator[Any]:
    with imported("tests.examples.llama_costs") as module:
        yield module


def held(cell: Any, rank: int) -> float:
    """Parameters of a rank: each has its share of what an axis shares, and all of what it does not."""
    whole = cell.layers * (SPARSE_BLOCK if cell.experts else BLOCK) + ENDS
    if cell.pp > 1:
        return cell.layers / cell.pp * BLOCK + VOCABULARY * WIDTH + (WIDTH if rank else 0)
    if cell.tp > 1:
        norms = cell.layers * NORMS + WIDTH
        return (whole - norms) / cell.tp + norms
    if cell.ep > 1:
        return whole - cell.layers * N_EXPERTS * EXPERT * (1 - 1 / cell.ep)
    return whole / cell.dp_shard


def kept_of_a_block(cell: Any) -> float:
    """What enters it, since it is computed again."""
    split = cell.tp if cell.sequence_parallel else 1
    return NUMBER * cell.batch * LENGTH / cell.cp / split * WIDTH


def living(cell: Any, rank: int) -> float:
    """At the peak of a window's second micro-batch, but for what does not grow with the number of blocks."""
    kept = cell.layers * kept_of_a_block(cell)
    if cell.pp > 1:
        on_their_way = 2 * cell.pp if cell.schedule == "GPipe" else cell.pp - rank
        kept = cell.layers / cell.pp * on_their_way * kept_of_a_block(cell) / (2 * cell.pp)
    return 4 * NUMBER * held(cell, rank) + kept


def sent_of_a_block(cell: Any) -> float:
    n = max(cell.dp_replicate, cell.dp_shard, cell.tp, cell.cp)
    share, entering = (n - 1) / n, cell.batch * LENGTH * WIDTH
    if cell.tp > 1:  # what a block ends with is not computed again
        return NUMBER * (11 * share * entering + 2 * share * NORMS if cell.sequence_parallel else 10 * share * entering)
    if cell.dp_shard > 1:
        return NUMBER * share * (3 * BLOCK + 2 * PARAMETERS)
    gradients = 2 * share * (BLOCK + PARAMETERS)
    return NUMBER * (gradients + (cell.cp > 1) * 6 * share * cell.batch * KEY_HEADS * LENGTH * HEAD)


def test_a_rank_keeps_and_sends_what_the_formulas_say(llama_costs: Any, all_cases: bool, tmp_path: Path) -> None:
    kind = llama_costs.Cell
    ways: list[dict[str, Any]] = [{"pp": 2}]
    if all_cases:
        ways += [{"tp": 2}, {"dp_replicate": 2}, {"dp_shard": 2}, {"cp": 2}, {"tp": 2, "sequence_parallel": False}]
        ways += [{"pp": 2, "schedule": "GPipe"}, {"dp_replicate": 2, "ep": 2, "experts": True}]
    shared = {"accumulation": 2, "recompute": "full"}
    cells = [kind(**way, layers=layers, **shared) for way in ways for layers in (4, 6)]
    found = llama_costs.costs(cells, str(tmp_path))
    for cell, ranks in found.items():
        smaller = cell._replace(layers=4)
        for rank, cost in enumerate(ranks):
            other = found[smaller][rank]
            assert cost.weights == cost.gradients == cost.moments / 2 == NUMBER * held(cell, rank), cell
            if cell.pp > 1:
                assert cost.in_flight == (4 if cell.schedule == "GPipe" else cell.pp - rank), cell
            elif cell.layers > 4 and cell.ep == 1:
                assert cost.kept - other.kept == 2 * kept_of_a_block(cell), cell
                assert cost.sent - other.sent == 2 * sent_of_a_block(cell), cell
            if cell.layers > 4:
                within = 0.05 if cell.ep > 1 else 0.01  # AdamW counts steps, and blocks get other numbers of tokens
                growth = living(cell, rank) - living(smaller, rank)
                assert cost.peak - other.peak == pytest.approx(growth, rel=within), cell


def test_a_block_that_is_recomputed_selectively_keeps_what_the_formula_says(llama_costs: Any) -> None:
    model = importlib.import_module("model")  # of the llama example
    sizes = {"dim": WIDTH, "n_heads": HEADS, "n_kv_heads": KEY_HEADS, "hidden_dim": HIDDEN, "max_seq_len": LENGTH}
    tokens, kept = torch.zeros(4, LENGTH, dtype=torch.long), []
    for layers in (2, 4):
        llama = model.Llama(model.LlamaConfig(vocab_size=VOCABULARY, n_layers=layers, **sizes)).double()
        for block in llama.layers:
            recompute(block, dt.ActivationCheckpointingParameters().keep)
        counted = llama_costs.Counted(1)
        with counted:
            logits = llama(tokens)
            kept.append(counted.living([*llama.parameters(), *llama.buffers()]))
            del logits
    per_position = 5 * WIDTH + 2 * KEY_HEADS * HEAD + 2 * HIDDEN + HEADS
    assert kept[1] - kept[0] == 2 * NUMBER * 4 * LENGTH * per_position
