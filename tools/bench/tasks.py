"""What the benches of whole trainers train: models, real DataLoaders, and the plain PyTorch loops beside them.

The trainer and the plain loop run in one process and one thread, by turns of 50 batches: the plain loop does its turn
where the trainer's user code begins a batch, so that whatever slows the machine slows both. A figure is the median over
blocks of 200 batches, with one validation each where there are any; the first block does not count, since what happens
once (imports, opening files, the first collection of garbage) is no cost of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

Plain = Generator[None, None, None]
VALIDATE_EVERY, LOG_EVERY, TURN = 200, 10, 50
BATCH, READY = 32, 50


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """`n` samples with a label, some of them the same."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(BATCH * READY, 32, generator=generator)
        self.y = torch.randint(10, (BATCH * READY,), generator=generator)
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        index %= BATCH * READY
        return self.x[index], self.y[index]


class ReadyBatches(Samples):
    """The same as `n` batches, each made once."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.ready = list(zip(self.x.split(BATCH), self.y.split(BATCH), strict=True))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ready[index % READY]


class SampleStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same, as a stream."""

    def __init__(self, n: int) -> None:
        self.samples = Samples(n)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.samples[index] for index in range(len(self.samples)))


class Tokens(Dataset[tuple[Tensor]]):
    """`n` sequences of 65 tokens."""

    def __init__(self, n: int) -> None:
        self.tokens = torch.randint(512, (256, 65), generator=torch.Generator().manual_seed(0))
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.tokens[index % 256],)


class TinyGPT(nn.Module):
    """A decoder of `blocks` layers."""

    def __init__(self, width: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(512, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 512)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight
        logits: Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def mlp_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return TinyGPT()


def large_gpt() -> nn.Module:
    torch.manual_seed(0)
    return TinyGPT(width=512, blocks=8)


def gpt_loss(model: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        model: Builds the model.
        loss: Of a model and a batch.
        dataset: Makes one of this many batches of each rank.
        batch_size: None where the dataset's samples are batches.
        shuffle: Whether the loader shuffles.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    dataset: Callable[[int], Any]
    batch_size: int | None
    shuffle: bool

    def loader(self, batches: int, device: str = "cpu") -> DataLoader[Any]:
        """A loader as a user writes it for one process, with this many batches for each rank."""
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        dataset = self.dataset(batches * ranks)
        return DataLoader(dataset, self.batch_size, shuffle=self.shuffle, pin_memory=device == "cuda")

    def own_part(self, batches: int, device: str = "cpu") -> DataLoader[Any]:
        """A loader as a user writes it for this rank of the plain loop."""
        if not dist.is_initialized():
            return self.loader(batches, device)
        dataset = self.dataset(batches * dist.get_world_size())
        return DataLoader(dataset, self.batch_size, sampler=DistributedSampler(dataset, shuffle=self.shuffle))


TASKS = {
    "ready": Task(mlp, mlp_loss, ReadyBatches, None, False),
    "map": Task(mlp, mlp_loss, lambda batches: Samples(batches * BATCH), BATCH, True),
    "iterable": Task(mlp, mlp_loss, lambda batches: SampleStream(batches * BATCH), BATCH, False),
    "gpt": Task(gpt, gpt_loss, lambda batches: Tokens(batches * 4), 4, True),
    "gpt 25M": Task(large_gpt, gpt_loss, lambda batches: Tokens(batches * 4), 4, True),
}


def moved(batch: Any, device: str) -> Any:
    """A batch of tensors as a user moves it."""
    return batch if device == "cpu" else [part.to(device, non_blocking=True) for part in batch]


@dataclass(frozen=True)
class Row:
    """What is measured.

    Attributes:
        task: Of `TASKS`.
        kind: "bare": clipping and the step; "accumulation": the same every 4 batches; "everyday": with validation every
            200 steps, a JSONL line every 10, a schedule and a progress bar; "full": the same with everything else that
            Dream Trainer watches, beside the everyday loop.
        batches: Batches that are trained.
        device: On which; other trainers than ours run on the CPU alone.
    """

    task: str
    kind: str
    batches: int
    device: str = "cpu"

    @property
    def accumulation(self) -> int:
        return 4 if self.kind == "accumulation" else 1

    @property
    def steps(self) -> int:
        return self.batches // self.accumulation

    @property
    def is_everyday(self) -> bool:
        return self.kind in ("everyday", "full")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class Turns:
    """The plain loop's turns: `tick` where a trainer's user code begins a batch.

    Args:
        row: What is measured; its plain loop runs for as many batches.
        turn: Batches of a turn.
        block: Batches of a block.
    """

    def __init__(self, row: Row, *, turn: int = TURN, block: int = VALIDATE_EVERY) -> None:
        self._row, self._turn, self._block = row, turn, block
        self._plain: Iterator[None] | None = None
        self._count = 0
        self._left: tuple[float, float] | None = None
        self._ours: list[tuple[float, float]] = []
        self._theirs: list[tuple[float, float]] = []

    def tick(self) -> None:
        if self._count % self._turn == 0:
            arrived = _clocks(self._row.device)
            if self._plain is None:  # not before: some of them make the process group
                self._plain = (plain_everyday if self._row.is_everyday else plain_bare)(self._row)
            if self._left is not None:
                self._ours.append(_difference(arrived, self._left))
            for _ in range(self._turn):
                next(self._plain)
            self._left = _clocks(self._row.device)
            self._theirs.append(_difference(self._left, arrived))
        self._count += 1

    def result(self) -> dict[str, float]:
        """Medians over blocks: the ratios by CPU and by wall time, and microseconds of a plain batch and of ours."""
        turns = self._block // self._turn
        starts = range(turns, len(self._ours) - turns + 1, turns)
        blocks = [
            [sum(part[clock] for part in side[start : start + turns]) for side in (self._ours, self._theirs)]
            for clock in (0, 1)
            for start in starts
        ]
        cpu, wall = blocks[: len(starts)], blocks[len(starts) :]
        per_batch = 1e6 / self._block
        return {
            "cpu": statistics.median(ours / plain for ours, plain in cpu),
            "wall": statistics.median(ours / plain for ours, plain in wall),
            "plain_us": statistics.median(plain for _, plain in cpu) * per_batch,
            "more_us": statistics.median(ours - plain for ours, plain in cpu) * per_batch,
        }


def _clocks(device: str) -> tuple[float, float]:
    """CPU and wall seconds, once the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time(), time.perf_counter()


def _difference(later: tuple[float, float], earlier: tuple[float, float]) -> tuple[float, float]:
    return later[0] - earlier[0], later[1] - earlier[1]


def _plain_model(task: Task, device: str) -> nn.Module:
    model = task.model().to(device)
    return nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model


def plain_bare(row: Row) -> Plain:
    task = TASKS[row.task]
    model = _plain_model(task, row.device)
    optimizer = make_optimizer(model.parameters())
    for index, batch in enumerate(task.own_part(row.batches + TURN, row.device), start=1):
        loss = task.loss(model, moved(batch, row.device))
        if row.accumulation > 1:
            loss = loss / row.accumulation
        loss.backward()
        if index % row.accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield


def plain_everyday(row: Row) -> Plain:
    with everyday(row) as after_step:
        task = TASKS[row.task]
        model = _plain_model(task, row.device)
        optimizer = make_optimizer(model.parameters())
        scheduler, validation = CosineAnnealingLR(optimizer, row.steps + TURN), task.loader(10, row.device)
        for batch in task.own_part(row.batches + TURN, row.device):
            loss = task.loss(model, moved(batch, row.device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            after_step(model, loss, validation)
            yield


class everyday:
    """What a user writes around a step by hand: a JSONL line every 10, validation every 200, a progress bar."""

    def __init__(self, row: Row) -> None:
        from rich.progress import Progress

        self._task, self._device = TASKS[row.task], row.device
        self._log = open(f"plain-{time.time_ns()}.jsonl", "w")  # noqa: SIM115
        self._bar = Progress(auto_refresh=False)
        self._shown = self._bar.add_task("train", total=row.steps)
        self._losses: list[Tensor] = []
        self._step = 0

    def __enter__(self) -> Callable[[nn.Module, Tensor, Iterable[Any]], None]:
        self._bar.__enter__()
        return self._after_step

    def __exit__(self, *raised: Any) -> None:
        self._bar.__exit__(*raised)
        self._log.close()

    def _after_step(self, model: nn.Module, loss: Tensor, validation: Iterable[Any]) -> None:
        self._step += 1
        self._losses.append(loss.detach())
        if self._step % LOG_EVERY == 0:
            value = torch.stack(self._losses).mean().item()
            self._losses.clear()
            self._write({"train/loss": value, "time": time.time()})
            self._bar.update(self._shown, completed=self._step, description=f"loss {value:.4f}")
        if self._step % VALIDATE_EVERY == 0:
            model.eval()
            with torch.no_grad():
                found = [self._task.loss(model, moved(batch, self._device)) for batch in validation]
            self._write({"val/loss": torch.stack(found).mean().item()})
            model.train()

    def _write(self, values: dict[str, float]) -> None:
        self._log.write(json.dumps({"step": self._step, **values}) + "\n")
