"""A small model with mixtures of experts, trained by Dream Trainer on any mesh, and by a loop written by hand."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dream_trainer as dt
from tests.api import DistributedDataLoader, MoE
from tests.trainer.arithmetic import Tokens, full, step_by_hand
from tests.trainer.meshes import count, mean_loss
from tests.trainer.small import CaseConfig as Config, Noting, case_config

VOCABULARY, WIDTH, HIDDEN, LENGTH, STEPS, BATCH = 13, 8, 12, 8, 10, 8
RATE = 0.02


@dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh."""

    world_size: int = 1
    shard: int | str = 1
    replicate: int | str = "auto"
    accumulation: int = 1
    clip: float | None = 0.05
    recompute: str = "none"
    fused: bool = False
    experts: int = 4
    ep: int = 1
    cp: int = 1
    tp: int = 1
    sequence: bool = False
    backend: str | None = None
    overlap: bool = False
    rate: float = RATE


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, HIDDEN, case.experts, 2, n_shared=1, balance_rate=case.rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x + self.mix(x)))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Rows(Tokens):
    vocabulary, row_length, seed = VOCABULARY, LENGTH, 3


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean over labels, and their number."""
    tokens, labels = batch
    return mean_loss(model(tokens), labels), count(labels)


def split_dense_layers(model: Model, mesh: DeviceMesh, *, in_sequence: bool, whole_inside: bool = True) -> None:
    """All but routers and experts, and norms outside of a sequence. Mixtures have whole sequences, if they are to."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    stream = Shard(1) if in_sequence else Replicate()
    embedding = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    head = parallel.ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    parallel.parallelize_module(model, mesh, {"embedding": embedding, "head": head})
    shared = {"gate": parallel.ColwiseParallel(), "up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    whole = parallel.PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(Replicate(),),
        desired_output_layouts=(Shard(1),),
    )
    for block in model.blocks:
        plan = {"mix": parallel.ColwiseParallel(input_layouts=stream, output_layouts=stream)}
        plan |= {f"moe.shared.{name}": style for name, style in shared.items() if whole_inside}
        plan |= {"norm": parallel.SequenceParallel(use_local_output=not whole_inside)} if in_sequence else {}
        plan |= {"moe": whole} if in_sequence and whole_inside else {}
        parallel.parallelize_module(block, mesh, plan)


class Trained(Noting):
    loaded: dict[str, Tensor] | None = None

    def configure_models(self) -> None:
        self.model = Model(self.config.case)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        case = self.config.case
        size = BATCH * case.cp * case.tp // (case.world_size * case.accumulation)
        return (
            DistributedDataLoader(Rows(BATCH * STEPS), size, shuffle=False),
            DistributedDataLoader(Rows(7), 2, drop_last=False),
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=self.config.case.fused)
        self.initial = state_of(self.model)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        split_dense_layers(self.model, mesh, in_sequence=self.config.case.sequence)

    def cut_batch(self, batch: tuple[Tensor, Tensor], cut: Any) -> tuple[Tensor, Tensor]:
        return cut(batch[0]), cut(batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        loss, count = loss_of(self.model, batch)
        self.backward(loss, weight=count)
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss, count = loss_of(self.model, batch)
        return {"loss": loss}, count

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def on_load(self, path: Any) -> None:
        self.loaded = everything(self)


def config_of(case: Case, experiment: str = "case", **changes: Any) -> Config:
    return case_config(
        case,
        experiment,
        {"compile": case.backend is not None} | changes.pop("devices", {}),
        changes.pop("training", {}),
        compile_parameters=dt.CompileParameters(backend=case.backend or "eager"),
        **changes,
    )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole copies of weights and biases of balancing."""
    return {name: full(value.detach()).clone() for name, value in model.state_dict().items()}


def everything(trainer: Trained) -> dict[str, Tensor]:
    """Those and the optimizer's moments."""
    state = state_of(trainer.model)
    for name, p in trainer.model.named_parameters():
        state |= {f"{key} of {name}": full(value).clone() for key, value in trainer.optimizer.state[p].items()}
    return state


def reference(case: Case, start: dict[str, Tensor]) -> dict[str, Any]:
    """The same training by hand from `start`: one process, no framework."""
    model = Model(case)
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Rows(BATCH * STEPS)
    losses, norms, largest = [], [], []
    for tokens, labels in zip(data.tokens.split(BATCH), data.labels.split(BATCH), strict=True):
        loss, _ = loss_of(model, (tokens, labels))
        loss.backward()
        losses.append(loss.item())
        norms.append(step_by_hand(case, model, optimizer))
        largest.append(float(model.blocks[1].moe.loads.max() / (2 * BATCH * LENGTH / case.experts)))
        for block in model.blocks:
            loads = block.moe.loads.double()
            block.moe.balance_bias += case.rate * torch.sign(loads.mean() - loads)
            block.moe.loads.zero_()
    with torch.no_grad():
        model.eval()
        seen = [loss_of(model, (row[0][None], row[1][None])) for row in Rows(7)]  # type: ignore[attr-defined]
    loss = sum(loss * count for loss, count in seen) / sum(count for _, count in seen)
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "largest": largest, "val/loss": float(loss), "state": state}
