"""The parts of examples/gpt that need no trainer: a causal model, corpora split by file and packed, a drawn curve."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.examples.launch import EXAMPLES, modules_of


@pytest.fixture(autouse=True)
def example_modules() -> Iterator[None]:
    with modules_of(EXAMPLES / "gpt"):
        yield


def test_no_position_sees_a_later_byte() -> None:
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(n_layers=2, n_heads=2, dim=16, window=12))
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert not torch.equal(before[:, 7], after[:, 7])


def test_the_corpus_is_real_and_the_same_each_time() -> None:
    from corpus import load_corpus

    corpus, again = load_corpus(128), load_corpus(128)
    assert corpus.n_validation_files > 5
    assert corpus.n_train_files > 10 * corpus.n_validation_files
    assert corpus.train[0].shape == (129,)
    assert corpus.train[0].dtype is torch.uint8
    assert len(corpus.validation) <= 1024
    assert torch.equal(corpus.validation.windows, again.validation.windows)


def test_the_loss_curve_has_the_last_value_of_each_step(tmp_path: Path) -> None:
    from plot import read_metrics

    records = [{"step": s, "train/loss": 3.0 - s} for s in (1, 2)] + [
        {"step": 2, "val/loss": 2.0},
        {"step": 2, "train/loss": 0.5},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_metrics(metrics, "train/loss") == ([1, 2], [2.0, 0.5])
