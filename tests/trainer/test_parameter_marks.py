"""What a model says of its parameters by attributes is there for `configure_optimizers`, however it was cut."""

from typing import Any

import torch

from tests.trainer.meshes import Case, Trained, config_of
from tests.worlds import run_world

ALONE = Case(steps=1)
ON_TWO = [
    Case(tp=2, steps=1),
    Case(cp=2, steps=1, shard="auto"),
    Case(pp=2, steps=1),
    Case(dp=2, ep=2, experts=True, steps=1),
]


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


def marks(cases: list[Case]) -> list[dict[str, dict[str, Any]]]:
    found = []
    for case in cases:
        with Marked(config_of(case)) as trainer:
            trainer.fit()
            found.append(trainer.marks)
    return found


def test_attributes_of_parameters_are_those_of_configure_models() -> None:
    ((alone,),) = run_world(marks, 1, [ALONE])
    assert {mark["no_decay"] for mark in alone.values()} == {True, False}
    for ranks in run_world(marks, 2, ON_TWO):
        for case, found in zip(ON_TWO, ranks, strict=True):
            assert {mark["full_name"] for mark in found.values()} == set(found), case
            no_decay = {name: mark["no_decay"] for name, mark in found.items()}
            if case.tp == 2:
                assert no_decay.pop("head.bias") == "by the plan"
            if not case.experts:
                assert no_decay.items() <= {name: mark["no_decay"] for name, mark in alone.items()}.items(), case
