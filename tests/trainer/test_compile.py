"""Compilation changes speed alone: the same losses and names, equal blocks compiled once, nothing compiled again."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from dream_trainer.parallel import axis
from tests.api import ConfigError, DistributedDataLoader, fsdp_modules
from tests.overlap import overlap_on_the_cpu
from tests.trainer import arithmetic, test_tensor_parallel as split
from tests.trainer.arithmetic import full
from tests.trainer.small import Built, Validates, fused_adamw, run_config
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


class Trained(Validates, Built, dt.DreamTrainer):
    make_model: Any = Net
    init_weights = dt.DreamTrainer.init_weights

    def __init__(self, config: Any) -> None:
        super().__init__(config, make_optimizer=fused_adamw)
        self.compilations: list[int] = []

    def configure_dataloaders(self) -> tuple[Any, Any]:
        x = torch.randn(4 * N_STEPS + 2, WIDTH, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(-1, keepdim=True))
        size = self.config.training_parameters.train_batch_size
        return DistributedDataLoader(data, size), DistributedDataLoader(data, size, drop_last=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.compilations.append(len(compilations))
        return result


class Whole(Trained):
    """A model without repeated blocks, of a class of PyTorch's own."""

    make_model = staticmethod(lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1)))


class Encoder(Trained):
    """Blocks of a class of PyTorch's own."""

    def make_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        blocks = nn.TransformerEncoder(layer, N_BLOCKS, enable_nested_tensor=False)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 1))


def config_of(experiment: str, *, backend: str | None, recompute: str = "none", n_ranks: int = 1) -> Any:
    return run_config(
        experiment,
        fsdp_parameters=dt.FSDPParameters(min_group_mib=0),
        device_parameters=dt.DeviceParameters(
            device="cpu", compile=backend is not None, activation_checkpointing=recompute
        ),
        training_parameters=dt.TrainingParameters(max_steps=N_STEPS, train_batch_size=4 // n_ranks),
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
            "compilations": trainer.compilations,
            "validation": trainer.evaluate()["val/loss"],
            "weights": {name: full(tensor).clone() for name, tensor in trainer.model.state_dict().items()},
            "groups": len(fsdp_modules(trainer.model)),
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


@pytest.mark.slow
def test_inductor_learns_what_the_eager_model_does() -> None:
    for found in run_world(observe_inductor, 2):
        assert found["compiled"]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-4)


def observe_inductor() -> dict[str, Any]:
    ways = {"eager": None, "compiled": "inductor"}
    return {way: run(Trained, config_of(way, backend=backend, n_ranks=2)) for way, backend in ways.items()}


@pytest.mark.pitfall(26)
def test_nothing_is_compiled_unless_asked_for() -> None:
    assert not dt.DeviceParameters().compile


def test_split_layers_are_not_compiled_where_pytorch_cannot() -> None:
    split = dt.DeviceParameters(device="cpu", tensor_parallel=2, compile=True)

    class Split(Trained):
        def apply_tensor_parallel(self, mesh: Any) -> None:
            raise AssertionError("not reached")

    config = replace(config_of("never", backend="aot_eager"), device_parameters=split)
    variable = replace(config, compile_parameters=dt.CompileParameters(dynamic=True))
    with pytest.raises(ConfigError, match="dynamic=True with tensor_parallel=2.*Use dynamic=False"):
        Split(variable).apply_compile()


CELL = split.Cell(2, "sequence", arithmetic.Case(accumulation=2, weighted=True, clip=0.05, optimizer="adamw"))


def overlapping() -> Any:
    config = split.config_of(CELL)
    return replace(
        config,
        device_parameters=replace(config.device_parameters, compile=True),
        compile_parameters=dt.CompileParameters(async_tensor_parallel=True),
    )


def test_an_overlap_without_compiled_blocks_is_refused() -> None:
    config = replace(
        split.config_of(split.Cell(1, "layers", arithmetic.Case())),
        compile_parameters=dt.CompileParameters(async_tensor_parallel=True),
    )
    refusal = pytest.raises(ConfigError, match=r"of compiled blocks. Set device_parameters.compile=True")
    with refusal, split.Trained(config) as trainer:
        trainer.fit()


def trained() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patches, overlap_on_the_cpu() as calls:
        patches.setattr(axis, "why_memory_is_not_shared", lambda group, device: None)
        with split.Trained(overlapping()) as trainer:
            trainer.fit()
            return {"norms": trainer.norms, "weights": split.weights_of(trainer.model), "calls": dict(calls)}


@pytest.mark.slow
def test_products_in_pieces_train_as_whole_ones_do() -> None:
    expected = arithmetic.reference(CELL.case)
    for result in run_world(trained, 2):
        assert min(result["calls"].values()) > 0
        assert len(result["calls"]) == 2
        assert result["norms"] == pytest.approx([float(norm) for norm in expected["norms"]], rel=1e-9)
        own = {f"model.{name}": weight for name, weight in result["weights"].items()}
        torch.testing.assert_close(own, expected["weights"], rtol=1e-9, atol=1e-9)
