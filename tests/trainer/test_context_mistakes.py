"""What context parallelism cannot do is named, on all ranks, before a step ends wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dream_trainer as dt
from tests.api import (
    ConfigError,
    DataError,
    GatheredAttention,
    HookError,
    MeshShape,
    Ranks,
    RanksDifferError,
    SequenceCut,
    SequenceParts,
    UlyssesAttention,
    own_class,
)
from tests.trainer.sequences import Block, Case, Model, Trained, config_of
from tests.trainer.small import Spread, make_config, run_ranks


class RanksOfTwo(Ranks):
    """Two ranks that share sequences, the other of which has another batch."""

    mesh_shape = MeshShape(pp=1, dp_replicate=1, dp_shard=1, cp=2, tp=1)

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.stack((values, values + 1))


def cut_of(ranks: int = 2, *, ulysses: bool = False) -> SequenceCut:
    parts = SequenceParts(0, ranks, None, is_balanced=not ulysses)
    world: Any = RanksOfTwo(0, 2, None, sample_copies=2)
    return SequenceCut(UlyssesAttention(parts) if ulysses else GatheredAttention(parts), world)


def test_a_length_that_ranks_cannot_share_is_named_with_its_field_and_what_fits() -> None:
    cut, batch = cut_of(), {"text": {"tokens": torch.zeros(3, 30)}, "pairs": (torch.zeros(3, 2), torch.zeros(3, 8))}
    cut.begin(batch)
    told = r"batch\['text'\]\['tokens'\] has 30 positions along dimension 1, .* multiple of 4, twice context_parallel=2"
    with pytest.raises(DataError, match=told + r"\. Use sequences of 28 or 32 positions"):
        cut.cut(batch["text"]["tokens"])
    with pytest.raises(DataError, match=r"batch\['pairs'\]\[0\] has 2 positions .* Use sequences of 4 positions"):
        cut.cut(batch["pairs"][0])
    with pytest.raises(DataError, match="a tensor made in cut_batch has 5 positions along dimension -1"):
        cut.cut(torch.zeros(3, 5), dim=-1)
    assert cut.cut(batch["pairs"][1]).shape == (3, 4)
    ulysses = cut_of(3, ulysses=True)
    ulysses.begin(batch)
    with pytest.raises(DataError, match=r"has 8 positions .* a multiple of 3, context_parallel=3. Use .* 6 or 9"):
        ulysses.cut(batch["pairs"][1])


def test_what_is_no_sequence_is_not_cut() -> None:
    cut = cut_of()
    cut.begin([3, torch.zeros(4)])
    with pytest.raises(HookError, match=r"cut\(batch\[0\], dim=1\) with int. Cut tensors along the sequence"):
        cut.cut(3)  # type: ignore[arg-type]
    with pytest.raises(HookError, match=r"with a tensor of shape \(4,\). Cut tensors"):
        cut.cut(torch.zeros(4))
    with pytest.raises(HookError, match="cut_batch cut nothing, and each of the 2 ranks would do the whole work"):
        cut.end(None, is_training=True)


def test_ranks_that_share_sequences_and_read_different_ones_are_told() -> None:
    cut = cut_of()
    cut.begin(None)
    cut.cut(torch.zeros(3, 8))
    with pytest.raises(RanksDifferError, match=r"that share sequences \(context_parallel\) have different batches"):
        cut.end(None, is_training=True)


def test_what_the_trainer_or_its_config_lacks_is_named_when_it_is_built() -> None:
    class Uncut(dt.DreamTrainer):
        configure_models = Trained.configure_models
        configure_optimizers = Trained.configure_optimizers
        configure_dataloaders = Trained.configure_dataloaders
        training_step = Trained.training_step

    with pytest.raises(ConfigError, match="context_parallel=2, but Uncut does not override cut_batch. Cut each batch"):
        Uncut(config_of(Case(2)))

    class Cuts(Spread):
        cut_batch = Trained.cut_batch

    with pytest.raises(HookError, match="Cuts overrides cut_batch, which only ContextParallelMixin calls. Add it"):
        Cuts(make_config())


def test_a_compiled_block_within_another_is_named() -> None:
    class Nested(Trained):
        def model_blocks(self, model: Any) -> Any:
            return [model.blocks[1], *(block.mlp for block in model.blocks)]

    trainer = Nested(config_of(Case(2, backend="eager")))
    trainer.model = Model(Case())
    with pytest.raises(ConfigError, match=r"model_blocks gives 'blocks.1' and 'blocks.1.mlp', which is within it"):
        trainer.apply_compile()


def test_blocks_that_two_models_have_are_compiled_once() -> None:
    trainer = Trained(config_of(Case(2, backend="eager", recompute="full")))
    trainer.model, trainer.other = Model(Case()), Model(Case())
    trainer.other.blocks = trainer.model.blocks
    trainer.apply_activation_checkpointing()
    trainer.apply_compile()
    assert {own_class(block) for block in trainer.model.blocks} == {Block}
    assert len(type(trainer.model.blocks[0]).__mro__) == len(type(trainer.other.blocks[1]).__mro__)


def test_a_batch_is_prepared_in_one_process_too_and_what_is_no_batch_is_named() -> None:
    class Prepared(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            assert "positions" in batch
            return super().training_step(batch, batch_idx)

    with Prepared(config_of(Case(), max_steps=1)) as trainer:
        trainer.fit()
        assert trainer.global_step == 1

    class Forgotten(Trained):
        def cut_batch(self, batch: Any, cut: Any) -> Any:
            cut(batch["tokens"])

    with pytest.raises(HookError, match="Forgotten.cut_batch returned None. Return the batch"):
        Forgotten(config_of(Case())).fit()


MISTAKES = {
    "own backward": "step() found gradients that self.backward() has not made, under context_parallel=2, where ranks",
    "no weight": "backward() was called without weight= under context_parallel=2",
    "no weight in validation": "validation_step returned values without their weight, under context_parallel",
    "no weight in log": "log('loss') without weight= in a validation under context_parallel",
    "rows of samples": "gathers the rows of samples, of which each of context_parallel=2 ranks has a part",
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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_values_without_weights_end_the_run_on_all_ranks(mistake: str, tmp_path: Path) -> None:
    code = f"from tests.trainer.test_context_mistakes import make_mistake; make_mistake({mistake!r})"
    for status, text in run_ranks(code, 2, tmp_path):
        assert status == 1
        assert MISTAKES[mistake] in text


def make_mistake(mistake: str) -> None:
    Unweighted.mistake = mistake
    Unweighted(config_of(Case(2), max_steps=1, val_every_n_steps=1)).fit()
