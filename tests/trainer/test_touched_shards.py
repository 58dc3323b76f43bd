"""Large sharded models, gathered block by block: code that reads their weights elsewhere trains as one process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.errors import StepError
from tests.trainer import test_plain_steps as plain
from tests.trainer.small import BY_BLOCKS, make_config, weights
from tests.trainer.test_plain_steps import SIZE, WIDTH, Bayesian, Loss, Plain, Samples, fill, fit_loss
from tests.worlds import run_world


class Net(nn.Module):
    """Blocks, a head, and a scale that no block has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bayesian() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.empty(1))
        self.double()
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y.tanh()
        return self.head(x) * self.scale

    divergence, inverse = plain.Net.divergence, plain.Net.inverse
    init_hidden, as_object = plain.Net.init_hidden, plain.Net.as_object


def kept_beside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return fit_loss(model, x, y) + sum(block.kept.sum() for block in model.blocks)


def first_kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model(x)
    return model.blocks[0].kept.square().mean()


def objects_of_blocks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    hooks = [b.register_forward_hook(lambda module, given, output: SimpleNamespace(x=output)) for b in model.blocks]
    for block in model.blocks:
        x = x + block(x).x.tanh()
    for hook in hooks:
        hook.remove()
    return mse_loss(model.head(x), y)


def written(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Reads, writes by whole tensors and by shards, and reads again."""
    penalty = sum(p.square().sum() for p in model.parameters()).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.lerp_(torch.ones(parameter.shape, dtype=torch.float64), 0.01)
            parameter.mul_(0.99)
            parameter.copy_(parameter * 0.99)
    return fit_loss(model, x, y) + sum(p.square().sum() for p in model.parameters()) * penalty


def average_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        average = [p.clone() for p in model.parameters()]
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.lerp_(parameter, 0.5)
    return fit_loss(model, x, y) + sum((p * a).sum() for p, a in zip(model.parameters(), average, strict=True))


def gradient_of_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = fit_loss(model, x, y)
    gradients = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)
    return loss + sum(g.square().sum() for g in gradients)


def whole_tensor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    whole = getattr(model.head.weight, "full_tensor", lambda: model.head.weight)()  # a plain one has none
    return fit_loss(model, x, y) + whole.square().sum()


def of_an_earlier_forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Its backward comes to weights after that of the second forward has ended."""
    sums: list[Tensor] = []
    hooks = [b.register_forward_pre_hook(lambda module, given: sums.append(module.weight.sum())) for b in model.blocks]
    model(x)
    for hook in hooks:
        hook.remove()
    return fit_loss(model, x, y) + torch.stack(sums).sum()


OF_ALL = ("forward", "method only", "method first", "penalty on all", "weight of a block", "methods of blocks",
          "hidden state", "kept", "object", "clamped", "replaced data", "loaded", "frozen in the step",
          "gradient penalty")  # fmt: skip
KINDS: dict[str, Loss] = {name: plain.KINDS[name] for name in OF_ALL} | {
    "kept beside": kept_beside,
    "first kept": first_kept,
    "objects of blocks": objects_of_blocks,
    "written": written,
    "average by hand": average_by_hand,
    "gradient of weights": gradient_of_weights,
    "whole tensor": whole_tensor,
    "of an earlier forward": of_an_earlier_forward,
}
ONCE = ("replaced data", "loaded", "written")  # change weights, which two ranks do once and a loop by hand twice
LAYOUTS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "recomputed": {"activation_checkpointing": "full"},
    "offloaded": {"cpu_offload": True},
    "offloaded replicas": {"cpu_offload": True, "dp_shard": 1, "dp_replicate": 2},
}


class Assigns(torch.optim.SGD):
    """SGD whose own step assigns to `data`, as public implementations of SAM do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


class Touches(Plain, dt.ActivationCheckpointingMixin, dt.EvalMixin):
    assigns = False

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__(config, "forward")
        self.loss_of, self.seen = KINDS[kind], [0.0]

    def configure_models(self) -> None:
        self.model = Net()

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        if self.assigns:
            self.optimizer = Assigns(self.model.parameters(), lr=0.02)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DistributedDataLoader(Samples(), SIZE), DistributedDataLoader(Samples(), SIZE)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1]) * 0 + self.model.divergence()}

    def post_val_epoch(self, metrics: dict[str, Any]) -> None:
        self.seen.append(float(metrics["val/loss"]))


def config_of(layout: str, accumulation: int = 1) -> Any:
    devices = dt.DeviceParameters(**({"device": "cpu", "dp_shard": 2} | LAYOUTS[layout]))
    return make_config(devices=devices, fsdp=BY_BLOCKS, n_epochs=1, gradient_accumulation_steps=accumulation)


def train(kind: str, layout: str, accumulation: int) -> dict[str, Any]:
    with Touches(config_of(layout, accumulation), kind) as trainer:
        trainer.fit()
        return {"weights": weights(trainer.model), "norms": trainer.norms, "after": trainer.after, "seen": trainer.seen}


def train_all(cases: list[tuple[str, str, int]], directory: str) -> list[dict[str, Any]]:
    os.chdir(directory)
    return [train(*case) for case in cases]


def by_hand(kind: str, accumulation: int) -> dict[str, Any]:
    model, data = Net(), Samples()
    optimizer, norms, after = plain.optimizer_of(model), [], []
    ranks = 1 if kind in ONCE else 2
    size = 2 * SIZE // ranks
    parts = list(zip(data.x.split(size), data.y.split(size), strict=True))
    for start in range(0, len(parts), ranks * accumulation):
        window = parts[start : start + ranks * accumulation]
        for x, y in window:
            (KINDS[kind](model, x, y) / len(window)).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
        after.append(float(sum(p.detach().square().sum() for p in model.parameters())))
    seen = [0.0, float(model.divergence().detach())]
    return {"weights": weights(model), "norms": norms, "after": after, "seen": seen}


@pytest.mark.pitfall(104)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_code_that_reads_weights_outside_of_their_block_trains_as_one_process(layout: str, tmp_path: Path) -> None:
    names = list(KINDS) if layout == "blocks" else ["method first", "penalty on all", "kept", "first kept", "written"]
    cases = [(kind, layout, 1 + number % 2) for number, kind in enumerate(names)]
    for found, *_, (kind, _, accumulation) in zip(*run_world(train_all, 2, cases, str(tmp_path)), cases, strict=True):
        torch.testing.assert_close(
            found, by_hand(kind, accumulation), rtol=1e-10, atol=1e-10, msg=f"{kind}: {{}}".format
        )


def with_assigned_data(directory: str) -> list[dict[str, Tensor]]:
    os.chdir(directory)
    found = []
    for fsdp in (BY_BLOCKS, dt.FSDPParameters()):
        config = config_of("blocks")
        config.fsdp_parameters = fsdp
        Touches.assigns = True
        with Touches(config, "forward") as trainer:
            trainer.fit()
            found.append(weights(trainer.model))
    return found


def test_an_optimizer_of_ones_own_may_assign_to_data(tmp_path: Path) -> None:
    model, data = Net(), Samples()
    for x, y in zip(data.x.split(2 * SIZE), data.y.split(2 * SIZE), strict=True):
        fit_loss(model, x, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.02 * parameter.grad
                parameter.grad = None
    for rank in run_world(with_assigned_data, 2, str(tmp_path)):
        for found in rank:
            torch.testing.assert_close(found, weights(model), rtol=1e-10, atol=1e-10)


def refused(directory: str) -> tuple[str, bool, str]:
    os.chdir(directory)
    trainer = Touches(config_of("blocks"), "forward")
    trainer.loss_of = plain.functional
    trainer._session.start()
    with pytest.raises(StepError) as error:
        trainer._train()
    unmoved = all(map(torch.equal, weights(trainer.model).values(), weights(Net()).values()))
    trainer.world.forbidden = "a callback on rank 0"
    with pytest.raises(RuntimeError) as forbidden, trainer._parallel.whole():
        trainer.model.divergence()
    trainer.world.forbidden = None
    return str(error.value), unmoved, str(forbidden.value)


@pytest.mark.pitfall(104)
def test_what_cannot_meet_whole_weights_is_refused_before_they_move(tmp_path: Path) -> None:
    for said, unmoved, forbidden in run_world(refused, 2, str(tmp_path)):
        assert "torch.func" in said
        assert "min_group_mib" in said
        assert unmoved
        assert "a callback on rank 0" in forbidden


class ChangesInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        values = super().forward(x).exp()
        total = values * 1
        values.mul_(2)
        return total


class OfChanges(Touches):
    def configure_models(self) -> None:
        self.model = ChangesInPlace()


def changed_in_place(directory: str) -> str:
    os.chdir(directory)
    trainer = OfChanges(config_of("blocks"), "forward")
    trainer._session.start()
    with pytest.raises(RuntimeError) as error:
        trainer._train()
    return str(error.value)


def test_what_backward_needs_and_code_changed_in_place_is_named(tmp_path: Path) -> None:
    for said in run_world(changed_in_place, 2, str(tmp_path)):
        assert "(3, 1)" in said
        assert "version" in said
