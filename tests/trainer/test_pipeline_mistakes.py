"""What a pipeline cannot do is named, on all ranks, before a step ends wrong; optimizers of parts of a model train."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from tests import api
from tests.trainer.small import fit, run_ranks
from tests.trainer.stages import BLOCKS, VOCABULARY, Case, Model, Trained, config_of, count, mean_loss, train
from tests.worlds import run_world


def stages_of(model: Model, n_stages: int = 2) -> list[list[str]]:
    return api.even_stages(model, list(model.blocks), n_stages)


def test_blocks_are_dealt_evenly_with_what_comes_before_and_after_them() -> None:
    model = Model(Case())
    assert stages_of(model) == [
        ["position", "embedding", "blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3", "blocks.4", "norm", "head"],
    ]
    inner = nn.ModuleDict({"inner": model, "end": nn.Linear(2, 2)})
    assert api.even_stages(inner, list(model.blocks), 5)[4] == ["inner.blocks.4", "inner.norm", "inner.head", "end"]


def test_a_model_that_cannot_be_cut_is_named_with_what_to_do() -> None:
    model = Model(Case())
    with pytest.raises(api.ConfigError, match=f"Model has {BLOCKS} repeated blocks, .* Use at most {BLOCKS} stages, w"):
        stages_of(model, 6)
    with pytest.raises(api.ConfigError, match="has 0 repeated blocks, which .*Sequential"):
        api.even_stages(nn.Linear(2, 2), [], 2)
    first, last = stages_of(model)
    with pytest.raises(api.HookError, match=r"gave 2 stages \(4, 5 names\), and 3 are needed"):
        api.check_stages(model, [first, last], 3)
    with pytest.raises(api.HookError, match="names 'layers.0', which Model does not have"):
        api.check_stages(model, [[*first, "layers.0"], last], 2)
    with pytest.raises(api.HookError, match="has the parameter 'position' in no stage"):
        api.check_stages(model, [first[1:], last], 2)
    with pytest.raises(api.HookError, match=r"has the parameter 'blocks.2.norm.weight' in stages 0 or 1"):
        api.check_stages(model, [[*first, "blocks.2"], last], 2)
    frozen = Model(Case())
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(first)))
    with pytest.raises(api.ConfigError, match="stage 0 of the pipeline has no parameter that is trained"):
        api.check_stages(frozen, [first, last], 2)


def test_a_batch_is_cut_along_first_dimensions_alone() -> None:
    parts = api.cut({"x": torch.arange(5), "n": torch.tensor(3), "name": "a"}, 2, 5)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part["n"] == 3 and part["name"] == "a" for part in parts)
    words, sizes = list("abcde"), (3, 3)
    parts = api.cut((torch.zeros(5), {"words": words, "n": [1, 2, 3, 4, 5], "sizes": sizes, "few": [1, 2]}), 2, 5)
    assert [part[1]["words"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [part[1]["n"] for part in parts] == [[1, 2, 3], [4, 5]]
    assert all(part[1]["sizes"] == sizes and part[1]["few"] == [1, 2] for part in parts)
    assert api.shapes_of((torch.zeros(5), words)) == api.shapes_of((torch.zeros(5), list("fghij")))
    with pytest.raises(api.DataError, match=r"5 samples and a tensor of shape \[7, 5\], and cuts each"):
        api.cut((torch.zeros(5, 2), torch.zeros(7, 5)), 2, 5)


def test_batches_look_alike_by_shapes_counts_and_words_and_not_by_rates_or_addresses() -> None:
    class Options:
        pass

    x, kept = torch.zeros(2, 3), [Options() for _ in range(3)]
    like = api.shapes_of({"x": x, "rate": 0.5, "length": 3, "mode": "a", "options": kept[0], "mask": None})
    assert like == api.shapes_of(
        {"x": x + 1, "rate": 0.6, "length": 3, "mode": "a", "options": Options(), "mask": None}
    )
    assert len({like, like}) == 1
    for other in ({"x": x[:1]}, {"x": x.double()}, {"length": 4}, {"mode": "b"}, {"options": 1}, {"mask": x}):
        changed = {"x": x, "rate": 0.5, "length": 3, "mode": "a", "options": kept[1], "mask": None} | other
        assert api.shapes_of(changed) != like


class Careless(Trained):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        model, inputs = self.model, (tokens,)

        self.told = {}
        for name, mistake in {
            "batches": lambda: self.forward_backward(model, (tokens + self.world.rank,), labels, mean_loss),
            "weights": lambda: self.forward_backward(
                model, inputs, labels, mean_loss, weight=count if self.world.is_main else None
            ),
            "model": lambda: model(tokens),
            "backward": lambda: self.backward(torch.zeros((), requires_grad=True)),
            "weight": lambda: self.forward_backward(model, inputs, labels, mean_loss, weight=3.0),
            "odd": lambda: self.forward_backward(model, (tokens[:15],), labels[:15], mean_loss, weight=count),
            "targets": lambda: self.forward_backward(model, inputs, labels[:8], mean_loss, weight=count),
            "rows": lambda: self.world.all_gather_with_gradient(tokens.double()),
        }.items():
            with pytest.raises((api.StepError, api.DataError, api.ConfigError, api.RanksDifferError)) as raised:
                mistake()
            self.told[name] = str(raised.value)
        self.forward_backward(model, inputs, labels, mean_loss, weight=count)
        self.step(model, self.optimizer)
        return {}


def be_careless() -> dict[str, str]:
    return fit(Careless(config_of(Case(2), max_steps=1, val_every_n_epochs=None))).told


def test_a_step_that_no_pipeline_can_run_is_refused_on_all_ranks() -> None:
    for told in run_world(be_careless, 2):
        for name, what in {"batches": "a batch", "weights": "weights of its micro-batches"}.items():
            assert f"though the run takes it for that: {what} (" in told[name]
            assert "The ranks of a pipeline (pipeline_parallel) need the same ones" in told[name]
        assert "the model was called under pipeline_parallel=2, with gradients, but each rank only has" in told["model"]
        assert "backward() was called under pipeline_parallel=2, but no rank has the whole" in told["backward"]
        assert "was given weight=float under pipeline_parallel=2, but each micro-batch needs its own" in told["weight"]
        assert "a batch of 15 samples cannot be cut into microbatches=4 of one size" in told["odd"]
        assert "was given 16 samples and a tensor of shape [8, 6]" in told["targets"]
        assert "Under pipeline_parallel=2 some ranks have parts of them, or no outputs" in told["rows"]


class Normed(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.head = nn.Sequential(self.head, nn.Flatten(0, 1), nn.BatchNorm1d(VOCABULARY).double())

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if self.head is None else output.unflatten(0, x.shape[:2])


class Unweighted(Trained):
    """Learns what depends on how many micro-batches there are, and notes what is said of it."""

    def configure_models(self) -> None:
        self.model, self.told = Normed(self.config.case), []

    def warn_once(self, key: str, message: str) -> None:
        self.told.append(message)
        super().warn_once(key, message)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        where = torch.arange(len(labels))[:, None]
        self.forward_backward(self.model, (tokens,), labels.clamp(min=0).masked_fill(where == 0, -100), mean_loss)
        self.step(self.model, self.optimizer)
        return {}


def be_unweighted() -> list[str]:
    return fit(Unweighted(config_of(Case(2), max_steps=1, val_every_n_epochs=None))).told


def test_means_that_depend_on_the_number_of_micro_batches_are_named() -> None:
    for told in run_world(be_unweighted, 2):
        (norms,) = (message for message in told if "normalise each micro-batch" in message)
        assert norms.startswith("head.2 of Normed normalise each micro-batch of a pipeline by itself")


class Other(Trained):
    mistake = ""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        if self.mistake == "groups":
            named = dict(self.model.named_parameters())
            groups = [[p for name, p in named.items() if ("embedding" in name) is first] for first in (True, False)]
            self.optimizer = torch.optim.AdamW([{"params": group} for group in groups])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        if self.mistake == "unfrozen":
            first = ("position", "embedding", "blocks.0", "blocks.1")
            for parameter in (p for name, p in self.model.named_parameters() if name.startswith(first)):
                parameter.requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)


MISTAKES = {
    "groups": "one parameter with copies in several stages, and embedding.weight is in group 0 of optim",
    "microbatches": "cannot run microbatches=1 through 2 stages on 2 ranks",
    "unfrozen": "the outputs of stage 0 of self.model need gradients, and did not in the first batch of this shape",
}


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=pytest.mark.slow if name != "groups" else ()) for name in MISTAKES]
)
def test_a_model_that_is_no_pipeline_ends_the_run_on_all_ranks(mistake: str, tmp_path: Path) -> None:
    code = f"from tests.trainer.test_pipeline_mistakes import make_mistake; make_mistake({mistake!r})"
    assert_ends_both(code, MISTAKES[mistake], tmp_path)


def assert_ends_both(code: str, said: str, directory: Path) -> None:
    ranks = run_ranks(code, 2, directory)
    assert [status for status, _ in ranks] == [1, 1]
    assert any(said in text for _, text in ranks)  # the other one may hear of it first
    assert all(said in text or "stops because of rank" in text for _, text in ranks)


def make_mistake(mistake: str) -> None:
    Other.mistake = mistake
    microbatches = 1 if mistake == "microbatches" else None
    case = Case(2, microbatches=microbatches, tied=mistake == "groups")
    Other(config_of(case, max_steps=2)).fit()


class OfParts(Trained):
    """An optimizer of the head and one of all else, which step one after the other, or together without clipping. A
    rank without such a part has one of nothing."""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        of_head = [p for name, p in self.model.named_parameters() if name.startswith("head.")]
        others = [p for name, p in self.model.named_parameters() if not name.startswith("head.")]
        self.optimizer = torch.optim.AdamW([{"params": others}], lr=1e-2)
        self.head_optimizer = torch.optim.AdamW([{"params": of_head}], lr=2e-2)

    def configure_schedulers(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.head_optimizer, lambda step: 1 / (1 + step))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        self.forward_backward(self.model, (tokens,), labels, mean_loss, weight=count)
        turns: list[Any] = [(self.optimizer,), (self.head_optimizer, self.scheduler)]
        if self.config.case.clip is None:
            turns = [([self.optimizer, self.head_optimizer], self.scheduler)]
        self.norms += [self.step(self.model, *turn).item() for turn in turns]
        return {}

    def warn_once(self, key: str, message: str) -> None:
        assert not key.startswith("beside")
        super().warn_once(key, message)


class InAnotherOrder(OfParts):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        self.forward_backward(self.model, (tokens,), labels, mean_loss, weight=count)
        both = [self.optimizer, self.head_optimizer]
        for optimizer in reversed(both) if self.world.rank else both:
            self.step(self.model, optimizer)
        return {}


def step_in_another_order(max_steps: int) -> None:
    InAnotherOrder(config_of(Case(2), saves=True, max_steps=max_steps, val_every_n_epochs=None)).fit()


@pytest.mark.parametrize("max_steps", [3, pytest.param(1, marks=pytest.mark.slow)])  # before the next one, or a save
def test_stages_that_step_in_another_order_are_refused_before_anything_is_saved(max_steps: int, tmp_path: Path) -> None:
    code = f"from tests.trainer.test_pipeline_mistakes import step_in_another_order as go; go({max_steps})"
    assert_ends_both(code, "by step 1 the stages have called step() for other optimizers than each other", tmp_path)
    assert not list(tmp_path.rglob("step_*/manifest.json"))


def hop(case: Case, experiment: str, *steps: int) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"saves": True, "val_every_n_epochs": None}
    return [train(OfParts, [case], experiment, max_steps=max_steps, **options)[0] for max_steps in steps]


@pytest.mark.parametrize("clip", [0.05, pytest.param(None, marks=pytest.mark.slow)])
def test_a_rank_without_a_part_steps_nothing_and_checkpoints_have_all(clip: float | None) -> None:
    alone = run_world(hop, 1, Case(clip=clip), "alone", 4)[0][0]
    ranks = run_world(hop, 2, Case(2, clip=clip), "hops", 2, 3)
    last = run_world(hop, 1, Case(clip=clip), "hops", 4)[0][0]
    for first, second in ranks:
        assert [*first["norms"], *second["norms"], *last["norms"]] == pytest.approx(alone["norms"], rel=1e-10)
    torch.testing.assert_close(last["weights"], alone["weights"], rtol=1e-9, atol=1e-9)
