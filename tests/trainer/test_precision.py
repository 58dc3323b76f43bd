"""bf16, fp16 and reductions against loops written by hand, and the models that mixed precision breaks elsewhere."""

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.trainer.arithmetic import fill, full, same_bits
from tests.trainer.small import BY_BLOCKS, Alone, Sharded, fit, make_config, sgd, train_by_hand, weights
from tests.worlds import run_each, run_world

N_STEPS, SIZE, WIDTH, VOCABULARY, LENGTH = 4, 4, 8, 16, 6
BF16 = dt.DeviceParameters(device="cpu", precision="bf16")


class Block(nn.Module):
    """Norms of both kinds and a buffer in float32, which promotes what it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(LENGTH)
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.batch_norm(self.norm(x * self.table))) * self.table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.position + self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def decode(self, *, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def contrast(self, pair: dict[str, Tensor]) -> Tensor:
        """Calls itself twice, on what needs gradients: as siamese networks do."""
        return self(pair["one"]) * self(pair["other"]) + self.position.mean()

    def elapsed(self, seconds: Tensor) -> Tensor:
        return seconds * 2

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decode(hidden=self.encode(tokens))


def by_forward(model: Model, tokens: Tensor) -> Tensor:
    return model(tokens)


def by_methods(model: Model, tokens: Tensor) -> Tensor:
    return model.decode(hidden=model.encode(tokens))


def by_parts(model: Model, tokens: Tensor) -> Tensor:
    x = model.embed(tokens)
    for block in model.blocks:
        x = block(x)
    return model.head(model.norm(x))


def by_contrast(model: Model, tokens: Tensor) -> Tensor:
    return model.contrast({"one": tokens, "other": tokens.flip(-1)})


def by_two_ways(model: Model, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        before = model.encode(tokens)
    return by_methods(model, tokens) + by_forward(model, tokens) + before.mean()


WAYS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    way.__name__: way for way in (by_forward, by_methods, by_parts, by_contrast, by_two_ways)
}


def tokens() -> Tensor:
    return torch.randint(WIDTH, (N_STEPS * SIZE, LENGTH), generator=torch.Generator().manual_seed(1))


class Trainer(Sharded):
    def __init__(self, config: Any, way: str = "by_forward", dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, DataLoader(tokens(), batch_size=config.training_parameters.train_batch_size))
        self.way, self.dtype = WAYS[way], dtype
        self.digits: set[bool] = set()

    def make_model(self) -> nn.Module:
        return Model().to(self.dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.model.eval()  # batch norm's statistics are of each rank's batch, and so depend on the number of ranks
        loss = F.cross_entropy(self.way(self.model, batch).flatten(0, 1), batch.flatten())
        self.losses.append(loss.item())
        self.backward(loss)
        if not self.is_accumulating_gradients:
            gradient = full(self.model.head.weight.grad)
            self.digits.add(torch.equal(gradient, gradient.bfloat16().to(gradient.dtype)))
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {}


def trained(
    config: Any, way: str = "by_forward", dtype: torch.dtype = torch.float32, cls: Any = None
) -> dict[str, Any]:
    with (cls or Trainer)(config, way, dtype) as trainer:
        trainer.fit()
        if trainer.world.is_main:  # the other rank does not call it
            trainer.counted = trainer.model.count()
        found = {"losses": trainer.losses, "norms": trainer.norms, "coarse": trainer.digits}
        return found | {"weights": weights(trainer.model), "count": vars(trainer).get("counted")}


@cache
def plain(way: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same in one process, without half precision."""
    return trained(config_for(dt.DeviceParameters(device="cpu")), way, dtype)


def config_for(devices: dt.DeviceParameters, *, ranks: int = 1, accumulation: int = 1) -> Any:
    return make_config(
        fsdp=BY_BLOCKS,
        devices=devices,
        n_epochs=1,
        train_batch_size=SIZE // ranks // accumulation,
        gradient_accumulation_steps=accumulation,
        gradient_clip_norm=1.0,
    )


def off_by(found: dict[str, Any], expected: dict[str, Any]) -> float:
    norms = max(abs(a - b) for a, b in zip(found["norms"], expected["norms"], strict=True))
    return max(norms, *(float((found["weights"][n] - w).abs().max()) for n, w in expected["weights"].items()))


# -- one process


def test_bf16_is_bit_for_bit_a_loop_with_autocast_around_the_forward() -> None:
    unclipped = dt.TrainingParameters(n_epochs=1, train_batch_size=SIZE)
    found = trained(replace(config_for(BF16), training_parameters=unclipped), "by_methods")
    model = Model().eval()
    fill(model)
    losses = []

    def loss_of(model: Model, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(by_methods(model, batch).flatten(0, 1), batch.flatten())
        losses.append(loss.item())
        return loss

    train_by_hand(model, sgd(model), [[batch] for batch in tokens().split(SIZE)], loss_of)
    assert found["losses"] == losses
    assert same_bits(found["weights"], weights(model))


def linear() -> nn.Module:
    model = nn.Linear(WIDTH, WIDTH)
    fill(model)
    return model


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


class Pair(Alone):
    """Two updates of one model in a step, and a forward without gradients before each: as GANs and teachers do."""

    make_model = staticmethod(linear)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        for _ in range(2):
            self.backward(twice(self.model, batch))
            self.step(self.model, self.optimizer)
        return {}


def twice(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(batch)
    return (model(batch).float() - target.float() - 1).square().mean()


@pytest.mark.pitfall(25)
def test_a_forward_without_gradients_or_a_step_before_a_forward_changes_nothing() -> None:
    batch = torch.ones(2, WIDTH)
    trainer = fit(Pair(make_config(devices=BF16, n_epochs=1), [batch] * 3, make_optimizer=plain_sgd))

    def cast_by_hand(model: nn.Module, batch: Tensor) -> Tensor:
        """Without autocast and its cache."""
        output = F.linear(batch.bfloat16(), *(p.bfloat16() for p in model.parameters()))
        return (output.float() - output.detach().float() - 1).square().mean()

    model = linear()
    train_by_hand(model, plain_sgd(model), [[batch]] * 6, cast_by_hand)
    assert same_bits(weights(trainer.model), weights(model))


class FullHead(Alone):
    """Its loss is computed outside autocast, in float32, and `backward` is called where autocast is on."""

    make_model = staticmethod(linear)

    def loss_of(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        with torch.autocast("cpu", enabled=False):
            return self.model(batch).square().sum()


def test_what_is_computed_in_float32_has_its_gradient_in_float32() -> None:
    batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    trainer = fit(FullHead(make_config(devices=BF16, n_epochs=1), [batch], make_optimizer=plain_sgd))
    model = linear()
    train_by_hand(model, plain_sgd(model), [[batch]], lambda model, batch: model(batch).square().sum())
    assert same_bits(weights(trainer.model), weights(model))


def test_every_step_and_what_asks_for_it_computes_in_the_configured_precision() -> None:
    seen: dict[str, torch.dtype] = {}

    class Everywhere(Alone, dt.EvalMixin):
        make_model = staticmethod(lambda: Model().eval())

        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
            seen["training"] = self.model.decode(hidden=self.model.encode(batch)).dtype
            return {}

        def validation_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
            seen["validation"] = self.model(batch).dtype
            return {}

        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen["prediction"] = self.model(batch).dtype
            return batch

        def post_fit(self) -> None:
            seen["outside"] = self.model(tokens()[:2]).dtype
            with self.autocast():
                seen["asked for"] = self.model(tokens()[:2]).dtype

    with Everywhere(make_config(devices=BF16, n_epochs=1), [tokens()[:2]], [tokens()[:2]]) as trainer:
        trainer.fit()
        trainer.predict([tokens()[:2]])
    half = dict.fromkeys(("training", "validation", "prediction", "asked for"), torch.bfloat16)
    assert seen == half | {"outside": torch.float32}


def test_tf32_is_said_to_need_cuda_and_changes_no_bit_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    found = trained(config_for(dt.DeviceParameters(device="cpu", precision="tf32")), "by_forward")
    assert off_by(found, plain("by_forward")) == 0
    assert [record.message for record in caplog.records if "tf32" in record.message] == [
        'precision="tf32" is for CUDA devices; this cpu computes in float32.'
    ]


# -- two ranks

EXACT = dt.DeviceParameters(device="cpu")
WORLD: dict[str, tuple[dt.DeviceParameters, str, int, torch.dtype]] = {
    **{f"{way} fsdp": (EXACT, way, 1, torch.float64) for way in WAYS},
    "by_two_ways ddp": (replace(EXACT, dp_replicate=2, dp_shard=1), "by_two_ways", 1, torch.float64),
    "accumulated": (EXACT, "by_two_ways", 2, torch.float64),
    "compiled": (replace(EXACT, compile=True), "by_parts", 1, torch.float64),
    "offloaded": (replace(EXACT, cpu_offload=True), "by_methods", 1, torch.float64),
    **{f"bf16 {way}": (replace(EXACT, precision="bf16"), way, 1, torch.float32)
       for way in ("by_forward", "by_methods", "by_parts")},
    "fp16": (replace(EXACT, precision="fp16"), "by_methods", 1, torch.float32),
    "reduced in bf16": (replace(EXACT, reduce_dtype="bf16"), "by_forward", 1, torch.float32),
}  # fmt: skip


def on_a_rank(name: str, directory: Path) -> dict[str, Any]:
    os.chdir(directory)
    devices, way, accumulation, dtype = WORLD[name]
    compiling = dt.CompileParameters(backend="aot_eager")
    config = replace(config_for(devices, ranks=2, accumulation=accumulation), compile_parameters=compiling)
    return trained(config, way, dtype, Compiled if devices.compile else Trainer)


class Compiled(dt.CompileMixin, Trainer):
    pass


class OfNorms(Trainer):
    """Its blocks are norms, so that sharding casts what a norm is given."""

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.norm, *(block.norm for block in model.blocks)]


def on_a_rank_besides() -> dict[str, Any]:
    found: dict[str, Any] = {"norms": trained(config_for(BF16, ranks=2), cls=OfNorms)["losses"]}
    with Trainer(config_for(BF16, ranks=2)) as trainer:
        trainer.fit()
        with trainer.autocast():
            found["seconds"] = trainer.model.elapsed(torch.tensor([123456.0]))
            with trainer.gathered(trainer.model):
                found["by name"] = trainer.model.norm(input=torch.zeros(2, WIDTH)).shape
        found["signature"] = str(inspect.signature(trainer.model.forward))
        trainer.world.forbidden = "a callback on rank 0"
        with pytest.raises(RuntimeError, match="a callback on rank 0"), trainer.gathered(trainer.model):
            trainer.model.encode(tokens()[:2])
        trainer.world.forbidden = None
    with Trainer(config_for(replace(EXACT, reduce_dtype="fp32"), ranks=2), dtype=torch.float64) as trainer:
        trainer.fit()
        found["dtype"] = trainer.model(tokens()[:2]).dtype
    return found


@pytest.mark.pitfall(83)
def test_what_a_sharded_model_is_given_and_gives_is_not_rounded_and_its_face_is_its_own() -> None:
    ranks = run_world(on_a_rank_besides, 2)
    losses = [sum(pair) / 2 for pair in zip(*(rank["norms"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(plain("by_forward")["losses"], rel=0.03)
    for rank in ranks:
        assert rank["seconds"].tolist() == [246912.0]
        assert rank["signature"] == str(inspect.signature(Model().forward))
        assert rank["dtype"] == torch.float64
        assert rank["by name"] == (2, WIDTH)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], ...]]:
    """Of each case, what each rank found."""
    return dict(run_each(on_a_rank, 2, list(WORLD), tmp_path_factory.mktemp("precision")))


@pytest.mark.parametrize("name", [name for name, case in WORLD.items() if case[3] == torch.float64])
@pytest.mark.pitfall(24, 66)
def test_whatever_is_called_on_a_sharded_model_computes_and_learns_as_on_a_plain_one(world: Any, name: str) -> None:
    for found in world[name]:  # in float64, so reducing gradients in float32 would show
        assert off_by(found, plain(WORLD[name][1], torch.float64)) < 1e-12
    assert world[name][0]["count"] == sum(weight.numel() for weight in found["weights"].values())


@pytest.mark.parametrize("name", [name for name, case in WORLD.items() if case[0].precision in ("bf16", "fp16")])
@pytest.mark.pitfall(25, 65)
def test_half_precision_bears_buffers_norms_and_methods(world: Any, name: str) -> None:
    """Sharded parameters are cast before they are gathered, so that it is not the bits of one process."""
    expected = plain(WORLD[name][1])["losses"]
    losses = [sum(pair) / 2 for pair in zip(*(found["losses"] for found in world[name]), strict=True)]
    assert losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=0.02)
    for found in world[name]:
        assert {weight.dtype for weight in found["weights"].values()} == {torch.float32}
        assert same_bits(found["weights"], world[name][0]["weights"])


def test_gradients_cross_ranks_in_the_type_asked_for(world: Any) -> None:
    assert world["reduced in bf16"][0]["coarse"] == {True}
    assert world["bf16 by_forward"][0]["coarse"] == {False}
    assert off_by(world["reduced in bf16"][0], plain("by_forward")) < 2e-2
