"""The deferred build: models are described on the meta device, then made real one parameter at a time.

with tape.recording():
    trainer.configure_models()              # ordinary code; parameters take no memory
with torch.no_grad(), tape.recording():
    trainer.init_weights()                  # by default: `default_init(model, tape)`
plan = remember(models, tape)
...                                         # fully_shard and friends, on the meta parameters
materialize(models, plan, device)           # this rank's part of every tensor, the same bits in every world
"""
