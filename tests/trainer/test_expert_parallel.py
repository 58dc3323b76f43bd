"""Mixtures of experts, also of ranks that share experts, train as a loop by hand; what cannot be is named."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dream_trainer as dt
from tests import api
from tests.api import EMA, DistributedDataLoader, ExpertExchange, MoE, split_experts
from tests.trainer import mixtures
from tests.trainer.arithmetic import full, same_bits
from tests.trainer.meshes import mean_loss
from tests.trainer.mixtures import BATCH, LENGTH, VOCABULARY, WIDTH, Case, Rows, Trained, config_of, everything
from tests.trainer.small import Sent, errors_of, fit_each
from tests.trainer.stages import count
from tests.worlds import run_world

ALONE = [Case(), Case(accumulation=2, fused=True), Case(recompute="full", clip=None), Case(recompute="selective")]
WHOLE = [Case(2), Case(2, shard="auto", accumulation=2, recompute="full"), Case(2, accumulation=2, fused=True)]
WORLD_2 = [
    Case(2, ep=2),
    Case(2, ep=2, accumulation=2, recompute="full", fused=True),
    Case(2, ep=2, shard="auto", recompute="selective", clip=None),
    Case(2, ep=2, cp=2),
    Case(2, ep=2, overlap=True),
]
WORLD_4 = [
    Case(4, ep=2, accumulation=2, overlap=True),
    Case(4, ep=2, cp=2, shard="auto"),
    Case(4, ep=2, tp=2, shard=2, replicate=1, sequence=True, fused=True),
]
FURTHER_4 = [
    Case(4, ep=2, shard="auto", accumulation=2, fused=True),
    Case(4, ep=2, shard=2, replicate=2, recompute="full"),
    Case(4, ep=4, shard="auto"),
    Case(4, ep=2, tp=2, accumulation=2, recompute="full"),
    Case(4, ep=2, tp=2, shard=1, replicate=2, sequence=True, fused=True),
]
COMPILED_ALONE = [Case(backend="aot_eager"), Case(accumulation=2, recompute="full", backend="aot_eager")]
COMPILED = [Case(2, ep=2, shard="auto", recompute="full", backend="eager")]
FURTHER_COMPILED_2 = [
    Case(2, ep=2, accumulation=2, recompute="selective", backend="aot_eager"),
    Case(2, ep=2, backend="aot_eager"),  # with batches of other sizes than before
]
FURTHER_COMPILED_4 = [
    Case(4, ep=2, shard="auto", backend="aot_eager"),
    Case(4, ep=2, tp=2, shard=1, replicate=2, sequence=True, backend="aot_eager"),
]


def found_in(trainer: Trained) -> dict[str, Any]:
    return {
        "start": trainer.initial,
        "losses": [trainer.logged[step]["train/loss"] for step in range(1, mixtures.STEPS + 1)],
        "largest": [trainer.logged[n]["experts/model.blocks.1.moe/max_load"] for n in range(1, mixtures.STEPS + 1)],
        "norms": trainer.norms,
        "state": mixtures.state_of(trainer.model),
        "val/loss": trainer.evaluate()["val/loss"],
    }


def train(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return fit_each((Trained(config_of(case)) for case in cases), found_in)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ALONE, id="alone"),
        pytest.param(WHOLE, id="with whole experts"),
        pytest.param(WORLD_2, id="2 ranks"),
        pytest.param(WORLD_4, id="4 ranks"),
        pytest.param(FURTHER_4, id="4 ranks, further", marks=pytest.mark.slow),
        pytest.param([Case(8, ep=2, tp=2, shard="auto", sequence=True)], id="8 ranks", marks=pytest.mark.slow),
        pytest.param(COMPILED_ALONE, id="alone, compiled", marks=pytest.mark.slow),
        pytest.param(COMPILED, id="compiled"),
        pytest.param(FURTHER_COMPILED_2, id="2 ranks, compiled", marks=pytest.mark.slow),
        pytest.param(FURTHER_COMPILED_4, id="4 ranks, compiled", marks=pytest.mark.slow),
    ],
)
def test_training_equals_a_loop_written_by_hand(cases: list[Case]) -> None:
    n_ranks = cases[0].world_size
    by_rank = run_world(train, n_ranks, cases) if n_ranks > 1 else [train(cases)]
    (alone,) = train([Case()])
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = mixtures.reference(case, alone["start"])
        for result in ranks:
            assert same_bits(result["start"], alone["start"]), case
            for key in ("losses", "norms", "largest"):
                assert result[key] == pytest.approx(expected[key], rel=1e-10, abs=1e-10), (case, key)
            assert result["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-10), case
            for name, value in expected["state"].items():
                if name.endswith("balance_bias"):
                    assert torch.equal(result["state"][name], value), (case, name)
                    assert value.any()
                torch.testing.assert_close(result["state"][name], value, rtol=1e-10, atol=1e-10, msg=f"{case}: {name}")


class Counted(Trained):
    """Counts the bytes of rows that this rank gives to be exchanged, those for itself too."""

    sent = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        with Sent(alltoall_base_=lambda out, rows, *_: rows.nbytes * rows.is_floating_point()) as sent:
            result = super().training_step(batch, batch_idx)
        self.sent += sent.n_bytes
        return result


def sent(cases: Sequence[Case]) -> list[tuple[float, str]]:
    configs = (config_of(case, training={"max_steps": 1}, devices={"verify": False}) for case in cases)
    return fit_each(map(Counted, configs), lambda trainer: (trainer.sent, trainer.describe()))


def test_a_step_sends_what_the_page_says() -> None:
    cases = {Case(2, ep=2, accumulation=2): 4, Case(2, ep=2, shard="auto", recompute="full"): 6}
    for case, ranks in zip(cases, zip(*run_world(sent, 2, list(cases)), strict=True), strict=True):
        layers, tokens, chosen = 2, BATCH * LENGTH, 2
        assert sum(sent for sent, _ in ranks) == cases[case] * layers * tokens * chosen * WIDTH * 8
        assert all("| ep, of these | 2 | 0, 1 | inside the host |" in text for _, text in ranks)


class Stacked(nn.Module):
    """Experts that know nothing of ranks but `exchange`."""

    exchange: ExpertExchange | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        expert = x.detach().abs().argmax(-1) % 4
        order = expert.argsort(stable=True)
        rows, counts = x[order], torch.bincount(expert, minlength=4)
        if self.exchange is None:
            out = self.compute(rows, counts, self.weight, self.bias)
        else:
            own = self.exchange.send(rows, counts)
            weights = (self.exchange.local(weight) for weight in (self.weight, self.bias))
            out = own.give_back(self.compute(own.rows, own.counts, *weights))
        return torch.empty_like(x).index_copy(0, order, out)

    def compute(self, rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        expert = torch.arange(len(counts)).repeat_interleave(counts)
        return torch.einsum("nd,ndh->nh", rows, weight[expert]) + bias[expert]


class OfOthers(Trained):
    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Flatten(0, 1), Stacked(), nn.Linear(WIDTH, 13))
        self.model.append(nn.Unflatten(0, (-1, LENGTH))).double()

    def apply_expert_parallel(self, mesh: DeviceMesh) -> None:
        split_experts(self.model[2], mesh)


def train_others(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    with OfOthers(config_of(case)) as trainer:
        trainer.fit()
        return trainer.norms, everything(trainer)


def test_layers_of_others_share_their_experts_by_a_hook() -> None:
    norms, state = train_others(Case())
    for found, there in run_world(train_others, 2, Case(2, ep=2)):
        assert found == pytest.approx(norms, rel=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(there[name], value, rtol=1e-10, atol=1e-10, msg=name)


def use(cases: Sequence[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with Trained(config_of(case, training={"max_steps": 1})) as trainer:
            trainer.fit()
            rows = Rows(3)
            with trainer.gathered(trainer.model):
                alone = trainer.model(rows.tokens) if trainer.world.is_main else None
            predicted = trainer.predict(DistributedDataLoader(Rows(5), 2, drop_last=False))
            trainer.export(f"{case.world_size}-{case.shard}.safetensors", dtype=torch.float64)
            found.append({"alone": alone, "together": trainer.model(rows.tokens), "predicted": predicted})
    return found


def test_whole_weights_are_at_hand_on_a_rank_alone_and_in_exports(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (expected,) = use([Case()])
    weights = load_file(tmp_path / "1-1.safetensors")
    for case, ranks in (
        (Case(2, ep=2), run_world(use, 2, [Case(2, ep=2)])),
        (Case(4, ep=2, shard=4), run_world(use, 4, [Case(4, ep=2, shard=4)])),
    ):
        for (result,) in ranks:
            torch.testing.assert_close(result["together"], expected["together"], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(result["predicted"], expected["predicted"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ranks[0][0]["alone"], expected["alone"], rtol=1e-10, atol=1e-10)
        found = load_file(tmp_path / f"{case.world_size}-{case.shard}.safetensors")
        torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-10)


def stop_and_go_on(case: Case) -> list[dict[str, Any]]:
    saves = dt.CheckpointParameters(save_every_n_epochs=None)
    results = []
    for experiment, steps in (("unbroken", 4), ("broken", 2), ("broken", 4)):
        config = config_of(
            case, experiment, training={"max_steps": steps}, checkpoint_parameters=saves, callbacks=[EMA(decay=0.5)]
        )
        with Trained(config) as trainer:
            trainer.fit()
            averages = trainer.get_callback(EMA).averaged("model")
            state = everything(trainer) | {f"EMA of {name}": full(value).clone() for name, value in averages.items()}
            results.append({"loaded": trainer.loaded, "state": state})
    return results


def test_a_run_on_shared_experts_goes_on_to_the_bit() -> None:
    case = Case(2, ep=2, accumulation=2, recompute="full")
    for unbroken, broken, resumed in run_world(stop_and_go_on, 2, case):
        assert broken["state"]["blocks.0.moe.balance_bias"].any()
        assert not any("loads" in name for name in unbroken["state"])
        assert all(torch.equal(broken["state"][name], value) for name, value in resumed["loaded"].items())
        assert same_bits(resumed["state"], unbroken["state"])


class Unsteady(Trained):
    """Its third step has a gradient that is not finite, once."""

    is_spoiled = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 2 and not self.is_spoiled:
            self.is_spoiled = True
            loss = self.model(batch[0]).sum() * float("inf")
            self.backward(loss, weight=1)
            self.step(self.model, self.optimizer)
            return {}
        return super().training_step(batch, batch_idx)


def test_a_window_that_runs_again_counts_its_tokens_once() -> None:
    config = config_of(Case(), training={"on_nonfinite": "retry", "max_steps": 4})
    assert same_bits(*fit_each((kind(config) for kind in (Trained, Unsteady)), everything))


class Staged(Trained):
    """Beside the model in stages a mixture that each rank has whole, trained by a loss of its own."""

    def configure_models(self) -> None:
        self.model = mixtures.Model(self.config.case)
        self.critic = MoE(WIDTH, WIDTH, 4, 2, balance_rate=mixtures.RATE).double()

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DistributedDataLoader(Rows(BATCH * mixtures.STEPS), BATCH, shuffle=False), None

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        loss = self.forward_backward(self.model, (tokens,), labels, mean_loss, weight=count)
        self.norms.append(float(self.step(self.model, self.optimizer)))
        points = torch.stack([torch.sin(tokens.double() * (number + 1)) for number in range(WIDTH)], dim=-1)
        self.backward(self.critic(points).square().mean(), weight=len(tokens), model=self.critic)
        self.step(self.critic, self.critic_optimizer)
        return {"loss": loss}


def train_stages(n_stages: int) -> dict[str, Any]:
    with Staged(config_of(Case(), devices={"pipeline_parallel": n_stages})) as trainer:
        trainer.fit()
        found = {"norms": trainer.norms, "start": trainer.initial, "state": mixtures.state_of(trainer.model)}
        return found | {"critic": mixtures.state_of(trainer.critic), "logged": trainer.logged}


def test_stages_of_a_pipeline_balance_the_mixtures_that_they_hold() -> None:
    alone = train_stages(1)
    expected = mixtures.reference(Case(), alone["start"])
    loads = [
        {name: v for name, v in alone["logged"][step].items() if "_load" in name}
        for step in range(1, mixtures.STEPS + 1)
    ]
    assert {len(of_step) for of_step in loads} == {6}  # of two blocks and the critic
    for rank in run_world(train_stages, 2, 2):
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        assert any(name.endswith("balance_bias") for name in rank["state"])
        for name, value in (rank["state"] | rank["critic"]).items():
            is_counted = name.endswith("balance_bias")
            close = 0.0 if is_counted else 1e-10
            wanted = (alone["critic"] if name in rank["critic"] else expected["state"])[name]
            torch.testing.assert_close(value, wanted, rtol=close, atol=close, msg=name)
        for step, of_step in enumerate(loads, start=1):
            assert {name: rank["logged"][step][name] for name in of_step} == pytest.approx(of_step)


class WithoutExperts(Trained):
    def configure_models(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH)


TWO: Any = SimpleNamespace(size=lambda: 2)  # a mesh of two ranks


def test_experts_that_ranks_cannot_share_evenly_are_named() -> None:
    with pytest.raises(
        api.ConfigError, match=r"gate has shape \[3, 12, 8\], and expert_parallel=2 ranks cannot share its"
    ):
        split_experts(api.GatedExperts(3, 8, 12), TWO)
    with pytest.raises(api.ConfigError, match="MoE has no direct parameters to share by experts"):
        split_experts(api.MoE(8, 12, 4, 2), TWO)


class InParts(Trained):
    """Gives its mixtures the parts of sequences that ranks have."""

    def apply_tensor_parallel(self, mesh: Any) -> None:
        mixtures.split_dense_layers(self.model, mesh, in_sequence=True, whole_inside=False)


MISTAKES = {
    "parts of sequences": "self.model computes other gradients than one process: ",
    "differ": "Use the same device_parameters on every rank",
    "no mixture": "WithoutExperts.apply_expert_parallel split no experts: each rank would have all of them",
}


def make_mistake(mistake: str) -> None:
    if mistake == "parts of sequences":
        InParts(config_of(Case(2, tp=2, sequence=True, recompute="full"))).fit()
    if mistake == "no mixture":
        WithoutExperts(config_of(Case(2, ep=2))).fit()
    Trained(config_of(Case(2, ep=1 + int(os.environ["RANK"])))).fit()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_ends_the_run_on_all_ranks(mistake: str) -> None:
    for error in errors_of(make_mistake, mistake):
        assert MISTAKES[mistake] in error


@pytest.mark.parametrize(("replicate", "shard", "experts"), [(4, 1, 2), (1, 8, 2), (2, 4, 4)])
def test_experts_share_with_shards(replicate: int, shard: int, experts: int) -> None:
    devices = dt.DeviceParameters(dp_replicate=replicate, dp_shard=shard, expert_parallel=experts)
    api.resolve_mesh(devices, replicate * shard, shard_by_default=True)
    with pytest.raises(api.ConfigError, match=r"expert_parallel=3 does not divide the \d ranks of dp_"):
        api.resolve_mesh(replace(devices, expert_parallel=3), replicate * shard, shard_by_default=True)
