"""Large sharded models, gathered block by block: code that reads their weights elsewhere trains as one process."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss

import dream_trainer as dt
from tests.api import start
from tests.trainer import test_plain_steps as plain
from tests.trainer.arithmetic import fill, same_bits
from tests.trainer.small import BY_BLOCKS, error_of, fit_each, make_config, train_by_hand, weights
from tests.trainer.test_plain_steps import SIZE, WIDTH, Bayesian, Loss, Plain, fit_loss, loop_by_hand, parts
from tests.worlds import run_world


class Net(nn.Module):
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


def written(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Reads, writes by whole tensors and by shards, and reads again."""
    penalty = sum(p.square().sum() for p in model.parameters()).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.lerp_(torch.ones(parameter.shape, dtype=torch.float64), 0.01)
            parameter.mul_(0.99)
            parameter.copy_(parameter * 0.99)
    return fit_loss(model, x, y) + sum(p.square().sum() for p in model.parameters()) * penalty


def gradient_of_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = fit_loss(model, x, y)
    gradients = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)
    return loss + sum(g.square().sum() for g in gradients)


def of_an_earlier_forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Its backward comes to weights after that of the second forward has ended."""
    sums: list[Tensor] = []
    hooks = [b.register_forward_pre_hook(lambda module, given: sums.append(module.weight.sum())) for b in model.blocks]
    model(x)
    for hook in hooks:
        hook.remove()
    return fit_loss(model, x, y) + torch.stack(sums).sum()


def frozen_after_a_read(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        block.weight.norm()
        block.requires_grad_(number != 1)
    return fit_loss(model, x, y)


def in_other_ways(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By NumPy, `nn.init`, copies of a state and whole tensors."""
    nn.init.constant_(model.blocks[0].rho, 0.3)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.blocks[0].weight.zero_()
    model.load_state_dict(state)
    whole = getattr(model.head.weight, "full_tensor", lambda: model.head.weight)()  # a plain one has none
    return fit_loss(model, x, y) * float(model.blocks[0].weight.detach().numpy().sum()) + whole.square().sum()


OF_ALL = ("forward", "method only", "method first", "penalty on all", "weight of a block", "methods of blocks",
          "hidden state", "kept", "object", "clamped", "replaced data", "loaded", "frozen in the step",
          "gradient penalty")  # fmt: skip
KINDS: dict[str, Loss] = {name: plain.KINDS[name] for name in OF_ALL} | {
    "kept beside": kept_beside,
    "written": written,
    "gradient of weights": gradient_of_weights,
    "of an earlier forward": of_an_earlier_forward,
    "frozen after a read": frozen_after_a_read,
    "in other ways": in_other_ways,
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
    make_model = Net
    validated = 0.0

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1]) * 0 + self.model.divergence()}

    def post_val_epoch(self, metrics: dict[str, Any]) -> None:
        self.validated = float(metrics["val/loss"])


def config_of(layout: str, accumulation: int = 1) -> Any:
    devices = dt.DeviceParameters(**({"device": "cpu", "dp_shard": 2} | LAYOUTS[layout]))
    return make_config(devices=devices, fsdp=BY_BLOCKS, n_epochs=1, gradient_accumulation_steps=accumulation)


def train(kind: str, layout: str, accumulation: int) -> dict[str, Any]:
    with Touches(config_of(layout, accumulation), KINDS[kind]) as trainer:
        trainer.fit()
        found = {"weights": weights(trainer.model), "norms": trainer.norms, "after": trainer.after}
        return found | {"validated": trainer.validated}


def train_all(cases: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


def by_hand(kind: str, accumulation: int) -> dict[str, Any]:
    model = Net()
    norms, after = loop_by_hand(model, KINDS[kind], accumulation, 1 if kind in ONCE else 2)
    found = {"weights": weights(model), "norms": norms, "after": after}
    return found | {"validated": float(model.divergence().detach())}


@pytest.mark.pitfall(104)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_code_that_reads_weights_outside_of_their_block_trains_as_one_process(layout: str) -> None:
    names = list(KINDS) if layout == "blocks" else ["method first", "penalty on all", "kept", "written"]
    cases = [(kind, layout, 1 + number % 2) for number, kind in enumerate(names)]
    for found, *_, (kind, _, accumulation) in zip(*run_world(train_all, 2, cases), cases, strict=True):
        torch.testing.assert_close(
            found, by_hand(kind, accumulation), rtol=1e-10, atol=1e-10, msg=f"{kind}: {{}}".format
        )


class TakesSteps(Touches):
    def configure_optimizers(self) -> None:
        self.optimizer = Assigns(self.model.parameters(), lr=0.02)


class Attends(nn.Module):
    """Attention asks whether its query is its key, also when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)
        self.double()
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.into(x)[:, None].expand(-1, 3, -1)
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


class OfAttention(Touches):
    make_model = Attends
    post_epoch = dt.BaseTrainer.post_epoch

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.attention]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}


def with_assigned_data_and_attention() -> list[dict[str, Tensor]]:
    kinds = ((TakesSteps, "blocks"), (OfAttention, "recomputed"))
    trainers = (kind(config_of(layout), fit_loss) for kind, layout in kinds)
    return fit_each(trainers, lambda trainer: weights(trainer.model))


def test_an_optimizer_may_assign_to_data_and_a_block_that_is_given_one_tensor_twice_is_recomputed() -> None:
    model = Net()
    train_by_hand(model, torch.optim.SGD(model.parameters(), lr=0.02), [[batch] for batch in parts(2 * SIZE)])
    attends = Attends()
    loop_by_hand(attends, fit_loss, 1, 2)
    for found in run_world(with_assigned_data_and_attention, 2):
        torch.testing.assert_close(found, [weights(model), weights(attends)], rtol=1e-10, atol=1e-10)


def read_on_one_rank() -> str:
    config = config_of("blocks")
    config.device_parameters = dt.DeviceParameters(device="cpu", dp_shard=2, start_timeout_seconds=12.0)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if trainer.world.rank == 0:
            model.blocks[1].weight.norm()
        return fit_loss(model, x, y)

    trainer = Touches(config, loss_of)
    return error_of(trainer, RuntimeError)


def test_weights_that_one_rank_alone_reads_are_named_before_a_collective_gives_up() -> None:
    said, _ = run_world(read_on_one_rank, 2)
    assert "blocks.1.weight" in said
    assert "0, 1" in said


def refused() -> tuple[str, bool, str]:
    trainer = Touches(config_of("blocks"), plain.functional)
    said = error_of(trainer)
    unmoved = same_bits(weights(trainer.model), weights(Net()))
    trainer.world.forbidden = "a callback on rank 0"
    with pytest.raises(RuntimeError) as forbidden, trainer._runtime.parallel.whole():
        trainer.model.divergence()
    trainer.world.forbidden = None
    return said, unmoved, str(forbidden.value)


@pytest.mark.pitfall(104)
def test_what_cannot_meet_whole_weights_is_refused_before_they_move() -> None:
    for said, unmoved, forbidden in run_world(refused, 2):
        assert "torch.func" in said
        assert "min_group_mib" in said
        assert unmoved
        assert "a callback on rank 0" in forbidden


def clipped_with_decay(parameters: list[nn.Parameter]) -> float:
    norm = sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5
    for parameter in parameters:
        parameter.grad.mul_(min(1.0, 0.1 / norm))
        parameter.grad += 0.01 * parameter.detach()
        parameter.grad.add_(torch.ones(parameter.shape, dtype=torch.float64) * 0.01)
    return norm


class ByHand(Touches):
    freezes = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        if self.freezes:  # in the last micro-batch, so that its gradient is of the first alone
            self.model.blocks[1].requires_grad_(self.is_accumulating_gradients)
        self.backward(fit_loss(self.model, *batch))
        if not self.is_accumulating_gradients:
            if not self.freezes:
                self.reduce_gradients(self.optimizer)
                self.norms.append(clipped_with_decay(list(self.model.parameters())))
            self.step(self.model, self.optimizer)
        return {}


def with_gradients_by_hand() -> list[tuple[dict[str, Tensor], list[float]]]:
    found = []
    for freezes in (False, True):
        with ByHand(config_of("blocks", 2), fit_loss) as trainer:
            trainer.freezes = freezes
            trainer.fit()
            found.append((weights(trainer.model), trainer.norms))
    return found


@pytest.mark.pitfall(103)
def test_gradients_are_read_and_changed_as_whole_ones() -> None:
    results = run_world(with_gradients_by_hand, 2)
    batches = parts(SIZE)
    for number, freezes in enumerate((False, True)):
        model, norms = Net(), []
        optimizer = plain.optimizer_of(model)
        for first in range(0, len(batches), 4):
            for place, (x, y) in enumerate(batches[first : first + 4]):
                model.blocks[1].requires_grad_(not freezes or place < 2)
                (fit_loss(model, x, y) / 4).backward()
            if not freezes:
                norms.append(clipped_with_decay(list(model.parameters())))
            optimizer.step()
            optimizer.zero_grad()
        for rank in results:
            torch.testing.assert_close(rank[number], (weights(model), norms), rtol=1e-10, atol=1e-10)


class Shrinks(Touches):
    """Reads, and shrinks weights by less than half precision has."""

    make_model = staticmethod(lambda: Net().float())

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch[0].float()).mean()
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert (parameter * 1).dtype == torch.float32
                parameter.mul_(1 - 1e-4)
                parameter.copy_(parameter.detach().clone() * (1 - 1e-4))
        self.backward(loss + sum(p.square().sum() for p in self.model.parameters()))
        self.step(self.model, self.optimizer)
        return {}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model(batch[0].float()).mean()}


def in_half_precision() -> dict[str, Tensor]:
    config = config_of("blocks")
    config.device_parameters = dt.DeviceParameters(device="cpu", dp_shard=2, precision="bf16")
    trainer = Shrinks(config, fit_loss)
    start(trainer._runtime)
    trainer._train()
    return weights(trainer.model)


def test_weights_keep_full_precision_where_code_reads_and_writes_them() -> None:
    steps = len(parts(2 * SIZE))
    for found in run_world(in_half_precision, 2):
        for name, value in weights(Net().float()).items():
            torch.testing.assert_close(found[name], value * (1 - 1e-4) ** (2 * steps), rtol=1e-6, atol=0)


class ChangesInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        values = super().forward(x).exp()
        total = values * 1
        values.mul_(2)
        return total


class OfChanges(Touches):
    make_model = ChangesInPlace


def changed_in_place() -> str:
    return error_of(OfChanges(config_of("blocks"), fit_loss), RuntimeError)


def test_what_backward_needs_and_code_changed_in_place_is_named() -> None:
    for said in run_world(changed_in_place, 2):
        assert "(3, 1)" in said
        assert "version" in said
