"""`verify` finds what ranks compute otherwise than one model in one piece, and changes nothing else."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.api import StepError
from tests.trainer import meshes, mixing, stages
from tests.trainer.sequences import WIDTH, Case, Config, Model, Trained, config_of
from tests.trainer.small import fit_each, run_ranks
from tests.worlds import run_world

SAID = r"self\.model computes on 2 ranks what one process does, within \d\.\de-1\d of its size; verified in \d+\.\d s"
SEQUENCES = [
    Case(2, shard="auto", packed=True, accumulation=2),
    Case(2, attention="ulysses", packed=True, dropout=0.1, recompute="full"),
    Case(2, backend="aot_eager", recompute="selective", causal=False),
]
LAYERS = [meshes.Case(tp=2, steps=2), meshes.Case(tp=2, steps=2, plan="dtensors", loss_parallel=True, dropout=0.1)]
EXPERTS = [meshes.Case(dp=2, shard=2, ep=2, experts=True, steps=2)]
ON_FOUR = [
    meshes.Case(tp=2, cp=2, shard="auto", steps=2),
    meshes.Case(tp=2, dp=2, shard=2, ep=2, experts=True, plan="layers", steps=2),
]


def comparing(config: Any, *, compares: bool = True) -> Any:
    return replace(config, device_parameters=replace(config.device_parameters, verify=compares))


def of_sequences(case: Case) -> Config:
    return config_of(case, max_steps=2, val_every_n_epochs=None)


def of_stages(*cases: stages.Case) -> list[tuple[type[Any], Any]]:
    return [(stages.Trained, stages.config_of(case, max_steps=2, val_every_n_epochs=None)) for case in cases]


def of_meshes(*cases: list[meshes.Case]) -> list[tuple[type[Any], Any]]:
    return [(meshes.Trained, meshes.config_of(case, val_every_n_epochs=None)) for some in cases for case in some]


def train(of: list[tuple[type[Any], Any]]) -> list[list[float]]:
    return fit_each(
        (kind(comparing(config, compares=compares)) for kind, config in of for compares in (False, True)),
        lambda trainer: trainer.norms,
    )


class Awkward(nn.Module):
    """A right block that keeps state of all kinds, is set from outside, and gives positions along with samples."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.factor, self.calls = inner, 1.0, 0
        self.memory: Any = 0.0
        self.seen: list[float] = []
        self.register_buffer("decays", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        self.decays, self.calls = self.decays * 0.5, self.calls + 1
        out = self.inner(x, mask) * self.factor * self.decays * self.calls + self.memory + len(self.seen)
        self.memory = torch.full((), 0.1 * self.calls, dtype=torch.float64)
        self.seen.append(0.0)
        return out.flatten(0, 1), out[:0]


class AwkwardModel(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.blocks = nn.ModuleList(Awkward(block) for block in self.blocks)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            flat, _ = block(x, mask)
            x = flat.unflatten(0, x.shape[:2])
        return self.head(x)


class TrainsAwkward(Trained):
    def configure_models(self) -> None:
        self.model = AwkwardModel(self.config.case)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        for block in self.model.blocks:
            plan: dict[str, Any] = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
            parallelize_module(block.inner, mesh, plan | {"out": RowwiseParallel()})

    def cut_batch(self, batch: dict[str, Tensor], cut: Any) -> dict[str, Tensor]:
        """With positions of one dimension, of which a part has as many as there are samples."""
        positions = torch.arange(batch["tokens"].shape[1])
        return super().cut_batch(batch, cut) | {"positions": cut(positions, dim=0)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        for block in self.model.blocks:
            block.factor = 0.5 + self.global_step
        return super().training_step(batch, batch_idx)


STAGES = [
    stages.Case(2, tied=True, schedule="Interleaved1F1B"),
    stages.Case(2, frozen=True),
    stages.Case(2, schedule="ZBVZeroBubble"),
    stages.Case(2, precision="bf16", dropout=0.1, recompute="full"),
]
AWKWARD = [(TrainsAwkward, of_sequences(case)) for case in (Case(2), Case(tp=2))]


ON_TWO = [*AWKWARD, *of_meshes(LAYERS[1:], EXPERTS), (Trained, of_sequences(SEQUENCES[0])), *of_stages(STAGES[0])]
MORE_ON_TWO = [
    *of_meshes(LAYERS[:1]),
    *((Trained, of_sequences(case)) for case in SEQUENCES[1:]),
    *of_stages(*STAGES[1:]),
]
MORE_ON_FOUR = [
    *of_meshes(ON_FOUR[1:], [meshes.Case(pp=2, tp=2, steps=2), meshes.Case(pp=2, cp=2, steps=2)]),
    *of_meshes([meshes.Case(pp=2, dp=2, ep=2, experts=True, steps=2)]),
    *of_stages(stages.Case(2, dp=2, shard=2, schedule="InterleavedZeroBubble")),
]


@pytest.mark.parametrize(
    ("n_ranks", "of"),
    [
        pytest.param(2, ON_TWO, id="2 ranks"),
        pytest.param(4, of_meshes(ON_FOUR[:1]), id="4 ranks"),
        pytest.param(2, MORE_ON_TWO, id="more of 2 ranks", marks=pytest.mark.slow),
        pytest.param(4, MORE_ON_FOUR, id="more of 4 ranks", marks=pytest.mark.slow),
    ],
)
def test_models_that_ranks_share_rightly_train_the_same_bits_with_it(n_ranks: int, of: Any) -> None:
    for norms in run_world(train, n_ranks, of):
        assert norms[::2] == norms[1::2]
        assert all(len(of_case) == 2 for of_case in norms)


class Mixes(nn.Module):
    """Adds what a function gives, and a norm over the batch if it is to have one."""

    def __init__(self, mix: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.mix, self.scale = mix, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64) if mix is None else None

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.scale(x)
        return x + (self.norm(y.mT).mT if self.norm is not None else self.mix(y))


class TrainsMixing(Trained):
    mix: Callable[[Tensor], Tensor] | None = None
    found = ""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.blocks.append(Mixes(type(self).mix))

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(self.model.blocks)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        try:
            return super().training_step(batch, batch_idx)
        except StepError as error:  # what leaves `fit` would end the job
            self.found = str(error)
        return super().training_step(batch, batch_idx)


def what_is_found(cases: list[tuple[str, Case]]) -> list[str]:
    def made(name: str, case: Case) -> TrainsMixing:
        mix = (mixing.WRONG | mixing.RIGHT).get(name)
        trainer_class = type("TrainsMixing", (TrainsMixing,), {"mix": staticmethod(mix) if mix else None})
        return trainer_class(config_of(case, max_steps=1, val_every_n_epochs=None))

    return fit_each((made(*case) for case in cases), lambda trainer: trainer.found)


def test_whatever_sees_a_part_of_a_sequence_alone_is_found_in_the_first_step() -> None:
    cases = [(name, Case(2)) for name in (*mixing.WRONG, "BatchNorm1d")] + [("own softmax", Case(2, shard="auto"))]
    for found in run_world(what_is_found, 2, cases):
        for (name, _), text in zip(cases, found, strict=True):
            where = r"computes other values .*first self\.model\.blocks\.2,"
            if "Function" in name:
                where = r"computes other gradients .*of self\.model\."
            elif "checkpoint" in name:
                where = "may only cover this rank's part .*use_reentrant=False"
            assert re.match(rf"under context_parallel=2 .*self\.model.* {where}", text), (name, text)


def test_what_looks_like_it_and_is_right_trains() -> None:
    cases = [(name, case) for name in mixing.RIGHT for case in (Case(2), Case(2, attention="ulysses"))]
    for found in run_world(what_is_found, 2, cases):
        assert dict(zip(cases, found, strict=True)) == dict.fromkeys(cases, "")


def compare() -> None:
    Trained(comparing(of_sequences(Case(2)))).fit()


def test_what_it_has_found_equal_is_said_once(tmp_path: Path) -> None:
    first, second = run_ranks("from tests.trainer.test_verify import compare; compare()", 2, tmp_path)
    assert (first[0], second[0]) == (0, 0)
    assert len(re.findall(SAID, first[1])) == 1
    assert not re.search(SAID, second[1])
