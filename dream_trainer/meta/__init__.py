"""The deferred build: models are described on the meta device, then made real one parameter at a time.

    tape = Tape(seed)
    with tape.recording():
        trainer.configure_models()              # ordinary code; parameters take no memory
    with torch.no_grad(), tape.recording():
        trainer.init_weights()                  # by default: `default_init(model, tape)`
    plan = remember(models, tape)
    ...                                         # fully_shard and friends, on the meta parameters
    materialize(models, plan, device)           # this rank's part of every tensor, the same bits in every world

`tape` is the way in, `recorder` decides what to do with each call, `functions` says what kind of thing a torch
function is, `history` keeps recorded calls and replays them, `initialise` is the default of `init_weights`, and
`realize` puts real tensors in the place of meta ones.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .initialise import default_init as default_init
    from .realize import Plan as Plan
    from .realize import materialize as materialize
    from .realize import remember as remember
    from .tape import Tape as Tape

_HOMES = {
    "Tape": "tape",
    "default_init": "initialise",
    "Plan": "realize",
    "remember": "realize",
    "materialize": "realize",
}
__all__ = ["Plan", "Tape", "default_init", "materialize", "remember"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
