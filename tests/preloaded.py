"""What every rank of a test needs, imported once by the server that ranks are forked from; see worlds.py.

It starts no thread and computes nothing, since neither would be there in what is forked.
"""

from importlib import import_module
from threading import active_count

MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "torchdata.stateful_dataloader",
    "dream_trainer.callbacks",
    "dream_trainer.checkpoint.store",
    "dream_trainer.trainer.dream",
    "dream_trainer.trainer.restored_state",
    "dream_trainer.trainer.saved_state",
)

for name in MODULES:
    import_module(name)
if active_count() > 1:
    raise RuntimeError("an import has started a thread, which no forked rank would have")
