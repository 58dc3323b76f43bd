"""OptimizerParameters: the optimizer, its numbers, and its groups of parameters."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from dream_trainer.checks import check_between, check_names, check_pattern, check_positive, refuse, spell
from dream_trainer.config.parameter_class import PositiveFloat, PositiveInt, parameters
from dream_trainer.errors import ConfigError
from dream_trainer.optim.groups import GroupParameters

_Share = Annotated[float, partial(check_between, low=0, high=1, below=True)]
OptimizerName = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "nadam", "adafactor", "muon"]

HYPERPARAMETERS: dict[str, tuple[str, ...]] = {  # fields that each optimizer takes in addition to those that all take
    "adamw": ("betas", "eps", "amsgrad"),
    "adam": ("betas", "eps", "amsgrad"),
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("eps",),
    "rmsprop": ("alpha", "eps", "momentum", "centered"),
    "nadam": ("betas", "eps"),
    "adafactor": (),
    "muon": ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "hidden", "adamw_lr", "betas", "eps"),
}

HAS_FUSED = ("adamw", "adam", "sgd", "adagrad", "muon")  # of "muon" the AdamW half


@parameters
class OptimizerParameters:
    """One of PyTorch's named optimizers, and the grouping of the model's parameters for it.

    A hyperparameter at None has PyTorch's own default for that optimizer. A hyperparameter that the named optimizer
    does not take raises an error.

    Raises:
        ConfigError: A value is invalid, or the named optimizer does not take it.
    """

    name: OptimizerName = "adamw"
    """Optimizer. "muon" is `dream_trainer.optim.Muon` on hidden matrices and AdamW on all other parameters."""
    lr: PositiveFloat = 1e-3
    """Learning rate. 1e-3 is PyTorch's for AdamW."""
    weight_decay: Annotated[float, partial(check_between, low=0)] | None = None
    """Weight decay of matrices: decoupled in AdamW, Muon and Adafactor, an L2 penalty in the others. None is PyTorch's
    default (AdamW 0.01, Muon 0.1, the others 0)."""
    betas: tuple[float, float] | None = None
    """Decay rates of the running mean and square of the gradient: adamw, adam, nadam, and the AdamW half of muon."""
    eps: PositiveFloat | None = None
    """Added to the denominator: adamw, adam, nadam, adagrad, rmsprop, and the AdamW half of muon."""
    amsgrad: bool | None = None
    """Keep the largest running square: adamw, adam."""
    momentum: _Share | None = None
    """Momentum: sgd, rmsprop, muon."""
    dampening: Annotated[float, partial(check_between, low=0, high=1)] | None = None
    """Share of the gradient kept out of the momentum: sgd."""
    nesterov: bool | None = None
    """Nesterov momentum: sgd, muon."""
    alpha: _Share | None = None
    """Decay rate of the running square: rmsprop."""
    centered: bool | None = None
    """Normalise by the gradient's variance: rmsprop."""
    ns_steps: PositiveInt | None = None
    """Newton-Schulz iterations: muon."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = None
    """How muon's rate follows a matrix's shape. None or "match_rms_adamw" makes updates as large as AdamW's, so that
    one `lr` serves both. "original" is Keller Jordan's rule, whose rate is some fifty times AdamW's."""
    hidden: Annotated[tuple[str, ...], partial(check_names, example="blocks")] = ()
    """Regular expressions of the names of muon's matrices. () takes those inside the model's repeated blocks."""
    adamw_lr: PositiveFloat | None = None
    """Learning rate of muon's AdamW half. None uses `lr`."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel per group. "auto" uses it if the optimizer, device and parameters have it, otherwise one kernel per
    operation (foreach). True insists, False disables."""
    decay_vectors: bool = False
    """Decay biases, scalars and normalisation weights too. By default only matrices decay."""
    decay_embeddings: bool = True
    """Decay embedding tables."""
    groups: tuple[GroupParameters, ...] = ()
    """Parameters with a different rate or decay. The first pattern that matches a parameter decides."""
    layer_decay: float | None = None
    """Factor of the learning rate from each block to the one below it. None has one rate for all."""

    def __post_init__(self) -> None:
        self._check_hyperparameters()
        if self.fused is True and self.name not in HAS_FUSED:
            names = spell(repr(name) for name in HAS_FUSED)
            raise ConfigError(f'fused=True: {self.name!r} has no fused implementation. Use fused="auto", or {names}.')
        are_groups = isinstance(self.groups, tuple | list) and all(isinstance(g, GroupParameters) for g in self.groups)
        example = "(GroupParameters(pattern=..., lr_scale=...),)"
        refuse(not are_groups, f"groups={self.groups!r} is no tuple of GroupParameters. Use {example}.")
        if self.layer_decay is not None:
            check_between("layer_decay", self.layer_decay, 0, 1)
            check_positive("layer_decay", self.layer_decay, hint=" freeze() leaves parameters as they are.")

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these fields that are not None, as keyword arguments of PyTorch's optimizer."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def _check_hyperparameters(self) -> None:
        takes = HYPERPARAMETERS[self.name]
        for name in dict.fromkeys(name for names in HYPERPARAMETERS.values() for name in names):
            value = getattr(self, name)
            if name not in takes and value is not None and value != ():
                others = spell(repr(other) for other, names in HYPERPARAMETERS.items() if name in names)
                raise ConfigError(f"{name}={value!r} means nothing to {self.name!r}. Leave it out, or use {others}.")
        if self.betas is not None:
            if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
                raise ConfigError(f"betas={self.betas!r} are not two numbers. Use a pair such as (0.9, 0.95).")
            for index, beta in enumerate(self.betas):
                check_between(f"betas[{index}]", beta, 0, 1, below=True)
        is_sgd, momentum, dampening = self.name == "sgd", self.momentum, self.dampening
        refuse(
            is_sgd and self.nesterov and (not momentum or dampening),
            f"nesterov=True needs momentum and no dampening, not {momentum=}, {dampening=}. Use momentum=0.9, "
            "dampening=None.",
        )
        is_idle = is_sgd and dampening and not momentum
        refuse(is_idle, f"dampening={dampening} does nothing without momentum. Set momentum=0.9.")
        refuse((self.ns_steps or 0) >= 100, f"ns_steps={self.ns_steps} is too many. Use 5.")
        refuse(
            self.adjust_lr_fn == "original" and self.adamw_lr is None,
            f'adjust_lr_fn="original" with lr={self.lr} for both halves: Muon then needs a rate some fifty times '
            'AdamW\'s. Set adamw_lr too, such as lr=0.02, adamw_lr=3e-4, or use adjust_lr_fn="match_rms_adamw".',
        )
        for pattern in self.hidden:
            check_pattern("hidden", pattern)
