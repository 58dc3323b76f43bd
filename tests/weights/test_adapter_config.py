"""Adapters under another config than theirs: equal weights would be another function, so they are refused by name."""

import os
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, get_peft_model

import dream_trainer as dt
from dream_trainer.checkpoint import typed_json
from tests.api import CheckpointError, Ranks, read_shared, refuse_other_adapters
from tests.trainer.small import weights
from tests.weights.adapted import Adapted, Net, lora, make, prepare
from tests.worlds import gloo_group, run_world


def kind_of(**changes: Any) -> type[Adapted]:
    """A trainer whose adapters differ from the others in some fields."""
    return type("Changed", (Adapted,), {"changes": changes})


def fit(experiment: str, steps: int, kind: type[Adapted] = Adapted, **more: Any) -> dict[str, torch.Tensor]:
    with make(experiment, steps, kind=kind, **more) as trainer:
        trainer.fit()
        return weights(trainer.model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a run stopped after two steps and wrote its adapters."""
    with chdir(directory := tmp_path_factory.mktemp("configs")):
        prepare(directory)
        with make("run", 2) as trainer:
            trainer.fit()
            trainer.export("theirs")
        yield directory


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of the run, relative to where it was."""
    monkeypatch.chdir(trained)
    return "runs/tests/adapters/run"


def refusal(kind: type[Adapted], here: str, **more: Any) -> str:
    with pytest.raises(CheckpointError) as refused:
        fit("other", 3, kind, **({"resume": here} | more))
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_alpha": 16}, "lora_alpha was 8 and is 16"),
        ({"use_dora": True, "target_modules": ["up"]}, "use_dora was False and is True"),
        ({"modules_to_save": None}, "modules_to_save was ['head'] and is None"),
    ],
)
def test_a_run_does_not_go_on_under_another_config(changes: dict[str, Any], said: str, here: str) -> None:
    message = refusal(kind_of(**changes), here)
    assert said in message
    assert "Give get_peft_model the config of the checkpoint" in message
    assert f'load_adapters(model, "adapters", may_differ={sorted(set(changes))})' in message


def test_nor_under_another_kind_of_adapter_or_without_any(here: str) -> None:
    class Scaled(Adapted):
        def configure_models(self) -> None:
            wanted = IA3Config(target_modules=["up", "down"], feedforward_modules=["down"])
            self.model = get_peft_model(Net().double(), wanted)

    class Plain(Adapted):
        def configure_models(self) -> None:
            self.model = Net().double()

        def load_pretrained(self) -> None:
            dt.load_weights(self.model, "base.safetensors")

    assert "peft_type was 'LORA' and is 'IA3'" in refusal(Scaled, here)
    assert "model 'model' had adapters of peft there, and has none in this run" in refusal(Plain, here)


def test_and_so_does_a_start_from_the_weights_alone(here: str) -> None:
    step = f"{here}/checkpoints/step_00000002"
    message = refusal(kind_of(lora_alpha=16), here, resume="auto", init_from=step, init_strict=False)
    assert "lora_alpha was 8 and is 16" in message
    fit("from weights", 0, init_from=step, init_strict=False)


def test_what_training_alone_looks_at_may_change(here: str) -> None:
    expected = fit("as it was", 2, resume=here)
    found = fit("dropout", 2, kind_of(lora_dropout=0.1), resume=here)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    trained = fit("dropout, trained", 3, kind_of(lora_dropout=0.1), resume=here)
    assert any(not torch.equal(trained[name], expected[name]) for name in expected)


def test_a_silent_one_is_loaded(here: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    dumps = typed_json.dumps

    def without_adapters(value: Any, **options: Any) -> str:
        return dumps({k: v for k, v in value.items() if k != "adapters"} if "seed" in value else value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(typed_json, "dumps", without_adapters)
        fit("earlier", 1)
    fit("earlier", 2, kind_of(lora_alpha=16))
    (line,) = [record.getMessage() for record in caplog.records if "config of its adapters" in record.getMessage()]
    assert "earlier/checkpoints/step_00000001: it has no config of its adapters, so it could not be checked" in line


def start_from(path: str, may_differ: list[str], **changes: Any) -> dict[str, torch.Tensor]:
    class Start(Adapted):
        def load_pretrained(self) -> None:
            super().load_pretrained()
            dt.load_adapters(self.model, path, may_differ=may_differ)

    Start.changes = changes
    return fit("start", 0, Start, resume=None)


def test_a_directory_of_peft_is_compared_too(here: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        start_from("theirs", [], lora_alpha=16, lora_dropout=0.5)
    assert str(refused.value) == (
        "Could not load adapters from theirs: they are configured otherwise, so that the same weights "
        "would be another function: lora_alpha was 8 and is 16. Give get_peft_model the config in "
        "theirs/adapter_config.json, or take the weights under the new one on purpose, by may_differ=['lora_alpha']."
    )
    straight = start_from("theirs", [])
    on_purpose = start_from("theirs", ["lora_alpha"], lora_alpha=16)
    assert all(torch.equal(on_purpose[name], value) for name, value in straight.items())


@gloo_group()
def refusals_on_ranks(directory: str, step: Path) -> list[str]:
    """Of a resume and of a start from a directory, where rank 0 alone has another config."""
    os.chdir(directory)
    world, said = Ranks.of_default_group(), []
    model = get_peft_model(Net().double(), lora(lora_alpha=16 if world.is_main else 8))
    saved = read_shared(step)["adapters"]
    for load in (
        lambda: refuse_other_adapters(step, {"model": model}, saved, world=world),
        lambda: dt.load_adapters(model, "theirs"),
    ):
        with pytest.raises(CheckpointError) as refused:
            load()
        said.append(str(refused.value))
    return said


def test_what_one_rank_finds_all_ranks_say(trained: Path, here: str) -> None:
    first, second = run_world(refusals_on_ranks, 2, str(trained), Path(here, "checkpoints/step_00000002"))
    assert first == second
    assert all("rank 0: " in message and "lora_alpha was 8 and is 16" in message for message in first)
