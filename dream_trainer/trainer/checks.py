"""What a trainer's constructor checks of its class and config, so that a mistake is named before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dream_trainer.errors import ConfigError, HookError

if TYPE_CHECKING:
    from dream_trainer.config.device import DeviceParameters
    from dream_trainer.trainer.abstract import AbstractTrainer


def check_trainer(cls: type[AbstractTrainer], config: Any) -> None:
    """Checks that `cls` has the hooks its parts require and `config` the fields they read.

    Raises:
        ConfigError: The config is invalid or lacks the field of a mixin.
        HookError: A required hook is not overridden.
    """
    from dream_trainer.config.base import check_config

    check_config(config)
    _check_config_classes(cls, config)
    _check_hooks(cls)


def _parts(cls: type) -> list[type[AbstractTrainer]]:
    from dream_trainer.trainer.abstract import AbstractTrainer

    return [part for part in cls.__mro__ if issubclass(part, AbstractTrainer)]


def _check_config_classes(cls: type, config: Any) -> None:
    for part in _parts(cls):
        needed = vars(part).get("_config_class")
        if needed is not None and not isinstance(config, needed):
            raise ConfigError(
                f"{part.__name__} needs {needed.__name__}, which {type(config).__name__} does not inherit. "
                f"Write `class {type(config).__name__}(BaseTrainerConfig, {needed.__name__})`."
            )


def _check_hooks(cls: type) -> None:
    from dream_trainer.trainer.abstract import AbstractTrainer

    for part in _parts(cls):
        for hook, purpose in vars(part).get("_required_hooks", {}).items():
            if getattr(cls, hook) is getattr(AbstractTrainer, hook):
                raise HookError(f"{cls.__name__} does not override {hook}, which {part.__name__} requires: {purpose}")


def refuse_unused_parallelism(cls: type[AbstractTrainer], devices: DeviceParameters) -> None:
    """Refuses what the config asks for and nothing in `cls` does.

    Raises:
        ConfigError: A hook is missing; the message names it.
    """
    from dream_trainer.trainer.abstract import AbstractTrainer

    def refuse(hook: str, field: str, is_wanted: bool, advice: str) -> None:
        if is_wanted and getattr(cls, hook) is getattr(AbstractTrainer, hook):
            value = vars(devices)[field]
            raise ConfigError(f"{field}={value!r}, but {cls.__name__} does not override {hook}. {advice}")

    add = "Add {0} to its bases and {1} to its config's, which bring a default."
    refuse(
        "apply_tensor_parallel",
        "tensor_parallel",
        devices.tensor_parallel > 1,
        "Split each model's layers over the mesh there with parallelize_module, or set tensor_parallel=1.",
    )
    refuse(
        "apply_activation_checkpointing",
        "activation_checkpointing",
        devices.activation_checkpointing != "none",
        add.format("ActivationCheckpointingMixin", "ActivationCheckpointingConfigMixin"),
    )
    refuse("apply_compile", "compile", devices.compile, add.format("CompileMixin", "CompileConfigMixin"))


_SETUP_HOOKS = (
    "configure_models",
    "init_weights",
    "load_pretrained",
    "configure_optimizers",
    "configure_schedulers",
    "configure_metrics",
)


def uncalled_hooks(cls: type[AbstractTrainer]) -> list[str]:
    """Hooks that `cls` overrides and nothing in it calls."""
    from dream_trainer.trainer.abstract import AbstractTrainer

    if cls._keeps_ranks_equal:
        return []
    return [hook for hook in _SETUP_HOOKS if getattr(cls, hook) is not getattr(AbstractTrainer, hook)]
