"""Random layers among split ones: each rank draws for its part, and all draw the same for what is whole."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, mse_loss

import dream_trainer as dt
from tests.api import ConfigError, declare_random_layer, undeclared_dropouts
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import CaseConfig as Config, run_config, train_by_hand, weights
from tests.worlds import run_each

WIDTH, LENGTH, BATCH, STEPS = 8, 6, 4, 4


@dataclass(frozen=True)
class Case:
    in_sequence: bool
    recompute: str = "none"
    backend: str | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.hidden_dropout, self.dropout = nn.Dropout(0.5), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.hidden_dropout(gelu(self.up(self.norm(x))))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches() -> list[Tensor]:
    return list(torch.randn(STEPS, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).double())


class Trained(dt.DreamTrainer):
    def configure_models(self) -> None:
        self.model = Model()

    def apply_tensor_parallel(self, mesh: Any) -> None:
        case = self.config.case
        stream: Any = Shard(1) if case.in_sequence else Replicate()
        for number, block in enumerate(self.model.blocks):
            plan = {"up": ColwiseParallel(input_layouts=stream), "down": RowwiseParallel(output_layouts=stream)}
            plan |= {"norm": SequenceParallel()} if case.in_sequence else {}
            parallelize_module(block, mesh, plan)
            if case.in_sequence and number == 0:
                cut = PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
                )
                parallelize_module(block, mesh, cut)
            declare_random_layer(block.hidden_dropout, mesh, Shard(-1))
            declare_random_layer(block.dropout, mesh, stream)
        parallelize_module(
            self.model, mesh, {"head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate())}
        )

    def configure_dataloaders(self) -> tuple[Any, None]:
        return dt.data.PerRankLoader(batches()), None

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.initial = weights(self.model)
        self.dropped: dict[str, dict[int, Tensor]] = {}
        self.ends: list[float] = []
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Dropout):
                layer.register_forward_hook(partial(self.note, name))

    def note(self, name: str, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if layer.training:  # and not in the verification of the first step
            dropped = ((output == 0) & (args[0] != 0)).detach()
            assert torch.equal(self.dropped.setdefault(name, {}).setdefault(self.global_step, dropped), dropped)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.model(batch), batch.flip(1))
        self.backward(loss)
        self.step(self.model, self.optimizer)
        self.ends.append(float(torch.rand(())))
        return {"loss": loss}


def config_of(case: Case, experiment: str, **training: Any) -> Config:
    return run_config(
        experiment,
        Config,
        device_parameters=dt.DeviceParameters(
            device="cpu",
            tensor_parallel=2,
            activation_checkpointing=case.recompute,  # type: ignore[arg-type]
            compile=case.backend is not None,
        ),
        compile_parameters=dt.CompileParameters(backend=case.backend or "eager"),
        training_parameters=dt.TrainingParameters(**{"n_epochs": 1} | training),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=experiment == "broken"),
        case=case,
    )


def fit(case: Case, experiment: str, **training: Any) -> dict[str, Any]:
    with Trained(config_of(case, experiment, **training)) as trainer:
        trainer.fit()
        found = {"start": trainer.initial, "weights": weights(trainer.model)}
        return found | {"dropped": trainer.dropped, "ends": trainer.ends}


def train(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """In one go, and stopped after two steps and gone on with."""
    unbroken = fit(case, "unbroken")
    fit(case, "broken", max_steps=2)
    return unbroken, fit(case, "broken")


def by_hand(start: dict[str, Tensor], dropped: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    model = Model()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, x in enumerate(batches()):
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Dropout):
                kept = (~dropped[name][step]).double() / (1 - layer.p)
                layer.forward = lambda y, kept=kept: y * kept  # type: ignore[method-assign]
        train_by_hand(model, optimizer, [[(x, x.flip(1))]])
    return weights(model)


CASES = [Case(in_sequence=False, recompute="full")]
FURTHER = [Case(in_sequence=True, recompute="full"), Case(in_sequence=True, recompute="selective", backend="aot_eager")]


@pytest.mark.parametrize("cases", [CASES, pytest.param(FURTHER, marks=pytest.mark.slow)])
def test_what_ranks_drop_is_of_their_parts_and_trains_as_one_process_that_drops_it(cases: list[Case]) -> None:
    for case, ((here, resumed_here), (there, resumed_there)) in run_each(train, 2, cases):
        dropped = {}
        for name in here["dropped"]:
            one, other = ([*of_rank["dropped"][name].values()] for of_rank in (here, there))
            is_cut = case.in_sequence or "hidden" in name
            assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == STEPS * [not is_cut]
            shares = [float(mask.double().mean()) for mask in (*one, *other)]
            assert sum(shares) / len(shares) == pytest.approx(0.5 if "hidden" in name else 0.25, abs=0.1)
            pairs = zip(one, other, strict=True)
            dropped[name] = [torch.cat(pair, 2 if "hidden" in name else 1) if is_cut else pair[0] for pair in pairs]
        assert here["ends"] == there["ends"]  # generators are alike after it
        for name, value in by_hand(here["start"], dropped).items():
            torch.testing.assert_close(here["weights"][name], value, rtol=1e-10, atol=1e-10, msg=f"{case}: {name}")
        for unbroken, resumed in ((here, resumed_here), (there, resumed_there)):
            assert same_bits(resumed["weights"], unbroken["weights"])
            assert resumed["ends"] == unbroken["ends"][2:]


def test_mistakes_are_told_by_name() -> None:
    mesh: Any = SimpleNamespace(get_local_rank=lambda: 0)
    with pytest.raises(ConfigError, match=r"laid out as Partial\(sum\)\. Use Shard\(dim\) or Replicate\(\)"):
        declare_random_layer(nn.Dropout(), mesh, Partial())
    block = Block()
    block.hidden_dropout.p = 0
    assert undeclared_dropouts({"model": nn.ModuleList([block])}) == ["model.0.dropout"]
    declare_random_layer(block.dropout, mesh, Shard(1))
    assert undeclared_dropouts({"model": block}) == []
    with pytest.raises(ConfigError, match="was given a Block after its dropout had been declared"):
        declare_random_layer(block, mesh, Shard(1))
    with pytest.raises(ConfigError, match="was given a Dropout after it had been declared"):
        declare_random_layer(block.dropout, mesh, Shard(1))
