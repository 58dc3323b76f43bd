"""Hooks: the methods that users write, each declared once as a documented no-op or default."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dream_trainer.config.checkpoint_parameters import Mode
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.data.sample_count import SampleCount, count_tokens
from dream_trainer.distributed.world import World
from dream_trainer.errors import HookError
from dream_trainer.events.collection import BaseCallback
from dream_trainer.loggers.buffer import Reduction
from dream_trainer.loggers.interface import MediaLog
from dream_trainer.nested import to_device
from dream_trainer.parallel.axis import Parallelism
from dream_trainer.parallel.joined_buffers import BufferPolicy
from dream_trainer.parallel.sharding import repeated_blocks


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
        raise HookError(f"{type(self).__name__} does not override configure_dataloaders.")

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
        return SampleCount()(batch)

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


# -- the methods that mixins override: each does nothing by default, and an override calls `super()`


class NoRounds:
    def as_one_model(self) -> AbstractContextManager[None]:
        """Wraps what speaks of the run's model, such as an export: inside, all ranks have its weights; a collective."""
        return nullcontext()

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to save: `tensors` (models' and optimizers', with names), replaced or extended; a collective."""
        return tensors

    def tensors_to_load(self, tensors: dict[str, Tensor], saved: Collection[str], *, is_own: bool) -> dict[str, Tensor]:
        """Where a checkpoint with the names `saved` is loaded to; it `is_own` unless this run begins from another's."""
        return tensors


_NO_VALUE: Any = object()  # an argument that was not given


class MixinHooks(Hooks):
    """The methods that mixins override."""

    _required_hooks: ClassVar[dict[str, str]] = {}  # the hooks that it cannot do without, and why
    _config_class: ClassVar[type | None] = None  # which carries its field
    _keeps_ranks_equal: ClassVar[bool] = False  # whether parameters and gradients are kept so over ranks (SetupMixin)
    _shards_parameters: ClassVar[bool] = False  # whether "auto" shards parameters (FSDPMixin)
    _parallelism: ClassVar[Parallelism | None] = None  # the way to divide work, or to change modules, that it brings
    # The callbacks that run unless `CallbackCollection(defaults=...)` says otherwise.
    _default_callbacks: ClassVar[Sequence[type[BaseCallback]]] = ()
    _saves_checkpoints: ClassVar[bool] = False  # whether the run can be saved, at any time (CheckpointMixin)

    # The trainer's own.
    _runtime: Any  # its Runtime
    changing_weights: Callable[[], AbstractContextManager[None]]
    warn_once: Callable[[str, str], None]
    backward: Callable[..., None]
    close: Callable[[], None]
    settle: Callable[[], None]

    def _setup_stages(self) -> list[tuple[str, str]]:
        """The setup order as (stage, reason) pairs, for `describe`."""
        return []

    def _join_world(self, parameters: DeviceParameters, workers: int | Literal["hosts"]) -> World:
        """The ranks that train."""
        return World(parameters, shard_by_default=self._shards_parameters, workers=workers)

    def _finish_setup(self) -> None:
        """Models, data and optimizers are ready; loggers and checkpoints open here."""

    def _resume(self) -> None:
        """Loads the newest checkpoint, if the config asks for it."""

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Wraps `step`, a training or validation step; the result is called with each batch and its index."""
        return step

    def _window_started(self) -> None:
        """Before each window's first micro-batch; not again when it runs again."""

    def _window_finished(self, *, is_last: bool) -> None:
        """Loggers flush when due: after each window and its events, after a resume, and with `is_last` where the run
        ends, which may be found out only after the window's validation."""

    def _validation_context(self) -> AbstractContextManager[None]:
        """Wraps a complete validation."""
        return nullcontext()

    def _validated(self, metrics: dict[str, float]) -> None:
        """Takes the exact metrics of a validation, before `post_val_epoch`."""

    def _best_modes(self) -> dict[str, Mode]:
        """The validation metrics whose best values are kept, each with whether "min" or "max" is best."""
        return {}

    def _close(self) -> None:
        """Releases the mixins' resources."""

    # -- what training code calls; of models in stages a mixin does it in another way

    def forward_backward(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        weight: Callable[[Any], Tensor | float] | Tensor | float | None = None,
    ) -> Tensor:
        """The loss of a batch, and its gradients: `loss = loss_fn(model(*inputs), targets)`, then `backward(loss)`.

        With a model in stages, a batch's micro-batches pass through them forward and backward, and the same
        `training_step` serves both. In a validation, or under `torch.no_grad()`, it only computes the loss.

        Args:
            model: Called with `inputs`.
            inputs: Positional arguments; in stages every tensor in them is cut along its first dimension.
            targets: Other inputs of the loss; cut the same way.
            loss_fn: Gives the mean loss, a scalar, of outputs and targets.
            weight: Over how many tokens or samples that is the mean, as `backward` takes it: a number, or a function of
                targets, which stages ask for each micro-batch and need.

        Returns:
            The loss of the whole batch.

        Raises:
            StepError: As `backward` does; or stages cannot do what is asked for.
        """
        loss = loss_fn(model(*inputs), targets)
        if self._runtime.state.training and torch.is_grad_enabled():
            self.backward(loss, weight=weight(targets) if callable(weight) else weight, model=model)
        return loss

    # -- what training code calls; without LoggerMixin these do nothing, and warn of it once

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Tensor | float | None = _NO_VALUE,
        *,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
    ) -> None:
        """Logs a value, or a dict of them; the loggers get it reduced over all micro-batches and ranks since the last
        flush.

        Nothing waits for the device. Ranks need not log the same names. A tensor that you will change in place
        afterwards must be logged as its `clone()`.

        Args:
            name: Shown by the loggers. In validation `val/` (and the loader's name) is prepended if missing, except in
                `post_val_epoch` and `post_epoch`, whose values form a separate line at the step where the validation or
                the epoch ends. You can also pass a dict of values; nested ones become `outer/inner`.
            value: A number or a tensor of one element. None, such as of a `step` that waits, is passed over.
            weight: Weight in the mean; zero counts for nothing under any reduction. Default: the micro-batch's backward
                weight if it has one, otherwise its batch size; 1 before the first batch.
            reduce: "mean", "sum", "min", "max" or "last" (on the highest rank that logged it).

        Raises:
            TypeError: The value is not a scalar, or both a dict and a value are given.
            ValueError: The name belongs to the stamp of a line, or had another reduction before.
        """
        if self._runtime.records.media is None:
            self._media_log("log")  # warns
        elif isinstance(name, Mapping):
            if value is not _NO_VALUE:
                raise TypeError("log() was given a dict and a value. Log a name and its value, or only a dict.")
            self.log_dict(name, weight=weight, reduce=reduce)
        elif value is _NO_VALUE:
            raise TypeError(f"log({name!r}) has no value. Log a number or a tensor of one element under that name.")
        elif value is not None:
            self._runtime.records.current.add(name, value, weight, reduce)

    def log_dict(
        self, values: Mapping[str, Any], *, weight: Tensor | float | None = None, reduce: Reduction = "mean"
    ) -> None:
        """Logs several values, nested dicts under `outer/inner`, as `log` does with a dict."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict({f"{name}/{key}": item for key, item in value.items()}, weight=weight, reduce=reduce)
            else:
                self.log(name, value, weight=weight, reduce=reduce)

    def log_image(self, name: str, image: Any, caption: str | None = None) -> None:
        """Logs an image, as `log_images` does."""
        self.log_images(name, [image], [caption])

    def log_images(self, name: str, images: Iterable[Any], captions: Sequence[str | None] | None = None) -> None:
        """Logs images side by side, as rank 0 has them; `log_image(name, image, caption=None)` logs a single one.

        Like all media, they are copied to the host now, which waits for the device: log them now and then. They are
        written with the step that the running window completes; in a validation under `val/` with its numbers. A
        DTensor is gathered, so all ranks of its mesh must log it; of other tensors only rank 0's count.

        Args:
            name: As the loggers will show it, here as in the other methods for media.
            images: Pillow images, or tensors or arrays `[channels, height, width]` of 1, 3 or 4 channels, or
                `[height, width]`. Any device. Floating point from 0 to 1 (values beyond are clamped, with one
                warning; NaN is 0), uint8 from 0 to 255, or bool (True is white). Other integers raise an error.
            captions: One text for each image, or None for it; where the logger can show them.

        Raises:
            RuntimeError: A DTensor is logged where only rank 0 runs, as in a main_process_only callback.
            ValueError: A shape or number of things does not fit: of images, captions, columns, bins, frames, samples.
            TypeError: An image is not a tensor or array, or of another dtype; the same of the other media.
        """
        if media := self._media_log("log_images"):
            media.images(name, images, captions)

    def log_image_grid(
        self, name: str, images: Iterable[Any], *, columns: int | None = None, caption: str | None = None
    ) -> None:
        """Logs images as a grid in a single image, as `log_images` does.

        Args:
            images: `[n, channels, height, width]`, or single ones as in `log_images`. Smaller ones lie in the upper
                left of their cells; grey ones become colour in a grid with colour images. All have an alpha channel,
                or none has.
            columns: Images per row; None makes the grid as near to a square as `n` allows.
            caption: Text for the grid, if the logger can show it.
        """
        if media := self._media_log("log_image_grid"):
            media.image_grid(name, images, columns, caption)

    def log_video(self, name: str, frames: Any, fps: float) -> None:
        """Logs a video, as `log_images` does.

        Args:
            frames: `[time, channels, height, width]`, with values as of images.
            fps: Frames per second.
        """
        if media := self._media_log("log_video"):
            media.video(name, frames, fps)

    def log_audio(self, name: str, samples: Any, sample_rate: int) -> None:
        """Logs sound, as `log_images` does.

        Args:
            samples: `[samples]` or `[channels, samples]` of 1 or 2 channels, floating point from -1 to 1.
            sample_rate: Samples per second.
        """
        if media := self._media_log("log_audio"):
            media.audio(name, samples, sample_rate)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Logs rows under named columns, as `log_images` does; cells are numbers, strings, or shown by `str`."""
        if media := self._media_log("log_table"):
            media.table(name, columns, rows)

    def log_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Logs how the finite elements of a tensor of any shape are distributed, as `log_images` does; counted on their
        device, in `bins` bins of one width from the lowest to the highest."""
        if media := self._media_log("log_histogram"):
            media.histogram(name, values, bins)

    def log_text(self, name: str, text: str) -> None:
        """Logs text, as Markdown where it can be shown; with the step, as `log_images` does."""
        if media := self._media_log("log_text"):
            media.text(name, text)

    def _media_log(self, method: str) -> MediaLog | None:
        """Where media go; None, with a warning for each method, if there is no log."""
        media: MediaLog | None = self._runtime.records.media
        if media is None:
            self.warn_once(method, f"{type(self).__name__}.{method} does nothing: the trainer has no LoggerMixin.")
        return media
