"""What every rank of a test needs, imported once by the server that ranks are forked from; see worlds.py.

It starts no thread and computes nothing, since neither would be there in what is forked.
"""

import gc
from importlib import import_module
from threading import active_count

MODULES = (
    "cattrs.preconf.json",
    "peft",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "torchdata.stateful_dataloader",
    "torchmetrics",
    "tests.worlds",
    "dream_trainer.callbacks",
    "dream_trainer.checkpoint.store",
    "dream_trainer.trainer.dream",
    "dream_trainer.trainer.saved_state",
)

for name in MODULES:
    import_module(name)
gc.collect()
gc.freeze()  # closing a trainer collects garbage, which takes half a second over all that is imported
if active_count() > 1:
    raise RuntimeError("an import has started a thread, which no forked rank would have")
