"""`compare_first_forward` finds what looks at other positions within a rank's part, and changes nothing else."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dream_trainer as dt
from dream_trainer.errors import ConfigError
from tests.trainer.sequences import WIDTH, Case, Config, Trained, config_of
from tests.trainer.small import run_ranks
from tests.worlds import run_world

SAID = r"self\.model computes of parts of sequences what it does of whole ones, within \d\.\de-1\d of"
ON_TWO = [
    Case(2, shard="auto", packed=True, accumulation=2),
    Case(2, attention="ulysses", packed=True, dropout=0.1),
    Case(2, causal=False, recompute="full"),
    Case(2, backend="aot_eager", recompute="selective"),
]


def comparing(case: Case, *, compares: bool = True) -> Config:
    config = config_of(case, max_steps=2, val_every_n_epochs=None)
    parameters = replace(config.context_parallel_parameters, compare_first_forward=compares)
    return replace(config, context_parallel_parameters=parameters)


def train(cases: list[Case], directory: str) -> list[list[float]]:
    os.chdir(directory)
    results = []
    for case in cases:
        for compares in (False, True):
            with Trained(comparing(case, compares=compares)) as trainer:
                trainer.fit()
                results.append(trainer.norms)
    return results


def test_models_that_act_by_position_train_the_same_bits_with_it(tmp_path: Path) -> None:
    for cases, world_size in ((ON_TWO, 2), ([Case(2, tp=2, shard="auto")], 4)):
        for norms in run_world(train, world_size, cases, str(tmp_path)):
            assert norms[::2] == norms[1::2]
            assert len(norms[0]) == 2


class WithSink(nn.Module):
    """Attention by hand beside a key of its own, of which nobody can tell from outside that it is attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        weights = torch.cat((scores, torch.ones_like(scores[..., :1])), -1).softmax(-1)
        return x + self.out(weights[..., :-1] @ x)


class Mistaken(Trained):
    """Its third block sees one rank's part alone."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.blocks.append(WithSink())

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(self.model.blocks)


def compare(trainer: type[Trained], case: Case) -> None:
    trainer(comparing(case)).fit()


def test_the_first_block_that_sees_a_part_alone_is_named_on_all_ranks(tmp_path: Path) -> None:
    code = "from tests.trainer.test_sequence_comparison import *; compare(Mistaken, Case(2, shard='auto'))"
    told = (
        r"self\.model computes other values than of whole sequences: first self\.model\.blocks\.2, by [\d.e-]+ of its"
    )
    for status, text in run_ranks(code, 2, tmp_path):
        assert status == 1
        assert re.search(told, text)


def test_what_it_has_found_equal_is_said_once(tmp_path: Path) -> None:
    code = "from tests.trainer.test_sequence_comparison import *; compare(Trained, Case(2))"
    (first, second) = run_ranks(code, 2, tmp_path)
    assert (first[0], second[0]) == (0, 0)
    assert len(re.findall(SAID, first[1])) == 1
    assert not re.search(SAID, second[1])


def test_it_is_refused_where_no_rank_has_a_whole_model() -> None:
    config = comparing(Case(2))
    devices = replace(config.device_parameters, pipeline_parallel=2, dp_replicate=1)
    with pytest.raises(ConfigError, match="compare_first_forward=True with pipeline_parallel=2, where a forward of"):
        Trained(replace(config, device_parameters=devices))
    assert not dt.ContextParallelParameters().compare_first_forward
