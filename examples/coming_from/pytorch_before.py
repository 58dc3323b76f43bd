"""A classifier in plain PyTorch: the loop, a schedule, accumulation, clipping, validation, checkpoints.

    python examples/coming_from/pytorch_before.py
    python examples/coming_from/pytorch_before.py --resume

`pytorch_after.py` is the same as a trainer.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import Net, digits
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

EPOCHS = 2
BATCH_SIZE = 32
ACCUMULATE = 2
LEARNING_RATE = 5e-3


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)

    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # In order, and not shuffled: so that losses can be compared step by step.
    train_loader = DataLoader(digits("train"), batch_size=BATCH_SIZE)
    val_loader = DataLoader(digits("val"), batch_size=64)

    model = Net().to(device)
    torch.save(model.state_dict(), "initial.pt")  # what the comparison starts from
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    total_steps = EPOCHS * len(train_loader) // ACCUMULATE
    scheduler = OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=total_steps)
    first_epoch, best = 0, 0.0
    if options.resume:
        checkpoint = torch.load("last.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first_epoch, best = checkpoint["epoch"] + 1, checkpoint["best"]

    losses, accuracies = [], []
    for epoch in range(first_epoch, EPOCHS):
        model.train()
        loss_of_step = 0.0
        for batch_idx, (images, labels) in enumerate(train_loader):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels) / ACCUMULATE
            loss.backward()
            loss_of_step += loss.item()
            if (batch_idx + 1) % ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss_of_step)
                print(f"epoch {epoch} | step {len(losses)} | loss {loss_of_step:.6f}")
                loss_of_step = 0.0

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(device), labels.to(device)
                correct += (model(images).argmax(1) == labels).sum().item()
        accuracy = correct / len(val_loader.dataset)
        accuracies.append(accuracy)
        print(f"epoch {epoch} | accuracy {accuracy:.4f}")

        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "best.pt")
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**checkpoint, "scheduler": scheduler.state_dict(), "epoch": epoch, "best": best}, "last.pt")
    return {"train/loss": losses, "val/accuracy": accuracies}


if __name__ == "__main__":
    main()
