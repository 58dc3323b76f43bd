"""How long to train, in which batch sizes, and the policy for non-finite gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from dream_trainer.checks import divisors, refuse, spell
from dream_trainer.config.parameter_class import NonNegativeInt, PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError


def _check_duration(name: str, value: object, *, hint: str) -> None:
    if not isinstance(value, timedelta):
        raise ConfigError(f"{name}={value!r} does not say its unit. Use a timedelta, such as timedelta(hours=8).{hint}")
    refuse(value < timedelta(0), f"{name}={value!r} is negative. Use a timedelta of zero or more.{hint}")


@parameters
class TrainingParameters:
    """Limits, batch sizes, clipping and the validation schedule of one run.

    Training stops at the first limit it reaches. Zero is a value, not "unset": `max_steps=0` trains nothing.
    """

    _renamed: ClassVar[Mapping[str, str]] = {
        "max_epochs": "n_epochs",
        "gradient_clip_val": "gradient_clip_norm",
        "nonfinite": "on_nonfinite",
    }

    n_epochs: NonNegativeInt | None = None
    """Passes over the training data, also called `max_epochs`. None sets no limit, but a run without any limit stops
    after one epoch."""
    if TYPE_CHECKING:
        max_epochs: NonNegativeInt | None = None
    else:
        max_epochs = property(lambda self: self.n_epochs)
    max_steps: NonNegativeInt | None = None
    """Optimizer steps over the whole run. None sets no limit."""
    max_time: Annotated[timedelta, _check_duration] | None = None
    """Wall-clock time of training, including time before a resume. None sets no limit."""
    max_samples: NonNegativeInt | None = None
    """Samples consumed by all ranks over the whole run. None sets no limit."""
    max_tokens: NonNegativeInt | None = None
    """Tokens consumed by all ranks over the whole run, as counted by the trainer's `batch_tokens`. The last step may
    exceed it. None sets no limit."""
    train_batch_size: PositiveInt = 32
    """Maximum samples of one rank's micro-batch in training. Loaders use `trainer.micro_batch_size`."""
    val_batch_size: PositiveInt = 32
    """Samples of one rank's batch in validation. 32 fits small machines."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step on each rank. 1 steps after every batch."""
    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step over all ranks; sets the gradient accumulation. None disables."""
    gradient_clip_norm: PositiveFloat | None = None
    """Largest global gradient norm; larger gradients are scaled down. None does not clip."""
    gradient_clip_value: PositiveFloat | None = None
    """Largest absolute value of a gradient's element. None does not clip."""
    train_steps_per_epoch: NonNegativeInt | None = None
    """Optimizer steps after which an epoch ends early. None uses all data."""
    val_steps_per_epoch: NonNegativeInt | None = None
    """Batches per rank of one validation. None uses all data, 0 validates nothing."""
    val_every_n_steps: PositiveInt | None = None
    """Optimizer steps between validations. None disables."""
    val_every_n_epochs: PositiveInt | Literal["auto"] | None = "auto"
    """Epochs between validations. "auto" is 1 unless steps or minutes between them are set. None disables."""
    val_every_minutes: PositiveFloat | None = None
    """Minutes between validations. None disables."""
    num_sanity_val_steps: NonNegativeInt = 0
    """Batches per rank of a validation before the trainer's first training, to find its errors early. 0 disables."""
    sync_policy: Literal["no_sync", "reduce_scatter_each", "defer_all_reduce"] = "no_sync"
    """When gradients of an accumulation window are reduced. "no_sync": once, at its end, keeping full gradients until
    then. "reduce_scatter_each": in each micro-batch, keeping only shards. "defer_all_reduce" (for HSDP): scattered in
    each micro-batch and summed over replicas once. Results are equal; memory and traffic differ. Replicas without
    shards keep whole gradients and are reduced once under each."""
    on_nonfinite: Literal["raise", "skip", "retry"] = "raise"
    """Policy for a NaN or infinite gradient norm: "raise" an error, "skip" that step, or "retry" its window. On a CPU
    "raise" comes in the step itself. On an accelerator it comes up to 50 steps later, and no step after the bad one
    changes anything."""
    max_nonfinite: NonNegativeInt = 10
    """Consecutive non-finite steps that "skip" and "retry" tolerate. One more raises, since the run is lost by then."""
    fast_dev_run: bool = False
    """Smoke test: train on one accumulation window, validate on one batch, write no checkpoint."""
    overfit_batches: NonNegativeInt = 0
    """Train on this many first batches of each rank again and again, to test the model. 0 uses all data."""
    deterministic: bool = False
    """Use PyTorch's deterministic algorithms. They are slower, and operations without one raise an error."""

    def __post_init__(self) -> None:
        refuse(
            self.train_steps_per_epoch == 0 and self.epoch_limit is None,
            "train_steps_per_epoch=0 makes epochs without a step, and without n_epochs they never end. "
            "Set n_epochs, or use max_steps=0 to train nothing.",
        )
        refuse(
            self.global_batch_size is not None and self.gradient_accumulation_steps != 1,
            f"global_batch_size={self.global_batch_size} derives the accumulation, which "
            f"gradient_accumulation_steps={self.gradient_accumulation_steps} sets too. Leave one of them out.",
        )
        refuse(
            self.gradient_clip_norm is not None and self.gradient_clip_value is not None,
            f"gradient_clip_norm={self.gradient_clip_norm} (by norm) and "
            f"gradient_clip_value={self.gradient_clip_value} (by element) undo each other. Set one of them.",
        )

    @property
    def epochs_between_validations(self) -> int | None:
        """`val_every_n_epochs`, with "auto" resolved."""
        if self.val_every_n_epochs == "auto":
            return 1 if self.val_every_n_steps is None and self.val_every_minutes is None else None
        return self.val_every_n_epochs

    @property
    def epoch_limit(self) -> int | None:
        """Epochs to train: `n_epochs`, or 1 if no limit at all is set, or None if another limit ends the run."""
        limits = (self.n_epochs, self.max_steps, self.max_time, self.max_samples, self.max_tokens)
        return 1 if all(limit is None for limit in limits) else self.n_epochs


@parameters
class EvalParameters:
    """Which results of validations to keep."""

    best_metrics: Mapping[str, Literal["min", "max"]] = field(default_factory=lambda: {"val/loss": "min"})
    """Metrics whose best value is kept in `trainer.best`, each with "min" if lower or "max" if higher is better. A
    metric that a validation does not give causes a warning, except for the default."""


@dataclass(kw_only=True)
class EvalConfigMixin:
    eval_parameters: EvalParameters = field(default_factory=EvalParameters)


def micro_batch_size(parameters: TrainingParameters, dp_size: int) -> int:
    """`train_batch_size`, or the largest smaller size that divides a rank's share of `global_batch_size`."""
    size, total = parameters.train_batch_size, parameters.global_batch_size
    if total is None or total % dp_size:  # `accumulation_steps` raises an error later, with the loader's size
        return size
    return max(divisor for divisor in divisors(total // dp_size) if divisor <= size)


def accumulation_steps(parameters: TrainingParameters, batch_size: int, dp_size: int) -> int:
    """Micro-batches that each rank processes per optimizer step; `batch_size` is the loader's actual one."""
    total = parameters.global_batch_size
    if total is None:
        return parameters.gradient_accumulation_steps
    if total % (batch_size * dp_size) == 0:
        return total // (batch_size * dp_size)
    wrong = (
        f"global_batch_size={total} is not a multiple of {batch_size * dp_size} "
        f"(batch size {batch_size} x {dp_size} data-parallel ranks)."
    )
    smaller = total // (batch_size * dp_size) * batch_size * dp_size
    multiples = [value for value in (smaller, smaller + batch_size * dp_size) if value > 0]
    if total % dp_size == 0:
        raise ConfigError(
            f"{wrong} Use a batch size of {spell(divisors(total // dp_size))}, or global_batch_size={spell(multiples)}."
        )
    ranks = [number for number in divisors(total) if total % (batch_size * number) == 0]
    other = f", or {spell(ranks)} data-parallel ranks" if ranks else ""
    raise ConfigError(f"{wrong} Use global_batch_size={spell(multiples)}{other}.")
