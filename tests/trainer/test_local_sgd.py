"""Local SGD and DiLoCo are the loops one writes by hand, and a run stopped anywhere ends as the undisturbed one."""

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import dream_trainer as dt
from tests.api import CheckpointError, ConfigError, MoE, PerRankLoader
from tests.trainer import small
from tests.trainer.arithmetic import full
from tests.trainer.small import WIDTH, Batch, Samples, assert_same_weights, batches, weights
from tests.worlds import run_world

CPU = dt.DeviceParameters(device="cpu")
STEPS, EVERY = 10, 4
PLAIN = dt.LocalSGDParameters(every_n_steps=EVERY, workers=2)
DILOCO = replace(PLAIN, outer="sgd")
HEAVY_BALL = replace(DILOCO, nesterov=False, outer_lr=0.5, outer_momentum=0.6)


class Net(nn.Module):
    """Blocks to shard, a scalar that stays whole, a frozen layer, one that nobody uses, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.blocks(x)))) * self.scale


def start(model: nn.Module) -> None:
    small.fill(model)
    with torch.no_grad():
        model.scale.fill_(1.5)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


@dataclass
class Config(dt.DreamTrainerConfig, dt.LocalSGDConfigMixin):
    weighted: bool = False


class Trainer(small.Validates, small.Built, dt.DreamTrainer, dt.LocalSGDMixin):
    make_model = Net

    def __init__(self, config: Config, data: list[Batch], val: list[Batch]) -> None:
        super().__init__(config, PerRankLoader(data), PerRankLoader(val), make_optimizer=make_optimizer)
        self.validated: list[float] = []

    def init_weights(self) -> None:
        start(self.model)

    def weight_of(self, batch: Batch) -> float | None:
        return weight_of(batch) if self.config.weighted else None

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.validated.append(metrics["val/loss"])


def weight_of(batch: Batch) -> float:
    return 1.0 + int(batch[2][0]) % 5


def make_config(
    experiment: str,
    rounds: dt.LocalSGDParameters,
    *,
    steps: int = STEPS,
    accumulation: int = 1,
    weighted: bool = False,
    devices: dt.DeviceParameters = CPU,
    val_every: int | None = None,
    **checkpoints: Any,
) -> Config:
    training = {"max_steps": steps, "gradient_accumulation_steps": accumulation, "gradient_clip_norm": 0.3}
    validation = {"val_every_n_epochs": None, "val_every_n_steps": val_every}
    return small.run_config(
        experiment,
        Config,
        group="local",
        weighted=weighted,
        local_sgd_parameters=rounds,
        device_parameters=devices,
        training_parameters=dt.TrainingParameters(**training, **validation),
        checkpoint_parameters=dt.CheckpointParameters(
            **{"save_every_n_epochs": None, "save_at_end": False} | checkpoints
        ),
    )


def make_trainer(config: Config) -> Trainer:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return Trainer(config, batches(24)[rank::ranks] * 8, batches(4)[rank::ranks])


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return weights(trainer.model) | {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}


def by_hand(
    ranks: int,
    rounds: dt.LocalSGDParameters,
    *,
    steps: int = STEPS,
    accumulation: int = 1,
    weighted: bool = False,
    make: type[Net] = Net,
) -> dict[str, Any]:
    """Each worker trains its own model; batch norm normalises by a rank's samples, and is averaged after a step."""
    per_worker = ranks // rounds.workers
    models = [make() for _ in range(rounds.workers)]
    for model in models:
        start(model)
    optimizers = [make_optimizer(model) for model in models]
    begin = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    outer = torch.optim.SGD(begin.values(), rounds.outer_lr, rounds.outer_momentum, nesterov=rounds.nesterov)
    data = batches(24)
    norms: list[list[float]] = [[] for _ in models]
    for step in range(steps):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            micro_batches = [
                (rank, data[(rank + ranks * (step * accumulation + micro)) % len(data)])
                for micro in range(accumulation)
                for rank in range(number * per_worker, (number + 1) * per_worker)
            ]
            shares = [weight_of(batch) if weighted else 1.0 for _, batch in micro_batches]
            buffers = {rank: copy.deepcopy(dict(model.named_buffers())) for rank, _ in micro_batches}
            for share, (rank, (x, y, _)) in zip(shares, micro_batches, strict=True):
                write(model, buffers[rank])
                (mse_loss(model(x), y) * share / sum(shares)).backward()
                buffers[rank] = copy.deepcopy(dict(model.named_buffers()))
            write(model, mean_of(list(buffers.values())))
            norms[number].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % rounds.every_n_steps == 0:
            mean = mean_of([model.state_dict() for model in models])
            if rounds.outer == "sgd":
                for name, p in begin.items():
                    p.grad = p - mean[name]
                outer.step()
                mean |= begin
            for model in models:
                model.load_state_dict(mean)
    states = [model.state_dict() for model in models]
    return {"states": states, "average": mean_of(states), "norms": norms}


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: sum(state[name].detach() for state in states) / len(states)
        if states[0][name].is_floating_point()
        else states[0][name]
        for name in states[0]
    }


def write(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


SHARDED = dt.DeviceParameters(device="cpu", dp_replicate=2, dp_shard=2)
REPLICAS = dt.DeviceParameters(device="cpu", dp_replicate="auto", dp_shard=1)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two workers of one rank": (2, {"rounds": PLAIN}),
    "two of one, accumulation and weights": (2, {"rounds": HEAVY_BALL, "accumulation": 2, "weighted": True}),
    "two of one, whole rounds": (2, {"rounds": DILOCO, "steps": 2 * EVERY}),
    "two of two replicas": (4, {"rounds": DILOCO, "devices": REPLICAS, "weighted": True, "accumulation": 2}),
    "two of two shards": (4, {"rounds": DILOCO, "devices": SHARDED, "weighted": True, "accumulation": 2}),
    "four of one": (4, {"rounds": replace(DILOCO, workers=4)}),
}


def train_all(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        options = dict(CASES[name][1])
        with make_trainer(make_config(name, options.pop("rounds"), **options)) as trainer:
            trainer.fit()
            own = state_of(trainer)
            with trainer._runtime.rounds.as_one_model():
                average = state_of(trainer)
            back = state_of(trainer)
            assert all(torch.equal(back[name], own[name]) for name in own)
            found[name] = {"own": own, "average": average, "norms": trainer.norms, "worker": trainer.world.worker}
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        names = [name for name, (n, _) in CASES.items() if n == ranks]
        results = run_world(train_all, ranks, names)
        found |= {name: [result[name] for result in results] for name in names}
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_loop_by_hand(trained: dict[str, list[dict[str, Any]]], name: str) -> None:
    ranks, options = CASES[name]
    expected = by_hand(ranks, **{key: value for key, value in options.items() if key != "devices"})
    for rank, found in enumerate(trained[name]):
        worker = rank // (ranks // options["rounds"].workers)
        assert found["worker"] == worker
        assert_same_weights(found["own"], expected["states"][worker])
        assert_same_weights(found["average"], expected["average"])
        torch.testing.assert_close(found["norms"], expected["norms"][worker], rtol=1e-12, atol=1e-12)


# -- what crosses workers


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")


def collectives(devices: dt.DeviceParameters) -> list[tuple[int, str, tuple[int, ...]]]:
    """Which ranks each collective of PyTorch's speaks to, after which step."""
    config = make_config("counted", DILOCO, devices=devices, steps=9)
    config.logger_parameters = dt.LoggerParameters(loggers=(), log_every_n_steps=1000)
    calls: list[tuple[int, str, tuple[int, ...]]] = []

    def recorded(name: str, original: Any) -> Any:
        def record(*args: Any, group: Any = None, **options: Any) -> Any:
            if group is None or group is not trainer.world.cpu_group:
                members = dist.get_process_group_ranks(group) if group is not None else range(trainer.world.world_size)
                calls.append((trainer.global_step, name, tuple(members)))
            return original(*args, group=group, **options)

        return record

    with make_trainer(config) as trainer, pytest.MonkeyPatch.context() as patches:
        trainer.launch_and_resume()
        for name in COLLECTIVES:
            patches.setattr(dist, name, recorded(name, getattr(dist, name)))
        trainer.fit()
    return calls


@pytest.mark.parametrize("devices", [REPLICAS, CPU], ids=["replicas", "shards"])
def test_nothing_crosses_workers_but_one_bucket_per_round(devices: dt.DeviceParameters) -> None:
    for rank, calls in enumerate(run_world(collectives, 4, devices)):
        inside = {0, 1} if rank < 2 else {2, 3}
        crossing = [(step, name, members) for step, name, members in calls if not set(members) <= inside]
        both = (rank % 2, rank % 2 + 2)
        assert crossing == [(step, "all_reduce", both) for step in (EVERY, 2 * EVERY)]
        assert any(set(members) == inside for _, _, members in calls)


STOPS = {"in a round": (3, 4), "twice": (1, 6), "at a round's end": (4, 7)}


def stop_and_go_on(devices: dt.DeviceParameters, names: list[str]) -> dict[str, Any]:
    """One run without a stop, and runs that lost their last steps, in each part of a round."""
    found: dict[str, Any] = {}
    with make_trainer(make_config("straight", DILOCO, devices=devices)) as trainer:
        trainer.fit()
        found["straight"] = whole_state(trainer)
    for name in names:
        every, stop = STOPS[name]
        saves = {"save_every_n_steps": every, "val_every": 2, "devices": devices}
        for steps in (stop, 9, STEPS) if name == "twice" else (stop, STEPS):
            with make_trainer(make_config(name, DILOCO, steps=steps, **saves)) as trainer:
                trainer.fit()
                found[name] = whole_state(trainer)
    return found


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Of this rank: weights, the optimizer's state, the average."""
    state = state_of(trainer)
    for index, values in enumerate(trainer.optimizer.state_dict()["state"].values()):
        state |= {f"{index}.{key}": full(value).clone() for key, value in values.items()}
    with trainer._runtime.rounds.as_one_model():
        return state | {f"average.{name}": value for name, value in state_of(trainer).items()}


@pytest.mark.parametrize(
    ("ranks", "devices", "names"), [(2, CPU, list(STOPS)), (4, SHARDED, ["twice"])], ids=["2", "sharded"]
)
def test_a_run_that_lost_its_last_steps_ends_as_without(
    ranks: int, devices: dt.DeviceParameters, names: list[str]
) -> None:
    for found in run_world(stop_and_go_on, ranks, devices, names):
        for name in names:
            assert found[name].keys() == found["straight"].keys()
            assert [key for key, value in found["straight"].items() if not torch.equal(value, found[name][key])] == []


def speak_of_the_average() -> dict[str, Any]:
    config = make_config("one", DILOCO, steps=6, save_every_n_steps=6, val_every=6)
    with make_trainer(config) as trainer:
        trainer.fit()
        with trainer._runtime.rounds.as_one_model():
            average = state_of(trainer)
        trainer.export("exported")
        return {"validated": trainer.validated, "average": average}


def test_validations_checkpoints_and_exports_have_the_average(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = run_world(speak_of_the_average, 2)[0]
    expected = by_hand(2, DILOCO, steps=6)["average"]
    assert_same_weights(found["average"], expected)
    model = Net()
    model.load_state_dict(expected)
    with torch.no_grad():
        losses = [mse_loss(model.eval()(x), y) for x, y, _ in batches(4)]
    torch.testing.assert_close(found["validated"], [float(sum(losses) / 4)], rtol=1e-12, atol=1e-12)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], found["average"][name]) for name in exported)


def begin_from() -> dict[str, Any]:
    """From a checkpoint in the middle of a round of two workers: with other words, and with four ranks in two."""
    with make_trainer(make_config("two", DILOCO, steps=6, save_every_n_steps=6)) as trainer:
        trainer.fit()
        with trainer._runtime.rounds.as_one_model():
            average = state_of(trainer)
    found: dict[str, Any] = {"average": average}
    other = make_trainer(make_config("other", replace(DILOCO, workers=1)))
    with other, pytest.raises(CheckpointError, match=r"written by workers=2.*run has 1"):
        other.load_checkpoint(Path("runs/tests/local/two/checkpoints/step_00000006"))
    path = str(Path("runs/tests/local/two/checkpoints/step_00000006").resolve())
    with make_trainer(make_config("new", replace(DILOCO, workers=1), steps=0, init_from=path)) as trainer:
        trainer.evaluate()
        found["init"] = state_of(trainer)
    alone = replace(PLAIN, workers=1)
    with make_trainer(make_config("later", alone, devices=REPLICAS, steps=4, save_every_n_steps=4)) as trainer:
        trainer.fit()
        found["before"] = whole_state(trainer)
    with make_trainer(make_config("later", PLAIN, steps=4)) as trainer:
        trainer.evaluate()
        found["resumed"] = whole_state(trainer)
        assert trainer.global_step == 4
    return found


def test_another_number_is_refused_another_run_begins_from_the_average_and_one_becomes_two() -> None:
    for found in run_world(begin_from, 2):
        assert all(torch.equal(found["init"][name], value) for name, value in found["average"].items())
        assert all(torch.equal(found["resumed"][name], value) for name, value in found["before"].items())


def test_one_process_is_one_worker_and_the_outer_optimizer_is_the_same() -> None:
    for rounds in (replace(PLAIN, workers="hosts"), replace(DILOCO, workers="hosts")):
        with make_trainer(make_config(f"{rounds.outer}", rounds)) as trainer:
            trainer.fit()
        assert_same_weights(state_of(trainer), by_hand(1, replace(rounds, workers=1))["states"][0])


@pytest.mark.parametrize(
    ("devices", "training", "message"),
    [
        (replace(CPU, cpu_offload=True), {}, "cpu_offload"),
        (CPU, {"on_nonfinite": "retry"}, "retry"),
    ],
)
def test_what_needs_all_ranks_is_refused(devices: dt.DeviceParameters, training: dict[str, Any], message: str) -> None:
    config = make_config("refused", PLAIN, devices=devices)
    config.training_parameters = dt.TrainingParameters(max_steps=1, **training)
    with pytest.raises(ConfigError, match=f"LocalSGDMixin with.*{message}.* is not supported"):
        make_trainer(config)


class Synchronised(Trainer):
    make_model = staticmethod(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Net()))


class Gathering(Trainer):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        self.world.all_gather_with_gradient(batch[0])
        return super().training_step(batch, batch_idx)


class Balanced(Trainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.experts = MoE(WIDTH, WIDTH, 4, 2, balance_rate=0.01)


REFUSED: dict[str, tuple[type[Trainer], dt.LocalSGDParameters, str]] = {
    "workers": (Trainer, replace(PLAIN, workers=3), "workers=3 does not divide the dp_replicate=2 copies"),
    "batch norm": (Synchronised, PLAIN, "model.norm is a SyncBatchNorm over all ranks"),
    "experts": (Balanced, PLAIN, "experts balances its experts by the loads of all ranks"),
    "gathering": (Gathering, PLAIN, "all_gather_with_gradient speaks to all ranks in each step"),
}


def refused(name: str) -> None:
    cls, rounds, _ = REFUSED[name]
    cls(make_config("refused", rounds), batches(24)[int(os.environ["RANK"]) :: 2], []).fit()


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_cross_workers_in_each_step_is_refused_by_name(name: str) -> None:
    for error in small.errors_of(refused, name):
        assert REFUSED[name][2] in error


def test_averages_of_weights_are_refused_by_name() -> None:
    config = make_config("ema", replace(PLAIN, workers=1))
    config.callbacks = dt.CallbackCollection([dt.EMA(0.9)])
    with pytest.raises(ConfigError, match=r"does not work with callbacks\.EMA"), make_trainer(config) as trainer:
        trainer.launch_and_resume()


class Unnormed(Net):
    """Without statistics of batches, so that workers of any ranks train alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


class Plain(Trainer):
    make_model = Unnormed

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DataLoader(Samples(48), batch_size=4 // self.world.world_size), None


def train_parts(parts: list[tuple[str, int, dict[str, Any]]]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, steps, options in parts:
        with Plain(make_config(name, DILOCO, steps=steps, **options), [], []) as trainer:
            trainer.fit()
            found[name] = state_of(trainer)
    return found


def test_a_run_goes_on_with_other_ranks_in_each_worker() -> None:
    """Stopped within a round, twice: two workers of one rank, of two replicas or shards, of one again."""
    saves = {"save_every_n_steps": 6}
    run_world(train_parts, 2, [("replicas", 6, saves), ("shards", 6, saves)])
    later = {"save_every_n_steps": 11}
    run_world(
        train_parts, 4, [("replicas", 11, later | {"devices": REPLICAS}), ("shards", 11, later | {"devices": SHARDED})]
    )
    found = run_world(train_parts, 2, [("replicas", 14, {}), ("shards", 14, {}), ("straight", 14, {})])
    for worker, expected in zip(found, by_hand(2, DILOCO, steps=14, make=Unnormed)["states"], strict=True):
        for state in worker.values():
            assert_same_weights(state, expected)


class Broken(Trainer):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 5 and self.world.worker == 1:
            batch = (batch[0] * float("nan"), *batch[1:])
        return super().training_step(batch, batch_idx)


def break_one() -> None:
    Broken(make_config("broken", DILOCO, save_every_n_steps=4), batches(24)[int(os.environ["RANK"]) :: 2], []).fit()


def test_a_gradient_that_is_not_finite_ends_all_workers_and_no_average_has_it(tmp_path: Path) -> None:
    first, second = small.run_ranks("from tests.trainer.test_local_sgd import break_one; break_one()", 2, tmp_path)
    assert "NonFiniteError" in second[1]
    assert "rank 1" in first[1]
    saved = {path.name for path in (tmp_path / "runs/tests/local/broken/checkpoints").glob("step_*")}
    assert saved <= {"step_00000004"}
