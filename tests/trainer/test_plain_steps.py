"""Code that treats a model as a plain module inside a step, on 2 ranks as in one process by hand: replicas, small
models that are whole in steps, and large ones that are gathered block by block; what those are given and give."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn.functional import linear, mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.data import TensorDataset

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.arithmetic import fill, same_bits
from tests.trainer.small import BY_BLOCKS, Sharded, error_of, fit_each, make_config, train_by_hand, weights
from tests.worlds import run_each, run_world

WIDTH, LENGTH, SIZE = 6, 24, 3
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Bayesian(nn.Module):
    """A layer with a divergence of its own, an inverse, a local loss, and a tensor that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rho = nn.Parameter(torch.empty(WIDTH, WIDTH)), nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight * self.rho.exp()
        return linear(x, self.weight + 0.1 * self.rho).view(-1, WIDTH)

    def divergence(self) -> Tensor:
        return (self.weight.square() + self.rho.exp()).mean()

    def inverse(self, z: Tensor) -> Tensor:
        return z @ self.weight

    def local_loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


class Blocks(nn.Module):
    """Weights that `fully_shard` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bayesian() for _ in range(3))
        self.head, self.scale = nn.Linear(WIDTH, 1), nn.Parameter(torch.empty(1))
        self.double()
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y.tanh()
        return self.end(x)

    def end(self, x: Tensor) -> Tensor:
        return self.head(x) * self.scale

    def divergence(self) -> Tensor:
        return torch.stack([block.divergence() for block in self.blocks]).sum()

    def inverse(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block.inverse(z)
        return z

    def init_hidden(self, count: int) -> Tensor:
        return next(self.parameters()).new_ones(count, WIDTH)

    def as_object(self, x: Tensor) -> Any:
        return SimpleNamespace(value=self(x))


class Net(Blocks):
    """A recurrent layer, a scripted one, transposed and channels-last weights, and a scale without shape, too."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
        self.image = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.empty(5, WIDTH).t())
        self.scale = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(3))
        self.double()
        fill(self)

    def end(self, x: Tensor) -> Tensor:
        x = self.recurrent(x[:, None])[0][:, 0] + self.scripted(x)
        of_image = self.image(x.view(-1, 1, 2, 3)).mean((1, 2, 3))[:, None]
        return (x @ self.transposed).sum(1, keepdim=True) * self.scale + of_image + self.head(x)


def fit_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def functional(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    blocks = dict(model.blocks.named_parameters())

    def of_blocks(parameters: dict[str, Tensor]) -> Tensor:
        return sum(functional_call(model.blocks[0], part(parameters, "0."), (x,)).square().mean() for _ in range(2))

    def part(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}

    inner = grad(of_blocks)(blocks)
    return fit_loss(model, x, y) + of_blocks(blocks) + sum(g.square().sum() for g in inner.values())


def kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model(x)
    return model.blocks[1].kept.square().mean()


def clamped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)
    return fit_loss(model, x, y)


def replaced_data(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.99
    return fit_loss(model, x, y)


def loaded(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.load_state_dict({name: value * 0.99 for name, value in model.state_dict().items()})
    return fit_loss(model, x, y)


def distilled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for block in model.blocks:
        block.kept = None  # no module with a tensor of a graph can be copied
    teacher = copy.deepcopy(model)
    return fit_loss(model, x, y) + (model(x) - teacher(x).detach() * 0.5).square().mean()


def frozen_block(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.blocks[0].requires_grad_(False)
    loss = fit_loss(model, x, y)
    model.blocks[0].requires_grad_(True)
    return loss


def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    values = model.inverse(x).tanh() + model.blocks[0](x).tanh()
    (inner,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    return fit_loss(model, x, y) + inner.square().mean()


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


KINDS: dict[str, Loss] = {
    "forward": fit_loss,
    "method only": lambda model, x, y: model.divergence(),
    "method first": lambda model, x, y: model.divergence() + fit_loss(model, x, y),
    "penalty on all": lambda model, x, y: fit_loss(model, x, y) + sum(p.square().sum() for p in model.parameters()),
    "weight of a block": lambda model, x, y: fit_loss(model, x, y) + model.blocks[1].weight.square().sum(),
    "methods of blocks": lambda model, x, y: model.inverse(x).tanh().mean() + model.blocks[0].local_loss(x),
    "hidden state": lambda model, x, y: fit_loss(model, x + model.init_hidden(len(x)), y),
    "functional": functional,
    "kept": kept,
    "object": lambda model, x, y: mse_loss(model.as_object(x).value, y),
    "clamped": clamped,
    "replaced data": replaced_data,
    "loaded": loaded,
    "copied": distilled,
    "frozen in the step": frozen_block,
    "gradient penalty": gradient_penalty,
    "kept beside": kept_beside,
    "written": written,
    "gradient of weights": gradient_of_weights,
    "of an earlier forward": of_an_earlier_forward,
    "frozen after a read": frozen_after_a_read,
    "in other ways": in_other_ways,
}
ONCE = ("replaced data", "loaded", "written")  # change weights, which two ranks do once and a loop by hand twice
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {},
    "replicas": {"dp_shard": 1, "dp_replicate": 2},
    "blocks": {},
    "recomputed": {"activation_checkpointing": "full"},
    "offloaded": {"cpu_offload": True},
    "offloaded replicas": {"cpu_offload": True, "dp_shard": 1, "dp_replicate": 2},
}
WHOLE = ("shards", "replicas")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(LENGTH, width, dtype=torch.float64, generator=generator) for width in (WIDTH, 1))
    return TensorDataset(x, y)


def parts(size: int) -> list[Any]:
    return list(zip(*(tensor.split(size) for tensor in data().tensors), strict=True))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.05)


def sum_of_squares(model: nn.Module) -> float:
    return float(sum(p.detach().square().sum() for p in model.parameters()))


class Plain(Sharded, dt.ActivationCheckpointingMixin, dt.EvalMixin):
    """Notes what its weights are after each step, and what they give in validation and at the end of an epoch."""

    make_model = Blocks
    ended = validated = 0.0

    def __init__(self, config: Any, own_loss: Loss) -> None:
        loaders = (DistributedDataLoader(data(), SIZE) for _ in range(2))
        super().__init__(config, *loaders, make_optimizer=optimizer_of)
        self.own_loss = own_loss
        self.after: list[float] = []

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)

    def loss_of(self, batch: Any) -> Tensor:
        return self.own_loss(self.model, *batch)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        if not self.is_accumulating_gradients:
            self.after.append(sum_of_squares(self.model))
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1]) * 0 + self.model.divergence()}

    def post_val_epoch(self, metrics: dict[str, Any]) -> None:
        self.validated = float(metrics["val/loss"])

    def post_epoch(self) -> None:
        self.ended = float(self.model.divergence().detach())


class OfNet(Plain):
    make_model = Net


def config_of(layout: str, accumulation: int = 1, **devices: Any) -> Any:
    return make_config(
        devices=dt.DeviceParameters(**{"device": "cpu", "dp_shard": 2} | LAYOUTS[layout] | devices),
        fsdp=None if layout in WHOLE else BY_BLOCKS,
        n_epochs=1,
        gradient_accumulation_steps=accumulation,
    )


def train(case: tuple[str, str, int]) -> dict[str, Any]:
    kind, layout, accumulation = case
    with (OfNet if layout in WHOLE else Plain)(config_of(layout, accumulation), KINDS[kind]) as trainer:
        trainer.fit()
        found = {"weights": weights(trainer.model), "norms": trainer.norms, "after": trainer.after}
        output = trainer.model(parts(2)[0][0]).detach()
        return found | {"ended": trainer.ended, "validated": trainer.validated, "out": output}


def by_hand(kind: str, layout: str, accumulation: int) -> dict[str, Any]:
    model = Net() if layout in WHOLE else Blocks()
    norms, after = loop_by_hand(model, KINDS[kind], accumulation, 1 if kind in ONCE else 2)
    end = float(model.divergence().detach())
    found = {"weights": weights(model), "norms": norms, "after": after, "ended": end, "validated": end}
    return found | {"out": model(parts(2)[0][0]).detach()}


def loop_by_hand(model: nn.Module, loss_of: Loss, accumulation: int, ranks: int) -> tuple[list[float], list[float]]:
    """Trains `model` as `ranks` ranks do, one after the other; norms, and sums of squares of weights, at each step."""
    optimizer, norms, after = optimizer_of(model), [], []
    batches = parts(2 * SIZE // ranks)
    for first in range(0, len(batches), ranks * accumulation):
        window = batches[first : first + ranks * accumulation]
        norms += train_by_hand(model, optimizer, [window], lambda model, batch: loss_of(model, *batch))
        after.append(sum_of_squares(model))
    return norms, after


@pytest.mark.pitfall(104)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_code_that_treats_the_model_as_a_plain_module_trains_as_one_process(layout: str) -> None:
    kinds = ["method first", "penalty on all", "kept", "written"]
    if layout in WHOLE:
        kinds = list(KINDS)
    elif layout == "blocks":
        kinds = [kind for kind in KINDS if kind not in ("functional", "copied")]
    cases = [(kind, layout, 1 + number % 2) for number, kind in enumerate(kinds)]
    for case, ranks in run_each(train, 2, cases):
        expected = by_hand(*case)
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=f"{case}: {{}}".format)


def local_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([block.weight.to_local().square().sum() for block in model.blocks]).sum()


def of_shards_alone() -> tuple[str, bool]:
    trainer = Plain(config_of("blocks"), local_loss)
    said = error_of(trainer)
    return said, same_bits(weights(trainer.model), weights(Blocks()))


@pytest.mark.pitfall(104)
def test_a_loss_of_shards_alone_is_refused_before_weights_move() -> None:
    for message, are_equal in run_world(of_shards_alone, 2):
        assert "model.blocks.0.weight" in message
        assert are_equal


class Assigns(torch.optim.SGD):
    """SGD whose own step assigns to `data`, as public implementations of SAM do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


class TakesSteps(Plain):
    def configure_optimizers(self) -> None:
        self.optimizer = Assigns(self.model.parameters(), lr=0.02)


class Attends(nn.Module):
    """Attention asks whether its query is its key, also when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, batch_first=True)])
        self.head = nn.Linear(WIDTH, 1)
        self.double()
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.into(x)[:, None].expand(-1, 3, -1)
        return self.head(self.blocks[0](rows, rows, rows, need_weights=False)[0].mean(1))

    def divergence(self) -> Tensor:
        return self.head.weight.square().sum()


class OfAttention(Plain):
    make_model = Attends


def with_assigned_data_and_attention() -> list[dict[str, Tensor]]:
    kinds = ((TakesSteps, "blocks"), (OfAttention, "recomputed"))
    trainers = (kind(config_of(layout), fit_loss) for kind, layout in kinds)
    return fit_each(trainers, lambda trainer: weights(trainer.model))


def test_an_optimizer_may_assign_to_data_and_a_block_that_is_given_one_tensor_twice_is_recomputed() -> None:
    model = Blocks()
    train_by_hand(model, torch.optim.SGD(model.parameters(), lr=0.02), [[batch] for batch in parts(2 * SIZE)])
    attends = Attends()
    loop_by_hand(attends, fit_loss, 1, 2)
    for found in run_world(with_assigned_data_and_attention, 2):
        torch.testing.assert_close(found, [weights(model), weights(attends)], rtol=1e-10, atol=1e-10)


def read_on_one_rank() -> str:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if trainer.world.rank == 0:
            model.blocks[1].weight.norm()
        return fit_loss(model, x, y)

    trainer = Plain(config_of("blocks", start_timeout_seconds=12.0), loss_of)
    return error_of(trainer, RuntimeError)


def test_weights_that_one_rank_alone_reads_are_named_before_a_collective_gives_up() -> None:
    said, _ = run_world(read_on_one_rank, 2)
    assert "blocks.1.weight" in said
    assert "0, 1" in said


def refused() -> tuple[str, bool, str]:
    trainer = Plain(config_of("blocks"), functional)
    said = error_of(trainer)
    unmoved = same_bits(weights(trainer.model), weights(Blocks()))
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


class ByHand(Plain):
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
        model, norms = Blocks(), []
        optimizer = optimizer_of(model)
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


class Shrinks(Plain):
    """Reads, and shrinks weights by less than half precision has."""

    make_model = staticmethod(lambda: Blocks().float())

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
    (found,) = fit_each([Shrinks(config_of("blocks", precision="bf16"), fit_loss)], lambda t: weights(t.model))
    return found


def test_weights_keep_full_precision_where_code_reads_and_writes_them() -> None:
    steps = len(parts(2 * SIZE))
    for found in run_world(in_half_precision, 2):
        for name, value in weights(Blocks().float()).items():
            torch.testing.assert_close(found[name], value * (1 - 1e-4) ** (2 * steps), rtol=1e-6, atol=0)


class ChangesInPlace(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        values = super().forward(x).exp()
        total = values * 1
        values.mul_(2)
        return total


class OfChanges(Plain):
    make_model = ChangesInPlace


def changed_in_place() -> str:
    return error_of(OfChanges(config_of("blocks"), fit_loss), RuntimeError)


def test_what_backward_needs_and_code_changed_in_place_is_named() -> None:
    for said in run_world(changed_in_place, 2):
        assert "(3, 1)" in said
        assert "version" in said


class Output(dict[str, Tensor]):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self["x"] = x


class Ordered(OrderedDict[str, Tensor]):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self["x"] = x


@dataclass
class Record:
    x: Tensor
    calls: int = field(init=False, default=0)


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x[None], [len(x)], batch_first=True)


MAKE: dict[str, Any] = {"tensor": lambda x: x, "dict": Output, "ordered": Ordered, "record": Record, "packed": packed}


def tensor_in(value: Any) -> Tensor:
    if isinstance(value, dict):
        return value["x"]
    if isinstance(value, Record):
        return value.x
    return value.data if isinstance(value, PackedSequence) else value


class Converts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        return MAKE[self.kind](self.linear(tensor_in(given)).tanh())


class Trains(Sharded):
    given: Any = None

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = self.model(batch[0].float())
        self.given = type(output).__name__, tensor_in(output).dtype
        return tensor_in(output).square().mean()


def train_through(kind: str) -> tuple[str, torch.dtype, dict[str, Tensor]]:
    with Trains(config_of("blocks", precision="bf16"), DistributedDataLoader(data(), SIZE)) as trainer:
        trainer.make_model = lambda: nn.Sequential(Converts(kind), Converts(kind))
        trainer.fit()
        return (*trainer.given, weights(trainer.model))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 casts within a hook that cannot be overridden")
@pytest.mark.pitfall(104)
def test_containers_keep_their_class_and_what_they_hold_is_cast() -> None:
    (_, plain), *_ = results = list(run_each(train_through, 2, list(MAKE)))
    names = ["Tensor", "Output", "Ordered", "Record", "PackedSequence"]
    for (_, ranks), expected in zip(results, names, strict=True):
        for (name, dtype, trained), (_, _, of_tensors) in zip(ranks, plain, strict=True):
            assert (name, dtype) == (expected, torch.float32)
            assert same_bits(trained, of_tensors)
