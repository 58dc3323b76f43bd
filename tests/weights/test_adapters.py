"""Adapters of peft: trained on any layout as by peft's own loop, saved without their base, exported and merged."""

import json
import os
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

import dream_trainer as dt
from tests.api import CheckpointError, ConfigError, main
from tests.weights.adapted import (
    LAYOUTS,
    Adapted,
    Dora,
    Net,
    base_values,
    by_hand,
    lora,
    make,
    prepare,
    their_base,
    token_rows,
    train,
    train_layouts,
)
from tests.worlds import run_world

Runs = dict[str, Any]


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Runs]]:
    with chdir(directory := tmp_path_factory.mktemp("adapters")):
        prepare(directory)
        ranks = run_world(train_layouts, 2, str(directory))
        yield directory, {"alone": {"straight": train("alone", 6), "cut": train("alone-cut", 3)}} | ranks[0]


@pytest.fixture
def runs(all_runs: tuple[Path, Runs], monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What the runs came to, in the directory where they were."""
    monkeypatch.chdir(all_runs[0])
    return all_runs[1]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-11)


def checkpoint(experiment: str, step: int) -> Path:
    return Path(f"runs/tests/adapters/{experiment}/checkpoints/step_{step:08d}")


def predictions(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(token_rows()[:4])


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_each_layout_trains_as_peft_does(layout: str, runs: Runs) -> None:
    run = runs[layout]["straight"]
    model, losses = by_hand(run["first"], 6)
    assert run["losses"] == pytest.approx(losses, rel=1e-12)
    assert_close(run["weights"], dict(model.state_dict()))
    for name, value in base_values().items():
        place, _, kind = name.rpartition(".")
        inside = "original_module" if place == "head" else "base_layer"
        assert torch.equal(run["weights"][f"base_model.model.{place}.{inside}.{kind}"], value)
    assert_close(run["first"], runs["alone"]["straight"]["first"])


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_a_checkpoint_holds_the_adapters_and_not_the_base(layout: str, runs: Runs) -> None:
    stored = FileSystemReader(checkpoint(layout, 6)).read_metadata().state_dict_metadata
    models = {name.removeprefix("models.model.") for name in stored if name.startswith("models.")}
    assert models == {name for name in runs["alone"]["straight"]["weights"] if "lora" in name or "modules_to" in name}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_in_another_layout(layout: str, runs: Runs) -> None:
    found = train(f"{layout} alone", 6, resume=str(checkpoint(f"{layout}-cut", 3)))
    assert found["losses"] == pytest.approx(runs["alone"]["straight"]["losses"][3:], rel=1e-12)
    assert_close(found["weights"], runs["alone"]["straight"]["weights"])


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_peft_loads_what_is_exported(layout: str, runs: Runs) -> None:
    expected, _ = by_hand(runs[layout]["straight"]["first"], 6)
    adapted = PeftModel.from_pretrained(their_base(), f"{layout}-adapters")
    torch.testing.assert_close(predictions(adapted), predictions(expected), rtol=0, atol=1e-11)
    config = json.loads(Path(f"{layout}-adapters/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(Path("base.safetensors").resolve())
    assert config["auto_mapping"] == {"base_model_class": "Net", "parent_library": "tests.weights.adapted"}
    merged = load_file(f"{layout}-merged/model.safetensors")
    assert_close(merged, dict(adapted.merge_and_unload().state_dict()))


@pytest.mark.parametrize("layout", ["shards", "pipeline"])
def test_the_command_exports_the_same_from_a_checkpoint(layout: str, runs: Runs, tmp_path: Path) -> None:
    path, out = str(checkpoint(layout, 6)), tmp_path / "adapters"
    assert main(["checkpoints", "export", path, str(out)]) == 0
    assert main(["checkpoints", "export", path, f"{out}-merged", "--merge-adapters"]) == 0
    for found, live in ((f"{out}", f"{layout}-adapters"), (f"{out}-merged", f"{layout}-merged")):
        file = "model.safetensors" if found.endswith("merged") else "adapter_model.safetensors"
        assert_close(load_file(f"{found}/{file}"), load_file(f"{live}/{file}"))
    both = [json.loads(Path(f"{place}/adapter_config.json").read_text()) for place in (out, f"{layout}-adapters")]
    assert both[0] == both[1]


def test_a_base_elsewhere_or_another_one(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, base = checkpoint("alone", 6), Path("base.safetensors")
    base.rename(tmp_path / "moved.safetensors")
    try:
        arguments = ["checkpoints", "export", str(path), str(tmp_path / "out"), "--merge-adapters"]
        assert main(arguments) == 1
        assert "base.safetensors does not exist" in capsys.readouterr().err
        assert main([*arguments, "--base", str(tmp_path / "moved.safetensors")]) == 0
        save_file(base_values() | {"blocks.1.up.weight": torch.zeros(16, 8, dtype=torch.float64)}, base)
        assert main([*arguments, "--overwrite"]) == 1
        assert "is not what base_model.model.blocks.1.up.base_layer.weight was" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="1 of those 15 are not what this run has"):
            train("alone", 8, resume=str(path))
    finally:
        (tmp_path / "moved.safetensors").rename(base)


class GoingOn(Adapted):
    def load_pretrained(self) -> None:
        super().load_pretrained()
        dt.load_adapters(self.model, "shards-adapters")


def go_on(layout: str | None, directory: str) -> dict[str, Tensor]:
    os.chdir(directory)
    with make("going on", 0, layout, kind=GoingOn, resume=None) as trainer:
        trainer.fit()
        return trainer.weights()


def test_adapters_start_from_a_directory_of_peft(runs: Runs) -> None:
    expected = runs["shards"]["straight"]["weights"]
    assert_close(go_on(None, str(Path.cwd())), expected)
    for found in run_world(go_on, 2, "pipeline", str(Path.cwd())):
        assert_close(found, expected)


class Tied(Adapted):
    changes = {"target_modules": ["embed", "up"], "modules_to_save": None}

    def configure_models(self) -> None:
        base = Net().double()
        base.head.weight = base.embed.weight
        self.model = get_peft_model(base, lora(**self.changes))

    def load_pretrained(self) -> None:
        pass


class TrainedWhole(Tied):
    changes = {"target_modules": ["up"], "modules_to_save": ["head"]}


class Untouched(Tied):
    changes = {"target_modules": ["up"], "modules_to_save": None}


def test_what_cannot_be_merged_is_named(runs: Runs) -> None:
    with make("dora", 1, kind=Dora, resume=None) as trainer:
        trainer.fit()
        with pytest.raises(CheckpointError, match=r"blocks.0.up is more than a product .*merge_and_unload"):
            trainer.export("dora-merged", merge_adapters=True)
        trainer.export("dora")
        adapted = PeftModel.from_pretrained(their_base(), "dora")
        torch.testing.assert_close(predictions(adapted), predictions(trainer.model), rtol=0, atol=1e-11)


def test_merging_into_a_tied_weight_or_two_adapters_at_once_is_refused(runs: Runs, tmp_path: Path) -> None:
    class Two(Adapted):
        changes = {"target_modules": ["up"], "modules_to_save": None}

        def configure_models(self) -> None:
            super().configure_models()
            self.model.add_adapter("second", lora(**self.changes))
            self.model.base_model.set_adapter(["default", "second"])
            self.model.double()

    for kind, said in (
        (Tied, r"model.embed is added to a weight that is also base_model.model.head.weight"),
        (TrainedWhole, r"head is trained whole, and its weight was also base_model.model.embed.weight"),
        (Two, r"\['default', 'second'\] are active at once"),
    ):
        with make(kind.__name__, 1, kind=kind, resume=None) as trainer:
            trainer.fit()
            with pytest.raises(CheckpointError, match=said):
                trainer.export(tmp_path / "merged", merge_adapters=True)
    with make("untouched", 1, kind=Untouched, resume=None) as trainer:
        trainer.fit()
        trainer.export(tmp_path / "merged", merge_adapters=True)
        merged = Net().double()
        merged.head.weight = merged.embed.weight
        merged.load_state_dict(load_file(tmp_path / "merged/model.safetensors"), strict=False)
        torch.testing.assert_close(predictions(merged), predictions(trainer.model), rtol=0, atol=1e-11)


def test_a_model_without_adapters_is_refused() -> None:
    for load in (dt.load_base_weights, dt.load_adapters):
        with pytest.raises(ConfigError, match="Net is not wrapped by peft. Use load_weights"):
            load(Net(), "base.safetensors")
