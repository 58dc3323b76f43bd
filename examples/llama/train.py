"""Trains a Llama on the Python standard library's own source, byte by byte.

    python examples/llama/train.py --model tiny --training.max-steps 50
    torchrun --nproc-per-node=2 examples/llama/train.py --model debug --model.n-layers 8

What is learned does not depend on how ranks divide the work, with `--device-parameters`; settings.py has all arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from model import Llama
from parallel import parallelize, sample
from settings import LlamaTrainerConfig, command_line
from text import load_corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from weights import to_hf

import dream_trainer as dt


class LlamaTrainer(dt.DreamTrainer):
    """Next-token prediction."""

    config: LlamaTrainerConfig

    def configure_models(self) -> None:
        self.model = Llama(self.config.model).to(getattr(torch, self.config.dtype))

    def model_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(self.model.layers)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        wanted = self.config.tensor_parallel_parameters
        parallelize(self.model, mesh, sequence_parallel=wanted.sequence_parallel, loss_parallel=wanted.loss_parallel)

    def init_weights(self) -> None:
        self.model.init_weights()

    def configure_dataloaders(self) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
        corpus = load_corpus(self.config.seq_len)
        train = DataLoader(corpus.train, self.micro_batch_size, shuffle=True, drop_last=True)
        return train, DataLoader(corpus.validation, self.config.training_parameters.val_batch_size)

    def configure_optimizers(self) -> None:
        self.optimizer = dt.build_optimizer(self.config.optimizer, self.model)

    def configure_schedulers(self) -> None:
        self.scheduler = dt.build_schedule(self.config.schedule, self.optimizer, total_steps=self.total_steps)

    def cut_batch(self, batch: Tensor, cut: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """Tokens, targets and positions of samples [batch, seq_len + 1], uint8: those that this rank has of them."""
        tokens, positions = batch.long(), torch.arange(batch.shape[1] - 1, device=batch.device)
        return cut(tokens[:, :-1]), cut(tokens[:, 1:]), cut(positions, dim=0)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor | None]:
        loss = self.loss(batch)
        return {"loss": loss, "grad_norm": self.step(self.model, self.optimizer, self.scheduler)}

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> tuple[dict[str, Tensor], int]:
        return {"loss": self.loss(batch)}, self.n_labels(batch[1])

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean nats per token; in training its gradients too."""
        tokens, targets, positions = batch
        # Only ranks that share sequences begin elsewhere than at 0; a pipeline cuts its inputs by samples.
        begins_elsewhere = self.config.device_parameters.context_parallel > 1
        inputs = (tokens, positions.expand_as(tokens)) if begins_elsewhere else (tokens,)
        return self.forward_backward(self.model, inputs, targets, self.mean_loss, weight=self.n_labels)

    def mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean nats per token."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def n_labels(self, targets: Tensor) -> int:
        """Over how many tokens that is the mean."""
        return targets.numel()


def main() -> None:
    """Trains from the command line, then shows or writes what was asked for."""
    config = command_line()
    with LlamaTrainer(config) as trainer:
        trainer.fit()
        text = sample(trainer) if config.sample_tokens else ""
        if text and trainer.world.is_main:
            print(f"\nThe model writes:\n\n{text}\n")
        if config.export_to is not None:
            to_hf(trainer.model, config.export_to, world=trainer.world, overwrite=True)


if __name__ == "__main__":
    main()
