"""What surrounds a step, on every mesh: averages, metrics, best values, counters, exports, retries, attributes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dream_trainer as dt
from tests.api import DistributedDataLoader
from tests.trainer.arithmetic import full
from tests.trainer.meshes import BATCH, VOCABULARY, Case, Model, Rows, Trained, config_of, count, mean_loss
from tests.trainer.small import fit
from tests.worlds import run_each, run_world

ON_TWO = [Case(cp=2, shard="auto"), Case(tp=2, plan="layers"), Case(pp=2), Case(dp=2, shard=2, ep=2, experts=True)]
ON_FOUR = [Case(tp=2, dp=2, shard=2), Case(pp=2, dp=2, shard="auto", schedule="ZBVZeroBubble", blocks=4)]
STEPS = 3


class Whole(Trained):
    """Two epochs; the first window of the second is not finite at first, and runs again."""

    has_retried = False

    def configure_metrics(self) -> None:
        from torchmetrics import MeanMetric, SumMetric
        from torchmetrics.classification import MulticlassAccuracy

        self.accuracy = MulticlassAccuracy(num_classes=VOCABULARY, ignore_index=-100, average="micro")
        self.mean, self.trained = MeanMetric(), SumMetric()  # both in float32
        self.totals: list[float] = []

    def configure_dataloaders(self) -> tuple[Any, Any]:
        train, _ = super().configure_dataloaders()
        return train, DistributedDataLoader(Rows(11), 5, drop_last=False)  # ranks have unequal numbers of batches

    def loss(self, model: Model, batch: tuple[Tensor, ...]) -> Tensor:
        is_bad = self.training and self.global_step == STEPS and not self.has_retried
        self.has_retried |= is_bad
        scale = float("nan") if is_bad else 1.0
        return self.forward_backward(
            model, self.inputs(batch), batch[1], lambda scores, of: mean_loss(scores, of) * scale, weight=count
        )

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Any]:
        self.log("largest", batch[1].max(), reduce="max")
        self.log("labels", count(batch[1]), reduce="sum")
        self.trained.update(count(batch[1]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        loss, scores = self.loss(self.model, batch), full(self.model(*self.inputs(batch)))
        self.accuracy.update(scores.flatten(0, 1), batch[1].flatten())
        self.mean.update(full(loss.detach()), weight=count(batch[1]))
        return {"loss": loss}, count(batch[1])

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        self.totals.append(float(self.trained.compute()))
        self.trained.reset()


def train(numbered: tuple[int, Case], directory: Path) -> dict[str, Any]:
    number, case = numbered
    here = directory / str(number)
    os.makedirs(here, exist_ok=True)
    os.chdir(here)
    saves = dt.CheckpointParameters(
        save_every_n_epochs=None, save_at_end=False, best_metric="val/loss", save_on_best=True
    )
    config = config_of(replace(case, steps=STEPS), n_epochs=2, on_nonfinite="retry")
    with Whole(replace(config, callbacks=[dt.EMA(0.5)], checkpoint_parameters=saves)) as trainer:
        trainer.fit()
        trainer.export("weights.safetensors", overwrite=True)
        trainer.export("ema.safetensors", weights="ema", overwrite=True)
        return {
            "norms": trainer.norms,
            "logged": [{k: v for k, v in line.items() if k != "time"} for line in trainer.history],
            "evaluated": trainer.evaluate(),
            "best": dict(trainer.best),
            "counters": (trainer.samples_seen, trainer.global_step, trainer.skipped_steps),
            "totals": trainer.totals,
            "checkpoints": [(c.step, c.metrics) for c in trainer.checkpoints()],
            "predicted": trainer.predict(DistributedDataLoader(Rows(5), 3, drop_last=False)),
        }


def numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: numbers(item) if key != "val/mean" else pytest.approx(item, rel=1e-6) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(numbers(item) for item in value)
    return pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("n_ranks", "cases"),
    [
        pytest.param(2, ON_TWO, id="2 ranks"),
        pytest.param(4, ON_FOUR[:1], id="4 ranks", marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR[1:], id="4 ranks in stages", marks=pytest.mark.slow),
        pytest.param(2, [Case(cp=2, compile=True, experts=True)], id="compiled", marks=pytest.mark.slow),
    ],
)
def test_what_surrounds_a_step_is_one_processs_on_every_mesh(n_ranks: int, cases: list[Case], tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    from safetensors.torch import load_file

    alone = run_each(train, 1, list(enumerate(case.alone for case in cases)), tmp_path / "alone")
    by_case = run_each(train, n_ranks, list(enumerate(cases)), tmp_path / "ranks")
    for ((number, case), ranks), (_, (expected,)) in zip(by_case, alone, strict=True):
        assert expected["counters"] == (2 * STEPS * BATCH, 2 * STEPS, 0)
        for found in ranks:
            torch.testing.assert_close(found.pop("predicted"), expected["predicted"], rtol=1e-9, atol=1e-9)
            for name, value in found.items():
                assert value == numbers(expected[name]), (case, name)
        for file in ("weights", "ema"):
            ours, theirs = (load_file(tmp_path / way / f"{number}/{file}.safetensors") for way in ("ranks", "alone"))
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=f"{case}: {{}}".format)


MARKED = [replace(case, steps=1) for case in (Case(tp=2), Case(cp=2, shard="auto"), Case(pp=2), ON_TWO[3])]


class Marked(Trained):
    """Decays what is not marked, as models with a `no_weight_decay` of their own do."""

    def configure_models(self) -> None:
        super().configure_models()
        for name, parameter in self.model.named_parameters():
            vars(parameter).update(full_name=name, no_decay=parameter.ndim == 1)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        super().apply_tensor_parallel(mesh)
        for name, parameter in self.model.named_parameters():
            if name == "head.bias":
                vars(parameter)["no_decay"] = "by the plan"

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.marks = {name: dict(vars(parameter)) for name, parameter in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.model.parameters())


def marks(case: Case) -> dict[str, dict[str, Any]]:
    return fit(Marked(config_of(case))).marks


def test_attributes_of_parameters_are_those_of_configure_models() -> None:
    (alone,) = run_world(marks, 1, Case(steps=1))
    assert {mark["no_decay"] for mark in alone.values()} == {True, False}
    for case, ranks in run_each(marks, 2, MARKED):
        for found in ranks:
            assert {mark["full_name"] for mark in found.values()} == set(found), case
            no_decay = {name: mark["no_decay"] for name, mark in found.items()}
            if case.tp == 2:
                assert no_decay.pop("head.bias") == "by the plan"
            if not case.experts:
                assert no_decay.items() <= {name: mark["no_decay"] for name, mark in alone.items()}.items(), case
