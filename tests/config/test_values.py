"""Values of all parameter classes: which of them raise ConfigError, with the field, its value and the fix."""

import math
import sys
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dream_trainer as dt
from dream_trainer.config.parameter_class import PositiveInt, parameters
from dream_trainer.errors import ConfigError

Training, Device, Checkpoint, Logger = (
    dt.TrainingParameters,
    dt.DeviceParameters,
    dt.CheckpointParameters,
    dt.LoggerParameters,
)
CLASSES = [
    *(Training, Device, Checkpoint, Logger, dt.BranchParameters, dt.EvalParameters, dt.WandbParameters),
    *(dt.MLflowParameters, dt.TrackioParameters, dt.FSDPParameters, dt.PipelineParallelParameters),
    *(dt.ContextParallelParameters, dt.TensorParallelParameters, dt.LocalSGDParameters, dt.Float8Parameters),
    *(dt.ActivationCheckpointingParameters, dt.CompileParameters),
]
METRIC = {"best_metric": "val/loss"}


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_refuses_a_value_of_another_type(cls: Any) -> None:
    for field in fields(cls):
        with pytest.raises(ConfigError, match=rf"^{field.name}=<object object at .*> .*\. Use .+"):
            cls(**{field.name: object()})


@pytest.mark.pitfall(53)
@pytest.mark.parametrize("cls", CLASSES)
def test_it_cannot_be_changed_after_it_was_built(cls: Any) -> None:
    name = fields(cls)[0].name
    with pytest.raises(FrozenInstanceError, match=rf"replace\(\.\.\., {name}=\.\.\.\)"):
        setattr(cls(), name, 3)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Training, {"n_epochs": -1}, "n_epochs=-1 is too small. Use an integer of at least 0. None is also valid."),
    (Training, {"max_time": 60}, "max_time=60 does not say its unit. Use a timedelta"),
    (Training, {"max_time": timedelta(seconds=-1)}, "is negative"),
    (Training, {"train_batch_size": 0}, "train_batch_size=0 is too small"),
    (Training, {"gradient_clip_norm": 0.0}, "Use a positive number. None is also valid."),
    (Training, {"gradient_clip_norm": 1.0, "gradient_clip_value": 1.0}, "Set one of them"),
    (Training, {"on_nonfinite": "ignore"}, "Use 'raise', 'skip' or 'retry'"),
    (Training, {"train_steps_per_epoch": 0, "max_steps": 3}, "never end"),
    (Training, {"global_batch_size": 64, "gradient_accumulation_steps": 2}, "Leave one of them out"),
    (Device, {"device": "tpu"}, "device='tpu' is not known. Use 'auto', 'cpu', 'cuda', 'mps' or 'xpu'."),
    (Device, {"reduce_dtype": "fp8"}, "Use 'fp32', 'bf16', 'fp16' or None."),
    (Device, {"dp_shard": 0}, "dp_shard=0 is too small. Use an integer of at least 1. 'auto' is also valid."),
    (Device, {"hang_timeout_seconds": -1}, "Use a positive number. 'auto' or None is also valid."),
    (Device, {"overlap_reduce": True, "cpu_offload": True}, "overlap_reduce=True with cpu_offload=True"),
    (Device, {"overlap_reduce": True, "tensor_parallel": 2}, "overlap_reduce=True with tensor_parallel=2"),
    (Checkpoint, {"save_local_every_n_steps": 10}, "=10 does not say where. Set local_directory"),
    (Checkpoint, {"local_directory": "s3://bucket/runs"}, "local_directory='s3://bucket/runs' is not in a file system"),
    (Checkpoint, {"directory": "https://bucket/runs"}, "checkpoint_parameters.directory: https: is no place"),
    (Checkpoint, {"keep_last": 0}, "keep_last=0 is too small"),
    (Checkpoint, {"keep_every_n_steps": 1.5}, "keep_every_n_steps=1.5"),
    (Checkpoint, {"keep_best": 1}, "needs a metric"),
    (Checkpoint, {"best_mode": "smallest"}, "best_mode='smallest'"),
    (Checkpoint, {"when_busy": "other"}, "when_busy='other' is not known. Use 'wait' or 'skip'."),
    (Checkpoint, {"save_on_best": True}, "save_on_best=True needs a metric. Set best_metric"),
    (Checkpoint, {"resume": "best"}, "resume='best' needs a metric. Set best_metric"),
    *(
        (Checkpoint, {"resume": value}, f'resume={value!r} is not understood. Use "auto"')
        for value in ("", True, -1, 2.0)
    ),
    (Logger, {"loggers": "csv"}, "loggers='csv' is a string. Use a tuple of strings: loggers=('csv',)."),
    (Logger, {"loggers": ("csv", "csv")}, "names one logger twice"),
    (dt.MLflowParameters, {"tags": {"a": 1}}, "tags['a']=1 is of type int. Use a string"),
    (dt.EvalParameters, {"best_metrics": {"val/loss": "low"}}, "best_metrics['val/loss']='low' is not known"),
    (dt.FSDPParameters, {"reshard_after_forward": 1}, "Use True, False or an integer above 1"),
    (dt.LocalSGDParameters, {"outer_momentum": 1.0}, "is not a number from 0.0 to below 1.0"),
    (dt.Float8Parameters, {"skip": ("(",)}, "skip='(' is not a regular expression"),
    (dt.ActivationCheckpointingParameters, {"keep": ()}, "keep=() keeps nothing"),
    (dt.PipelineParallelParameters, {"stages_per_rank": 2}, "stages_per_rank=2 with schedule='1F1B': it has 1"),
    (dt.PipelineParallelParameters, {"stages_per_rank": 1, "schedule": "Interleaved1F1B"}, "B': it has 2 or more"),
    (dt.CompileParameters, {"async_tensor_parallel": True, "backend": "eager"}, "only inductor overlaps"),
]


@pytest.mark.parametrize(("cls", "values", "message"), WRONG, ids=str)
def test_a_wrong_value_raises_an_error_with_the_fix(cls: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        cls(**values)
    assert message in str(raised.value)


RIGHT: list[tuple[Any, dict[str, Any]]] = [
    (Training, {"n_epochs": 0, "max_steps": 0, "max_samples": 0, "val_steps_per_epoch": 0, "max_time": timedelta(0)}),
    (Device, {"dp_shard": 4, "hang_timeout_seconds": None, "host_timeout_seconds": math.inf}),
    *((Checkpoint, {"resume": value}) for value in ("auto", "latest", 0, 7, "runs/a/step_00000007", None)),
    (Checkpoint, {"save_on_best": True, "keep_best": 2, "resume": "best", **METRIC}),
    (Checkpoint, {"directory": "s3://bucket/runs", "local_directory": "/dev/shm", "save_local_every_n_steps": 1}),
    (Checkpoint, {"init_from": Path("a"), "directory": Path("b"), "save_every_n_minutes": 1e-6}),
    (Logger, {"loggers": [], "history_lines": None}),
    (dt.FSDPParameters, {"min_group_mib": 0, "reshard_after_forward": 2}),
]


@pytest.mark.pitfall(7)
@pytest.mark.parametrize(("cls", "values"), RIGHT, ids=str)
def test_values_at_the_edge_are_kept(cls: Any, values: dict[str, Any]) -> None:
    made = cls(**values)
    assert {name: getattr(made, name) for name in values} == values


def test_former_names_of_fields_work() -> None:
    old: Any = {"gradient_clip_val": 1.0, "nonfinite": "skip", "max_epochs": 3}
    assert Training(**old).max_epochs == 3
    assert Training(**old) == Training(gradient_clip_norm=1.0, on_nonfinite="skip", n_epochs=3)
    with pytest.raises(ConfigError, match="max_epochs is another name of n_epochs, and both are set. Only set"):
        Training(n_epochs=1, max_epochs=2)


@pytest.mark.parametrize(
    ("program", "name"), [("/x/train.py", "train"), ("/x/vision/__main__.py", "vision"), (None, "notebook")]
)
def test_a_project_is_by_default_the_script(program: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    if program is not None:
        main.__file__ = program
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert dt.DreamTrainerConfig(experiment="one").run_dir == Path("runs") / name / "default" / "one"


def test_a_place_of_checkpoints_has_no_credentials_in_it() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_parameters.directory: .*credentials") as raised:
        Checkpoint(directory="s3://key:secret@bucket/runs")
    assert "secret@" not in str(raised.value)


def test_an_unknown_field_is_answered_with_the_nearest_or_with_all() -> None:
    with pytest.raises(ConfigError, match=r"TrainingParameters has no field n_epoch\. Did you mean n_epochs\?"):
        Training(n_epoch=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"no field x\. Use optimizer, schedule, counters or data\."):
        dt.BranchParameters(x=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="traning_parameters.*training_parameters"):
        dt.DreamTrainerConfig(experiment="one", traning_parameters=None)  # type: ignore[call-arg]


def test_a_subclass_is_checked_as_its_parent_and_by_its_own_types() -> None:
    @parameters
    class Longer(dt.TrainingParameters):
        warmup: PositiveInt = 3
        part: dt.BranchParameters = dt.BranchParameters()

    assert Longer(n_epochs=2, warmup=5).warmup == 5
    for values, message in (
        ({"n_epochs": -1}, "n_epochs=-1"),
        ({"warmup": 0}, "warmup=0"),
        ({"part": 3}, r"part=3 is of type int\. Use BranchParameters\("),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 2}, "Leave one of them out"),
    ):
        with pytest.raises(ConfigError, match=message):
            Longer(**values)  # type: ignore[arg-type]
