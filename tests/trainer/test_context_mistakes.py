"""What context parallelism cannot do is named, on all ranks, before a step ends wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests import api
from tests.trainer.sequences import Block, Case, Model, Trained, config_of
from tests.trainer.small import Spread, make_config, run_ranks


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
        (lambda cut: cut.cut(3), api.HookError, r"with int\. Only cut tensors along the sequence"),
        (lambda cut: cut.cut(torch.zeros(4)), api.HookError, r"with a tensor of shape \(4,\). Only cut tensors"),
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
    cut.begin()
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
    trainer.model, trainer.other = Model(Case()), Model(Case())
    trainer.other.blocks = trainer.model.blocks
    trainer.apply_activation_checkpointing()
    trainer.apply_compile()
    assert {api.own_class(block) for block in trainer.model.blocks} == {Block}
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
def test_values_without_weights_end_the_run_on_all_ranks(mistake: str, tmp_path: Path) -> None:
    code = f"from tests.trainer.test_context_mistakes import make_mistake; make_mistake({mistake!r})"
    for status, text in run_ranks(code, 2, tmp_path):
        assert status == 1
        assert MISTAKES[mistake] in text


def make_mistake(mistake: str) -> None:
    Unweighted.mistake = mistake
    Unweighted(config_of(Case(2), max_steps=1, val_every_n_steps=1)).fit()
