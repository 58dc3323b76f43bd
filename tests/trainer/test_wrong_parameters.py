"""Values that no run can use are refused when they are written down, with the field and what to write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dream_trainer as dt
from tests.api import ActivationCheckpointingParameters, ConfigError, EvalParameters, Progress
from tests.trainer.small import make_config, run_config

DEVICES, SGD = dt.DeviceParameters, dt.LocalSGDParameters
NO_MAPPING = r"best_metrics=.* not a dict with strings.*Use best_metrics=\{'name': \.\.\.\}"
CASES: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (dt.CheckpointParameters, {field: value}, f"{field}={value!r}")
        for field in ("save_every_n_steps", "save_every_n_epochs")
        for value in (0, -1, 2.5, True)
    ),
    *((dt.CheckpointParameters, {"resume": value}, f"resume={value!r}") for value in (True, -1, 2.5)),
    (ActivationCheckpointingParameters, {"every_n_blocks": 0}, "every_n_blocks=0 is too small"),
    (ActivationCheckpointingParameters, {"keep": ()}, 'Use activation_checkpointing="full" for that'),
    (
        ActivationCheckpointingParameters,
        {"keep": ("aten.matmull.default",)},
        "PyTorch has no operation 'aten.matmull.default'. Names look like",
    ),
    (ActivationCheckpointingParameters, {"keep": ("mm",)}, "PyTorch has no operation 'mm'"),
    (DEVICES, {"activation_checkpointing": "some"}, "selective"),
    (
        dt.CompileParameters,
        {"backend": "aot_eager", "async_tensor_parallel": True},
        "async_tensor_parallel=True with backend='aot_eager'",
    ),
    (EvalParameters, {"best_metrics": {"val/loss": "smallest"}}, "'min' or 'max'"),
    *((EvalParameters, {"best_metrics": names}, NO_MAPPING) for names in (["val/loss"], "val/loss", None, {1: "min"})),
    (
        DEVICES,
        {"expert_parallel": 2, "cpu_offload": True},
        "cpu_offload=True with expert_parallel=2 is not supported: .*Use cpu_offload=False",
    ),
    (DEVICES, {"expert_parallel": 0}, "expert_parallel=0"),
    (
        DEVICES,
        {"tensor_parallel": 2, "compile": True, "activation_checkpointing": "full"},
        'tensor_parallel=2 and activation_checkpointing="full".*Use "selective"',
    ),
    *(
        (
            DEVICES,
            {"pipeline_parallel": 2, name: True},
            f"{name}=True with pipeline_parallel=2 is not supported: .*Use ",
        )
        for name in ("overlap_reduce", "cpu_offload")
    ),
    (dt.PipelineParallelParameters, {"schedule": "zigzag"}, "schedule='zigzag' is not known"),
    (
        dt.PipelineParallelParameters,
        {"stages_per_rank": 2},
        "stages_per_rank=2 with schedule='1F1B': it has 1. Leave stages_per_rank",
    ),
    (
        dt.PipelineParallelParameters,
        {"schedule": "Interleaved1F1B", "stages_per_rank": 1},
        "stages_per_rank=1 with schedule='Interleaved1F1B': it has 2 or more",
    ),
    (dt.ContextParallelParameters, {"attention": "ring"}, "attention='ring'"),
    (DEVICES, {"float8": "fp8"}, r'float8="fp8"|float8=\'fp8\''),
    (dt.Float8Parameters, {"skip": ("(",)}, r"skip: '\(' is not a regular expression"),
    (dt.Float8Parameters, {"skip": "wk"}, "skip='wk' is a string"),
    (SGD, {"every_n_steps": 0}, "every_n_steps"),
    (SGD, {"workers": 0}, "workers"),
    (SGD, {"outer": "adam"}, "outer"),
    (SGD, {"outer_lr": 0.0}, "outer_lr"),
    (SGD, {"outer_momentum": 1.0}, "outer_momentum"),
    (SGD, {"outer": "sgd", "outer_momentum": 0.0}, "nesterov"),
    (dt.LoggerParameters, {"loggers": ("wand",)}, "loggers"),
    (dt.LoggerParameters, {"loggers": ("jsonl", "jsonl")}, "loggers"),
    (dt.LoggerParameters, {"log_every_n_steps": 0}, "log_every_n_steps"),
    (dt.LoggerParameters, {"strict": 1}, "strict"),
    (dt.WandbParameters, {"mode": "of"}, "mode='of' is not known. Use 'online', 'offline', 'disabled' or None"),
    # One name is not taken letter by letter where several are possible.
    (dt.LoggerParameters, {"loggers": "jsonl"}, r"loggers=.*\('jsonl',\)"),
    (dt.LoggerParameters, {"loggers": None}, "loggers=.*not a tuple of strings"),
    (dt.WandbParameters, {"tags": "baseline"}, r"tags=.*\('baseline',\)"),
    (ActivationCheckpointingParameters, {"keep": "aten.mm.default"}, r"keep=.*\('aten.mm.default',\)"),
    (dt.OptimizerParameters, {"name": "muon", "hidden": "blocks"}, r"hidden=.*\('blocks',\)"),
    (
        dt.OptimizerParameters,
        {"name": "muon", "groups": dt.GroupParameters(pattern="head", lr_scale=2)},
        "groups=.*not a tuple",
    ),
    (Progress, {"metrics": "train/loss"}, r"metrics=.*\('train/loss',\)"),
    # A misspelt field is answered with the nearest one.
    (dt.TrainingParameters, {"max_step": 3}, "max_step(?!s).*max_steps"),
    (DEVICES, {"precison": "bf16"}, "precison.*precision"),
    (dt.CheckpointParameters, {"save_every": 3}, "save_every(?!_).*save_every_n_steps"),
    (run_config, {"traning_parameters": None}, "traning_parameters.*training_parameters"),
]


@pytest.mark.parametrize(
    ("cls", "fields", "words"),
    CASES,
    ids=[f"{cls.__name__} {[*fields][-1]} {n}" for n, (cls, fields, _) in enumerate(CASES)],
)
def test_it_is_refused(cls: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cls(**fields)


@pytest.mark.parametrize("name", ["separate_reduce_group", "symmetric_memory"])
def test_an_older_pytorch_is_told_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(ConfigError, match=f"{name}=True needs PyTorch 2.13, and this is 2.11.0"):
        dt.FSDPParameters(**{name: True})


def test_fields_are_changed_in_a_copy() -> None:
    parameters = dt.TrainingParameters(max_steps=3)
    with pytest.raises(AttributeError, match=r"replace\(training_parameters, max_steps=\.\.\.\)"):
        parameters.max_steps = 4  # type: ignore[misc]
    with pytest.raises(ConfigError, match="experiment=.* 300 bytes"):
        replace(make_config(), experiment="x" * 300)


class Bare(dt.BaseTrainer, dt.SetupMixin):
    configure_models = configure_optimizers = configure_dataloaders = training_step = lambda *_: None


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"activation_checkpointing": "full"}, "'full', but Bare .*Add ActivationCheckpointingMixin"),
        ({"compile": True}, "compile=True, but Bare does not.*Add CompileMixin to its bases and Comp"),
        ({"expert_parallel": 2}, "expert_parallel=2, but Bare .* Add ExpertParallelMixin to its bases"),
        ({"float8": "rowwise"}, "does not override apply_float8. Add Float8Mixin to its bases"),
        ({"context_parallel": 2}, "It takes ContextParallelMixin among the trainer's bases"),
        ({"pipeline_parallel": 2}, "Add PipelineParallelMixin to its bases and PipelineParallelConfigMixin"),
    ],
    ids=str,
)
def test_a_trainer_without_the_mixin_is_told_to_add_it(devices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bare(run_config(device_parameters=dt.DeviceParameters(device="cpu", **devices)))
