"""What ranks draw and drop is alike only where it is of the whole of a sequence, or of samples, that they share."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.api import DistributedDataLoader, declare_random_layer, in_backward
from tests.trainer import mixtures
from tests.trainer.arithmetic import fill
from tests.trainer.sequences import LENGTH, Block, Case, Model, Rows, Trained, config_of
from tests.trainer.small import fit_each, told, train_by_hand
from tests.worlds import run_world

STEPS = 4
CASES = [Case(2), Case(2, attention="ulysses", recompute="full", shard="auto"), Case(2, accumulation=2)]


class Draws:
    """What a run draws, noted in turn; in the loop by hand, what it drew."""

    def __init__(self, drawn: list[Any] | None = None) -> None:
        self.noted: list[Any] = []
        self._again: Iterator[Any] | None = None if drawn is None else iter(drawn)

    def __call__(self, draw: Any) -> Any:
        if self._again is not None:
            return next(self._again)
        value = draw()
        if not in_backward():  # where a block is computed again
            self.noted.append(value)
        return value


class SkippedBlock(Block):
    """Layer dropout, by torch's numbers and by Python's; and one chance for each sample."""

    draws: Draws

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.training:
            return super().forward(x, mask)
        if self.draws(lambda: float(torch.rand(())) < 0.3) or self.draws(lambda: random.random() < 0.3):
            return x
        kept = self.draws(lambda: torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.7))
        return x + (super().forward(x, mask) - x) * kept


class Diffused(Model):
    """Has noise of a level for each sample."""

    def __init__(self, case: Case, draws: Draws) -> None:
        super().__init__(case)
        self.blocks = nn.ModuleList(SkippedBlock(case) for _ in range(2))
        self.double()
        for block in self.blocks:
            block.draws = draws

    def forward(self, tokens: Tensor, level: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) * level[:, None, None] + self.position(positions)
        for block in self.blocks:
            x = block(x, None)
        return self.head(x)


def prepared(batch: dict[str, Tensor], draws: Draws) -> dict[str, Tensor]:
    """With tokens hidden at positions that are drawn for whole sequences."""
    tokens = batch["tokens"]
    hidden = draws(lambda: torch.rand(tokens.shape) < 0.2 + 0.1 * random.random())
    return {
        "tokens": tokens.masked_fill(hidden, 0),
        "labels": tokens,
        "positions": torch.arange(LENGTH).expand_as(tokens),
    }


def loss_of(model: Diffused, batch: dict[str, Tensor], draws: Draws) -> Tensor:
    level = draws(lambda: torch.rand(len(batch["tokens"]), dtype=torch.double))
    scores = model(batch["tokens"], level, batch["positions"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


class Drawing(Trained):
    def configure_models(self) -> None:
        self.draws, self.drawn_in_validation = Draws(), Draws()
        self.model = Diffused(self.config.case, self.draws)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        rows = 8 // self.config.case.accumulation
        return DistributedDataLoader(Rows(8 * STEPS), rows), DistributedDataLoader(Rows(8), 4)

    def cut_batch(self, batch: dict[str, Tensor], cut: Any) -> dict[str, Tensor]:
        whole = prepared(batch, self.draws if self.training else self.drawn_in_validation)
        return {name: cut(tensor) for name, tensor in whole.items()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        loss = loss_of(self.model, batch, self.draws)
        self.backward(loss, weight=batch["labels"].numel())
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return {"loss": loss_of(self.model, batch, self.drawn_in_validation)}, batch["labels"].numel()


def found_in(trainer: Drawing) -> dict[str, Any]:
    return {
        "drawn": trainer.draws.noted,
        "norms": trainer.norms,
        "metrics": [trainer.evaluate() for _ in range(2)],
        "validated": trainer.drawn_in_validation.noted[:4],
    }


def train(cases: list[Case]) -> list[dict[str, Any]]:
    return fit_each((Drawing(config_of(replace(case, clip=None))) for case in cases), found_in)


def by_hand(case: Case, drawn: list[Any], validated: list[Any]) -> tuple[list[float], float]:
    """Norms and the loss of validation of one process with whole sequences, and these numbers."""
    draws = Draws(drawn)
    model = Diffused(case, draws)
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.stack([row["tokens"] for row in Rows(8 * STEPS).rows])
    windows = [step.chunk(case.accumulation) for step in rows.split(8)]
    norms = train_by_hand(
        model, optimizer, windows, lambda model, tokens: loss_of(model, prepared({"tokens": tokens}, draws), draws)
    )
    assert next(draws._again, None) is None
    model.eval()
    draws = Draws(validated)
    with torch.no_grad():
        losses = [loss_of(model, prepared({"tokens": tokens}, draws), draws) for tokens in rows[:8].split(4)]
    return norms, float(sum(losses) / 2)


def test_a_loop_by_hand_that_draws_the_same_trains_the_same() -> None:
    for case, first, second in zip(CASES, *run_world(train, 2, CASES), strict=True):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b))
            for a, b in zip(first["drawn"], second["drawn"], strict=True)
        )
        assert {True, False} <= {one for one in first["drawn"] if isinstance(one, bool)}
        norms, loss = by_hand(case, first["drawn"], first["validated"])
        assert first["norms"] == pytest.approx(norms, rel=1e-10)
        assert second["norms"] == pytest.approx(norms, rel=1e-10)
        for metrics in first["metrics"]:  # the same numbers at each validation
            assert metrics["val/loss"] == pytest.approx(loss, rel=1e-10)


DROPPING: dict[str, Any] = {
    "tensor parallel": Case(tp=2, dropout=0.5),
    "data parallel": Case(dp=2, dropout=0.5),
    "context parallel": Case(2, dropout=0.5),
    "context parallel, declared": Case(2, dropout=0.5),
    "expert parallel": mixtures.Case(2, ep=2),
}


class Dropping(Trained):
    """Notes what its first block drops in the first step."""

    def pre_fit(self) -> None:
        self.dropped: list[Tensor] = []
        first = next(module for module in self.model.modules() if isinstance(module, nn.Dropout))
        first.register_forward_hook(self.note)

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if layer.training:  # and not in the verification of the first step
            self.dropped.append((output == 0).flatten()[:64])


class Declaring(Dropping):
    def configure_models(self) -> None:
        super().configure_models()
        assert self.world.mesh is not None
        for block in self.model.blocks:
            declare_random_layer(block.dropout, self.world.mesh["cp"], Shard(1))


class FirstDraw(mixtures.Trained):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.dropped = [torch.rand(64) < 0.5]
        return super().training_step(batch, batch_idx)


def train_dropping() -> tuple[dict[str, Tensor], list[str]]:
    kinds: dict[str, Any] = {"expert parallel": FirstDraw, "context parallel, declared": Declaring}
    found = {}
    with told() as lines:
        for name, case in DROPPING.items():
            kind = kinds.get(name, Dropping)
            of = mixtures.config_of(case, training={"max_steps": 1}) if kind is FirstDraw else None
            config = of or config_of(case, max_steps=1, val_every_n_epochs=None)
            with kind(config) as trainer:
                trainer.fit()
                found[name] = trainer.dropped[0]
    return found, [line for line in lines if "declare_random_layer" in line]


def test_what_ranks_drop_is_equal_on_the_axes_of_split_layers_and_sequences_and_on_no_other() -> None:
    (here, said), (there, _) = run_world(train_dropping, 2)
    (message,) = said  # of tensor parallelism alone
    assert "dropout: apply_tensor_parallel does not say whether the tensor_parallel=2 ranks have" in message
    equal = {name: torch.equal(here[name], there[name]) for name in DROPPING}
    assert all(8 < int(dropped.sum()) < 56 for dropped in (*here.values(), *there.values()))
    assert equal == {name: name in ("tensor parallel", "context parallel") for name in DROPPING}
