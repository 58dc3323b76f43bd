"""Mixtures of experts under the trainer: as a loop by hand, with biases that are the same bits on every mesh."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dream_trainer as dt
from tests.api import EMA, DistributedDataLoader, MoE
from tests.trainer import mixtures
from tests.trainer.arithmetic import full, same_bits
from tests.trainer.meshes import count, mean_loss
from tests.trainer.mixtures import BATCH, RATE, STEPS, WIDTH, Case, Rows, Trained, config_of, everything, reference
from tests.trainer.small import fit_each
from tests.worlds import run_world


def found_in(trainer: Trained) -> dict[str, Any]:
    return {
        "start": trainer.initial,
        "losses": [trainer.logged[step]["train/loss"] for step in range(1, STEPS + 1)],
        "largest": [trainer.logged[n]["experts/model.blocks.1.moe/max_load"] for n in range(1, STEPS + 1)],
        "norms": trainer.norms,
        "state": mixtures.state_of(trainer.model),
        "val/loss": trainer.evaluate()["val/loss"],
    }


def train(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return fit_each((Trained(config_of(case)) for case in cases), found_in)


def assert_as_by_hand(cases: Sequence[Case]) -> None:
    n_ranks = cases[0].world_size
    by_rank = run_world(train, n_ranks, cases) if n_ranks > 1 else [train(cases)]
    (alone,) = train([Case()])
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = reference(case, alone["start"])
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


ALONE = [Case(), Case(accumulation=2, fused=True), Case(recompute="full", clip=None), Case(recompute="selective")]
WORLD_2 = [Case(2), Case(2, shard="auto", accumulation=2, recompute="full"), Case(2, accumulation=2, fused=True)]


COMPILED = [Case(backend="aot_eager"), Case(accumulation=2, recompute="full", backend="aot_eager")]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ALONE, id="1 rank"),
        pytest.param(WORLD_2, id="2 ranks"),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_training_equals_a_loop_written_by_hand(cases: list[Case]) -> None:
    assert_as_by_hand(cases)


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
        self.critic = MoE(WIDTH, WIDTH, 4, 2, balance_rate=RATE).double()

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return DistributedDataLoader(Rows(BATCH * STEPS), BATCH, shuffle=False), None

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
    expected = reference(Case(), alone["start"])
    loads = [{name: v for name, v in alone["logged"][step].items() if "_load" in name} for step in range(1, STEPS + 1)]
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
