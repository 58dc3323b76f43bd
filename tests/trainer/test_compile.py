"""Compiling and recomputing blocks change neither losses nor names: blocks compile once, and less memory is kept."""

import copy
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from dream_trainer.parallel import axis
from tests.api import ConfigError, DistributedDataLoader, Recomputed, fsdp_modules, repeated_blocks
from tests.operations import Operations
from tests.trainer import arithmetic, test_tensor_parallel as split
from tests.trainer.arithmetic import full, same_bits
from tests.trainer.small import FromSeed, Validates, fused_adamw, run_config, weights
from tests.worlds import run_world

WIDTH, N_BLOCKS, N_STEPS = 8, 4, 5


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        # Before the blocks, so that all of them are given what needs a gradient: else the first is compiled by itself.
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(N_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Trained(Validates, FromSeed):
    make_model: Any = Net

    def __init__(self, config: Any) -> None:
        super().__init__(config, make_optimizer=fused_adamw)
        self.compilations: list[int] = []
        self.gradients: list[Tensor] = []

    def configure_dataloaders(self) -> tuple[Any, Any]:
        x = torch.randn(4 * N_STEPS + 2, WIDTH, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(-1, keepdim=True))
        size = self.config.training_parameters.train_batch_size
        return DistributedDataLoader(data, size), DistributedDataLoader(data, size, drop_last=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.compilations.append(len(compilations))
        return result

    def pre_optimizer_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.gradients += [full(p.grad).clone() for p in model.parameters()]


class Whole(Trained):
    """A model without repeated blocks, of a class of PyTorch's own."""

    make_model = staticmethod(lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1)))


class Encoder(Trained):
    """Blocks of a class of PyTorch's own."""

    def make_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        blocks = nn.TransformerEncoder(layer, N_BLOCKS, enable_nested_tensor=False)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 1))


def config_of(
    experiment: str,
    *,
    backend: str | None = None,
    recompute: str = "none",
    every_n_blocks: int = 1,
    accumulation: int = 1,
    n_ranks: int = 1,
) -> Any:
    training = {"max_steps": N_STEPS, "gradient_accumulation_steps": accumulation, "train_batch_size": 4 // n_ranks}
    return run_config(
        experiment,
        fsdp_parameters=dt.FSDPParameters(min_group_mib=0),
        device_parameters=dt.DeviceParameters(
            device="cpu", compile=backend is not None, activation_checkpointing=recompute
        ),
        training_parameters=dt.TrainingParameters(**training),
        activation_checkpointing_parameters=dt.ActivationCheckpointingParameters(every_n_blocks=every_n_blocks),
        compile_parameters=dt.CompileParameters(backend=backend or "inductor", fullgraph=backend is not None),
    )


compilations: list[str] = []


def counting(graph: Any, inputs: Any, **options: Any) -> Any:
    """PyTorch's "aot_eager", noting each compilation."""
    from torch._dynamo.backends.debugging import aot_eager

    compilations.append(type(graph).__name__)
    return aot_eager(graph, inputs, **options)


def run(cls: type[Trained], config: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    compilations.clear()
    with cls(config) as trainer:
        trainer.fit()
        return {
            "losses": trainer.losses,
            "gradients": trainer.gradients,
            "compilations": trainer.compilations,
            "validation": trainer.evaluate()["val/loss"],
            "weights": {name: full(tensor).clone() for name, tensor in trainer.model.state_dict().items()},
            "groups": len(fsdp_modules(trainer.model)),
            "blocks": repeated_blocks(trainer.model) == list(trainer.model.layers) if cls is Dropping else None,
            "cost": cost(trainer.model) if cls is Dropping and trainer.world.world_size == 1 else None,
        }


def observe(directory: str, n_ranks: int) -> dict[str, Any]:
    """Trains eagerly and compiled, with and without recomputing, on this rank."""
    os.chdir(directory)
    torch._dynamo.register_backend(counting, name="counting")
    return {
        f"{way}, {recompute}": run(Trained, config_of(way, backend=backend, recompute=recompute, n_ranks=n_ranks))
        for recompute in ("none", "selective")
        for way, backend in {"eager": None, "compiled": "counting"}.items()
    }


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a world of one, and of a sharded one of two, saw."""
    return run_world(observe, request.param, str(tmp_path_factory.mktemp("compile")), request.param)


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_learn_what_eager_ones_do(ranks: list[dict[str, Any]], recompute: str) -> None:
    for found in ranks:
        eager, compiled = found[f"eager, {recompute}"], found[f"compiled, {recompute}"]
        assert len(eager["losses"]) == N_STEPS
        assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-4)
        assert compiled["validation"] == pytest.approx(eager["validation"], rel=1e-4)
        assert list(compiled["weights"]) == list(eager["weights"]) == list(Net().state_dict())
        assert compiled["groups"] == (N_BLOCKS + 1 if len(ranks) > 1 else 0)
        torch.testing.assert_close(compiled["weights"], eager["weights"], rtol=1e-3, atol=1e-4)


@pytest.mark.pitfall(23)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_equal_blocks_compile_once_and_nothing_compiles_again(ranks: list[dict[str, Any]], recompute: str) -> None:
    for found in ranks:
        assert found[f"eager, {recompute}"]["compilations"] == [0] * N_STEPS
        assert found[f"compiled, {recompute}"]["compilations"] == [1] * N_STEPS


@pytest.mark.pitfall(23)
@pytest.mark.pitfall(24)
def test_modules_of_pytorchs_own_classes_are_compiled_too() -> None:
    (found,) = run_world(observe_own, 1)
    for eager, compiled in found:
        assert compiled["compilations"] == [1] * N_STEPS
        assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-4)
        assert list(compiled["weights"]) == list(eager["weights"])


def observe_own() -> list[list[dict[str, Any]]]:
    torch._dynamo.register_backend(counting, name="counting")
    return [
        [run(cls, config_of(way, backend=backend)) for way, backend in {"eager": None, "compiled": "counting"}.items()]
        for cls in (Whole, Encoder)
    ]


@pytest.mark.parametrize(
    ("devices", "compiled", "told"),
    [
        (
            {"compile": True, "tensor_parallel": 2},
            {"dynamic": True},
            "dynamic=True with tensor_parallel=2.*Use dynamic",
        ),
        ({"compile": True, "expert_parallel": 2}, {"fullgraph": True}, "fullgraph=True with expert_parallel=2 is not"),
        ({}, {"async_tensor_parallel": True}, r"of compiled blocks. Set device_parameters.compile=True"),
    ],
)
def test_what_cannot_be_compiled_is_refused(devices: dict[str, Any], compiled: dict[str, Any], told: str) -> None:
    devices, compiled = dt.DeviceParameters(device="cpu", **devices), dt.CompileParameters(**compiled)
    with pytest.raises(ConfigError, match=told):
        split.Trained(run_config(device_parameters=devices, compile_parameters=compiled))


CASE = arithmetic.Case(tp=2, accumulation=2, weighted=True, clip=0.05, optimizer="adamw")


@contextmanager
def overlap_on_the_cpu() -> Iterator[Counter[str]]:
    """Until it ends, the compiler fuses as on GPUs that share memory, into slow forms; how often each was called."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    calls: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")

    def counted(name: str, operation: Any) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return operation(*args, **kwargs)

        library.impl(name, run, "CPU")

    counted("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback)
    counted("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback)
    with pytest.MonkeyPatch.context() as patches, symmetric_memory._test_mode():
        patches.setattr(torch.distributed, "is_nccl_available", lambda: True)
        try:
            yield calls
        finally:
            library._destroy()


def overlapping() -> Any:
    config = arithmetic.config_of(CASE)
    devices = replace(config.device_parameters, compile=True)
    compiled = dt.CompileParameters(async_tensor_parallel=True)
    return replace(config, device_parameters=devices, compile_parameters=compiled)


def trained() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patches, overlap_on_the_cpu() as calls:
        patches.setattr(axis, "why_memory_is_not_shared", lambda group, device: None)
        with split.Trained(overlapping()) as trainer:
            trainer.fit()
            return {"norms": trainer.norms, "weights": weights(trainer.model), "calls": dict(calls)}


@pytest.mark.slow
def test_products_in_pieces_train_as_whole_ones_do() -> None:
    expected = arithmetic.reference(CASE)
    for result in run_world(trained, 2):
        assert min(result["calls"].values()) > 0
        assert len(result["calls"]) == 2
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        torch.testing.assert_close(result["weights"], expected["weights"], rtol=1e-9, atol=1e-9)


class Dropping(Trained):
    make_model = staticmethod(lambda: Net(dropout=0.3))


def cost(model: Net) -> dict[str, int]:
    """What one forward and backward of a model in one process keeps and computes."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    x = torch.ones(2, WIDTH, requires_grad=True)
    with Operations() as operations:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(x).sum()
        loss.backward()
    counts = Counter(operations.names)
    return {
        "bytes": sum(kept),
        "matrix products": counts["addmm"] + counts["mm"],
        "activations": counts["gelu"],
    }


WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "every second": {"recompute": "full", "every_n_blocks": 2},
}


def recomputing() -> dict[str, dict[str, Any]]:
    """Trains in each way on this rank."""
    ranks = int(os.environ["WORLD_SIZE"])
    return {
        way: run(Dropping, config_of(f"{way} of {ranks}", accumulation=2, n_ranks=2, **options))
        for way, options in WAYS.items()
    }


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    """What each rank of a world of one, and of a sharded one of two, saw."""
    return {size: run_world(recomputing, size) for size in (1, 2)}


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_recomputing_changes_no_bit_name_or_shard_also_with_dropout(worlds: Any, size: int, way: str) -> None:
    for found in worlds[size]:
        assert len(found[way]["losses"]) == 2 * N_STEPS
        assert found[way]["losses"] == found["none"]["losses"]
        assert len(found[way]["gradients"]) == len(found["none"]["gradients"]) > 0
        assert all(map(torch.equal, found[way]["gradients"], found["none"]["gradients"]))
        assert same_bits(found[way]["weights"], found["none"]["weights"])
        assert list(found[way]["weights"]) == list(Net().state_dict())
        assert found[way]["groups"] == (N_BLOCKS + 1 if size > 1 else 0)
        assert found[way]["blocks"]


def test_less_is_kept_and_no_more_than_asked_for_is_computed_again(worlds: Any) -> None:
    none, whole, selective, second = (worlds[1][0][way]["cost"] for way in WAYS)
    matrices = 2 * N_BLOCKS + 2
    backward = 2 * matrices  # towards weights and towards inputs
    assert none["matrix products"] == matrices + backward
    assert none["activations"] == N_BLOCKS
    # In backward a block stops as soon as all that it needs is there: its last product is not computed again.
    assert whole["matrix products"] == none["matrix products"] + N_BLOCKS
    assert whole["activations"] == 2 * N_BLOCKS
    assert second["activations"] == N_BLOCKS + N_BLOCKS // 2
    assert selective["matrix products"] == none["matrix products"]
    assert selective["activations"] == 2 * N_BLOCKS
    assert whole["bytes"] < 0.25 * none["bytes"]
    assert whole["bytes"] < second["bytes"] < 0.7 * none["bytes"]


@pytest.mark.pitfall(24)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_a_copied_model_computes_with_its_own_weights(mode: str) -> None:
    with Dropping(config_of(mode, recompute=mode)) as trainer:
        trainer.fit()
        twin = copy.deepcopy(trainer.model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        x = torch.ones(2, WIDTH)
        assert twin(x).abs().max() == 0
        twin(x).sum().backward()
        assert all(parameter.grad is not None for parameter in twin.parameters())
        assert trainer.model(x).abs().max() > 0
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        assert trainer.get_optimizers_by_model(twin) == []


def test_a_model_without_blocks_keeps_activations_and_alone_is_an_error() -> None:
    trainer = Trained(config_of("full", recompute="full"))
    trainer.model, trainer.critic = Net(), nn.Linear(WIDTH, 1)
    trainer.frozen_features = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    trainer.apply_activation_checkpointing()
    assert isinstance(trainer.model.layers[0], Recomputed)
    assert type(trainer.critic) is type(trainer.frozen_features) is nn.Linear
    alone = Trained(config_of("full", recompute="full"))
    alone.model = nn.Linear(WIDTH, 1)
    with pytest.raises(ConfigError, match="model 'model' has no repeated blocks to checkpoint. Override model_blocks"):
        alone.apply_activation_checkpointing()
