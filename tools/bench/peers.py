"""The tasks of `tasks.py` by other trainers, each as its documentation writes it, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn as nn
from tasks import LOG_EVERY, TASKS, VALIDATE_EVERY, Row, Turns, everyday, make_optimizer
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

RANKS = int(os.environ.get("WORLD_SIZE", 1))


def fabric(row: Row, turns: Turns) -> None:
    from contextlib import ExitStack

    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto")
    fabric.launch()
    task = TASKS[row.task]
    model = task.model()
    model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
    scheduler = CosineAnnealingLR(optimizer, row.steps)
    loader, validation = fabric.setup_dataloaders(task.loader(row.batches), task.loader(10))
    with ExitStack() as stack:
        after_step = stack.enter_context(everyday(row)) if row.is_everyday else None
        for index, batch in enumerate(loader, start=1):
            turns.tick()
            steps = index % row.accumulation == 0
            with fabric.no_backward_sync(model, enabled=not steps):
                loss = task.loss(model, batch)
                fabric.backward(loss / row.accumulation if row.accumulation > 1 else loss)
            if steps:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                if after_step is not None:
                    scheduler.step()
                    after_step(model, loss, validation)


def accelerate(row: Row, turns: Turns) -> None:
    from contextlib import ExitStack

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=row.accumulation)
    task = TASKS[row.task]
    model = task.model()
    optimizer = make_optimizer(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, row.steps)
    model, optimizer, scheduler, loader, validation = accelerator.prepare(
        model, optimizer, scheduler, task.loader(row.batches), task.loader(10)
    )
    with ExitStack() as stack:
        after_step = stack.enter_context(everyday(row)) if row.is_everyday else None
        for batch in loader:
            turns.tick()
            with accelerator.accumulate(model):
                loss = task.loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if after_step is not None:
                    scheduler.step()
                optimizer.zero_grad()
            if after_step is not None:
                after_step(model, loss, validation)


def lightning(row: Row, turns: Turns) -> None:
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    task = TASKS[row.task]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            turns.tick()
            loss = task.loss(self.model, batch)
            if row.is_everyday:
                self.log("train/loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", task.loss(self.model, batch))

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.parameters())
            if not row.is_everyday:
                return optimizer
            scheduler = {"scheduler": CosineAnnealingLR(optimizer, row.steps), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_steps=row.steps,
        gradient_clip_val=1.0,
        accumulate_grad_batches=row.accumulation,
        logger=CSVLogger(".") if row.is_everyday else False,
        log_every_n_steps=LOG_EVERY,
        val_check_interval=VALIDATE_EVERY if row.is_everyday else None,
        check_val_every_n_epoch=None if row.is_everyday else 1,
        num_sanity_val_steps=0,
        enable_progress_bar=row.is_everyday,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), task.loader(row.batches), task.loader(10) if row.is_everyday else None)


def hf_trainer(row: Row, turns: Turns) -> None:
    from transformers import Trainer, TrainingArguments

    task = TASKS[row.task]

    class OnTask(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(task.loader(row.batches))

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return self.accelerator.prepare(task.loader(10))

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            turns.tick()
            return task.loss(model, inputs)

        def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return task.loss(model, inputs), None, None

    model = task.model()
    optimizer = make_optimizer(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, row.steps)
    arguments = TrainingArguments(
        output_dir="hf",
        use_cpu=True,
        max_steps=row.steps,
        max_grad_norm=1.0,
        gradient_accumulation_steps=row.accumulation,
        logging_strategy="steps" if row.is_everyday else "no",
        logging_steps=LOG_EVERY,
        eval_strategy="steps" if row.is_everyday else "no",
        eval_steps=VALIDATE_EVERY,
        save_strategy="no",
        report_to=[],
        disable_tqdm=not row.is_everyday,
    )
    data = task.dataset(10)
    OnTask(model, arguments, train_dataset=data, eval_dataset=data, optimizers=(optimizer, scheduler)).train()


Runner = Callable[[Row, Turns], None]
PEERS: dict[str, tuple[str, Runner]] = {
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
    "HF Trainer": ("accelerate", hf_trainer),
    "Lightning": ("lightning", lightning),
}


def installed() -> list[str]:
    """The peers that can be run here."""
    found = [name for name, (package, _) in PEERS.items() if find_spec(package) is not None]
    return [name for name in found if name != "HF Trainer" or find_spec("transformers") is not None]
