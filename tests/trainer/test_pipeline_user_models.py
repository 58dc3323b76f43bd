"""Models as users have them, in stages: with skips, groups and parameters of several stages, which are one. What leaves
a pipeline is the whole model, and what cannot be cut is named, with what to do."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import TensorDataset

import dream_trainer as dt
from tests.api import (
    EMA,
    ConfigError,
    DistributedDataLoader,
    even_stages,
    export_checkpoint,
    keep_only,
    load_weights,
    remember_cut,
)
from tests.trainer import meshes
from tests.trainer.arithmetic import full, same_bits
from tests.trainer.small import fit, run_ranks, train_by_hand, weights
from tests.trainer.stages import (
    BATCH,
    BLOCKS,
    LENGTH,
    STEPS,
    VOCABULARY,
    WIDTH,
    Case,
    Model,
    Rows,
    Trained,
    assert_trained,
    config_of,
    count,
    mean_loss,
    reference,
    result_of,
    united,
    weights_of,
)
from tests.worlds import run_each, run_world


class Handing(nn.Module):
    """A U-Net that hands what its way down gave to its way up."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 6)
        self.double()

    def forward(self, x: Tensor, *skips: Tensor) -> Any:
        if self.enter is not None:
            x = self.enter(x)
        for layer in self.down:
            x = layer(x).relu()
            skips = (*skips, x)
        for layer in self.up:
            x, skips = layer(torch.cat((x, skips[-1]), dim=-1)).relu(), skips[:-1]
        return (x, *skips) if self.head is None else self.head(x)


def numbers() -> TensorDataset:
    return TensorDataset(*torch.randn(2, 24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


class OfUsers(dt.DreamTrainer):
    def configure_models(self) -> None:
        self.model = Handing()

    def configure_dataloaders(self) -> tuple[Any, None]:
        return DistributedDataLoader(numbers(), 8), None

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.initial = weights(self.model)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = self.forward_backward(self.model, (x,), y, nn.functional.mse_loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}


def train_handing(directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    os.chdir(directory)
    with OfUsers(config_of(Case(2, clip=None))) as trainer:
        trainer.fit()
        return trainer.initial, weights(trainer.model)


def test_skips_that_cross_are_trained_as_in_one_process(on_two_ranks: list[Any]) -> None:
    ranks = [handing for handing, *_ in on_two_ranks]
    model = Handing()
    model.load_state_dict(united([start for start, _ in ranks]), strict=False)
    batches = zip(*(tensor.split(8) for tensor in numbers().tensors), strict=True)
    train_by_hand(model, torch.optim.AdamW(model.parameters(), lr=1e-2), [[batch] for batch in batches])
    found = united([end for _, end in ranks])
    torch.testing.assert_close(found, weights(model), rtol=1e-11, atol=1e-11)


HEAD = dt.GroupParameters(pattern=r"^head\.", lr=3e-3)
LOWEST = dt.GroupParameters(pattern=r"^blocks\.0\.up", lr_scale=0.5)
OPTIMIZER = dt.OptimizerParameters(lr=1e-2, weight_decay=0.1, layer_decay=0.5, groups=(HEAD, LOWEST), fused=False)


def rate_of(name: str) -> tuple[float, float]:
    decay = 0.0 if name.endswith("bias") or "norm" in name else 0.1
    if name.startswith("head."):
        return 3e-3, decay
    depth = BLOCKS + 1 if name.startswith("norm") else 0
    if name.startswith("blocks."):
        depth = 1 + int(name.split(".")[1])
    return 1e-2 * 0.5 ** (BLOCKS + 1 - depth) * (0.5 if name.startswith("blocks.0.up") else 1), decay


class ByDepth(Trained):
    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.optimizer = dt.build_optimizer(OPTIMIZER, self.model)

    def configure_schedulers(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        loss = self.forward_backward(self.model, (tokens,), labels, mean_loss, weight=count)
        self.norms.append(float(self.step(self.model, self.optimizer, self.scheduler)))
        return {"loss": loss}


def train_by_depth(cases: list[tuple[int, int]], directory: str) -> list[dict[str, Any]]:
    os.chdir(directory)
    results = []
    for stages, steps in cases:
        config = config_of(Case(stages), "by-depth", saves=True, max_steps=steps, val_every_n_epochs=None)
        with ByDepth(config) as trainer:
            trainer.fit()
            groups = [(g["name"], g["lr"], g["weight_decay"]) for g in trainer.optimizer.param_groups]
            results.append(result_of(trainer) | {"groups": groups})
    return results


class OnceWithoutLabels(Trained):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        labels = torch.full_like(batch[1], -100) if batch_idx == 1 else batch[1]
        loss = self.forward_backward(self.model, (batch[0],), labels, meshes.mean_loss, weight=count)
        self.norms += [float(loss), float(self.step(self.model, self.optimizer))]
        return {"loss": loss}


def train_once_without_labels() -> list[float]:
    return fit(OnceWithoutLabels(config_of(Case(2), val_every_n_epochs=None))).norms


def train_all(directory: str) -> tuple[Any, Any, Any]:
    return train_handing(directory), train_by_depth([(2, 1), (2, 2), (2, 3)], directory), train_once_without_labels()


def test_a_batch_without_labels_has_the_loss_and_norm_0_in_stages(on_two_ranks: list[Any]) -> None:
    for losses_and_norms in (without for *_, without in on_two_ranks):
        assert [bool(number) for number in losses_and_norms] == [True] * 2 + [False] * 2 + [True] * (2 * STEPS - 4)
        assert torch.tensor(losses_and_norms).isfinite().all()


def windows() -> list[list[tuple[Tensor, Tensor]]]:
    """Four micro-batches to a step."""
    rows = Rows(BATCH * STEPS)
    steps = zip(rows.tokens.split(BATCH), rows.labels.split(BATCH), strict=True)
    return [list(zip(tokens.chunk(4), labels.chunk(4), strict=True)) for tokens, labels in steps]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def on_two_ranks(directory: Path) -> list[Any]:
    return run_world(train_all, 2, str(directory))


def test_layer_decay_and_groups_by_name_are_those_of_the_whole_model(on_two_ranks: list[Any], directory: Path) -> None:
    by_rank = [by_depth for _, by_depth, *_ in on_two_ranks]
    ((last,),) = run_world(train_by_depth, 1, [(1, STEPS)], str(directory))
    model = Model(Case())
    model.load_state_dict(united([of_rank[0]["start"] for of_rank in by_rank]), strict=False)
    rates = {name: rate_of(name) for name, _ in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": rates[n][0], "weight_decay": rates[n][1]} for n, p in model.named_parameters()],
        foreach=False,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step, window in enumerate(windows()):
        train_by_hand(
            model,
            optimizer,
            [window],
            lambda model, batch: mean_loss(model(batch[0]), batch[1]),
            weight_of=lambda batch: int(count(batch[1])),
            clip=0.05,
        )
        scheduler.step()
        stages = [of_rank[step] for of_rank in by_rank] if step < 3 else [last]
        found = united([stage["weights"] for stage in stages])
        torch.testing.assert_close(found, weights(model), rtol=1e-10, atol=1e-10)
        # A stage has the whole model's groups, and their rates, also of those that are empty there.
        expected = dt.parameter_groups(
            model, lr=1e-2, weight_decay=0.1, layer_decay=0.5, groups=(HEAD, LOWEST), decay_vectors=False
        )
        for stage in stages:
            assert [name for name, _, _ in stage["groups"]] == [group["name"] for group in expected]
            for (_, lr, decay), group in zip(stage["groups"], expected, strict=True):
                assert (lr, decay) == (pytest.approx(group["lr"] * 0.5 ** (step + 1)), group["weight_decay"])


def cut(model: Model, stage: int) -> Model:
    stages = even_stages(model, list(model.blocks), 2)
    remember_cut(model, (), list(model.blocks))
    keep_only(model, stages[stage])
    return model


@pytest.mark.parametrize("stage", [0, 1])
def test_what_matches_nothing_in_the_whole_model_is_refused_in_each_stage(stage: int) -> None:
    tied = cut(Model(Case(tied=True)), stage)
    groups = dt.parameter_groups(
        tied, lr=1.0, weight_decay=0.1, groups=(dt.GroupParameters(pattern="^head.w", lr=2.0),)
    )
    assert [group["name"] for group in groups] == ["decay", "no_decay", "^head.w decay"]
    assert [name for name, _ in groups[2]["params"]] == [["embedding.weight"], ["head.weight"]][stage]
    with pytest.raises(ConfigError, match=r"'heads' matches no parameter of the model. Near names: head"):
        dt.parameter_groups(tied, lr=1.0, weight_decay=0.1, groups=(dt.GroupParameters(pattern="heads", lr=2.0),))
    muon, adamw = dt.build_optimizers(
        dt.OptimizerParameters(name="muon", lr=1e-2, hidden=(r"^blocks\.4\.up",)), cut(Model(Case()), stage)
    )
    assert [len(group["params"]) for group in muon.param_groups] == [stage]
    muon.step()
    adamw.step()
    with pytest.raises(ConfigError, match="other modules than the model was cut by, as the one of blocks"):
        dt.parameter_groups(tied, lr=1.0, weight_decay=0.1, layer_decay=0.5, blocks=[nn.Linear(1, 1)])
    tied.more = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="more.bias was added after the model was cut into stages"):
        dt.parameter_groups(tied, lr=1.0, weight_decay=0.1)


CASES = [Case(2, tied=True), Case(2, tied=True, schedule="ZBVZeroBubble", weighted=False)]
CASES += [Case(2, tied=True, schedule="Interleaved1F1B", accumulation=2, microbatches=2)]
WORLD_4 = [Case(2, dp=2, tied=True, shard="auto"), Case(2, dp=2, tied=True), Case(4, tied=True, microbatches=4)]
WORLD_4 += [Case(2, dp=2, tied=True, shard="auto", schedule="ZBVZeroBubble")]  # one parameter of a rank's two stages


def averages_of(trainer: Trained) -> dict[str, Tensor]:
    return {name: full(value) for name, value in trainer.get_callback(EMA).checkpoint_tensors().items()}


def train(case: Case, experiment: str, steps: int) -> dict[str, Any]:
    is_saved = experiment != "case"
    config = config_of(case, experiment, saves=is_saved, callbacks=[EMA(decay=0.5)], max_steps=steps)
    with Trained(config) as trainer:
        trainer.fit()
        found = result_of(trainer) | {"averages": averages_of(trainer)}
        if experiment == "hops" and case.pp > 1:
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.zero_()
            load_weights(trainer.model, "alone.safetensors", optional=("scale",))
            found["loaded"] = weights_of(trainer)
        return found


def check(cases: list[Case]) -> None:
    for case, ranks in run_each(train, cases[0].world_size, cases, "case", STEPS):
        start = {name: value for result in ranks for name, value in result["start"].items()}
        assert torch.equal(start["embedding.weight"], start.get("head.weight", start["embedding.weight"]))
        assert_trained(ranks, reference(case, start), case)
        tied = [v for result in ranks for n, v in result["weights"].items() if n in ("embedding.weight", "head.weight")]
        assert all(torch.equal(copy, tied[0]) for copy in tied)


def test_tied_ends_are_one_parameter() -> None:
    check(CASES)
    (first,) = run_world(train, 1, Case(tied=True), "hops", 2)
    save_file({n: v.contiguous() for n, v in first["weights"].items()}, "alone.safetensors")
    for hopped in run_world(train, 2, CASES[0], "hops", 3):
        copies = {"head.weight": "embedding.weight"}
        assert all(torch.equal(v, first["weights"][copies.get(n, n)]) for n, v in hopped["loaded"].items())
    (last,), (unbroken,) = (run_world(train, 1, Case(tied=True), name, 4) for name in ("hops", "unbroken"))
    assert last["weights"].keys() == unbroken["weights"].keys()
    for kind in ("state", "averages"):
        torch.testing.assert_close(last[kind], unbroken[kind], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_tied_ends_beside_data_parallel_ranks_and_further_stages() -> None:
    check(WORLD_4)


class TwoHeads(Model):
    """Has a head of its own for short sequences, so that the last stage leaves its copy of the tied matrix out."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.other = nn.Linear(WIDTH, VOCABULARY).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None or x.shape[1] == LENGTH:
            return super().forward(x)
        if self.embedding is not None:
            x = self.embedding(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.other(self.norm(x)) * self.scale


class LeavingOut(Trained):
    def configure_models(self) -> None:
        self.model = TwoHeads(self.config.case)


def leave_out(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    with LeavingOut(config_of(case, "left-out")) as trainer:
        trainer.fit()
        return trainer.norms, weights_of(trainer)


def test_a_copy_that_a_stage_of_shards_leaves_out_is_trained_by_the_other() -> None:
    ((norms, weights),) = run_world(leave_out, 1, Case(tied=True, changing=True))
    by_rank = run_world(leave_out, 4, Case(2, dp=2, tied=True, shard="auto", changing=True))
    for found, of_rank in by_rank:
        assert found == pytest.approx(norms, rel=1e-10)
        for name, value in of_rank.items():
            expected = weights["embedding.weight" if name == "head.weight" else name]
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)


class FrozenLater(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.global_step == 1 and self.model.embedding is not None:
            self.model.embedding.requires_grad_(False)
        return super().training_step(batch, batch_idx)


def freeze_later() -> None:
    FrozenLater(config_of(Case(2, tied=True))).fit()


def test_a_copy_that_is_frozen_later_in_one_stage_is_refused_on_all_ranks(tmp_path: Path) -> None:
    ranks = run_ranks("from tests.trainer.test_pipeline_user_models import freeze_later; freeze_later()", 2, tmp_path)
    assert [status for status, _ in ranks] == [1, 1]
    said = "embedding.weight was frozen since its last step, and other stages have copies"
    assert any(said in text for _, text in ranks)


FROZEN = Case(2, frozen=True)


class Loaded(Trained):
    """With frozen layers in both stages, which come from a file."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.blocks[-1].requires_grad_(False)

    def load_pretrained(self) -> None:
        load_weights(self.model, "base.safetensors")


def travel(case: Case, experiment: str, *steps: int) -> list[dict[str, Any]]:
    results = []
    for max_steps in steps:
        config = config_of(case, experiment, callbacks=[EMA(decay=0.5)], max_steps=max_steps)
        checkpoints = dt.CheckpointParameters(save_every_n_epochs=None, save_frozen=False)
        with Loaded(replace(config, checkpoint_parameters=checkpoints)) as trainer:
            trainer.fit()
            results.append(result_of(trainer) | {"averages": averages_of(trainer)})
            with trainer.gathered(trainer.model):
                results[-1]["gathered"] = trainer.model.state_dict()
            trainer.export(f"{experiment}-{max_steps}", dtype=torch.float32)
            trainer.export(f"{experiment}-{max_steps}.safetensors", weights="ema")
    return results


def test_exports_and_checkpoints_without_frozen_weights_are_the_whole_models(tmp_path: Path) -> None:
    save_file(Model(FROZEN).state_dict(), tmp_path / "base.safetensors")
    ranks = run_world(travel, 2, FROZEN, "hops", 2, 3)
    weights = united([result["weights"] for *_, result in ranks])
    weights["scale"] = torch.full((), 0.5, dtype=torch.float64)
    exported = load_file(tmp_path / "hops-3" / "model.safetensors")
    assert same_bits(exported, {name: value.float() for name, value in weights.items()})
    (checkpoint,) = tmp_path.rglob("step_*3")  # without what is frozen, which is read from where each stage loaded it
    export_checkpoint(checkpoint, tmp_path / "saved")
    assert same_bits(load_file(tmp_path / "saved" / "model.safetensors"), weights)
    averages = united([result["averages"] for *_, result in ranks])
    found = load_file(tmp_path / "hops-3.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name.partition("model.")[2]], value) for name, value in averages.items())
    for *_, result in ranks:  # what a stage has can be taken
        assert result["gathered"].keys() == result["weights"].keys() | {"scale"} < weights.keys()
    alone = replace(FROZEN, pp=1)
    ((last,),), ((unbroken,),) = (run_world(travel, 1, alone, name, 4) for name in ("hops", "unbroken"))
    for kind in ("state", "averages"):
        torch.testing.assert_close(last[kind], unbroken[kind], rtol=1e-9, atol=1e-9)
