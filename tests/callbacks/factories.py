"""Every shipped callback, as the generic suite (test_every_callback.py) builds it. Add a line for each new one.

The suite's trainer has a trained `model` and a frozen `teacher` of the same shape, validates every 4 of its 12 steps,
and returns `loss` from its steps. Factories set what has no default, and what makes so short a run see the callback
work. `SECOND` has those that refuse a second one like the first. What can print into a file does so into `PRINTED`.
"""

import io
from collections.abc import Callable

from dream_trainer import callbacks as cb

PRINTED = io.StringIO()

FACTORIES: dict[str, Callable[[], cb.Callback]] = {
    "ActivationStats": lambda: cb.ActivationStats(4),
    "EMA": lambda: cb.EMA(),
    "EarlyStopping": lambda: cb.EarlyStopping(patience=9),
    "Every": lambda: cb.Every(20, "samples", lambda trainer: print("every", trainer.global_step, file=PRINTED)),
    "GarbageCollection": lambda: cb.GarbageCollection(2, 6),
    "GradientStats": lambda: cb.GradientStats(4),
    "LearningRate": lambda: cb.LearningRate(),
    "Memory": lambda: cb.Memory(4),
    "ModelSummary": lambda: cb.ModelSummary(file=PRINTED),
    "NonFiniteReport": lambda: cb.NonFiniteReport(),
    "Profiler": lambda: cb.Profiler(3, 2),
    "Progress": lambda: cb.Progress(file=PRINTED),
    "SanityChecks": lambda: cb.SanityChecks(),
    "SWA": lambda: cb.SWA(4, every=3, unit="steps", validate=False),  # the EMA beside it validates
    "Throughput": lambda: cb.Throughput(every_n_steps=2, tokens_per_sample=4),
    "TrainerSummary": lambda: cb.TrainerSummary(file=PRINTED),
    "WeightStats": lambda: cb.WeightStats(4),
    "WeightTransfer": lambda: cb.WeightTransfer("model", "teacher", decay=0.9),
}

SECOND: dict[str, Callable[[], cb.Callback]] = {
    "ActivationStats": lambda: cb.ActivationStats(2, name="more_activations"),
    "EMA": lambda: cb.EMA(validate=False),
    "GradientStats": lambda: cb.GradientStats(2, name="more_gradients"),
    "LearningRate": lambda: cb.LearningRate("rate"),
    "Memory": lambda: cb.Memory(2, name="more_memory"),
    "Profiler": lambda: cb.Profiler(8, 2),
    "Progress": lambda: cb.Progress(file=io.StringIO()),
    "Throughput": lambda: cb.Throughput("speed", every_n_steps=3),
    "WeightStats": lambda: cb.WeightStats(2, name="more_weights"),
}
