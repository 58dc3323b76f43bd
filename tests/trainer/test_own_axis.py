"""A parallelism of a third party (rows_axis.py) trains, saves, resumes and exports as one process does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import dream_trainer as dt
from tests.api import ConfigError, DistributedDataLoader, HookError, lay_mesh_among_data
from tests.trainer.arithmetic import full, same_bits
from tests.trainer.rows_axis import RowsConfig, RowsMixin, Table
from tests.trainer.small import FromSeed, run_config, train_by_hand
from tests.worlds import run_each, run_world

STEPS, BATCH, LENGTH, ROWS, WIDTH, CLIP = 6, 8, 4, 12, 8, 0.05
IDS = torch.randint(ROWS, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(7))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(ROWS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, ROWS)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Trained(RowsMixin, FromSeed):
    make_model = Model

    def configure_dataloaders(self) -> tuple[Any, Any]:
        size = BATCH // self.world.data_size // self.config.training_parameters.gradient_accumulation_steps
        return DistributedDataLoader(IDS, size, shuffle=False), DistributedDataLoader(IDS, size, drop_last=False)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.initial = state_of(self)
        self.first_rows = self.model.table.weight.to_local().shape[0] if self.world.world_size > 1 else ROWS

    def loss_of(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return loss_of(self.model, batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": loss_of(self.model, batch)}


def state_of(trainer: Trained) -> dict[str, Tensor]:
    return {name: full(value.detach()).clone() for name, value in trainer.model.state_dict().items()}


def config_of(ranks: int, steps: int = STEPS, *, shard: Any = "auto", accumulation: int = 1) -> RowsConfig:
    return run_config(
        f"rows-{ranks}-{steps}-{shard}-{accumulation}",
        RowsConfig,
        table_ranks=ranks,
        device_parameters=dt.DeviceParameters(device="cpu", dp_shard=shard),
        training_parameters=dt.TrainingParameters(
            max_steps=steps, gradient_clip_norm=CLIP, gradient_accumulation_steps=accumulation
        ),
        fsdp_parameters=dt.FSDPParameters(min_group_mib=0),
        checkpoint_parameters=dt.CheckpointParameters(save_every_n_epochs=None),
    )


def train(config: RowsConfig, directory: Path | None = None) -> dict[str, Any]:
    with Trained(config) as trainer:
        description = trainer.describe()
        trainer.fit()
        if directory is not None:
            trainer.export(directory, overwrite=True)
        with trainer.gathered(trainer.model), torch.no_grad():
            alone = float(loss_of(trainer.model, IDS)) if trainer.world.is_main else None
        return {
            "start": trainer.initial,
            "norms": trainer.norms,
            "state": state_of(trainer),
            "val/loss": trainer.evaluate()["val/loss"],
            "alone": alone,
            "rows": trainer.first_rows,
            "before launch": description,
            "description": trainer.describe(),
        }


def by_hand(start: dict[str, Tensor]) -> dict[str, Any]:
    model = Model()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = train_by_hand(model, optimizer, [[ids] for ids in IDS.split(BATCH)], loss_of, clip=CLIP)
    with torch.no_grad():
        loss = float(loss_of(model, IDS))
    return {"norms": norms, "state": {n: v.detach() for n, v in model.state_dict().items()}, "val/loss": loss}


def assert_as_by_hand(result: dict[str, Any], start: dict[str, Tensor]) -> None:
    expected = by_hand(start)
    assert same_bits(result["start"], start)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-10)
    assert result["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-10)
    torch.testing.assert_close(result["state"], expected["state"], rtol=1e-10, atol=1e-10)


def test_rows_on_two_ranks_are_trained_saved_and_exported_as_on_one(tmp_path: Path) -> None:
    cases = [config_of(2, shard=1), config_of(2, shard=1, accumulation=2), config_of(2)]
    alone = train(config_of(1))
    assert_as_by_hand(alone, alone["start"])
    for _, ranks in run_each(train, 2, cases, tmp_path / "model"):
        for result in ranks:
            assert result["rows"] == ROWS // 2
            assert_as_by_hand(result, alone["start"])
        assert ranks[0]["alone"] == pytest.approx(alone["val/loss"], rel=1e-10)
        assert "| rows | beside experts |" in ranks[0]["before launch"]
        assert "| rows, of these | 2 | 0, 1 |" in ranks[0]["description"]
    assert same_bits(load_file(tmp_path / "model" / "model.safetensors"), ranks[0]["state"])


@pytest.mark.slow
def test_rows_on_two_of_four_ranks_beside_shards_and_replicas() -> None:
    alone = train(config_of(1))
    cases = [config_of(2), config_of(2, shard=1), config_of(2, shard=2), config_of(4)]
    for _, ranks in run_each(train, 4, cases):
        for result in ranks:
            assert_as_by_hand(result, alone["start"])


def test_a_run_goes_on_to_the_bit_on_its_ranks_and_within_rounding_on_one() -> None:
    unbroken, _ = run_world(train, 2, config_of(2))
    first = config_of(2, 3)
    run_world(train, 2, replace(first, experiment="broken"))
    moved, _ = run_world(train, 2, replace(config_of(2), experiment="broken"))
    assert len(moved["norms"]) == STEPS - 3
    assert same_bits(moved["state"], unbroken["state"])
    run_world(train, 2, replace(first, experiment="elsewhere"))
    alone = train(replace(config_of(1), experiment="elsewhere"))
    assert len(alone["norms"]) == STEPS - 3
    torch.testing.assert_close(alone["state"], unbroken["state"], rtol=1e-10, atol=1e-10)


def lay_three() -> str:
    with Trained(config_of(1)) as trainer:
        trainer.launch_and_resume()
        with pytest.raises(ConfigError) as raised:
            lay_mesh_among_data(trainer.world, "rows", 3)
    return str(raised.value)


def test_ranks_that_do_not_divide_the_world_are_refused_on_all() -> None:
    said = "3 ranks of rows do not divide the 2 of dp_shard, among which they are. Use 1 or 2."
    assert run_world(lay_three, 2) == [said, said]


def test_without_its_mixin_a_hook_of_an_axis_is_refused() -> None:
    class NoMixin(dt.BaseTrainer, dt.SetupMixin):
        configure_models = configure_optimizers = configure_dataloaders = training_step = lambda *_: None

        def apply_tensor_parallel(self, mesh: Any) -> None: ...

    with pytest.raises(HookError, match="NoMixin overrides apply_tensor_parallel, which only TensorParallelMixin"):
        NoMixin(run_config())
