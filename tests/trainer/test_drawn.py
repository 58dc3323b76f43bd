"""Trainers drawn at random train what a plain PyTorch loop does, to 1e-10 in float64, stopped and resumed or not.

`--all` runs 2,000 examples, 1,700 alone and 300 on two ranks; otherwise there are 38. The seed is fixed, so what fails
once fails again, and hypothesis prints the smallest case it finds.

A `Case` is all there is to a run: optimizer, data, accumulation, weights, clipping, limits, stops. `run`
trains it with Dream Trainer in parts, as the stops say; `by_hand` trains in one process what it should have seen.
"""

import itertools
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, Dataset, default_collate

import dream_trainer as dt
from dream_trainer.trainer.step import gradients as step_gradients
from tests.api import DistributedDataLoader, PerRankLoader, epoch_order
from tests.trainer.arithmetic import fill, same_bits
from tests.trainer.resumable import state_tensors
from tests.trainer.small import (
    CaseConfig as Config,
    filled_network,
    mean_square,
    network,
    run_config,
    sharded,
    weights,
)
from tests.worlds import KeptWorld

WIDTH, SEED = 3, 7
DEALT = ("own", "plain")
"""Loaders whose samples the trainer deals to ranks; every other is a rank's own."""

Numbers = list[int]
Window = list[list[Numbers]]
"""By micro-batch and rank, the samples of one optimizer step."""


@dataclass(frozen=True)
class Case:
    """One run."""

    ranks: int = 1
    layout: str = "replicate"
    sync_policy: str = "no_sync"
    recompute: str = "none"
    optimizer: str = "sgd"
    scheduler: bool = False
    accumulation: int = 1
    by_global_batch: bool = False
    weight: str = "none"
    clip: str = "none"
    loader: str = "own"
    shuffle: bool = False
    drop_last: bool = False
    batch_size: int = 2
    length: int = 8
    more: int = 0
    """Samples that each rank has more than the one before, where they are its own."""
    epochs: int = 1
    max_steps: int | None = None
    stops: tuple[int, ...] = ()
    """Optimizer steps after which the run is stopped, to go on as another trainer."""
    moves: bool = False
    """Whether what follows the last stop is trained by one rank, with more accumulation."""


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    """Every case of so many ranks that the trainer has no reason to refuse."""

    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    yes = st.booleans()
    loader = choose("own", "own", "plain", "batches", "stateful", "handwritten")
    size, accumulation = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    drop_last, weight = draw(yes), choose("none", "int", "tensor")
    if loader == "own" and ranks > 1 and not drop_last and weight == "none":
        weight = "int"  # micro-batches of unequal sizes count alike only so
    step = size * ranks * accumulation
    layout = choose("replicate", "overlapped", "fsdp")
    case = Case(
        ranks=ranks,
        layout=layout,
        sync_policy=choose("no_sync", "reduce_scatter_each", "defer_all_reduce") if ranks > 1 else "no_sync",
        recompute=choose("none", "none", "full", "selective"),
        optimizer=choose("sgd", "adamw", "fused"),
        scheduler=draw(yes),
        accumulation=accumulation,
        by_global_batch=draw(yes) and loader in DEALT,
        weight=weight,
        clip=choose("none", "norm", "value"),
        loader=loader,
        shuffle=draw(yes),
        drop_last=drop_last,
        batch_size=size,
        length=draw(st.integers(step, 2 * step + 7)),
        more=draw(st.integers(0, 2 * size)),
        epochs=draw(st.integers(1, 3)),
        max_steps=draw(st.none() | st.integers(1, 6)),
    )
    last = len(limited(case, [n for _ in range(case.epochs) for n in range(steps_per_epoch(case))]))
    stops = draw(st.lists(st.integers(1, last - 1), max_size=2, unique=True)) if last > 1 else []
    # Fewer ranks see the same windows only where those are whole, and every micro-batch is a rank's.
    may_move = ranks > 1 and loader in DEALT and drop_last
    return replace(case, stops=tuple(sorted(stops)), moves=bool(stops) and may_move and draw(yes))


# -- what should be trained


def limited(case: Case, windows: list[Any]) -> list[Any]:
    return windows if case.max_steps is None else windows[: case.max_steps]


def own_samples(case: Case, rank: int) -> Numbers:
    """What one rank's loader holds, where each has its own."""
    return [100 * rank + number for number in range(case.length + case.more * rank)]


def batches_per_pass(case: Case) -> int:
    """Batches of every rank's own loader in one pass: as many as the shortest has."""
    fill_up = math.floor if case.drop_last and case.loader != "batches" else math.ceil
    return min(fill_up(len(own_samples(case, rank)) / case.batch_size) for rank in range(case.ranks))


def steps_per_epoch(case: Case) -> int:
    if case.loader in DEALT:
        return len(dealt(case, 0))
    return math.ceil(batches_per_pass(case) / case.accumulation)


def dealt(case: Case, epoch: int) -> list[Window]:
    """The windows of one pass over data that the trainer deals to ranks: consecutive samples to consecutive ranks."""
    order = epoch_order(SEED, epoch, case.length) if case.shuffle else torch.arange(case.length)
    assert sorted(order.tolist()) == list(range(case.length))
    chunk = case.batch_size * case.ranks
    if case.drop_last or (case.loader == "plain" and case.ranks > 1):
        rest = case.length % (chunk * case.accumulation)
    else:
        rest = case.length % chunk if case.length % chunk < case.ranks else 0
    chunks = order[: case.length - rest].split(chunk)
    micro = [[part.tolist() for part in chunk.tensor_split(case.ranks)] for chunk in chunks]
    return in_windows(case, micro)


def in_windows(case: Case, micro: list[list[Numbers]]) -> list[Window]:
    return [micro[start : start + case.accumulation] for start in range(0, len(micro), case.accumulation)]


def windows_of(case: Case, seen: Sequence[list[Numbers]]) -> list[Window]:
    """The windows that ought to be trained; where a loader draws the order, with the samples that ranks saw.

    Args:
        case: The run.
        seen: By rank, the samples of each batch.
    """
    if case.loader in DEALT:
        return limited(case, [window for epoch in range(case.epochs) for window in dealt(case, epoch)])
    count, windows = batches_per_pass(case), []
    for epoch in range(case.epochs):
        passes = [batches[epoch * count : (epoch + 1) * count] for batches in seen]
        for rank, batches in enumerate(passes):
            numbers, own = [number for batch in batches for number in batch], own_samples(case, rank)
            assert len(set(numbers)) == len(numbers)  # none twice
            assert set(numbers) <= set(own)
            if case.loader == "batches" or (case.loader == "stateful" and not case.shuffle):
                assert numbers == own[: len(numbers)]
            is_cut = case.max_steps is not None and case.max_steps < (epoch + 1) * steps_per_epoch(case)
            if not is_cut:
                assert len(batches) == count
                assert all(len(batch) == case.batch_size for batch in batches[:-1])
        windows += in_windows(case, [list(ranks) for ranks in zip(*passes, strict=True)])
    return limited(case, windows)


# -- data


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Points with a target; everything about one follows from its number."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        number = self.numbers[index]
        x = torch.sin(torch.arange(1, WIDTH + 1, dtype=torch.float64) * (number + 1) * 1.7)
        return x, x.sum(0, keepdim=True).cos(), number


def batch_of(numbers: Numbers) -> Any:
    data = Samples(numbers)
    return default_collate([data[index] for index in range(len(data))])


class HandWritten:
    """Draws its order from global generators and keeps no state."""

    def __init__(self, case: Case, numbers: Numbers) -> None:
        self.case, self.numbers = case, numbers

    def __iter__(self) -> Iterator[Any]:
        numbers = [self.numbers[index] for index in torch.randperm(len(self.numbers)).tolist()]
        size = self.case.batch_size
        for start in range(0, len(numbers) - (size - 1 if self.case.drop_last else 0), size):
            yield batch_of(numbers[start : start + size])


def make_loader(case: Case, rank: int) -> Any:
    size, numbers = case.batch_size, list(range(case.length)) if case.loader in DEALT else own_samples(case, rank)
    options: dict[str, Any] = {"drop_last": case.drop_last}
    if case.loader == "own":
        return DistributedDataLoader(Samples(numbers), size, shuffle=case.shuffle, **options)
    if case.loader == "plain":
        return DataLoader(Samples(numbers), size, shuffle=case.shuffle, **options)
    if case.loader == "batches":
        return PerRankLoader([batch_of(numbers[start : start + size]) for start in range(0, len(numbers), size)])
    if case.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return PerRankLoader(StatefulDataLoader(Samples(numbers), size, shuffle=case.shuffle, **options))
    return PerRankLoader(HandWritten(case, numbers))


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    # The large epsilon keeps gradients that are 0 but for rounding from becoming steps of full size.
    fused = case.optimizer == "fused"
    return torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1, eps=1e-4, fused=fused)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def weight_of(case: Case, numbers: Numbers) -> int:
    """0 to 3: some batches have nothing to learn from, and some windows nothing but such."""
    return 1 if case.weight == "none" else (sum(numbers) + len(numbers)) % 4


# -- by Dream Trainer


class Drawn(dt.BaseTrainer, dt.SetupMixin, dt.CheckpointMixin, dt.ActivationCheckpointingMixin):
    config: Config

    def __init__(self, config: Config, stop_after: int | None) -> None:
        super().__init__(config)
        self.stop_after = stop_after
        self.seen: list[Numbers] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_models(self) -> None:
        self.model = network()

    def init_weights(self) -> None:
        fill(self.model)

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model[0])

    def configure_optimizers(self) -> None:
        self.optimizer = make_optimizer(self.config.case, self.model)

    def configure_schedulers(self) -> None:
        if self.config.case.scheduler:
            self.scheduler = make_scheduler(self.optimizer)

    def configure_dataloaders(self) -> tuple[Any, None]:
        return make_loader(self.config.case, self.world.dp_rank), None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        case, numbers = self.config.case, batch[2].tolist()
        self.seen.append(numbers)
        weight: Any = weight_of(case, numbers)
        loss = mean_square(self.model, batch)
        self.backward(loss, weight={"none": None, "int": weight, "tensor": torch.tensor(weight)}[case.weight])
        self.losses.append(loss.item())
        if not self.is_accumulating_gradients:
            self.norms.append(float(self.step(self.model, self.optimizer, self.scheduler if case.scheduler else None)))
        return {}

    def post_train_step(self) -> None:
        if self.global_step == self.stop_after and self.world.rank == self.world.world_size - 1:
            self.request_stop("the test says so")


def make_config(case: Case, experiment: str, *, saves: bool) -> Config:
    window = case.batch_size * case.ranks * case.accumulation
    accumulation = (
        {"global_batch_size": window} if case.by_global_batch else {"gradient_accumulation_steps": case.accumulation}
    )
    clips = {"none": {}, "norm": {"gradient_clip_norm": 0.3}, "value": {"gradient_clip_value": 0.05}}
    return run_config(
        experiment,
        Config,
        seed=SEED,
        device_parameters=dt.DeviceParameters(
            device="cpu", activation_checkpointing=case.recompute, overlap_reduce=case.layout == "overlapped"
        ),
        training_parameters=dt.TrainingParameters(
            n_epochs=case.epochs,
            max_steps=case.max_steps,
            train_batch_size=case.batch_size,
            sync_policy=case.sync_policy,
            val_every_n_epochs=None,
            **accumulation,
            **clips[case.clip],
        ),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None, save_at_end=saves),
        case=case,
    )


def run(case: Case, experiment: str, stops: tuple[int | None, ...]) -> dict[str, Any]:
    """Trains up to each stop (None: to the end), each time by a new trainer, in `runs` of the working directory."""
    found: dict[str, Any] = {"seen": [], "losses": [], "norms": []}
    for stop in stops:
        torch.manual_seed(hash(stop))  # as a new process would find the generators in any state
        random.seed(stop)
        config = make_config(case, experiment, saves=stop is not None)
        with (sharded(Drawn) if case.layout == "fsdp" else Drawn)(config, stop) as trainer:
            trainer.fit()
            assert stop is None or trainer.global_step == stop
            for name in ("seen", "losses", "norms"):
                found[name] += getattr(trainer, name)
            found["tensors"] = state_tensors(trainer)
            found["counters"] = trainer.global_step, trainer.samples_seen, trainer.current_epoch
    return found


# -- by hand


def by_hand(case: Case, windows: Sequence[Window]) -> dict[str, Any]:
    """The same in one process, with nothing but PyTorch; losses by rank."""
    model = filled_network()
    optimizer = make_optimizer(case, model)
    scheduler = make_scheduler(optimizer)
    losses: list[list[float]] = [[] for _ in range(case.ranks)]
    norms: list[float] = []
    for window in windows:
        total = sum(weight_of(case, numbers) for ranks in window for numbers in ranks)
        for rank, numbers in ((rank, numbers) for ranks in window for rank, numbers in enumerate(ranks)):
            loss = mean_square(model, batch_of(numbers))
            (loss * (weight_of(case, numbers) / max(total, 1))).backward()
            losses[rank].append(loss.item())
        norms.append(clip_grad_norm_(model.parameters(), 0.3 if case.clip == "norm" else math.inf).item())
        if case.clip == "value":
            clip_grad_value_(model.parameters(), 0.05)
        if total:
            optimizer.step()
        optimizer.zero_grad()
        if case.scheduler:
            scheduler.step()
    return {"weights": weights(model), "losses": losses, "norms": norms}


# -- the examples

Runner = Callable[[Case, str, tuple[int | None, ...]], list[dict[str, Any]]]
COUNTER = itertools.count()


def run_there(case: Case, experiment: str, stops: tuple[int | None, ...]) -> dict[str, Any]:
    """On a rank of the kept world."""
    step_gradients.BUCKET_BYTES = 100  # so that some leave before a backward is over
    return run(case, experiment, stops)


def check(case: Case, train: Runner) -> None:
    """Trains `case` straight and in parts, and compares both with each other and with the loop by hand."""
    name = f"case-{next(COUNTER)}"
    straight = train(case, f"{name}-straight", (None,))
    try:
        compare_with_the_loop_by_hand(case, straight)
        if case.stops:
            parts = train(case, f"{name}-parts", case.stops if case.moves else (*case.stops, None))
            if case.moves:
                finish_on_one_rank(case, f"{name}-parts", straight)
            else:
                for found, expected in zip(parts, straight, strict=True):
                    assert_equal_bits(found, expected)
    finally:
        for left in Path("runs/tests/drawn").glob(f"{name}-*"):
            shutil.rmtree(left)


def compare_with_the_loop_by_hand(case: Case, ranks: list[dict[str, Any]]) -> None:
    seen = [rank["seen"] for rank in ranks]
    windows = windows_of(case, seen)
    for number, batches in enumerate(seen):
        assert batches == [micro[number] for window in windows for micro in window]
    samples = sum(len(numbers) for window in windows for micro in window for numbers in micro)
    for rank in ranks:
        assert rank["counters"][:2] == (len(windows), samples)
    expected = by_hand(case, windows)
    for number, rank in enumerate(ranks):
        assert rank["losses"] == pytest.approx(expected["losses"][number], rel=1e-10, abs=1e-10)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-10, abs=1e-10)
        assert_same_weights(rank, expected["weights"])


def finish_on_one_rank(case: Case, experiment: str, straight: list[dict[str, Any]]) -> None:
    alone = replace(case, ranks=1, accumulation=case.accumulation * case.ranks, sync_policy="no_sync")
    assert_same_weights(run(alone, experiment, (None,)), straight[0]["tensors"])


def assert_same_weights(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    tensors = {name: found["tensors"][name] for name in expected}
    torch.testing.assert_close(tensors, expected, rtol=1e-10, atol=1e-10)


def assert_equal_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("seen", "losses", "norms", "counters"):
        assert found[name] == expected[name], name
    assert same_bits(found["tensors"], expected["tensors"])


def check_many(ranks: int, count: int, train: Runner) -> None:
    @seed(20261122)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(ranks))
    def holds(case: Case) -> None:
        check(case, train)

    holds()


@pytest.fixture(autouse=True)
def hypothesis_writes_elsewhere(tmp_path: Path) -> None:
    set_hypothesis_home_dir(tmp_path / "hypothesis")


@pytest.mark.timeout(1800)
def test_alone(all_cases: bool) -> None:
    check_many(1, 1700 if all_cases else 30, lambda *what: [run(*what)])


@pytest.mark.timeout(1800)
def test_on_two_ranks(all_cases: bool) -> None:
    with KeptWorld() as world:
        check_many(2, 300 if all_cases else 8, lambda *what: world.call(run_there, 2, *what))
