"""A small model under peft's adapters, its trainer, and the same loop as peft's users write it."""

import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.trainer.small import weights

VOCABULARY, WIDTH, LENGTH, BATCH = 24, 8, 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embed is None else self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def lora(**changes: Any) -> LoraConfig:
    """Adapters of linear layers and of the embedding, and a head that is trained whole."""
    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["up", "down", "embed"], "modules_to_save": ["head"]}
    return LoraConfig(**(settings | changes))


def base_values() -> dict[str, Tensor]:
    """The base as its author saved it."""
    torch.manual_seed(3)
    return {name: value.detach().clone() for name, value in Net().double().state_dict().items()}


def their_base() -> Net:
    base = Net().double()
    base.load_state_dict(base_values())
    return base


def token_rows() -> Tensor:
    return torch.randint(VOCABULARY, (48, LENGTH + 1), generator=torch.Generator().manual_seed(7))


def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


class Adapted(dt.DreamTrainer):
    """LoRA on a base that is loaded from `base.safetensors`."""

    changes: dict[str, Any] = {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.losses: list[float] = []
        self.first: dict[str, Tensor] = {}

    def configure_models(self) -> None:
        self.model = get_peft_model(Net().double(), lora(**self.changes))

    def load_pretrained(self) -> None:
        dt.load_base_weights(self.model, "base.safetensors")

    def apply_tensor_parallel(self, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {}
        for name in (f"base_model.model.blocks.{block}" for block in range(3)):
            plan |= {f"{name}.up.base_layer": ColwiseParallel(), f"{name}.up.lora_B.default": ColwiseParallel()}
            plan |= {f"{name}.down.base_layer": RowwiseParallel(), f"{name}.down.lora_A.default": RowwiseParallel()}
        parallelize_module(self.model, mesh, plan)

    def configure_optimizers(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.02, fused=True)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(token_rows(), self.config.training_parameters.train_batch_size), None

    def pre_fit(self) -> None:
        self.first = self.weights()

    def weights(self) -> dict[str, Tensor]:
        """In whole, of all stages."""
        own = weights(self.model)
        return {name: value for part in self.world.all_gather_object(own) for name, value in part.items()}

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = self.forward_backward(self.model, (batch[:, :-1],), batch, loss_of)
        self.step(self.model, self.optimizer)
        self.losses.append(self.world_mean(loss))
        return {"loss": loss}

    def world_mean(self, loss: Tensor) -> float:
        return sum(self.world.all_gather_object(loss.item())) / self.world.world_size


class Dora(Adapted):
    changes = {"use_dora": True, "target_modules": ["up", "down"], "modules_to_save": None}


LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"dp_shard": 2, "dp_replicate": 1},
    "replicas": {"dp_shard": 1, "dp_replicate": 2},
    "tensor parallel": {"dp_shard": 1, "dp_replicate": 1, "tensor_parallel": 2},
    "pipeline": {"dp_shard": 1, "dp_replicate": 1, "pipeline_parallel": 2},
}


def make(
    experiment: str, steps: int, layout: str | None = None, kind: type[Adapted] = Adapted, **checkpoint: Any
) -> Adapted:
    """A trainer of `steps` steps of 8 rows each."""
    layout_of_ranks = LAYOUTS[layout] if layout else {}
    readers = 1 if layout in (None, "tensor parallel", "pipeline") else 2
    settings = {"save_every_n_epochs": None, "save_frozen": False} | checkpoint
    return kind(
        dt.DreamTrainerConfig(
            project="tests",
            group="adapters",
            experiment=experiment,
            device_parameters=dt.DeviceParameters(device="cpu", **layout_of_ranks),
            training_parameters=dt.TrainingParameters(max_steps=steps, train_batch_size=BATCH // readers),
            logger_parameters=dt.LoggerParameters(loggers=()),
            checkpoint_parameters=dt.CheckpointParameters(**settings),
        )
    )


def train(experiment: str, steps: int, layout: str | None = None, **checkpoint: Any) -> dict[str, Any]:
    """Trains, exports the adapters and the merged weights, and returns what a test compares."""
    with make(experiment, steps, layout, **checkpoint) as trainer:
        trainer.fit()
        trainer.export(f"{experiment}-adapters", overwrite=True)
        trainer.export(f"{experiment}-merged", merge_adapters=True, overwrite=True)
        return {"losses": trainer.losses, "weights": trainer.weights(), "first": trainer.first}


def train_layouts(directory: str) -> dict[str, Any]:
    """On two ranks: each layout in one go, and in two parts."""
    os.chdir(directory)
    return {
        layout: {"straight": train(layout, 6, layout), "cut": train(f"{layout}-cut", 3, layout)} for layout in LAYOUTS
    }


def prepare(directory: Path) -> None:
    """Writes the base."""
    save_file(base_values(), directory / "base.safetensors")


def by_hand(first: dict[str, Tensor], steps: int) -> tuple[nn.Module, list[float]]:
    """The loop with peft alone, in one process, from the given first weights."""
    model = get_peft_model(their_base(), lora())
    model.load_state_dict(first)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, fused=True)
    losses = []
    for rows in token_rows().split(BATCH)[:steps]:
        loss = loss_of(model(rows[:, :-1]), rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses
