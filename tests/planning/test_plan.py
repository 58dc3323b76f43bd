"""`dream-trainer plan`: what it says of a program, of a rank that does not fit, and of one that cannot be planned."""

import json
import os
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from dream_trainer.planning import PlanError, plan
from tests.api import main

PROGRAM = """
import torch
from torch import nn
import dream_trainer as dt

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        {LINE}
        return x

class Trainer(dt.DreamTrainer):
    def configure_models(self):
        self.model = Net()

    def model_blocks(self, model):
        return list(model.layers)

    def configure_dataloaders(self):
        data = torch.utils.data.TensorDataset(torch.zeros(32768, 64))
        return torch.utils.data.DataLoader(data, self.micro_batch_size), None

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def training_step(self, batch, batch_idx):
        loss = self.model(batch[0]).square().mean()
        self.backward(loss)
        self.step(self.model, self.optimizer)
        return {"loss": loss}

def default_config():
    return dt.DreamTrainerConfig(
        experiment="planned",
        device_parameters=dt.DeviceParameters(dp_replicate=1),
        fsdp_parameters=dt.FSDPParameters(min_group_mib=0),
        training_parameters=dt.TrainingParameters(max_steps=4, train_batch_size=128),
    )
"""


def written(directory: Path, line: str = "") -> str:
    path = directory / "planned.py"
    path.write_text(PROGRAM.replace("{LINE}", line or "pass"))
    return f"{path}:Trainer"


def test_a_rank_of_many_is_planned_alone_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = plan(written(tmp_path), world=64, rank=63)
    n_parameters = 4 * (64 * 64 + 64)
    assert found.worst.mesh == {"pp": 1, "dp_replicate": 1, "dp_shard": 64, "cp": 1, "tp": 1}
    assert found.worst.at_peak["parameters"] == 4 * n_parameters / 64
    of_steps = 8 * 4  # each parameter's count
    assert found.worst.at_peak["optimizer state"] == 8 * n_parameters / 64 + of_steps
    assert [astuple(row) for row in found.worst.traffic if row.operation == "all_gather"] == [
        ("all_gather", "dp_shard", 64, 8, 2 * 4 * n_parameters, 2 * 4 * n_parameters * 63 // 64, 8)
    ]
    assert found.ranks.keys() == {63}
    assert os.listdir(tmp_path) == ["planned.py"] or sorted(os.listdir(tmp_path)) == ["__pycache__", "planned.py"]


def test_where_a_rank_does_not_fit_the_smallest_change_is_named_with_its_own_plan(tmp_path: Path) -> None:
    program = written(tmp_path)
    peak = plan(program, world=2, rank=0).worst.peak
    found = plan(program, world=2, rank=0, gpu_memory=f"{peak / 2**20 * 0.9}MiB")
    assert not found.fits
    assert found.answer is not None
    assert found.answer.plan is not None
    as_changed = plan(program, *found.answer.flags.split(), world=2, rank=0)
    assert as_changed.worst.peak == found.answer.plan.peak <= 0.9 * peak
    assert found.tried[-1] is found.answer


def test_a_search_lists_the_meshes_that_fit_the_cheapest_first(tmp_path: Path) -> None:
    found = plan(written(tmp_path), world=16, gpu_memory="0.45MiB", search=True)
    fitting = [each for each in found.meshes if each.fits(found.memory)]
    assert [each.flags for each in fitting] == [
        "--device.dp-replicate=2 --device.dp-shard=8",
        "--device.dp-replicate=1 --device.dp-shard=16",
    ]
    of_a_host, of_all = fitting
    assert of_all.plan is not None
    assert of_all.cost is not None
    n_bytes, products = 4 * 4 * (64 * 64 + 64), 4 + 4 + 3  # forward, and gradients of weights and of all inputs but one
    assert of_all.plan.flops == products * 2 * 128 * 64 * 64
    assert of_all.cost.compute == pytest.approx(of_all.plan.flops / 400e12)
    norm = of_all.plan.traffic[1]
    assert norm.operation == "all_reduce"
    sent = (2 + 1) * n_bytes * 15 / 16 + norm.sent
    assert (of_all.cost.host, of_all.cost.network) == (0, pytest.approx(sent / 40e9))
    assert of_all.cost.samples == 16 * 128
    assert of_a_host.cost is not None
    assert of_a_host.cost.per_sample < of_all.cost.per_sample
    too_large = [each.flags for each in found.meshes if each.plan is not None and each not in fitting]
    copies = "--device.dp-replicate=16 --device.dp-shard=1"
    recomputing = [f"{copies} --device.activation-checkpointing={way}" for way in ("selective", "full")]
    assert sorted(too_large) == sorted([copies, *recomputing])
    (no_layers, no_parts, no_stages) = [each.error for each in found.meshes if each.error]
    assert "tensor_parallel=2, but Trainer does not override apply_tensor_parallel" in no_layers
    assert "context_parallel=2, but Trainer does not override cut_batch" in no_parts
    assert "pipeline_parallel=2" in no_stages


def test_the_flags_of_a_mesh_also_undo_what_the_config_has(tmp_path: Path) -> None:
    program, given = written(tmp_path), "--device.activation-checkpointing=full"
    mesh = plan(program, given, world=2, gpu_memory="1GiB", search=True).meshes[0]
    assert mesh.plan is not None
    assert "--device.activation-checkpointing=none" in mesh.flags
    assert plan(program, given, *mesh.flags.split(), world=2, rank=0).worst.peak == mesh.plan.peak
    assert plan(program, given, world=2, rank=0).worst.peak != mesh.plan.peak


@pytest.mark.parametrize(
    ("line", "flags", "options", "message"),
    [
        ("", [], {"world": 2, "search": True}, "--gpu-memory 80GiB"),
        ("x = x[x > 0]", [], {"world": 2, "rank": 0}, r"depends on values.*planned\.py:\d+ `x = x\[x > 0\]`"),
        ("", ["--device.dp-shard=3"], {"world": 8, "rank": 0}, "dp_replicate=1 x dp_shard=3 makes 3 ranks, but world"),
        ("", ["--training.max-stepz=3"], {"world": 2, "rank": 0}, "max-stepz"),
        ("", ["--training.max-steps=three"], {"world": 2, "rank": 0}, "max-steps"),
    ],
)
def test_what_cannot_be_planned_is_named(
    line: str, flags: list[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(written(tmp_path, line), *flags, **options)


def test_lines_that_read_values_are_reported(tmp_path: Path) -> None:
    (line,) = plan(written(tmp_path, "assert x.sum().item() == 1"), world=2, rank=0).worst.read
    assert line.endswith("`assert x.sum().item() == 1`")


def test_what_a_script_says_before_it_ends_itself_is_the_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('error: no such flag', file=sys.stderr)\nsys.exit(2)\n")
    with pytest.raises(PlanError, match="^no such flag$"):
        plan(str(script), world=2, rank=0)


def test_the_flags_of_plan_may_stand_among_those_of_the_program(tmp_path: Path, capsys: Any) -> None:
    words = ["--training.train-batch-size", "16", "--world", "2", "--device.dp-shard=2", "--rank", "0", "--json"]
    assert main(["plan", written(tmp_path), *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"].keys() == {"0"}
    assert report["worst"]["mesh"]["dp_shard"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--world", "5000"], "ranks"),
        (["--world", "2", "--rank", "2"], "ranks"),
        (["--world", "2", "--gpu-memory", "80 apples"], "'80 apples' is not a size"),
        (
            "--world 2 --gpu-memory 1GiB --search --rates 0 1 2".split(),
            "--rates 0.0 1.0 2.0: a rate is not above 0",
        ),
    ],
)
def test_a_wrong_flag_of_plan_is_code_2(flags: list[str], message: str, capsys: Any) -> None:
    assert main(["plan", "nowhere.py", *flags]) == 2
    assert message in capsys.readouterr().err
