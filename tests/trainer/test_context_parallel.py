"""Context parallelism changes who has which positions and nothing else: weights, losses, metrics and checkpoints."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.api import DistributedDataLoader
from tests.trainer import sequences
from tests.trainer.sequences import HEAD, LENGTH, STEPS, VOCABULARY, WIDTH, Case, Rows, Trained, config_of
from tests.trainer.small import Sent, fit_each, weights
from tests.worlds import run_world

WORLD_2 = [
    Case(2, recompute="selective"),
    Case(2, shard="auto", packed=True, accumulation=2),
    Case(2, attention="ulysses", recompute="full"),
    Case(2, attention="ulysses", causal=False, overlap=True),
    Case(2, backend="aot_eager", attention="ulysses", packed=True, shard="auto", recompute="full"),
]
FURTHER_2 = [
    Case(2, attention="ulysses", packed=True, shard="auto"),
    Case(2, shard="auto", offload=True),
    Case(2, packed=True, causal=False, clip=None),
    Case(2, backend="aot_eager", nested=True, clip=None),
    Case(2, backend="aot_eager", packed=True, recompute="selective", accumulation=2),
    Case(2, backend="aot_eager", attention="ulysses", causal=False, recompute="selective", nested=True),
    Case(2, backend="aot_eager", causal=False, shard="auto", recompute="full", overlap=False),
]
IN_FLOAT64 = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="inductor of PyTorch 2.11 gives attention's backward float32 where it is float64"
)
INDUCTOR_2 = [
    Case(2, backend="inductor", packed=True, recompute="full"),
    Case(2, backend="inductor", attention="ulysses", shard="auto", recompute="selective"),
    Case(2, backend="inductor", shard="auto", offload=True),
]
COMPILED_4 = [
    Case(4, backend="aot_eager", shard="auto", recompute="full"),
    Case(2, dp=2, backend="aot_eager", shard=2, attention="ulysses", packed=True, accumulation=2),
    Case(2, tp=2, backend="aot_eager", shard="auto"),
    Case(2, tp=2, backend="aot_eager", recompute="selective"),
]
WORLD_4 = [Case(2, dp=2, shard=2, attention="ulysses", packed=True, accumulation=2), Case(2, tp=2, shard="auto")]
FURTHER_4 = [
    Case(2, dp=2, packed=True, accumulation=2),
    Case(2, dp=2, shard=2, attention="ulysses"),
    Case(2, dp=2, shard="auto", packed=True),
    Case(4, shard="auto"),
]


def as_rings(size: int) -> Sent:
    """What this rank sends of queries, keys and values, as if every collective were a ring."""
    return Sent(
        _allgather_base_=lambda out, part, *_: part.nbytes * (size - 1),
        _reduce_scatter_base_=lambda part, *_: part.nbytes * (size - 1),
        alltoall_base_=lambda out, parts, *_: parts.nbytes * (size - 1) / size,
    )


def formula(case: Case) -> float:
    """What docs/context-parallel.md says that a rank sends in forward and backward of a step, in bytes of float64."""
    batch, queries, keys, layers, n = 8 // case.dp, WIDTH // HEAD, WIDTH // HEAD // 2, 2, case.cp
    heads = keys * 2 * (n - 1) / n if case.attention == "gathered" else 2 * (queries + keys) * (n - 1) / n**2
    runs = 2 if case.recompute == "none" else 3
    return 8 * layers * runs * batch * heads * LENGTH * HEAD


class Observed(Trained):
    """Notes what each step logs, and what the second one sends: the first is verified."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        if self.global_step != 1 or self.config.case.shard != 1 or self.config.case.backend is not None:
            return super().training_step(batch, batch_idx)
        with as_rings(self.config.case.cp) as sent:
            result = super().training_step(batch, batch_idx)
        self.sent = sent.n_bytes
        return result


def found_in(trainer: Observed) -> dict[str, Any]:
    return {
        "losses": [trainer.logged[step]["train/loss"] for step in range(1, STEPS + 1)],
        "labels": [trainer.logged[step]["labels"] for step in range(1, STEPS + 1)],
        "norms": trainer.norms,
        "sent": vars(trainer).get("sent"),
        "mesh": trainer.describe(),
        "weights": weights(trainer.model),
        "metrics": trainer.evaluate(),
        "predicted": trainer.predict(DistributedDataLoader(Rows(7), 1, drop_last=False)),
    }


def train(cases: list[Case]) -> list[dict[str, Any]]:
    return fit_each((Observed(config_of(case)) for case in cases), found_in)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WORLD_2, id="2 ranks"),
        pytest.param(FURTHER_2, id="2 ranks, further", marks=pytest.mark.slow),
        pytest.param(WORLD_4, id="4 ranks"),
        pytest.param(FURTHER_4, id="4 ranks, further", marks=pytest.mark.slow),
        pytest.param(INDUCTOR_2, id="compiled by inductor, of 2 ranks", marks=[pytest.mark.slow, IN_FLOAT64]),
        pytest.param(COMPILED_4, id="compiled, of 4 ranks", marks=pytest.mark.slow),
    ],
)
def test_training_on_parts_of_sequences_equals_a_loop_written_by_hand(cases: list[Case]) -> None:
    by_rank = run_world(train, cases[0].world_size, cases)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = sequences.reference(case)
        for result in ranks:
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10, abs=1e-10), case
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-10, abs=1e-10), case
            assert result["labels"] == expected["labels"]
            assert f"| cp | {case.cp} |" in result["mesh"]
            if case.shard == 1 and case.accumulation == 1 and not case.packed and case.backend is None:
                assert result["sent"] == formula(case), case
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-10), case
            assert result["predicted"].tolist() == pytest.approx(expected["predicted"], rel=1e-10), case
            torch.testing.assert_close(result["weights"], expected["weights"], rtol=1e-10, atol=1e-10)


class Foreign(Trained):
    """A model of transformers, of which this trainer only says where the tokens are."""

    def configure_models(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, attn_implementation="sdpa", **shape)
        self.model = LlamaForCausalLM(config).double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        scores = self.model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False).logits
        count = (batch["labels"] != -100).sum()
        loss = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / count.clamp(min=1)
        self.backward(loss, weight=count)
        self.norms.append(float(self.step(self.model, self.optimizer)))
        return {"loss": loss}


def train_foreign(case: Case) -> list[float]:
    with Foreign(config_of(case, val_every_n_epochs=None)) as trainer:
        trainer.fit()
        return trainer.norms


@pytest.mark.slow
def test_a_model_of_transformers_shares_its_sequences_unchanged() -> None:
    pytest.importorskip("transformers")
    alone = run_world(train_foreign, 1, Case())[0]
    for norms in run_world(train_foreign, 2, Case(2, attention="ulysses")):
        assert norms == pytest.approx(alone, rel=1e-6)  # its norms compute in float32
