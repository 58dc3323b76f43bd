"""What `log` and the results of steps may hold: options of other trainers, and results of which nothing is logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_ELSEWHERE = {
    "prog_bar": "the Progress callback shows what its `metrics` name",
    "on_step": "training's values are averaged over log_every_n_steps, validation's over the validation",
    "on_epoch": "training's values are averaged over log_every_n_steps, validation's over the validation",
    "sync_dist": "every value is reduced over all ranks",
    "reduce_fx": "pass reduce",
    "batch_size": "pass weight; the default is the batch's size",
    "step": "the step is the optimizer step that the value belongs to",
    "commit": "a line is written every log_every_n_steps",
}


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Raises TypeError for options that `log` does not have, with what does their work here."""
    for name in options:
        raise TypeError(f"log() has no option {name!r}: {_ELSEWHERE.get(name, 'it has weight and reduce')}.")


def unlogged(step: str, result: Mapping[str, Any]) -> str | None:
    """What to say of a `step` that logged nothing if its result has a tensor of several elements; else None."""
    for name, value in result.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            return (
                f"nothing that {step} returned is logged: {name!r} is a tensor of shape {tuple(value.shape)}. "
                "Return tensors of one element, such as its mean()."
            )
    return None
