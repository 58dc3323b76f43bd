"""Context parallelism changes who has which positions and nothing else; what it cannot do is named on all ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dream_trainer as dt
from tests import api
from tests.api import DistributedDataLoader
from tests.trainer import sequences
from tests.trainer.sequences import HEAD, LENGTH, STEPS, VOCABULARY, WIDTH, Case, Rows, Trained, config_of
from tests.trainer.small import Sent, Spread, errors_of, fit_each, make_config, weights
from tests.worlds import run_world

WORLD_2 = [
    Case(2, recompute="selective"),
    Case(2, shard="auto", packed=True, accumulation=2),
    Case(2, attention="ulysses", recompute="full"),
    Case(2, attention="ulysses", causal=False, overlap=True),
    Case(2, backend="aot_eager", attention="ulysses", packed=True, shard="auto", recompute="full"),
]
FURTHER_2 = [
    Case(2, shard="auto", offload=True),
    Case(2, packed=True, causal=False, clip=None),
    Case(2, backend="aot_eager", nested=True, clip=None),
    Case(2, backend="aot_eager", packed=True, recompute="selective", accumulation=2),
    Case(2, backend="aot_eager", attention="ulysses", causal=False, recompute="selective", nested=True),
    Case(2, backend="aot_eager", causal=False, shard="auto", recompute="full"),
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


class RanksOfTwo(api.Ranks):
    """Two ranks that share sequences, the other of which has another batch."""

    mesh_shape = api.MeshShape(pp=1, dp_replicate=1, dp_shard=1, cp=2, tp=1)

    def all_gather_object(self, value: Any, /) -> list[Any]:
        among, facts = value
        other = {name: f"not {fact}" for name, fact in facts.items()} if isinstance(facts, dict) else facts[::-1]
        return [value, (among, other)]


TOKENS = torch.zeros(3, 30)


@pytest.mark.parametrize(
    ("mistake", "error", "told"),
    [
        (
            lambda cut: cut.cut(TOKENS),
            api.DataError,
            r"a tensor of shape \(3, 30\), whose 30 positions .* multiple of 4.* pad them in the loader to 32",
        ),
        (
            lambda cut: cut.cut(torch.zeros(3, 5), dim=-1),
            api.DataError,
            r"a tensor of shape \(3, 5\), whose 5 positions along dimension -1",
        ),
        (lambda cut: None, api.HookError, "cut_batch cut nothing, and each of the 2 ranks would do the whole work"),
        (
            lambda cut: cut.cut(torch.zeros(3, 8)),
            api.RanksDifferError,
            r"a batch \(.* Ranks that share sequences \(context_parallel\) need the same",
        ),
    ],
)
def test_a_batch_that_ranks_cannot_share_is_named_with_what_fits(mistake: Any, error: Any, told: str) -> None:
    world: Any = RanksOfTwo(0, 2, None, sample_copies=2)
    cut = api.SequenceCut(api.GatheredAttention(api.SequenceParts(0, 2, None, is_balanced=True)), world)
    cut.clear()
    with pytest.raises(error, match=told):
        cut.end(mistake(cut), is_training=True)


def test_what_the_trainer_or_its_config_lacks_is_named_when_it_is_built() -> None:
    class Uncut(dt.DreamTrainer):
        configure_models = Trained.configure_models
        configure_optimizers = Trained.configure_optimizers
        configure_dataloaders = Trained.configure_dataloaders
        training_step = Trained.training_step

    with pytest.raises(
        api.ConfigError, match="context_parallel=2, but Uncut does not override cut_batch. Cut each batch"
    ):
        Uncut(config_of(Case(2)))

    class Cuts(Spread):
        cut_batch = Trained.cut_batch

    with pytest.raises(api.HookError, match="Cuts overrides cut_batch, which only ContextParallelMixin calls. Add it"):
        Cuts(make_config())


def test_blocks_that_two_models_have_are_compiled_once() -> None:
    trainer = Trained(config_of(Case(2, backend="eager", recompute="full")))
    trainer.model, trainer.other = sequences.Model(Case()), sequences.Model(Case())
    trainer.other.blocks = trainer.model.blocks
    trainer.apply_activation_checkpointing()
    trainer.apply_compile()
    assert {api.own_class(block) for block in trainer.model.blocks} == {sequences.Block}
    assert len(type(trainer.model.blocks[0]).__mro__) == len(type(trainer.other.blocks[1]).__mro__)


def test_a_batch_is_prepared_in_one_process_too() -> None:
    with Trained(config_of(Case(), max_steps=1)) as trainer:
        trainer.fit()  # with positions, which cut_batch adds
        assert trainer.global_step == 1


MISTAKES = {
    "own backward": "step() found gradients that self.backward() has not made, under context_parallel=2",
    "no weight": "backward() was called without weight= under context_parallel=2",
    "no weight in validation": "validation_step returned values without their weight, under context_parallel",
    "no weight in log": "log('loss') without weight= in a validation under context_parallel",
    "rows of samples": "gathers the rows of whole samples of all ranks. Under context_parallel=2 some ranks have parts",
}


class Unweighted(Trained):
    mistake = ""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.mistake == "no weight":
            self.backward(self.model(batch["tokens"], batch["positions"], None).mean())
        if self.mistake == "own backward":
            self.model(batch["tokens"], batch["positions"], None).mean().backward()
            self.step(self.model, self.optimizer)
        if self.mistake == "rows of samples":
            self.world.all_gather_with_gradient(batch["tokens"])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.mistake == "no weight in log":
            self.log("loss", 1.0)
        return {"loss": 1.0}


ORDINARY = ("own backward", "no weight", "no weight in validation")


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name in ORDINARY else pytest.mark.slow) for name in MISTAKES]
)
def test_values_without_weights_end_the_run_on_all_ranks(mistake: str) -> None:
    for error in errors_of(make_mistake, mistake):
        assert MISTAKES[mistake] in error


def make_mistake(mistake: str) -> None:
    Unweighted.mistake = mistake
    Unweighted(config_of(Case(2), max_steps=1, val_every_n_steps=1)).fit()
