"""Host reads, copies and collectives of a steady step are those of a loop by hand, with norms read late as on GPUs."""

import contextlib
import dataclasses
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import dream_trainer as dt
from dream_trainer import callbacks as cb
from tests.api import DistributedDataLoader, Flags, fsdp_modules, gathered_twins, local_tensor
from tests.late_norms import norms_are_read_late
from tests.trainer.small import BY_BLOCKS, WIDTH, Alone, Batch, FromSeed, Samples, fit, make_config
from tests.worlds import gloo_group, run_world

pytestmark = pytest.mark.usefixtures("late_norms")

POLICIES = ("no_sync", "reduce_scatter_each", "defer_all_reduce")
# Numbers of the first and of the last steady window; between flushes of the log and looks at the norms.
FIRST, LAST = 11, 15
# The pulse is a dozen numbers and the norm two; copies of so few are bookkeeping on the host, not data.
FEW = len(Flags())
# Calls of functions of our own that a step may take; to be lowered where some are saved.
MOST_CALLS = 120


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"):
            self.found["reads"] += 1
        elif name in ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"):
            tensor = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.found["copies"] += 1
            self.found["large copies"] += tensor.numel() > FEW
        elif name.startswith(("c10d", "_c10d")) and "wait" not in name:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def model() -> nn.Module:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)))
    return nn.Sequential(nn.Linear(WIDTH, 32), blocks, nn.Linear(32, 32))


def optimizer_for(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)


def data() -> Any:
    """One rank's batches in float32, made beforehand so that loading counts for neither side."""
    source = Samples(4)
    return [(source.x.float(), source.y.float(), torch.arange(4))] * 24


class Body:
    """The step of both trainers."""

    make_model = staticmethod(model)

    def __init__(self, config: Any, weighted: bool = False) -> None:
        super().__init__(config, make_optimizer=optimizer_for)
        self.counts, self.weighted = Counts(), weighted
        self.counting = contextlib.ExitStack()

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return data(), None

    def pre_train_batch(self, batch: Batch, batch_idx: int) -> None:
        start_or_end(self.local_batches / self.accumulation_steps, self.counts, self.counting)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        loss = mse_loss(self.model(batch[0]).mean(1, keepdim=True), batch[1])
        self.backward(loss, weight=len(batch[0]) if self.weighted else None)
        self.step(self.model, self.optimizer)
        return {"loss": loss}


class Bare(Body, Alone):
    pass


class Whole(Body, FromSeed):
    pass


def counted(trainer: Any) -> dict[str, int]:
    with trainer:
        trainer.fit()
    assert trainer.global_step > LAST
    return dict(trainer.counts.found)


def start_or_end(number: float, counts: Counts, stack: contextlib.ExitStack) -> None:
    """Counts from the start of the first steady window to the start of the last."""
    if number == FIRST:
        stack.enter_context(counts)
    if number == LAST:
        stack.close()


def by_hand(net: nn.Module, clip: Callable[[nn.Module], object]) -> dict[str, int]:
    counts, stack, optimizer = Counts(), contextlib.ExitStack(), optimizer_for(net)
    for number, (x, y, _) in enumerate(data()):
        start_or_end(number, counts, stack)
        mse_loss(net(x).mean(1, keepdim=True), y).backward()
        clip(net)
        optimizer.step()
        optimizer.zero_grad()
    return dict(counts.found)


@pytest.mark.pitfall(16)
@pytest.mark.parametrize("cls", [Bare, Whole])
@pytest.mark.parametrize("weighted", [False, True])
def test_alone_a_step_reads_copies_and_communicates_no_more_than_the_loop_by_hand(cls: Any, weighted: bool) -> None:
    found = counted(cls(make_config(max_steps=24, gradient_clip_norm=1.0), weighted))
    expected = by_hand(model(), lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
    assert found.get("reads", 0) == expected.get("reads", 0) == 0
    assert [name for name in found if "c10d" in name] == []
    assert found.get("large copies", 0) == expected.get("large copies", 0) == 0
    if not weighted:
        assert found.get("copies", 0) == expected.get("copies", 0) == 0


def watchers() -> list[dt.Callback]:
    averaging = [cb.EMA(), cb.SWA(start=100, validate=False), cb.WeightTransfer("model", "other", every_n_steps=100)]
    measuring = [cb.LearningRate(), cb.Throughput(), cb.Memory(), cb.GradientStats(), cb.WeightStats()]
    return [*averaging, *measuring, cb.Progress(), cb.GarbageCollection(), cb.NonFiniteReport(), cb.Profiler(100)]


class Watched(Whole):
    def configure_models(self) -> None:
        self.model, self.other = model(), model()
        self.other.requires_grad_(False)


@pytest.mark.pitfall(16)
def test_watchers_and_loggers_read_nothing_in_steps_that_do_not_flush(tmp_path: Any) -> None:
    config = make_config(
        max_steps=24, gradient_clip_norm=1.0, callbacks=watchers(), loggers=("jsonl", "csv", "tensorboard")
    )
    found = counted(Watched(config))
    assert found.get("reads", 0) == 0
    assert [name for name in found if "c10d" in name] == []
    assert len((tmp_path / "runs/tests/trainer/run/metrics.jsonl").read_text().splitlines()) == 3


class CallsCounted(Whole):
    """Counts the calls of Dream Trainer's own functions in steady windows that write nothing."""

    n_calls = 0

    def pre_train_batch(self, batch: Batch, batch_idx: int) -> None:
        if self.local_batches == FIRST:
            sys.setprofile(self.note)
        if self.local_batches == LAST:
            sys.setprofile(None)

    def note(self, frame: Any, event: str, argument: object) -> None:
        self.n_calls += event == "call" and frame.f_globals.get("__name__", "").startswith("dream_trainer.")


def test_an_everyday_step_of_one_process_makes_few_calls_of_our_own() -> None:
    config = make_config(max_steps=24, gradient_clip_norm=1.0, callbacks=[cb.Progress(clock=float)], loggers=("jsonl",))
    trainer = fit(CallsCounted(config))
    assert 50 * (LAST - FIRST) < trainer.n_calls <= MOST_CALLS * (LAST - FIRST)


def clip_shards(net: nn.Module) -> None:
    """With one all-reduce for the norm over local shards."""
    grads = [p.grad.to_local() for p in net.parameters()]
    total = torch.stack([grad.square().sum() for grad in grads]).sum()
    dist.all_reduce(total)
    for grad in grads:
        grad.mul_(torch.clamp(1.0 / (total.sqrt() + 1e-6), max=1.0))


@gloo_group()
def sharded_by_hand() -> dict[str, int]:
    """FSDP2 as its documentation shows it."""
    from torch.distributed.fsdp import fully_shard

    mesh, net = init_device_mesh("cpu", (2,)), model()
    for block in net[1]:
        fully_shard(block, mesh=mesh)
    return by_hand(fully_shard(net, mesh=mesh), clip_shards)


@norms_are_read_late()
def sharded_cases(directory: str) -> dict[str, Any]:
    os.chdir(directory)
    found: dict[str, Any] = {"hand": sharded_by_hand()}
    for accumulation in (1, 2):
        for weighted in (False, True):
            config = make_config(
                max_steps=20, fsdp=BY_BLOCKS, gradient_clip_norm=1.0, gradient_accumulation_steps=accumulation
            )
            found[f"trainer/{accumulation}/{weighted}"] = counted(Sharded(config, weighted))
            whole = dataclasses.replace(config, fsdp_parameters=dt.FSDPParameters())
            found[f"whole/{accumulation}/{weighted}"] = counted(Sharded(whole, weighted))
    for layout, cls in (("sharded", TwoModels), ("replicated", TwoReplicas)):
        for policy in POLICIES:
            config = make_config(max_steps=20, fsdp=BY_BLOCKS, gradient_accumulation_steps=2, sync_policy=policy)
            trainer = cls(config, False)
            found[f"two/{layout}/{policy}"] = counted(trainer)
            found[f"kept/{layout}/{policy}"] = trainer.kept
    config = make_config(
        max_steps=20, fsdp=BY_BLOCKS, gradient_clip_norm=1.0, callbacks=watchers(), loggers=("jsonl", "tensorboard")
    )
    found["watched"] = counted(ShardedWatched(config))
    return found


class Sharded(Whole):
    """Loads through our own loader, as a user would, at two ranks."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DistributedDataLoader(Float32(64), 1), None


class ShardedWatched(Watched, Sharded):
    pass


class TwoModels(Sharded):
    """Two models with an optimizer each, and the numbers of their gradients in the middle of a window."""

    def configure_models(self) -> None:
        self.model, self.other = model(), model()

    def configure_optimizers(self) -> None:
        self.optimizer, self.other_optimizer = optimizer_for(self.model), optimizer_for(self.other)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        for net, optimizer in ((self.model, self.optimizer), (self.other, self.other_optimizer)):
            self.backward(mse_loss(net(batch[0]).mean(1, keepdim=True), batch[1]))
            self.step(net, optimizer)
        if self.is_accumulating_gradients:
            self.kept = [gradients_kept(net) for net in (self.model, self.other)]
        return {}


class TwoReplicas(TwoModels):
    def __init__(self, config: Any, weighted: bool) -> None:
        devices = dt.DeviceParameters(device="cpu", dp_replicate=2, dp_shard=1)
        super().__init__(dataclasses.replace(config, device_parameters=devices), weighted)


def gradients_kept(net: nn.Module) -> tuple[int, int]:
    """Numbers of the gradients that this rank holds: of its shards, and of whole parameters."""
    twins = [pair for module in fsdp_modules(net) for pair in gathered_twins(module)]
    shards = [local_tensor(p.grad).numel() for p in net.parameters() if p.grad is not None]
    return sum(shards), sum(whole.grad.numel() for _, whole in twins if whole.grad is not None)


class Float32(Samples):
    def __getitem__(self, index: int) -> Any:
        x, y, number = super().__getitem__(index)
        return x.float(), y.float(), number


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(sharded_cases, 2, str(tmp_path_factory.mktemp("ranks")))


def collectives(found: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in found.items() if "c10d" in name}


@pytest.mark.pitfall(16)
def test_sharded_a_step_has_fully_shards_collectives_and_two_of_ours(ranks: list[dict[str, Any]]) -> None:
    steps = LAST - FIRST
    for rank, weighted in itertools.product(ranks, (False, True)):
        hand, found = rank["hand"], rank[f"trainer/1/{weighted}"]
        assert hand["c10d::allreduce_"] == steps
        assert collectives(found) == collectives(hand) | {"c10d::allreduce_": 2 * steps}
        assert found.get("reads", 0) == hand.get("reads", 0) == 0
        assert found.get("large copies", 0) <= hand.get("large copies", 0)
        if not weighted:  # watchers add nothing to it
            assert collectives(rank["watched"]) == collectives(found)
            assert rank["watched"].get("reads", 0) == 0


@pytest.mark.pitfall(16)
def test_a_small_sharded_model_is_gathered_once_and_reduced_once_in_a_step(ranks: list[dict[str, Any]]) -> None:
    steps = LAST - FIRST
    for rank, accumulation, weighted in itertools.product(ranks, (1, 2), (False, True)):
        found = rank[f"whole/{accumulation}/{weighted}"]
        assert collectives(found) == {"c10d::_allgather_base_": steps, "c10d::allreduce_": 2 * steps}
        assert found.get("reads", 0) == 0


@pytest.mark.pitfall(4, 5)
def test_gradients_are_reduced_once_per_window_and_not_once_per_micro_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        one, two = (collectives(rank[f"trainer/{accumulation}/False"]) for accumulation in (1, 2))
        reduced = [name for name in one if "reduce_scatter" in name]
        assert reduced
        assert all(one[name] == two[name] for name in reduced)
        assert one["c10d::allreduce_"] == two["c10d::allreduce_"]


@pytest.mark.pitfall(4)
def test_each_of_two_models_is_reduced_once_per_window_under_no_sync(ranks: list[dict[str, Any]]) -> None:
    """And once per micro-batch under the other policies; there are a norm for each model and one pulse."""
    for rank in ranks:
        one, two = collectives(rank["trainer/1/False"]), collectives(rank["two/sharded/no_sync"])
        assert reductions(two) == 2 * reductions(one) > 0
        assert two["c10d::allreduce_"] == 3 * (LAST - FIRST)
        for policy in POLICIES[1:]:
            each = collectives(rank[f"two/sharded/{policy}"])
            assert reductions(each) == 2 * reductions(two)
            assert each["c10d::allreduce_"] == two["c10d::allreduce_"]
        for policy in POLICIES:  # replicas, of which equal gradients have equal norms
            assert collectives(rank[f"two/replicated/{policy}"]) == {"c10d::allreduce_": 3 * (LAST - FIRST)}


@pytest.mark.pitfall(5)
def test_no_sync_keeps_whole_gradients_within_a_window_and_the_other_policies_shards(
    ranks: list[dict[str, Any]],
) -> None:
    whole = sum(p.numel() for p in model().parameters())
    for rank in ranks:
        assert rank["kept/sharded/no_sync"] == [(0, whole)] * 2
    for policy in POLICIES[1:]:
        kept = [rank[f"kept/sharded/{policy}"] for rank in ranks]
        assert all(gathered == 0 for models in kept for _, gathered in models)
        assert [sum(shards for shards, _ in parts) for parts in zip(*kept, strict=True)] == [whole] * 2


def reductions(found: dict[str, int]) -> int:
    return sum(count for name, count in found.items() if "reduce_scatter" in name)
