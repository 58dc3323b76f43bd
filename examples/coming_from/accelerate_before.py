"""A classifier with Accelerate: prepare, accumulate, clip, gather, checkpoints.

    python examples/coming_from/accelerate_before.py

`accelerate_after.py` is the same as a trainer.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from digits import Net, digits
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

EPOCHS = 2
LEARNING_RATE = 5e-3


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-from", help="such as accelerate/checkpoints/checkpoint_1")
    options = parser.parse_args(arguments)

    project = ProjectConfiguration("accelerate", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
    set_seed(42)

    # In order, and not shuffled: so that losses can be compared step by step.
    train_loader = DataLoader(digits("train"), batch_size=32)
    val_loader = DataLoader(digits("val"), batch_size=64)
    model = Net()
    if accelerator.is_main_process:
        torch.save(model.state_dict(), "initial.pt")  # what the comparison starts from
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    total_steps = EPOCHS * len(train_loader) // accelerator.gradient_accumulation_steps
    scheduler = CosineAnnealingLR(optimizer, total_steps)
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )
    first_epoch = 0
    if options.resume_from:
        accelerator.load_state(options.resume_from)
        first_epoch = int(Path(options.resume_from).name.removeprefix("checkpoint_")) + 1

    losses, accuracies = [], []
    for epoch in range(first_epoch, EPOCHS):
        model.train()
        micro_batches = []
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            micro_batches.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                losses.append(sum(micro_batches) / len(micro_batches))
                accelerator.print(f"epoch {epoch} | step {len(losses)} | loss {losses[-1]:.6f}")
                micro_batches = []

        model.eval()
        correct = []
        for images, labels in val_loader:
            with torch.no_grad():
                predictions = model(images).argmax(1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct.append(predictions == labels)
        accuracies.append(torch.cat(correct).float().mean().item())
        accelerator.print(f"epoch {epoch} | accuracy {accuracies[-1]:.4f}")
        accelerator.save_state()
    accelerator.end_training()
    return {"train/loss": losses, "val/accuracy": accuracies}


if __name__ == "__main__":
    main()
