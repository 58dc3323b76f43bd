"""Which of two values of a metric is better, and whether that is the lower or the higher one."""

from __future__ import annotations

import math
from collections.abc import Collection
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal

from dream_trainer.checks import nearest
from dream_trainer.errors import ConfigError

_MODES: dict[str, Literal["min", "max"]] = {
    **dict.fromkeys("loss error perplexity ppl nll mse rmse mae mape wer cer".split(), "min"),
    **dict.fromkeys("accuracy acc top1 top5 precision recall f1 auc auroc iou dice bleu map reward".split(), "max"),
}


def mode_of(
    metric: str, mode: Literal["min", "max"] | None, higher_is_better: bool | None = None, *, named_by: str, set_by: str
) -> Literal["min", "max"]:
    """Whether the lowest ("min") or the highest ("max") value of a metric is best; ConfigError if nobody knows."""
    if mode is not None:
        return mode
    if higher_is_better is not None:
        return "max" if higher_is_better else "min"
    known = mode_by_name(metric)
    if known is None:
        place, slash, name = metric.rpartition("/")
        near = get_close_matches(name, _MODES, n=1, cutoff=0.85)
        advice = f" Did you mean {place + slash + near[0]!r}?" if near else ""
        raise ConfigError(
            f"{named_by}={metric!r} does not say whether lower or higher values are better. "
            f'Set {set_by}="min" or "max".{advice}'
        )
    return known


def refuse_other_places(metric: str, loaders: Collection[str], *, named_by: str) -> None:
    """Raises ConfigError for a metric that no validation of these loaders can log."""
    places = [f"val/{name}/" if name else "val/" for name in loaders]
    if not places or metric.startswith(tuple(places)):
        return
    name = metric.rpartition("/")[2].removeprefix("val_").removeprefix("eval_")  # as other trainers call them
    possible = [place + name for place in places]
    raise ConfigError(
        f"{named_by}={metric!r} is no name of a validation's metric, which here begin with {' or '.join(places)}. "
        f"Did you mean {' or '.join(map(repr, possible))}?"
    )


def refuse_missing(metric: str, metrics: Collection[str], *, named_by: str) -> None:
    """Raises ConfigError for a metric that is not among those that a validation gave."""
    if metric in metrics:
        return
    last = metric.rpartition("/")[2]
    near = [name for name in metrics if name.rpartition("/")[2] == last] or [*filter(None, [nearest(metric, metrics)])]
    advice = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigError(
        f"{named_by}={metric!r} is not among the validation's metrics. {advice}Use one of {sorted(metrics)}."
    )


def mode_by_name(metric: str) -> Literal["min", "max"] | None:
    """The mode of some well-known metrics, such as "val/loss" and "val/near/accuracy"; None of any other."""
    return _MODES.get(metric.rpartition("/")[2].lower())


def is_better(value: Any, best: float | None, mode: Literal["min", "max"]) -> bool:
    """Whether a metric's value beats the best so far; equal ones do not."""
    if not is_value(value):
        return False
    if not is_value(best):
        return True
    return bool(value < best if mode == "min" else value > best)


def is_value(value: Any) -> bool:
    """Whether `value` is a number, and not NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
