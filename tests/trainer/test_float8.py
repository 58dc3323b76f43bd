"""Float8 is torchao's, on every mesh, and leaves nothing behind: parameters, names and checkpoints are plain ones."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dream_trainer as dt
from tests.api import EMA, ConfigError, DistributedDataLoader, MoE, own_class
from tests.trainer.arithmetic import same_bits
from tests.trainer.small import Sent, run_config, train_on, weights
from tests.worlds import run_world

pytest.importorskip("torchao")
WIDTH, BATCH, STEPS, LENGTH = 32, 16, 6, 4
NEAR = 5e-4  # float32's rounding, and a number here and there that is rounded to the next of float8 for it
EMULATED = dt.Float8Parameters(emulate=True)
WHOLE_SEQUENCES = dt.TensorParallelParameters(sequence_parallel=False)
GATHERED = dt.Float8Parameters(emulate=True, all_gather=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.narrow, self.back = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)  # no multiple of 16

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.gelu(self.up(y))) + self.back(self.narrow(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def samples() -> Tensor:
    return torch.randn(BATCH * STEPS, LENGTH, 16, generator=torch.Generator().manual_seed(1))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


class Trained(dt.DreamTrainer):
    loaded: dict[str, Tensor] | None = None

    def configure_models(self) -> None:
        self.model = Net()

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for layer in self.model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def pipeline_stages(self, model: nn.Module, n_stages: int) -> Any:
        four = [["embed"], ["layers.0"], ["layers.1"], ["head"]]
        return four if n_stages == 4 else super().pipeline_stages(model, n_stages)

    def cut_batch(self, batch: tuple[Tensor], cut: Callable[..., Tensor]) -> tuple[Tensor]:
        return (cut(batch[0]),)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        data = torch.utils.data.TensorDataset(samples())
        return tuple(DistributedDataLoader(data, self.config.training_parameters.train_batch_size) for _ in range(2))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.losses: list[float] = []
        self.initial, self.n_bytes = weights(self.model), 0.0

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> dict[str, Any]:
        weight = torch.numel if self.config.device_parameters.context_parallel > 1 else None
        with sent_by_two() as sent:
            loss = self.forward_backward(self.model, (batch[0],), batch[0].flip(-1), loss_of, weight=weight)
        self.step(self.model, self.optimizer)
        self.n_bytes = sent.n_bytes
        self.losses.append(float(self.world.all_reduce(loss.detach()) / self.world.world_size))
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": loss_of(self.model(batch[0]), batch[0].flip(-1))}

    def on_load(self, path: Path) -> None:
        self.loaded = weights(self.model)


def sent_by_two() -> Sent:
    """What this rank sends to be gathered or reduced by two ranks, except single numbers."""
    return Sent(
        _allgather_base_=lambda out, part, *_: part.nbytes,
        _reduce_scatter_base_=lambda part, *_: 2 * part.nbytes,  # gloo reduces for all
    )


def config_of(
    *,
    experiment: str = "run",
    steps: int = STEPS,
    callbacks: tuple[dt.Callback, ...] = (),
    float8_parameters: dt.Float8Parameters = EMULATED,
    tensor_parallel_parameters: dt.TensorParallelParameters | None = None,
    schedule: Any = "1F1B",
    micro_batch: int = BATCH,
    save: bool = False,
    **devices: Any,
) -> dt.DreamTrainerConfig:
    return run_config(
        experiment,
        group="float8",
        callbacks=dt.CallbackCollection(callbacks),
        device_parameters=dt.DeviceParameters(device="cpu", **devices),
        float8_parameters=float8_parameters,
        tensor_parallel_parameters=tensor_parallel_parameters or dt.TensorParallelParameters(),
        pipeline_parallel_parameters=dt.PipelineParallelParameters(schedule=schedule),
        training_parameters=dt.TrainingParameters(
            max_steps=steps, n_epochs=None, train_batch_size=micro_batch, val_every_n_epochs=None
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=save),
    )


def whole(batch: Tensor) -> list[Tensor]:
    return [batch]


def quarters(batch: Tensor) -> list[Tensor]:
    return [*batch.chunk(4)]


def positions(batch: Tensor) -> list[Tensor]:
    """The first and last of each sequence, and those between."""
    return [batch[:, [0, 3]], batch[:, [1, 2]]]


def by_hand(
    start: dict[str, Tensor], recipe: str, steps: int, cut: Callable[[Tensor], list[Tensor]] = whole
) -> list[float]:
    """By torchao's own conversion, in a plain loop of micro-batches."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = Net()
    model.load_state_dict(start)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name.endswith(("up", "down")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for x in samples().split(BATCH)[:steps]:
        loss = sum(loss_of(model(part), part.flip(-1)) / len(cut(x)) for part in cut(x))
        train_on(optimizer, [loss])
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("recipe", "recompute"), [("tensorwise", "none"), ("rowwise", "full"), ("tensorwise", "selective")]
)
def test_the_blocks_linear_layers_are_torchaos(recipe: str, recompute: str, caplog: pytest.LogCaptureFixture) -> None:
    from torchao.float8.float8_linear import Float8Linear

    with Trained(config_of(float8=recipe, activation_checkpointing=recompute)) as trainer:
        trainer.fit()
        assert trainer.losses == by_hand(trainer.initial, recipe, STEPS)
        found = [name for name, module in trainer.model.named_modules() if isinstance(module, Float8Linear)]
        assert found == [f"layers.{n}.{name}" for n in range(2) for name in ("up", "down")]
        assert {own_class(module) for module in trainer.model.modules()} == {type(m) for m in Net().modules()}
        assert list(trainer.model.state_dict()) == list(Net().state_dict())
        assert "| float8 |" in trainer.describe()
    assert "4 of 8 linear layers stay out of float8" in caplog.text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_the_input_of_float8(precision: str) -> None:
    with Trained(config_of(float8="tensorwise", precision=precision)) as trainer:
        trainer.fit()
        assert trainer.losses == pytest.approx(by_hand(trainer.initial, "tensorwise", STEPS), rel=2e-2)
        layer, x = trainer.model.layers[0].up, torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        with trainer.autocast():
            assert layer(x).dtype == half
            assert torch.equal(layer(x), layer(x.to(half)))


def test_layers_are_left_out_by_name() -> None:
    chosen = dt.Float8Parameters(emulate=True, skip=(r"^layers\.0\.", "down$"))
    with Trained(config_of(float8="tensorwise", float8_parameters=chosen, steps=1)) as trainer:
        trainer.fit()
        found = [name for name, module in trainer.model.named_modules() if type(module).__name__ == "Float8Linear"]
    assert found == ["layers.1.up"]


CASES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicas": {"dp_shard": 1},
    "gathered in float8": {"float8_parameters": GATHERED},
    "offloaded": {"float8_parameters": GATHERED, "cpu_offload": True},
    "recomputed": {"float8_parameters": GATHERED, "activation_checkpointing": "selective"},
}

IN_FOUR = {"pipeline_parallel": 2, "schedule": "InterleavedZeroBubble"}
TOGETHER: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], list[Tensor]]]] = {
    "layers": ("tensorwise", {"tensor_parallel": 2, "tensor_parallel_parameters": WHOLE_SEQUENCES}, whole),
    "sequences": ("rowwise", {"context_parallel": 2}, positions),
    "a pipeline": ("tensorwise", {"pipeline_parallel": 2, "activation_checkpointing": "full"}, quarters),
    "a pipeline of four": ("rowwise", IN_FOUR, quarters),
}
"""What two ranks share, and the micro-batches with which one process learns the same."""


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        with Trained(config_of(experiment=name, float8="tensorwise", micro_batch=BATCH // 2, **options)) as trainer:
            trainer.fit()
            local = trainer.model.layers[0].up.weight
            found[name] = {
                "losses": trainer.losses,
                "weights": weights(trainer.model),
                "start": trainer.initial,
                "sent": trainer.n_bytes,
                "validated": trainer.evaluate()["val/loss"] if name == "sharded" else None,
                "kind": type(getattr(local, "_local_tensor", local)).__name__,
            }
    for name, (recipe, options, _) in TOGETHER.items():
        with Trained(config_of(experiment=name, float8=recipe, **options)) as trainer:
            trainer.fit()
            found[name] = {"losses": trainer.losses}
    return found | {"travels": travels(), "averaged": averaged(), "mixtures": [mixture(ep) for ep in (1, 2)]}


def travels() -> list[dict[str, Any]]:
    """In float8 without a stop, and with one; then without float8."""
    eight = {"float8": "tensorwise", "float8_parameters": GATHERED}
    runs = [("whole", 4, eight), ("parts", 2, eight), ("parts", 4, eight), ("parts", 5, {})]
    found = []
    for experiment, steps, options in runs:
        with Trained(
            config_of(experiment=experiment, steps=steps, save=True, micro_batch=BATCH // 2, **options)
        ) as trainer:
            trainer.fit()
            found.append({"loaded": trainer.loaded, "weights": weights(trainer.model)})
    return found


def averaged() -> dict[str, Any]:
    options = {"float8": "tensorwise", "float8_parameters": GATHERED, "callbacks": (EMA(decay=0.5),)}
    with Trained(config_of(experiment="ema", steps=3, micro_batch=BATCH // 2, **options)) as trainer:
        trainer.fit()
        with trainer.gathered(trainer.model):
            whole = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return {"gathered": whole, "weights": weights(trainer.model), "validated": trainer.evaluate()["val/loss"]}


class Mixed(Trained):
    def configure_models(self) -> None:
        self.model = Net()
        for layer in self.model.layers:
            layer.back, layer.narrow = MoE(WIDTH, WIDTH, 16, 2, n_shared=1), nn.Identity()


def mixture(expert_parallel: int) -> dict[str, Any]:
    options = {"float8": "tensorwise", "dp_shard": 1, "expert_parallel": expert_parallel}
    with Mixed(config_of(experiment=f"mixture {expert_parallel}", micro_batch=BATCH // 2, **options)) as trainer:
        trainer.fit()
        kinds = {name: type(module).__name__ for name, module in trainer.model.layers[0].named_modules()}
        return {"losses": trainer.losses, "start": trainer.initial, "kinds": kinds}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(on_two_ranks, 2)


def test_meshes_learn_the_same_up_to_the_rounding_of_float8(ranks: list[dict[str, Any]]) -> None:
    start = ranks[0]["sharded"]["start"]
    alone = by_hand(start, "tensorwise", STEPS, lambda batch: [*batch.chunk(2)])
    assert by_hand(start, "tensorwise", STEPS) == pytest.approx(alone, abs=5e-3)
    for rank in ranks:
        for name in CASES:
            assert rank[name]["losses"] == pytest.approx(alone, abs=NEAR), name
            assert same_bits(rank[name]["start"], ranks[0]["sharded"]["start"])
        sharded = rank["sharded"]
        for name in ("gathered in float8", "offloaded", "recomputed"):  # the same casts in another place
            assert rank[name]["losses"] == sharded["losses"], name
            assert same_bits(rank[name]["weights"], sharded["weights"])


@pytest.mark.parametrize("name", TOGETHER)
def test_what_ranks_share_learns_as_one_process_does(ranks: list[dict[str, Any]], name: str) -> None:
    recipe, _, cut = TOGETHER[name]
    expected = by_hand(ranks[0]["sharded"]["start"], recipe, STEPS, cut)
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(expected, abs=NEAR)


def test_shards_cross_ranks_in_float8_where_that_is_asked_for(ranks: list[dict[str, Any]]) -> None:
    parameters = sum(p.numel() for p in Net().parameters())
    cast = 2 * 2 * WIDTH * 2 * WIDTH
    root = sum(p.numel() for part in ("embed", "head") for p in getattr(Net(), part).parameters())
    expected = {
        "sharded": 4 * (2 * (parameters - root) + root + 2 * parameters) / 2,
        "gathered in float8": (4 * (2 * (parameters - root) + root + 2 * parameters) - 2 * 3 * cast) / 2,
    }
    for rank in ranks:
        assert rank["sharded"]["kind"] == "Tensor"
        assert rank["gathered in float8"]["kind"] == "WeightWithDynamicFloat8CastTensor"
        for name, n_bytes in expected.items():
            assert rank[name]["sent"] == n_bytes, name


def test_a_stopped_run_goes_on_to_the_bit_and_without_float8(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        whole, begun, resumed, plain = rank["travels"]
        assert same_bits(resumed["loaded"], begun["weights"])
        assert same_bits(resumed["weights"], whole["weights"])
        assert same_bits(plain["loaded"], resumed["weights"])


def test_mixtures_keep_their_experts_and_routers_also_where_ranks_share_them(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        alone, shared = rank["mixtures"]
        assert same_bits(alone["start"], shared["start"])
        assert shared["losses"] == pytest.approx(alone["losses"], abs=5e-3)
        eight = {name for name, kind in shared["kinds"].items() if kind == "Float8Linear"}
        assert eight == {"up", "down", "back.shared.gate", "back.shared.up", "back.shared.down"}
        assert shared["kinds"]["back.router"] == "Linear"


def test_whole_copies_and_averages_are_in_the_weights_own_precision(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        averaged = rank["averaged"]
        assert same_bits(averaged["gathered"], averaged["weights"])
        assert averaged["validated"] > 0
        assert rank["sharded"]["validated"] > 0


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="all_gather=True with float8='rowwise': shards are gathered with one scale"):
        Trained(config_of(float8="rowwise", float8_parameters=GATHERED))
    nothing = dt.Float8Parameters(emulate=True, skip=("up", "down"))
    sizes = r"the sizes of model.layers.0.narrow \(8 x 32\), model.layers.0.back \(32 x 8\)"
    on_cpu = "float8='rowwise' on cpu: it has no products of float8"
    for parameters, told in ((dt.Float8Parameters(), on_cpu), (nothing, sizes)):
        trainer = Trained(config_of(float8="rowwise", float8_parameters=parameters))
        with trainer, pytest.raises(ConfigError, match=told):
            trainer.fit()
    monkeypatch.setattr("dream_trainer.trainer.mixins.float8.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"float8='rowwise' needs torchao, .* pip install torchao"):
        Trained(config_of(float8="rowwise"))
