"""A pipeline changes where layers are and nothing else: weights, losses, metrics and checkpoints are one process's,
and so are casts, loss scale and skipped steps of half precision."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.api import INITIAL_SCALE, WEIGHT_DIVISOR, DistributedDataLoader, ranks_of_stages
from tests.trainer import stages
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import Sent, fit
from tests.worlds import run_each, run_world

WORLD_2 = [
    stages.Case(2),
    stages.Case(2, schedule="GPipe", accumulation=2, microbatches=2, clip=None),
    stages.Case(2, weighted=False, recompute="full", microbatches=8),
    stages.Case(2, frozen=True, changing=True),
    stages.Case(2, schedule="Interleaved1F1B", accumulation=2, microbatches=4),
    stages.Case(2, schedule="InterleavedZeroBubble", weighted=False, recompute="selective"),
    stages.Case(2, schedule="ZBVZeroBubble"),
]
WORLD_4 = [
    stages.Case(2, dp=2, shard="auto", accumulation=2, microbatches=2),
    stages.Case(4, microbatches=4),
    stages.Case(2, dp=2, schedule="DualPipeV"),
]
FURTHER_4 = [
    stages.Case(2, dp=2, shard="auto"),
    stages.Case(2, dp=2, accumulation=2, microbatches=2),
    stages.Case(
        2, dp=2, shard="auto", schedule="GPipe", accumulation=2, weighted=False, microbatches=2, recompute="selective"
    ),
    stages.Case(2, dp=2, shard="auto", schedule="InterleavedZeroBubble", accumulation=2, microbatches=2),
]
SHARDED_4 = [
    stages.Case(2, dp=2, shard="auto", schedule="Interleaved1F1B", changing=True),
    stages.Case(2, dp=2, shard="auto", schedule="Interleaved1F1B", compile=True),
    stages.Case(2, dp=2, shard="auto", schedule="ZBVZeroBubble", recompute="full", changing=True),
    stages.Case(2, dp=2, shard="auto", schedule="DualPipeV", recompute="selective", accumulation=2, microbatches=4),
]

COMPILED = [
    stages.Case(2, compile=True, changing=True),
    stages.Case(2, compile=True, schedule="ZBVZeroBubble", recompute="full", accumulation=2, microbatches=4),
    stages.Case(2, compile=True, schedule="InterleavedZeroBubble", weighted=False),
    stages.Case(2, compile=True, schedule="DualPipeV", changing=True),
]


def sent_by_stages() -> Sent:
    return Sent(send=lambda tensors, *_: sum(tensor.nbytes for tensor in tensors))


class Observed(stages.Trained):
    """Notes what the second step sends; the first one finds out what stages have to expect."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        if self.global_step != 1 or self.config.case.accumulation > 1:
            return super().training_step(batch, batch_idx)
        with sent_by_stages() as sent:
            result = super().training_step(batch, batch_idx)
        self.sent = sent.n_bytes
        return result


def formula(case: stages.Case, rank: int) -> int:
    """What docs/pipeline-parallel.md says that a rank of a pipeline sends in a step, in bytes of float64."""
    ranks = ranks_of_stages(case.schedule, case.pp, 2 if case.schedule not in ("1F1B", "GPipe") else 1)
    ends = [(here, there) for one, other in pairwise(ranks) for here, there in ((one, other), (other, one))]
    microbatches = case.microbatches or 2 * case.pp
    rows = stages.BATCH // case.dp // microbatches
    return 8 * microbatches * rows * stages.LENGTH * stages.WIDTH * sum(here == rank != there for here, there in ends)


def train(case: stages.Case) -> dict[str, Any]:
    with Observed(stages.config_of(case)) as trainer:
        trainer.fit()
        predicted = trainer.predict(DistributedDataLoader(stages.Rows(13), 4, drop_last=False))
        found = {"predicted": predicted, "mesh": trainer.describe(), "sent": vars(trainer).get("sent")}
        return stages.result_of(trainer) | found


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WORLD_2, id="2 ranks"),
        pytest.param(WORLD_4, id="4 ranks"),
        pytest.param(FURTHER_4, id="4 ranks, further", marks=pytest.mark.slow),
        pytest.param(SHARDED_4, id="several stages of shards", marks=pytest.mark.slow),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_training_in_stages_equals_a_loop_written_by_hand(cases: list[stages.Case]) -> None:
    alone = run_each(train, 1, [stages.Case(), stages.Case(frozen=True)])
    starts = {case.frozen: found["start"] for case, (found,) in alone}
    for case, ranks in run_each(train, cases[0].world_size, cases):
        start = starts[case.frozen]
        assert all(0 < len(result["start"]) < len(start) for result in ranks)
        found = stages.united([result["start"] for result in ranks])
        assert found.keys() == start.keys()
        assert all(torch.equal(found[name], start[name]) for name in start), case
        expected = stages.reference(case, start)
        for rank, result in enumerate(ranks):
            if case.accumulation == 1 and not case.changing:
                assert result["sent"] == formula(case, rank // case.dp)
            assert result["val"] == pytest.approx(expected["val"], rel=1e-10), case
            torch.testing.assert_close(result["predicted"], expected["predicted"], rtol=1e-10, atol=1e-10)
            assert f"| pp | {case.pp} |" in result["mesh"]
            assert "| 0 | 0 | position, embedding, blocks.0" in result["mesh"]
        stages.united([result["weights"] for result in ranks])
        stages.assert_trained(ranks, expected, case)


class Shifting(stages.Trained):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.embedding.register_forward_pre_hook(shift)
        for block in self.model.blocks:
            block.register_forward_pre_hook(stretch)
        self.shifted: list[bool] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        once = (batch[0] + 1) % stages.VOCABULARY
        result = super().training_step(batch, batch_idx)
        self.shifted.append(torch.equal(batch[0], once))
        return result


def shift(module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0].add_(1).remainder_(stages.VOCABULARY).clone(),)


def stretch(module: torch.nn.Module, args: tuple[Tensor]) -> None:
    args[0].mul_(1.5)
    args[0][:, 0] += 1


def train_shifting(case: stages.Case) -> dict[str, Any]:
    with Shifting(stages.config_of(case, max_steps=2)) as trainer:
        trainer.fit()
        return stages.result_of(trainer) | {"shifted": trainer.shifted}


def test_a_stage_may_change_its_inputs_in_place() -> None:
    (alone,) = run_world(train_shifting, 1, stages.Case())
    cases = [stages.Case(2), stages.Case(2, schedule="ZBVZeroBubble")]  # where a rank hands on to itself
    for case, ranks in run_each(train_shifting, 2, cases):
        assert ranks[0]["shifted"] == [True, True]
        stages.assert_trained(ranks, alone, case)


class Drawing(stages.Trained):
    """Notes what was drawn: by each step, and for each micro-batch by the stage's first layer."""

    def pre_fit(self) -> None:
        self.drawn: list[float] = []
        self.dropped: list[Tensor] = []
        first = next(module for module in self.model.modules() if isinstance(module, torch.nn.Dropout))
        first.register_forward_hook(self.note_what_is_dropped)

    def note_what_is_dropped(self, module: torch.nn.Module, args: Any, output: Tensor) -> None:
        if module.training:
            self.dropped.append(output == 0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        self.drawn.append(torch.rand(()).item())
        return super().training_step(batch, batch_idx)


def draw() -> tuple[list[float], list[Tensor]]:
    trainer = fit(Drawing(stages.config_of(stages.Case(2, dropout=0.3), max_steps=2)))
    return trainer.drawn, trainer.dropped


def test_dropout_is_of_each_stages_own_and_steps_draw_alike() -> None:
    (drawn, first), (others, last) = run_world(draw, 2)
    assert drawn == others
    assert all(dropped.any() for dropped in first)
    assert not any(map(torch.equal, first, last))


OVERFLOWING = stages.Case(2, precision="fp16")
HALF = [
    stages.Case(2, precision="bf16", clip=None),
    stages.Case(2, precision="bf16", clip=None, schedule="GPipe", recompute="full", weighted=False, microbatches=8),
    stages.Case(2, precision="fp16", clip=None, schedule="ZBVZeroBubble", weighted=False),
    OVERFLOWING,
]
SHARDED = stages.Case(2, dp=2, shard="auto", precision="bf16", clip=None)


class Half(stages.Trained):
    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        if self.config.case == OVERFLOWING and self.model.embedding is not None:  # of one stage alone
            self.model.embedding.weight.register_hook(lambda grad: grad + torch.inf if self.global_step == 1 else grad)

    def loss_fn(self) -> Any:
        factor = 2.0**40 if self.config.case == OVERFLOWING and self.global_step == 2 else 1.0
        return lambda scores, labels: stages.mean_loss(scores, labels) * factor

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        with sent_by_stages() as sent:
            result = super().training_step(batch, batch_idx)
        self.sent = sent.n_bytes
        return result


def train_half(case: stages.Case) -> dict[str, Any]:
    with Half(stages.config_of(case, val_every_n_epochs=None)) as trainer:
        trainer.fit()
        return stages.result_of(trainer) | {"sent": trainer.sent, "skipped": trainer.skipped_steps}


def by_hand(case: stages.Case, start: dict[str, Tensor]) -> dict[str, Any]:
    model, dtype = stages.Model(case), torch.bfloat16 if case.precision == "bf16" else torch.float16
    model.load_state_dict(start, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, n_parts = stages.Rows(stages.BATCH * stages.STEPS), case.microbatches or 2 * case.pp
    scale = 1.0 if case.precision == "bf16" else INITIAL_SCALE / (WEIGHT_DIVISOR if case.weighted else 1)
    losses, norms, skipped = [], [], 0
    for step in range(stages.STEPS):
        rows, total, loss_sum = slice(step * stages.BATCH, (step + 1) * stages.BATCH), 0.0, 0.0
        factor = 2.0**40 if case == OVERFLOWING and step == 2 else 1.0
        for tokens, labels in zip(data.tokens[rows].chunk(n_parts), data.labels[rows].chunk(n_parts), strict=True):
            weight = stages.count(labels) if case.weighted else 1 / n_parts
            with torch.autocast("cpu", dtype, cache_enabled=False):
                loss = stages.mean_loss(model(tokens), labels) * factor * weight
            (loss * scale).backward()
            loss_sum, total = loss_sum + loss.item(), total + float(weight)
        if case == OVERFLOWING and step == 1:
            model.embedding.weight.grad += torch.inf
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters())) / (scale * total)
        losses.append(loss_sum / total)
        norms.append(float(norm))
        clip = 1.0 if case.clip is None else torch.clamp(case.clip / (norm + 1e-6), max=1.0)
        for p in model.parameters():
            p.grad *= torch.as_tensor(clip / (scale * total)).to(p.grad.dtype)
        if norm.isfinite():
            optimizer.step()
        else:
            scale, skipped = scale / 2, skipped + 1
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "skipped": skipped}


def test_half_precision_in_stages_is_that_of_one_process() -> None:
    for case, ranks in run_each(train_half, 2, HALF):
        expected = by_hand(case, stages.united([result["start"] for result in ranks]))
        for rank, result in enumerate(ranks):
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6), case
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6, nan_ok=True), case
            assert result["skipped"] == expected["skipped"] == (2 if case == OVERFLOWING else 0)
            assert result["sent"] == formula(case, rank) // 2  # float32, as what autocast adds to is
        weights = stages.united([result["weights"] for result in ranks])
        if case.clip is None:
            assert same_bits(weights, expected["weights"]), case
        for name, value in expected["weights"].items():  # the clipping's norm is over stages, rounded in another order
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6, msg=f"{case}: {name}")


@pytest.mark.slow
def test_shards_in_half_precision_are_those_without_stages() -> None:
    alone, _ = run_world(train_half, 2, replace(SHARDED, pp=1, accumulation=4))
    ranks = run_world(train_half, 4, SHARDED)
    for rank, result in enumerate(ranks):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        assert result["sent"] == formula(SHARDED, rank // 2) // 4  # bfloat16, as blocks give it
    weights = stages.united([result["weights"] for result in ranks])
    for name, value in alone["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6, msg=name)
