"""The deferred build: models are described on the meta device, then made real one parameter at a time.

with tape.recording():
    trainer.configure_models()              # ordinary code; parameters take no memory
with torch.no_grad(), tape.recording():
    trainer.init_weights()                  # by default: `default_init(model, tape)`
plan = remember(models, tape)
...                                         # fully_shard and friends, on the meta parameters
materialize(models, plan, device)           # this rank's part of every tensor, the same bits in every world
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.meta.initialise import default_init as default_init
    from dream_trainer.meta.realize import Plan as Plan, materialize as materialize, remember as remember
    from dream_trainer.meta.tape import Tape as Tape
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
