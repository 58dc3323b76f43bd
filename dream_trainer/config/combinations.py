"""Combinations of settings that are not supported: the table that checks configs, shown in docs/combinations.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dream_trainer.errors import ConfigError


class Combination(NamedTuple):
    """Settings that cannot be combined: each is on, or has the value after `=`."""

    settings: tuple[str, ...]
    reason: str
    remedy: str


_WRAPPED = "replicas are then wrapped in fully_shard, which gives their gradients at the end of a backward"
_ONE_OF_TWO = "Use one of the two."
_FEW_SHAPES = "Use dynamic=False, which compiles again for each shape, and pad batches to few."
_WORKERS = "workers step on their own, and this needs all ranks in each step"
_LEAVE_ONE = "Leave it at its default, or the mixin out."

UNSUPPORTED: tuple[Combination, ...] = (
    Combination(("overlap_reduce", "cpu_offload"), _WRAPPED, _ONE_OF_TWO),
    Combination(("overlap_reduce", "tensor_parallel"), _WRAPPED, _ONE_OF_TWO),
    Combination(
        ("overlap_reduce", "pipeline_parallel"),
        "a schedule runs many backwards of each parameter, and only the last could send gradients",
        "Use overlap_reduce=False, or pipeline_parallel=1.",
    ),
    Combination(
        ("cpu_offload", "pipeline_parallel"),
        "a stage's shards stay on the device through all micro-batches of a batch",
        "Use more stages, or tensor_parallel, for weights that do not fit, or pipeline_parallel=1.",
    ),
    Combination(
        ("cpu_offload", "expert_parallel"),
        "fully_shard does not move shared experts to the device and back",
        "Use cpu_offload=False with more expert_parallel, or additional dp_shard, which leave each rank less; or "
        "expert_parallel=1.",
    ),
    Combination(
        ("compile", "tensor_parallel", "activation_checkpointing=full"),
        "PyTorch cannot compile split layers that are run again whole",
        'Use "selective", or compile=False.',
    ),
    Combination(
        ("compile", "context_parallel", "expert_parallel"),
        "blocks whose sequences are shared are compiled whole, and experts that ranks share are not compiled",
        "Use compile=False, or one of the two.",
    ),
    Combination(
        ("compile_parameters.dynamic", "tensor_parallel"), "PyTorch cannot split layers of variable shapes", _FEW_SHAPES
    ),
    Combination(
        ("compile_parameters.dynamic", "context_parallel"),
        "which sequences are shared is known by their lengths",
        _FEW_SHAPES,
    ),
    Combination(
        ("compile_parameters.async_tensor_parallel", "compile=False"),
        "it only overlaps products of compiled blocks",
        "Set device_parameters.compile=True too, or leave it False.",
    ),
    Combination(
        ("compile_parameters.fullgraph", "expert_parallel"),
        "experts that ranks share are not compiled, inside of blocks that are",
        "Use fullgraph=False.",
    ),
    Combination(
        ("sync_policy", "pipeline_parallel"),
        "a stage reduces its gradients once, after the last micro-batch",
        'Use sync_policy="no_sync", or pipeline_parallel=1.',
    ),
    *(
        Combination(("LocalSGDMixin", other), _WORKERS, _LEAVE_ONE)
        for other in ("tensor_parallel", "context_parallel", "expert_parallel", "cpu_offload", "overlap_reduce")
    ),
    Combination(("LocalSGDMixin", "precision=fp16"), "its loss scale is one for all ranks", _LEAVE_ONE),
    Combination(("LocalSGDMixin", "on_nonfinite"), "a single worker would skip a step", _LEAVE_ONE),
)


def refuse_combinations(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if settings cannot be combined; settings missing in `settings` are off."""
    for names, reason, remedy in UNSUPPORTED:
        wanted = [name.partition("=") for name in names]
        if all(name in settings and _is_on(settings[name], value) for name, _, value in wanted):
            first, *others = [_spelled(name, settings[name]) for name, _, _ in wanted]
            raise ConfigError(f"{first} with {' and '.join(others)} is not supported: {reason}. {remedy}")


def settings_of(config: Any) -> dict[str, Any]:
    """Everything that the table may name, of a trainer's config."""
    settings: dict[str, Any] = dict(vars(config.device_parameters))
    settings |= {name: vars(config.training_parameters)[name] for name in ("sync_policy", "on_nonfinite")}
    compiled = vars(config).get("compile_parameters")
    if compiled is not None:
        names = ("dynamic", "fullgraph") if settings["compile"] else ("async_tensor_parallel",)
        settings |= {f"compile_parameters.{name}": vars(compiled)[name] for name in names}
    settings["LocalSGDMixin"] = "local_sgd_parameters" in vars(config)
    return settings


def _is_on(value: Any, wanted: str) -> bool:
    if wanted:
        return str(value) == wanted
    return value is True or (not isinstance(value, bool | None) and value not in (1, "none", "no_sync", "raise"))


def _spelled(name: str, value: Any) -> str:
    if name == "LocalSGDMixin":
        return name
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
