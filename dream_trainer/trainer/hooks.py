"""Hooks: the methods that users write, each declared once as a documented no-op or default.

Mixins define their own defaults for some hooks; a user's method always wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.optim import Optimizer

from dream_trainer.data.sample_count import SampleCount, count_tokens
from dream_trainer.errors import HookError
from dream_trainer.nested import to_device
from dream_trainer.parallel.sharding import repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dream_trainer.parallel.joined_buffers import BufferPolicy


class Hooks:
    """The methods that a trainer's author overrides."""

    # -- setup

    def configure(self) -> None:
        """First phase of setup: models are built. SetupMixin calls `configure_models` here under the meta build."""

    def setup(self) -> None:
        """Second phase: parallelise, materialise, data, optimizers. Without SetupMixin, assign everything to `self`
        here."""

    def configure_models(self) -> None:
        """Assign modules to `self`. Runs under the meta build; freeze or add adapters here. Required by SetupMixin."""

    def model_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of `model`, which sharding follows.

        Default: the children of every outermost `ModuleList`/`Sequential` of two or more children of one class.
        """
        return repeated_blocks(model)

    def buffer_policies(self) -> Mapping[str, BufferPolicy]:
        """How ranks join buffers that forwards change, by regular expression, searched for in `<model>.<name>`.

        - `"mean"`: the mean over the data-parallel ranks, after each accumulation step; for running averages. Those of
          batch and instance norms have it by default.
        - `"rank 0"`: rank 0's values on all ranks, after each accumulation step, as DistributedDataParallel does it;
          for queues, and for integers.
        - `"as is"`: each rank keeps its own; for buffers that may differ. Exports have rank 0's.

        Other buffers are compared at each validation and save, and if they differ, a warning names them. The first
        pattern that matches counts.

        Default: none.

        Example:
            ```python
            def buffer_policies(self):
                return {r"quantizer\\.codebook": "mean", r"queue": "rank 0", r"calls": "as is"}
            ```
        """
        return {}

    def apply_fully_shard(self, config: dict[str, Any]) -> None:
        """Shards every model with `fully_shard(module, **config)`; the config has the mesh and, if configured, the
        precision's and the offload's policy. FSDPMixin's default: by `model_blocks`, then the root."""

    def apply_replicate(self, mesh: DeviceMesh) -> None:
        """Replicates every model over `mesh` (dp_replicate, dp_shard=1). SetupMixin's default: nothing, since `step`
        averages gradients; with `cpu_offload` or split layers by `model_blocks`, then the root."""

    def init_weights(self) -> None:
        """Initialises parameters, seen as full tensors. Default: the constructors' values, then each module's own
        `init_weights` or `reset_parameters` for parameters that are still uninitialised."""

    def load_pretrained(self) -> None:
        """Loads weights into the materialised, sharded models. Default: nothing."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        """Returns `(train, val)`; `val` may be None or a dict of named loaders. Required."""
        raise HookError(
            f"{type(self).__name__} does not override configure_dataloaders. Return (train, val) loaders from it."
        )

    def configure_optimizers(self) -> None:
        """Assign optimizers to `self`, over real and sharded parameters. `total_steps` is known. Required by
        SetupMixin."""

    def configure_schedulers(self) -> None:
        """Assign learning rate schedulers to `self`. Default: none."""

    def configure_metrics(self) -> None:
        """Assign torchmetrics objects to `self`; they are moved to the device. Default: none."""

    # -- steps and batches

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """One micro-batch: forward, `self.backward(loss)`, and at the window's end `self.step(...)`. Required.

        Args:
            batch: The loader's batch, on the device.
            batch_idx: Index of the batch in the epoch.

        Returns:
            Values to log under `train/`.
        """
        raise HookError(f"{type(self).__name__} does not override training_step.")

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any] | tuple[dict[str, Any], Any]:
        """One validation batch, without gradients and in eval mode. Optional.

        Returns:
            Values whose exact mean over all samples and ranks is logged under `val/`; or these and the weight of the
            batch in that mean, such as its number of tokens: `return {"loss": loss}, tokens`.
        """
        raise HookError(f"{type(self).__name__} does not override validation_step.")

    def move_batch(self, batch: Any, device: torch.device) -> Any:
        """The batch on `device`. Default: any nested structure, tensors moved.

        Called once for each batch, in order. On CUDA it is called for the next micro-batch of a window before this one
        is trained, on a separate stream; the results are ready when `training_step` gets them.
        """
        return to_device(batch, device)

    def batch_size(self, batch: Any) -> int:
        """Number of samples in a batch of your own loader, on the host. Default: the number of graphs (`num_graphs`) or
        packed sequences, otherwise the first dimension of the first tensor.

        Loaders that the trainer deals to ranks know how many samples they dealt, and it isn't called for their batches
        unless you override it: because `collate_fn` leaves samples out, say. Then it weighs their batches in means, and
        `samples_seen` still counts all dealt samples.

        Raises:
            DataError: The batch holds no tensor.
        """
        return SampleCount().guess(batch)

    def batch_tokens(self, batch: Any) -> int | None:
        """Number of tokens in the batch, which `tokens_seen`, `max_tokens` and tokens per second count; None if it has
        none. Called on the host before the batch is moved, so that nothing waits for the device. A tensor of one whole
        number is taken as such.

        Default: counts entries >= 0 in "documents" (packed rows), ones in "attention_mask", or "labels" other than
        -100, of a dict of CPU tensors; the sum over the batches of several loaders.
        """
        return count_tokens(batch)

    # -- the user's state

    def state_dict(self) -> dict[str, Any]:
        """The user's own state, equal on all ranks: numbers, strings, small CPU tensors, containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""

    def rank_state_dict(self) -> dict[str, Any]:
        """Your per-rank state; restored at the same data-parallel layout."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `rank_state_dict`."""

    # -- events, in the order they happen, which EVENTS has from here on

    def pre_launch(self) -> None:
        """Before the process group, device and mesh exist."""

    def post_launch(self) -> None:
        """`self.world` is complete."""

    def pre_configure(self) -> None:
        """Before models are built."""

    def post_configure(self) -> None:
        """Models are built, on the meta device under SetupMixin."""

    def pre_setup(self) -> None:
        """Before models are parallelised and materialised."""

    def post_setup(self) -> None:
        """Models, data, optimizers and schedulers are ready; nothing has been resumed yet."""

    def pre_fit(self) -> None:
        """Everything is ready and resumed; training starts."""

    def pre_epoch(self) -> None:
        """An epoch starts or resumes. In the middle of an epoch, saved state wins over what you set here."""

    def pre_train_batch(self, batch: Any, batch_idx: int) -> None:
        """Before `training_step`; the batch is on the device."""

    def pre_optimizer_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Gradients are reduced and normalised, not yet clipped."""

    def post_optimizer_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """The optimizer has stepped; its gradients are still there."""

    def post_train_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        """After `training_step`, with its detached result; counters are advanced."""

    def post_train_step(self) -> None:
        """An accumulation window is complete."""

    def pre_val_epoch(self) -> None:
        """Validation starts."""

    def pre_val_batch(self, batch: Any, batch_idx: int) -> None:
        """Before `validation_step`; the batch is on the device."""

    def post_val_batch(self, result: dict[str, Any], batch_idx: int) -> None:
        """After `validation_step`, with its result."""

    def post_val_epoch(self, metrics: dict[str, float]) -> None:
        """Validation is over; `metrics` are exact over all samples and ranks, and equal on every rank."""

    def post_epoch(self) -> None:
        """An epoch is complete; `current_epoch` already counts it."""

    def post_fit(self) -> None:
        """Training is over, whether by its limits or by a stop request.

        The last checkpoint has been saved. Changes made here are in no checkpoint, unless you call
        `self.save_checkpoint()` afterwards.
        """

    def on_exception(self, exc: BaseException) -> None:
        """`fit` fails on this rank. Other ranks may be anywhere: no collectives here."""

    def on_interrupt(self) -> None:
        """A signal (Ctrl-C, SIGTERM, SIGHUP) ends the run; all ranks stand at the same step."""

    def on_save(self, path: Path) -> None:
        """A checkpoint is committed at `path`."""

    def on_load(self, path: Path) -> None:
        """The checkpoint at `path` has been loaded."""

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        """Metrics were reduced over all ranks and passed to the loggers. `step` is theirs: training metrics come a step
        later."""

    def teardown(self) -> None:
        """The trainer closes; release resources."""


_NAMES = [name for name in vars(Hooks) if not name.startswith("_")]
# Events that both callbacks and trainer classes may define, in the order they happen.
EVENTS = tuple(_NAMES[_NAMES.index("pre_launch") :])
