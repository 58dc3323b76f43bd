"""Plans and stages that train otherwise than one process: each ends the first step, on all ranks, with its place.

`test_verify.py` has what is wrong with parts of sequences (`mixing.WRONG`).
"""

import re
from collections.abc import Callable
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
from tests.trainer import mixtures, sequences, stages
from tests.trainer.arithmetic import same_bits
from tests.trainer.sequences import WIDTH
from tests.trainer.small import weights
from tests.worlds import run_world


class Columns(nn.Module):
    """Does something between a layer that is cut by columns and one that is cut by rows."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Split(sequences.Trained):
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


class LeavesASumOut(sequences.Trained):
    """Takes each rank's products for the whole."""

    def apply_tensor_parallel(self, mesh: Any) -> None:
        for block in self.model.blocks:
            plan: dict[str, Any] = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
            parallelize_module(block, mesh, plan | {"out": RowwiseParallel(output_layouts=Partial())})


class NormsParts(sequences.Trained):
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


class Unties(sequences.Trained):
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
LAYERS, SEQUENCES, PIPELINE = sequences.Case(tp=2), sequences.Case(2), stages.Case(2)
BLOCK, OF_STAGE = first("self.model.blocks.0"), first("self.model.blocks.2")
WRONG: dict[str, tuple[type[Any], Any, str]] = {
    "heads by the config": (Split, LAYERS, BLOCK),
    "beside large logits": (HasLargeLogits, LAYERS, first("the output of self.model")),
    "a norm over heads": (splits(lambda y: nn.functional.rms_norm(y, y.shape[-1:])), LAYERS, BLOCK),
    "columns by their number": (splits(lambda y: y * (y.argsort(-1) > 2)), LAYERS, BLOCK),
    "one matrix for three": (splits(lambda y: torch.cat(y.chunk(2, -1)[::-1], -1)), LAYERS, BLOCK),
    "a part of a sum": (LeavesASumOut, LAYERS, BLOCK),
    "a norm of parts": (NormsParts, LAYERS, last("self.model.blocks.1.norm")),
    "a tie that is gone": (Unties, SEQUENCES, last("self.model.embedding.weight")),
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
        CANNOT + r"AttributeError: 'NoneType' object has no attribute 'weight', at \S+test_wrong_plans.py:\d+ "
        r"`in_stages.*`. It is given a tensor of shape \[4, 6, 8\] by stage 0. Lists .* `if self.embedding is not N",
    ),
    "a layer by its number": (
        in_stages(lambda self, x: x + 0 * self.blocks[0].up.weight.sum()),
        PIPELINE,
        CANNOT + r"IndexError: blocks\[0\] is in stage 0 of the pipeline, and this rank has 2, 3, 4 of 5. .* passed",
    ),
}

OFTEN = ["a part of a sum", "a norm of parts", "layers of others", "a factor of each stage", "a buffer of one stage"]


def first_errors(names: list[str]) -> dict[str, str]:
    configs = {sequences.Case: sequences.config_of, mixtures.Case: mixtures.config_of, stages.Case: stages.config_of}
    found = {}
    for name in names:
        kind, case, _ = WRONG[name]
        trainer = kind(configs[type(case)](case))
        start(trainer._runtime)
        before = weights(trainer.model)
        with pytest.raises((StepError, HookError)) as error:
            trainer._train()
        assert same_bits(weights(trainer.model), before), name
        found[name] = str(error.value)
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OFTEN, id="often"),
        pytest.param([name for name in WRONG if name not in OFTEN], id="others", marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_otherwise_than_by_one_process_is_named_on_all_ranks(names: list[str]) -> None:
    of_ranks = run_world(first_errors, 2, names)
    for name in names:
        errors = [found[name] for found in of_ranks]
        assert all(re.search(WRONG[name][2], error) for error in errors), (name, errors)
        assert errors[0] == errors[1] or "expert" in name, name  # whose ranks have samples of their own
