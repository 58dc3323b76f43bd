"""What leaves a pipeline is the whole model: exports of what is trained now, and checkpoints without frozen weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import dream_trainer as dt
from tests.api import EMA, export_checkpoint, load_weights
from tests.trainer.arithmetic import full, same_bits
from tests.trainer.stages import Case, Model, Trained, config_of, result_of, united
from tests.worlds import run_world

CASE = Case(2, frozen=True)


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
            averages = trainer.get_callback(EMA).checkpoint_tensors()
            results.append(result_of(trainer) | {"averages": {name: full(value) for name, value in averages.items()}})
            with trainer.gathered(trainer.model):
                results[-1]["gathered"] = trainer.model.state_dict()
            trainer.export(f"{experiment}-{max_steps}", dtype=torch.float32)
            trainer.export(f"{experiment}-{max_steps}.safetensors", weights="ema")
    return results


def test_exports_and_checkpoints_without_frozen_weights_are_the_whole_models(tmp_path: Path) -> None:
    save_file(Model(CASE).state_dict(), tmp_path / "base.safetensors")
    ranks = run_world(travel, 2, CASE, "hops", 2, 3)
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
    ((last,),) = run_world(travel, 1, replace(CASE, pp=1), "hops", 4)
    ((unbroken,),) = run_world(travel, 1, replace(CASE, pp=1), "unbroken", 4)
    for kind in ("state", "averages"):
        torch.testing.assert_close(last[kind], unbroken[kind], rtol=1e-9, atol=1e-9)
