"""`verify` finds what ranks compute otherwise than one model in one piece, in parts of sequences, by plans, in stages.
It ends the first step on all ranks with the place, and changes nothing else."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

from tests.api import HookError, StepError, start
from tests.trainer import meshes, mixing, mixtures, stages
from tests.trainer.arithmetic import same_bits
from tests.trainer.sequences import WIDTH, Case, Config, Model, Trained, config_of
from tests.trainer.small import fit, run_ranks, weights
from tests.worlds import run_each

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


def train(of: tuple[type[Any], Any]) -> list[list[float]]:
    kind, config = of
    return [fit(kind(comparing(config, compares=compares))).norms for compares in (False, True)]


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
    for _, ranks in run_each(train, n_ranks, of):
        for norms, expected in ranks:
            assert norms == expected
            assert len(norms) == 2


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


def what_is_found(named: tuple[str, Case]) -> str:
    name, case = named
    mix = (mixing.WRONG | mixing.RIGHT).get(name)
    trainer_class = type("TrainsMixing", (TrainsMixing,), {"mix": staticmethod(mix) if mix else None})
    return fit(trainer_class(config_of(case, max_steps=1, val_every_n_epochs=None))).found


def test_whatever_sees_a_part_of_a_sequence_alone_is_found_in_the_first_step() -> None:
    cases = [(name, Case(2)) for name in (*mixing.WRONG, "BatchNorm1d")] + [("own softmax", Case(2, shard="auto"))]
    for (name, _), found in run_each(what_is_found, 2, cases):
        where = r"computes other values .*first self\.model\.blocks\.2,"
        if "Function" in name:
            where = r"computes other gradients .*of self\.model\."
        elif "checkpoint" in name:
            where = "may only cover this rank's part .*use_reentrant=False"
        for text in found:
            assert re.match(rf"under context_parallel=2 .*self\.model.* {where}", text), (name, text)


def test_what_looks_like_it_and_is_right_trains() -> None:
    cases = [(name, case) for name in mixing.RIGHT for case in (Case(2), Case(2, attention="ulysses"))]
    for case, found in run_each(what_is_found, 2, cases):
        assert found == ("", ""), case


def compare() -> None:
    Trained(comparing(of_sequences(Case(2)))).fit()


def test_what_it_has_found_equal_is_said_once(tmp_path: Path) -> None:
    first, second = run_ranks("from tests.trainer.test_verify import compare; compare()", 2, tmp_path)
    assert (first[0], second[0]) == (0, 0)
    assert len(re.findall(SAID, first[1])) == 1
    assert not re.search(SAID, second[1])


class Columns(nn.Module):
    """Does something between a layer that is cut by columns and one that is cut by rows."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Split(Trained):
    between = staticmethod(lambda y: y.unflatten(-1, (2, -1)).softmax(-1).flatten(-2))  # heads by the config

    def configure_models(self) -> None:
        super().configure_models()
        self.model.blocks = nn.ModuleList([Columns(self.between)])

    def apply_tensor_parallel(self, mesh: Any) -> None:
        parallelize_module(self.model.blocks[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(self.model.blocks)


class HasLargeLogits(Split):
    """Its vocabulary is padded, beside which an error is small."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.head.register_forward_hook(
            lambda _, __, logits: logits - 1e9 * (torch.arange(logits.shape[-1]) == 0)
        )

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return []


class LeavesASumOut(Trained):
    """Takes each rank's products for the whole."""

    def apply_tensor_parallel(self, mesh: Any) -> None:
        for block in self.model.blocks:
            plan: dict[str, Any] = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
            parallelize_module(block, mesh, plan | {"out": RowwiseParallel(output_layouts=Partial())})


class NormsParts(Trained):
    """A norm that is whole on each rank gets a part of the sequence. What follows begins with zeros, so that its
    gradient is 0 in the first step."""

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.zeros_(self.model.blocks[1].out.weight)
        nn.init.zeros_(self.model.blocks[1].out.bias)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        super().apply_tensor_parallel(mesh)
        of_parts = PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
            use_local_output=True,
        )
        parallelize_module(self.model.blocks[1], mesh, {"norm": of_parts})


class Unties(Trained):
    """Has its own copy of a tied weight since training began."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.head.weight = self.model.embedding.weight

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        self.model.head.weight = nn.Parameter(self.model.embedding.weight.detach().clone())
        return super().training_step(batch, batch_idx)


class MeansOverExperts(mixtures.Block):
    """Divides by the number of experts that this rank has."""

    def forward(self, x: Tensor) -> Tensor:
        weight = next(self.moe.experts.parameters())
        return super().forward(x) / len(getattr(weight, "_local_tensor", weight))


class CountsExperts(mixtures.Trained):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.blocks = nn.ModuleList(MeansOverExperts(self.config.case) for _ in range(2)).double()


class Ends(stages.Model):
    """Does something at the end of its forward, and so in each stage."""

    end: Callable[[Any, Tensor], Any]

    def __init__(self, case: stages.Case) -> None:
        super().__init__(case)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.end(super().forward(x))


class InStages(stages.Trained):
    end: Any = None

    def configure_models(self) -> None:
        self.model = type("Ends", (Ends,), {"end": type(self).end})(self.config.case)


def splits(between: Callable[[Tensor], Tensor]) -> type[Split]:
    return type("Split", (Split,), {"between": staticmethod(between)})


def in_stages(end: Callable[[Any, Tensor], Any]) -> type[InStages]:
    return type("InStages", (InStages,), {"end": end})


def first(place: str) -> str:
    return rf"under \w+_parallel=2 self\.model computes other values than one process: first {re.escape(place)}, by"


def last(place: str) -> str:
    return rf"under \w+_parallel=2 self\.model computes other gradients .*of {re.escape(place)}[.,]"


CANNOT = r"stage 1 of 2 of Ends \(blocks.2, blocks.3, .*\) cannot run: "
TENSOR, CONTEXT, PIPELINE = Case(tp=2), Case(2), stages.Case(2)
BLOCK, OF_STAGE = first("self.model.blocks.0"), first("self.model.blocks.2")
WRONG: dict[str, tuple[type[Any], Any, str]] = {
    "heads by the config": (Split, TENSOR, BLOCK),
    "beside large logits": (HasLargeLogits, TENSOR, first("the output of self.model")),
    "a norm over heads": (splits(lambda y: nn.functional.rms_norm(y, y.shape[-1:])), TENSOR, BLOCK),
    "columns by their number": (splits(lambda y: y * (y.argsort(-1) > 2)), TENSOR, BLOCK),
    "one matrix for three": (splits(lambda y: torch.cat(y.chunk(2, -1)[::-1], -1)), TENSOR, BLOCK),
    "a part of a sum": (LeavesASumOut, TENSOR, BLOCK),
    "a norm of parts": (NormsParts, TENSOR, last("self.model.blocks.1.norm")),
    "a tie that is gone": (Unties, CONTEXT, last("self.model.embedding.weight")),
    "experts of this rank": (CountsExperts, mixtures.Case(2, ep=2), BLOCK),
    "a factor of each stage": (in_stages(lambda self, x: x * 2), PIPELINE, OF_STAGE),
    "a sum that begins anew": (in_stages(lambda self, x: x + x.cumsum(1)), PIPELINE, OF_STAGE),
    "no gradient crosses": (
        in_stages(lambda self, x: x if self.head is not None else x.detach() + 0 * x),
        PIPELINE,
        last("self.model.blocks.1"),
    ),
    "a buffer of one stage": (
        in_stages(lambda self, x: x if self.head is None else x + 0 * self.seen.add_(1)),
        PIPELINE,
        first("the buffer self.model.seen"),
    ),
    "a dict that crosses": (
        in_stages(lambda self, x: {"x": x} if self.head is None else x),
        PIPELINE,
        "stage 0 of 2 of Ends .* gave the next one a dict, and only tensors cross",
    ),
    "layers of others": (
        in_stages(lambda self, x: x + 0 * self.embedding.weight.sum()),
        PIPELINE,
        CANNOT + r"AttributeError: 'NoneType' object has no attribute 'weight', at \S+test_verify.py:\d+ "
        r"`in_stages.*`. It is given a tensor of shape \[4, 6, 8\] by stage 0. Lists .* `if self.embedding is not N",
    ),
    "a layer by its number": (
        in_stages(lambda self, x: x + 0 * self.blocks[0].up.weight.sum()),
        PIPELINE,
        CANNOT + r"IndexError: blocks\[0\] is in stage 0 of the pipeline, and this rank has 2, 3, 4 of 5. .* passed",
    ),
}

OFTEN = ["a part of a sum", "a norm of parts", "layers of others", "a factor of each stage", "a buffer of one stage"]


def first_error(name: str) -> str:
    kind, case, _ = WRONG[name]
    configs = {Case: config_of, mixtures.Case: mixtures.config_of, stages.Case: stages.config_of}
    trainer = kind(configs[type(case)](case))
    start(trainer._runtime)
    before = weights(trainer.model)
    with pytest.raises((StepError, HookError)) as error:
        trainer._train()
    assert same_bits(weights(trainer.model), before), name
    return str(error.value)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OFTEN, id="often"),
        pytest.param([name for name in WRONG if name not in OFTEN], id="others", marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_otherwise_than_by_one_process_is_named_on_all_ranks(names: list[str]) -> None:
    for name, errors in run_each(first_error, 2, names):
        assert all(re.search(WRONG[name][2], error) for error in errors), (name, errors)
        assert errors[0] == errors[1] or "expert" in name, name  # whose ranks have samples of their own
