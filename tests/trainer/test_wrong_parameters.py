"""Combinations that no run can use are refused, with what to write; single fields: tests/config/test_values.py."""

from typing import Any

import pytest

import dream_trainer as dt
from tests.api import ConfigError
from tests.trainer.small import run_config


def test_a_schedule_of_several_stages_and_an_optimizers_groups_are_checked() -> None:
    with pytest.raises(ConfigError, match="stages_per_rank=1 with schedule='Interleaved1F1B': it has 2 or more"):
        dt.PipelineParallelParameters(schedule="Interleaved1F1B", stages_per_rank=1)
    with pytest.raises(ConfigError, match="groups=.*no tuple"):
        dt.OptimizerParameters(name="muon", groups=dt.GroupParameters(pattern="head", lr_scale=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="traning_parameters.*training_parameters"):
        run_config(traning_parameters=None)


def test_fields_are_changed_in_a_copy() -> None:
    parameters = dt.TrainingParameters(max_steps=3)
    with pytest.raises(AttributeError, match=r"replace\(\.\.\., max_steps=\.\.\.\)"):
        parameters.max_steps = 4  # type: ignore[misc]


class Bare(dt.BaseTrainer, dt.SetupMixin):
    configure_models = configure_optimizers = configure_dataloaders = training_step = lambda *_: None


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"activation_checkpointing": "full"}, "activation_checkpointing='full', .* no ActivationCheckpointingMixin"),
        ({"compile": True}, "compile=True, but Bare has no CompileMixin. Add it .* leave it at False"),
        ({"expert_parallel": 2}, "expert_parallel=2, but Bare has no ExpertParallelMixin. Add it"),
        ({"float8": "rowwise"}, "has no Float8Mixin. Add it .* leave it at 'none'"),
        ({"context_parallel": 2}, "has no ContextParallelMixin. Add it"),
        ({"pipeline_parallel": 2}, "has no PipelineParallelMixin. Add it to the trainer's bases. Or leave it at 1"),
        ({"tensor_parallel": 2}, "has no TensorParallelMixin. Add it"),
    ],
    ids=str,
)
def test_a_trainer_without_the_mixin_is_told_to_add_it(devices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bare(run_config(device_parameters=dt.DeviceParameters(device="cpu", **devices)))
