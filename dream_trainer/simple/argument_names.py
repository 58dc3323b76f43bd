"""Arguments that the trainer does not have, and what they are called: those of other trainers, or misspelt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from dream_trainer.errors import ConfigError
from dream_trainer.simple.nearest import nearest

OF_OTHERS: dict[str, str] = {
    **dict.fromkeys(("loss_fn", "loss_func", "criterion", "loss_function"), "loss"),
    **dict.fromkeys(("optim", "opt", "optimizers"), "optimizer"),
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("train_dataloader", "train_loader", "train_dl", "train_dataset", "train_data", "data"), "train"),
    **dict.fromkeys(
        ("eval_dataloader", "val_loader", "valid_dl", "valid", "eval_dataset", "val_dataset", "validation_data"), "val"
    ),
    **dict.fromkeys(("eval_steps", "eval_every", "val_every_n_steps", "val_check_interval"), "val_every"),
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "n_steps"), "steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val"), "clip"),
    **dict.fromkeys(("mixed_precision", "amp", "dtype"), "precision"),
    **dict.fromkeys(("num_workers", "num_dataloader_workers", "dataloader_num_workers"), "workers"),
    **dict.fromkeys(("data_collator", "collate_fn"), "collate"),
    **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size"), "val_batch_size"),
    "per_device_train_batch_size": "batch_size",
    "dataloader_shuffle": "shuffle",
    **dict.fromkeys(("lr_scheduler", "scheduler", "lr_schedule"), "schedule"),
    "scheduler_step_per_batch": "schedule_unit",
    "early_stopping_patience": "patience",
    **dict.fromkeys(("best_model_metric", "metric_for_best_model"), "monitor"),
    **dict.fromkeys(("train_step", "training_step"), "step"),
    **dict.fromkeys(("eval_step", "validation_step"), "val_step"),
    **dict.fromkeys(("compute_metrics", "metric"), "metrics"),
    **dict.fromkeys(("save_dir", "output_dir", "workspace", "run_name"), "name"),
    **dict.fromkeys(("fsdp", "sharded"), "shard"),
    **dict.fromkeys(("callback", "hooks"), "callbacks"),
    **dict.fromkeys(("logger", "report_to"), "loggers"),
    **dict.fromkeys(("use_cpu", "accelerator"), "device"),
    **dict.fromkeys(("progress_bar", "verbose"), "progress"),
}


def refuse_wrong_arguments(constructor: Callable[..., Any], given: tuple[Any, ...], named: Iterable[str]) -> None:
    """Raises ConfigError for arguments that `constructor` does not take, with what they are called.

    Args:
        constructor: Of the class.
        given: Arguments without a name; the model is the only one.
        named: Names of the others.
    """
    known = [*inspect.signature(constructor).parameters][1:]
    if len(given) > 1:
        raise ConfigError(
            f"only the model is given without a name, and {len(given)} arguments are. Write Trainer(model, loss=..., "
            "optimizer=..., train=...)."
        )
    for name in named:
        if name not in known:
            advice = f"Here it is {OF_OTHERS[name]}=." if name in OF_OTHERS else nearest(name, known)
            raise ConfigError(f"Trainer has no argument {name!r}. {advice}")
