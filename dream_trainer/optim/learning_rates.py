"""Learning rate schedules as closed forms of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from typing_extensions import override

from dream_trainer.checks import check_between, check_integer, refuse, spell
from dream_trainer.config.parameter_class import NonNegativeInt, parameters
from dream_trainer.errors import ConfigError

ScheduleName = Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt", "plateau"]

_TAKES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "cosine": ("min_lr_ratio",),
    "linear": ("min_lr_ratio",),
    "wsd": ("min_lr_ratio", "decay_steps", "decay_shape"),
    "inverse_sqrt": ("min_lr_ratio",),
    "plateau": ("min_lr_ratio", "mode", "factor", "patience", "cooldown"),
}
_NEEDS_TOTAL = ("cosine", "linear", "wsd")


@parameters
class ScheduleParameters:
    """A named schedule; each value at None has the default in its description. docs/schedules.md has the formulas.

    "wsd" is warm-up, stable, decay (MiniCPM, Hu et al. 2024, arXiv 2404.06395), "inverse_sqrt" that of Vaswani et al.
    (2017, arXiv 1706.03762), "plateau" PyTorch's ReduceLROnPlateau, which you step with a metric. A warm-up that is not
    shorter than the run is cut off by its end.
    """

    name: ScheduleName = "constant"
    """Form of the schedule."""
    unit: Literal["step", "epoch", "token"] = "step"
    """Unit of warm-up and decay, and how often the schedule is stepped: "epoch" once in `post_epoch`. With "token"
    each step's rate follows the number of tokens before it."""
    warmup_steps: int | float = 0
    """Length of the warm-up in units, or a fraction of the total below 1. 0 disables."""
    min_lr_ratio: Annotated[float, partial(check_between, low=0, high=1)] | None = None
    """Smallest factor on the learning rate: cosine, linear, wsd, inverse_sqrt, plateau. None is 0."""
    decay_steps: int | float | None = None
    """Length of wsd's decay in units, or a fraction of the total below 1. None is 0.1, which MiniCPM found enough."""
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] | None = None
    """Form of wsd's decay ("sqrt": Haegele et al. 2024, arXiv 2405.18392). None is "linear"."""
    mode: Literal["min", "max"] | None = None
    """Whether plateau's metric should fall or rise. None is "min"."""
    factor: Annotated[float, partial(check_between, low=0, high=1, below=True)] | None = None
    """Factor of plateau's reductions of the rate. None is 0.1."""
    patience: NonNegativeInt | None = None
    """Validations without improvement before plateau reduces the rate. None is 10."""
    cooldown: NonNegativeInt | None = None
    """Validations after a reduction that plateau does not count. None is 0."""

    def __post_init__(self) -> None:
        for name in dict.fromkeys(name for names in _TAKES.values() for name in names):
            value = getattr(self, name)
            if value is not None and name not in _TAKES[self.name]:
                others = spell(repr(other) for other, names in _TAKES.items() if name in names)
                raise ConfigError(f"{name}={value!r} means nothing to {self.name!r}. Leave it out, or use {others}.")
        _check_length("warmup_steps", self.warmup_steps, zero=True)
        if self.decay_steps is not None:
            _check_length("decay_steps", self.decay_steps, zero=False)
        refuse(
            self.decay_shape == "exponential" and not self.min_lr_ratio,
            'decay_shape="exponential" never reaches min_lr_ratio=0. Set min_lr_ratio, such as 0.01, or use another '
            "shape.",
        )
        refuse(
            self.name == "plateau" and (self.warmup_steps or self.unit != "step"),
            f'"plateau" follows a metric. Leave out warmup_steps={self.warmup_steps} and unit="{self.unit}".',
        )


class TokenAxis(NamedTuple):
    """Token counts for a schedule with `unit="token"`: before the next step, and of the run, if known."""

    now: Callable[[], int]  # such as `lambda: self.tokens_before_next_step`
    total: int | None  # such as `max_tokens`


def build_schedule(
    parameters: ScheduleParameters,
    optimizer: Optimizer,
    *,
    total_steps: int | None,
    steps_per_epoch: int | None = None,
    tokens: TokenAxis | None = None,
) -> LambdaLR | ReduceLROnPlateau:
    """The named schedule over `optimizer`'s groups, each relative to its own learning rate.

    Pass it to `self.step(model, optimizer, scheduler)`. With `unit="epoch"` call its `step()` in `post_epoch` instead,
    and for "plateau" `step(metrics[...])` in `post_val_epoch`; both come before the checkpoint of that moment.

    Args:
        parameters: The schedule and its numbers.
        optimizer: A new one; its groups' rates are those of factor 1.
        total_steps: Optimizer steps of the run, `self.total_steps`; None if that is unknown.
        steps_per_epoch: Optimizer steps of one epoch; needed for `unit="epoch"` if the total is.
        tokens: How many there were and will be; needed for `unit="token"`.

    Raises:
        ConfigError: The schedule needs a total that is not known.
    """
    return build_schedules(
        parameters, [optimizer], total_steps=total_steps, steps_per_epoch=steps_per_epoch, tokens=tokens
    )[0]


def build_schedules(
    parameters: ScheduleParameters,
    optimizers: Sequence[Optimizer],
    *,
    total_steps: int | None,
    steps_per_epoch: int | None = None,
    tokens: TokenAxis | None = None,
) -> list[LambdaLR | ReduceLROnPlateau]:
    """One schedule for each of several optimizers, in their order; arguments and errors of `build_schedule`."""
    if parameters.name == "plateau":
        smallest = parameters.min_lr_ratio or 0.0
        settings = {name: getattr(parameters, name) for name in ("mode", "factor", "patience", "cooldown")}
        given = {name: value for name, value in settings.items() if value is not None}
        return [
            ReduceLROnPlateau(one, min_lr=[smallest * group["lr"] for group in one.param_groups], **given)
            for one in optimizers
        ]
    if parameters.unit != "token":
        factor = rate_factor(parameters, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        return [LambdaLR(optimizer, factor) for optimizer in optimizers]
    if tokens is None:
        raise ConfigError(
            'unit="token" follows the tokens of the run, and nothing tells them. Pass tokens=TokenAxis(lambda: '
            "self.tokens_before_next_step, total=max_tokens)."
        )
    factor = rate_factor(parameters, total_steps=tokens.total)
    return [TokenLR(optimizer, factor, tokens.now) for optimizer in optimizers]


class TokenLR(LambdaLR):
    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], now: Callable[[], int]) -> None:
        self.origin = origin = [0]  # tokens of the run before its beginning
        super().__init__(optimizer, lambda _: factor(now() - origin[0]))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "origin"}


def rate_factor(
    parameters: ScheduleParameters, *, total_steps: int | None, steps_per_epoch: int | None = None
) -> Callable[[int], float]:
    """The factor on the learning rate as a function of the step (or epoch), from 0; for "plateau" a ConfigError."""
    refuse(parameters.name == "plateau", '"plateau" follows a metric and has no form in steps. Use build_schedule.')
    total = _total(parameters, total_steps, steps_per_epoch)
    warmup = _length(parameters.warmup_steps, total)
    after = _after_warmup(parameters, warmup, total)

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else after(step)

    return factor


def _after_warmup(parameters: ScheduleParameters, warmup: int, total: int | None) -> Callable[[int], float]:
    smallest = parameters.min_lr_ratio or 0.0
    if parameters.name == "constant":
        return lambda step: 1.0
    if parameters.name == "inverse_sqrt":
        return lambda step: max(smallest, math.sqrt((warmup + 1) / (step + 1)))
    assert total is not None  # _total raised otherwise
    start, shape = warmup, str(parameters.name)
    if parameters.name == "wsd":
        length = _length(0.1 if parameters.decay_steps is None else parameters.decay_steps, total)
        start, shape = max(warmup, total - length), parameters.decay_shape or "linear"
    return lambda step: _decayed(shape, smallest, 1.0 if step >= total else max(0.0, (step - start) / (total - start)))


def _decayed(shape: str, smallest: float, x: float) -> float:
    """Falls from 1 to `smallest` as x goes from 0 to 1."""
    if shape == "exponential":
        return math.pow(smallest, x)
    if shape == "cosine":
        return smallest + (1 - smallest) * (1 + math.cos(math.pi * x)) / 2
    return 1 - (1 - smallest) * (math.sqrt(x) if shape == "sqrt" else x)


def _total(parameters: ScheduleParameters, total_steps: int | None, steps_per_epoch: int | None) -> int | None:
    """Length of the run in units, if it is needed; None if not."""
    is_fraction = isinstance(parameters.warmup_steps, float) and parameters.warmup_steps > 0
    what = repr(parameters.name) if parameters.name in _NEEDS_TOTAL else f"warmup_steps={parameters.warmup_steps}"
    if parameters.name not in _NEEDS_TOTAL and not is_fraction:
        return None
    if total_steps is None:
        raise ConfigError(
            f"total_{parameters.unit if parameters.unit == 'token' else 'step'}s=None, and {what} needs the run's "
            f"length. Set {'max_tokens' if parameters.unit == 'token' else 'max_steps or n_epochs'}, or use a schedule "
            'without an end ("constant", "inverse_sqrt") with warmup_steps as a number of steps.'
        )
    if parameters.unit != "epoch":
        return total_steps
    if not steps_per_epoch:
        raise ConfigError(
            f'steps_per_epoch={steps_per_epoch}, and unit="epoch" needs it to count {what} in epochs. '
            'Pass the optimizer steps of one epoch, or use unit="step".'
        )
    return math.ceil(total_steps / steps_per_epoch)


def _length(value: int | float, total: int | None) -> int:
    if isinstance(value, int):
        return value
    return 0 if total is None else round(value * total)


def _check_length(name: str, value: object, *, zero: bool) -> None:
    """Raises ConfigError unless `value` is a count, or a fraction below 1; 0 only if `zero`."""
    if isinstance(value, float):
        if not (0 < value < 1 or (zero and value == 0)):
            raise ConfigError(f"{name}={value!r} is not a fraction of the total. Use one below 1, or an integer.")
    else:
        check_integer(name, value, minimum=0 if zero else 1, hint=" A number below 1 is a fraction of the total.")
