"""Which of two values of a metric is better, and whether that is the lower or the higher one."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal

from dream_trainer.checks import nearest
from dream_trainer.errors import ConfigError

# Words in names of metrics; of two words in a row also both in one, as in "cross_entropy".
_LOWER = frozenset(
    "loss losses error errors err perplexity ppl nll mse rmse mae mape wer cer eer ece fid bpb bpc bits "
    "crossentropy".split()
)
_HIGHER = frozenset(
    "accuracy acc top f1 f2 auc auroc auprc precision recall sensitivity specificity miou iou dice jaccard bleu "
    "rouge rougel meteor psnr ssim reward rewards return returns success winrate ndcg mrr r2 kappa mcc correlation "
    "pearson spearman exactmatch".split()
)
_LAST_AND_NEUTRAL = frozenset(
    "rate score mean avg average macro micro weighted total sum ema epoch step per token tokens byte char word dim val "
    "valid validation test dev eval train at".split()
)
_NOBODY_KNOWS = frozenset("neg negative minus inverse inv to until per no non without win".split())


def mode_of(
    metric: str,
    mode: Literal["min", "max"] | None,
    *,
    higher_is_better: bool | None = None,
    named_by: str,
    set_by: str,
) -> Literal["min", "max"]:
    """Whether the lowest ("min") or the highest ("max") value of a metric is best.

    Raises:
        ConfigError: Nobody knows.
    """
    if mode is not None:
        return mode
    if higher_is_better is not None:
        return "max" if higher_is_better else "min"
    known = mode_by_name(metric)
    if known is None:
        near = _with_a_known_word(metric)
        advice = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"{named_by}={metric!r} does not say whether lower or higher values are better. "
            f'Set {set_by}="min" or "max".{advice}'
        )
    return known


def _with_a_known_word(metric: str) -> str | None:
    """The probably intended name, if its last part is close to a known word."""
    place, slash, name = metric.rpartition("/")
    near = get_close_matches(name, [*_LOWER, *_HIGHER], n=1, cutoff=0.85)
    return f"{place}{slash}{near[0]}" if near else None


def refuse_other_places(metric: str, loaders: Collection[str], *, named_by: str) -> None:
    """Raises ConfigError for a metric that no validation of these loaders can log."""
    places = [f"val/{name}/" if name else "val/" for name in loaders]
    if not places or metric.startswith(tuple(places)):
        return
    possible = [place + metric.rpartition("/")[2] for place in places]
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
    """Infers the mode from the last word in the last part of a name, or the last two joined; None if unknown.

    "val/token_accuracy" and "val/top5" are better high, "val/dice_loss" and "val/word_error_rate" low. Unknown are
    "val/score", "val/negative_loss", "val/accuracy_gap" and "val/steps_to_success".
    """
    name = metric.rpartition("/")[2]
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+[0-9]*|[A-Z]+[0-9]*", name)]
    if words[-2:] == ["win", "rate"]:
        words = [*words[:-2], "winrate"]
    while len(words) > 1 and words[-1] in _LAST_AND_NEUTRAL and _mode_of_word("".join(words[-2:])) is None:
        words.pop()
    if not words or _NOBODY_KNOWS.intersection(words) or re.match(r"\d", name):
        return None
    if "".join(words).rstrip("0123456789") == "map":  # a separate word elsewhere, as in "feature_map"
        return "max"
    return _mode_of_word(words[-1]) or _mode_of_word("".join(words[-2:]))


def _mode_of_word(word: str) -> Literal["min", "max"] | None:
    names = {word, word.rstrip("0123456789")}
    if names & _LOWER:
        return "min"
    return "max" if names & _HIGHER else None


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
