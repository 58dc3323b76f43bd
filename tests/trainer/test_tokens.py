"""Tokens: counted exactly over ranks, as a limit, in the log, in schedules and after a resume."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import dream_trainer as dt
from tests import api
from tests.trainer.small import Config, make_config
from tests.worlds import run_world

GLOBAL_BATCH, ROW, STEPS = 4, 16, 6


def documents(count: int, seed: int) -> list[np.ndarray]:
    """Of 3 to 40 tokens each."""
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 50, size=generator.integers(3, 40)) for _ in range(count)]


class Source(torch.utils.data.Dataset[np.ndarray]):
    def __init__(self, seed: int) -> None:
        self.documents = documents(60, seed)
        self.lengths = np.array([len(document) for document in self.documents])

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[index]


def packed() -> api.PackedRows:
    return api.PackedRows(api.Mixture({"a": Source(1), "b": Source(2)}, {"a": 2, "b": 1}, seed=3), ROW, block_size=32)


def tokens_by_step(steps: int) -> list[int]:
    """Real tokens of each step's rows, read one after the other."""
    rows = packed()
    rows.begin(9, None)
    real = [int((rows[position]["documents"] >= 0).sum()) for position in range(steps * GLOBAL_BATCH)]
    return [sum(real[at : at + GLOBAL_BATCH]) for at in range(0, len(real), GLOBAL_BATCH)]


class Words(dt.DreamTrainer):
    schedule: dt.ScheduleParameters | None = None

    def configure_models(self) -> None:
        self.model = nn.Embedding(50, 2)

    def configure_dataloaders(self) -> tuple[Any, None]:
        parts = self.world.dp_size * self.config.training_parameters.gradient_accumulation_steps
        return api.DistributedDataLoader(packed(), GLOBAL_BATCH // parts), None

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.rates: list[float] = []

    def configure_schedulers(self) -> None:
        if self.schedule is not None:
            tokens = dt.TokenAxis(lambda: self.tokens_before_next_step, self.config.training_parameters.max_tokens)
            self.scheduler = dt.build_schedule(
                self.schedule, self.optimizer, total_steps=self.total_steps, tokens=tokens
            )

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch["tokens"]).square().mean()
        self.backward(loss, weight=batch["weights"].sum())
        if not self.is_accumulating_gradients:
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.step(self.model, self.optimizer, None if self.schedule is None else self.scheduler)
        return {"loss": loss}


class Scheduled(Words):
    schedule = dt.ScheduleParameters(name="cosine", unit="token", warmup_steps=100, min_lr_ratio=0.1)


def config_of(callbacks: tuple[dt.Callback, ...] = (), accumulation: int = 1, **training: Any) -> Config:
    options: dict[str, Any] = {"seed": 9, "callbacks": callbacks, "log_every": 1}
    checkpoint = dt.CheckpointParameters(save_every_n_epochs=None)
    return make_config(gradient_accumulation_steps=accumulation, checkpoint=checkpoint, **options | training)


def train(trainer_class: type[Words] = Words, **options: Any) -> dict[str, Any]:
    with trainer_class(config_of(**options)) as trainer:
        trainer.fit()
        return {
            "step": trainer.global_step,
            "tokens": trainer.tokens_seen,
            "total_steps": trainer.total_steps,
            "rates": trainer.rates,
            "lines": [dict(line) for line in trainer.history],
        }


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2)])
def test_tokens_are_counted_over_all_ranks_and_end_the_run(ranks: int, accumulation: int) -> None:
    by_step = tokens_by_step(STEPS)
    assert len(set(by_step)) > 1, "else steps would do as well"
    limit = sum(by_step[:4]) - 1
    for found in run_world(partial(train, accumulation=accumulation, max_tokens=limit), ranks):
        assert (found["step"], found["tokens"], found["total_steps"]) == (4, sum(by_step[:4]), None)
        logged = [line["tokens_seen"] for line in found["lines"]]
        assert logged == np.cumsum(by_step[:4]).tolist()


def test_a_resumed_run_counts_on_and_follows_the_same_rates() -> None:
    by_step = tokens_by_step(STEPS)
    before = [0, *np.cumsum(by_step).tolist()]
    limit = before[STEPS]
    factor = api.rate_factor(
        dt.ScheduleParameters(name="cosine", warmup_steps=100, min_lr_ratio=0.1), total_steps=limit
    )
    wanted = [0.5 * factor(tokens) for tokens in before[:STEPS]]
    assert len(set(wanted)) == STEPS
    rates: list[float] = []
    for until in (1, 3, None):
        # The limit stays: the rates depend on it.
        found = train(Scheduled, max_tokens=limit, max_steps=until)
        rates += found["rates"]
    assert rates == pytest.approx(wanted)
    assert (found["tokens"], found["step"]) == (limit, STEPS)


def test_callbacks_follow_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    limit = sum(tokens_by_step(20))
    callbacks = (
        api.Every(200, "tokens", lambda trainer: calls.append(trainer.tokens_seen)),
        dt.Progress(line_seconds=0.0),
        api.Throughput(every_n_steps=5, warm_up_steps=1),
    )
    found = train(callbacks=callbacks, max_tokens=limit)
    counts = [line["tokens_seen"] for line in found["lines"] if "tokens_seen" in line]
    expected = [after for before, after in zip([0, *counts], counts, strict=False) if after // 200 > before // 200]
    assert calls == expected
    line = next(line for line in found["lines"] if "throughput/tokens_per_second" in line)
    per_row = line["throughput/tokens_per_second"] / line["throughput/samples_per_second"]
    assert per_row == pytest.approx(sum(tokens_by_step(6)[1:]) / 20)
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert "eta" in shown


class Padded(Words):
    def configure_dataloaders(self) -> tuple[Any, None]:
        rank = self.world.rank
        return api.PerRankLoader([{"tokens": torch.ones(2, 3 + rank, dtype=torch.int64)}] * (3 + rank)), None

    def batch_tokens(self, batch: Any) -> int:
        return batch["tokens"].numel()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.backward(self.model(batch["tokens"]).square().mean(), weight=batch["tokens"].numel())
        self.step(self.model, self.optimizer)
        return {}


def test_tokens_of_ranks_with_other_data_add_up() -> None:
    # Three batches of 2 x 3, and, of the four of the other rank, three of 2 x 4.
    trained = run_world(partial(train, trainer_class=Padded, n_epochs=1, accumulation=2), 2)
    assert [found["tokens"] for found in trained] == [42, 42]


class Untold(Words):
    def batch_tokens(self, batch: Any) -> None:
        return None


def test_a_limit_in_tokens_that_nobody_counts_is_refused() -> None:
    with pytest.raises(api.DataError, match="max_tokens=10, and batch_tokens gives None for a batch of type dict"):
        train(Untold, max_tokens=10)
    assert train(Untold, max_steps=1)["tokens"] == 0


class Summed(Words):
    def batch_tokens(self, batch: Any) -> Any:
        return (batch["documents"] >= 0).sum()


class Averaged(Words):
    def batch_tokens(self, batch: Any) -> Any:
        return (batch["documents"] >= 0).float().sum()


def test_a_count_may_be_a_tensor_of_one_whole_number() -> None:
    by_step = tokens_by_step(3)
    found = train(Summed, max_steps=3)
    assert (type(found["tokens"]), found["tokens"]) == (int, sum(by_step))
    assert [line["tokens_seen"] for line in found["lines"]] == np.cumsum(by_step).tolist()
    assert train(Summed, max_steps=6)["tokens"] == sum(tokens_by_step(6))
    with pytest.raises(
        api.HookError, match=r"Averaged\.batch_tokens gave tensor\(\d+\.\) for a batch of type dict.*whole"
    ):
        train(Averaged, max_steps=9)


def test_what_batches_tell() -> None:
    packed_batch = {"documents": torch.tensor([[0, 0, 1, -1], [0, -1, -1, -1]]), "labels": torch.zeros(2, 4)}
    masked = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    labelled = {"labels": torch.tensor([[5, -100, 3]])}
    assert [api.count_tokens(batch) for batch in (packed_batch, masked, labelled)] == [4, 3, 2]
    assert api.count_tokens({"text": packed_batch, "pairs": masked, "images": {"x": torch.ones(3)}}) == 7
    assert api.count_tokens(("text", packed_batch)) == 4
    classes = {"labels": torch.tensor([5, 2, 3])}
    for other in (torch.ones(3), [torch.ones(3)], (torch.ones(2), torch.ones(2)), {"x": torch.ones(3)}, classes, None):
        assert api.count_tokens(other) is None
    assert api.count_tokens({"documents": torch.zeros(3, dtype=torch.int64, device="meta")}) is None
