"""AbstractTrainer: the readable state, the registries, and the parts below as one interface. It runs nothing.
`BaseTrainer` brings the loop. Every part with state is a separate object with one name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, cast

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.config.trainer_config import BaseTrainerConfig, hold
from dream_trainer.config.training_parameters import micro_batch_size
from dream_trainer.data.window import Window
from dream_trainer.distributed.world import World
from dream_trainer.errors import HookError
from dream_trainer.events.collection import BaseCallback, CallbackCollection, Timed
from dream_trainer.modules.class_change import unwrap
from dream_trainer.modules.precision import autocast
from dream_trainer.parallel.sharding import frozen
from dream_trainer.screen import logger
from dream_trainer.trainer.counters import Counters
from dream_trainer.trainer.event_table import event_table, notify
from dream_trainer.trainer.hooks import MixinHooks
from dream_trainer.trainer.registry import Scheduler
from dream_trainer.trainer.run_record import RunRecorder
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.session import Limits, close, set_limits
from dream_trainer.trainer.user_class import check_assignment, check_trainer

C = TypeVar("C", bound=BaseCallback)

built_instead: ContextVar[Callable[[type], type]] = ContextVar("instead", default=lambda cls: cls)
"""The class to build instead of a trainer's: a subclass of it."""


class AbstractTrainer(MixinHooks):
    """The interface of a trainer. Build on `BaseTrainer` or `DreamTrainer`.

    Raises:
        ConfigError: The config is invalid, or lacks the field of a mixin.
        HookError: A required hook is not overridden.
    """

    _runtime: Runtime
    if TYPE_CHECKING:
        # Inferred and not declared, so that a user's class may say `config: MyConfig`: pyright takes no narrower
        # declaration of what is declared and can be assigned.
        config = cast(BaseTrainerConfig, ...)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(built_instead.get()(cls))

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_trainer(type(self), config)
        self.config = config
        runtime = vars(self)["_runtime"] = Runtime(self, config)  # cannot be assigned
        hold(config, runtime)
        config.callbacks.use_defaults(make() for make in self._default_callbacks)
        runtime.recorder = RunRecorder(runtime)
        runtime.events = event_table(runtime, is_main=True)

    if not TYPE_CHECKING:  # for a checker any name would be an attribute, and a trainer a function

        def __setattr__(self, name: str, value: Any) -> None:
            check_assignment(self, name, value)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            cls = type(self).__name__
            if not name.startswith("__") and "_runtime" not in vars(self):
                raise HookError(f"{cls}.__init__ does not call super().__init__(config). Call it first.")
            raise AttributeError(f"{cls!r} object has no attribute {name!r}", name=name, obj=self)

    # -- state everybody may read

    @property
    def progress(self) -> Counters:
        """All counters."""
        return self._runtime.progress

    @property
    def training(self) -> bool:
        """Whether the trainer trains (True) or validates (False)."""
        return self._runtime.state.training

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in a whole accumulation window; known once data is set up."""
        return self._runtime.state.accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        """Samples of one rank's micro-batch, for the training loader: `train_batch_size`, or the largest number below
        it that divides this rank's share of `global_batch_size`. Known after launch."""
        return micro_batch_size(self.config.training_parameters, self.world.dp_size)

    @property
    def total_steps(self) -> int | None:
        """Planned optimizer steps of the whole run; None if endless or unknown. Known once data is set up."""
        return self._runtime.state.total_steps

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of a whole epoch; None if unknown until the data end. Known once data is set up."""
        return self._runtime.state.steps_per_epoch

    @property
    def train_dataloader(self) -> Any:
        """The configured training loader. An assigned loader is used from the next pass over the data."""
        return self._runtime.state.train_dataloader

    @train_dataloader.setter
    def train_dataloader(self, loader: Any) -> None:
        self._runtime.state.train_dataloader = loader

    @property
    def val_dataloaders(self) -> dict[str, Any]:
        """Maps names to validation loaders; the name of a single one is ""."""
        return self._runtime.state.val_dataloaders

    @property
    def is_padding_batch(self) -> bool:
        """Whether this validation batch only joins collectives and does not count."""
        return self._runtime.state.is_padding_batch

    @property
    def is_sanity_validation(self) -> bool:
        """Whether the running validation is the one before training, which logs nothing."""
        return self._runtime.state.is_sanity_validation

    @property
    def is_evaluating(self) -> bool:
        """Whether `evaluate()` runs, which is not a validation of the training (EvalMixin)."""
        return self._runtime.state.is_evaluating

    @property
    def val_name(self) -> str:
        """Name of the running validation loader; "" for a single one."""
        return self._runtime.state.val_name

    @property
    def world(self) -> World:
        """Rank, device, mesh and collectives.

        Raises:
            HookError: Read before launch.
        """
        return self._runtime.launched or self._runtime.world

    @property
    def global_step(self) -> int:
        """Accumulation windows completed with at least one `step()`."""
        return self._runtime.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed, which is the 0-based number of the running one."""
        return self._runtime.progress.current_epoch

    @property
    def batch_idx(self) -> int:
        """Micro-batches of this rank completed in the epoch, which is the 0-based number of the running one."""
        return self._runtime.progress.batch_idx

    @property
    def local_batches(self) -> int:
        """Training batches processed since this process started."""
        return self._runtime.window.local_batches

    @property
    def is_accumulating_gradients(self) -> bool:
        """True unless this batch ends its accumulation window; an epoch's last batch ends one too."""
        return self._runtime.session.is_ready and not self._runtime.accumulation.is_last

    @property
    def accumulation_window(self) -> AccumulationWindow:
        """A view of the micro-batches between two optimizer steps."""
        return AccumulationWindow(self._runtime)

    @property
    def steps_per_pass(self) -> int | None:
        """Optimizer steps of a whole pass over the data; None if unknown until its end. An epoch may be shorter."""
        return None if self._runtime.data.stream is None else self._runtime.data.stream.steps_per_epoch

    @property
    def seconds_waiting_for_data(self) -> float:
        """Seconds that training has spent loading data, or waiting for workers, in this process."""
        return self._runtime.data.feed.seconds_waiting if self._runtime.session.is_ready else 0.0

    @property
    def seconds_saving(self) -> float:
        """Seconds that training has waited for checkpoints in this process."""
        return self._runtime.saver.seconds

    @property
    def seconds_validating(self) -> float:
        """Seconds that training has been interrupted by validations and `predict` in this process."""
        return self._runtime.window.validation_seconds

    @property
    def samples_seen(self) -> int:
        """Samples consumed by all ranks since the run began; independent of world size and accumulation."""
        return self._runtime.progress.samples_seen

    @property
    def tokens_seen(self) -> int:
        """Tokens of the batches consumed by all ranks since the run began, as `batch_tokens` counts them."""
        return self._runtime.progress.tokens_seen

    @property
    def tokens_before_next_step(self) -> int:
        """`tokens_seen` plus the current window's tokens: the position of a token schedule when `step` steps it."""
        return self._runtime.progress.tokens_seen + self._runtime.window.tokens

    @property
    def has_trained(self) -> bool:
        """Whether a step of this process had a gradient."""
        return self._runtime.session.is_ready and self._runtime.optimizer_step.had_gradients

    def times_stepped(self, stepped: Optimizer | Scheduler) -> int:
        """How often `step` has stepped this optimizer or scheduler in this process."""
        return self._runtime.optimizer_step.times_stepped[id(stepped)] if self._runtime.session.is_ready else 0

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far. Reading it waits for the device."""
        if self._runtime.session.is_ready:
            self._runtime.optimizer_step.guard.settle()
        return self._runtime.progress.skipped_steps

    @property
    def callbacks(self) -> CallbackCollection:
        """The callbacks, as configured."""
        return self.config.callbacks

    @property
    def run_dir(self) -> Path:
        """Directory of this run's files: `<runs_dir>/<project>/<group>/<experiment>`."""
        return self._runtime.run_dir

    # -- registries

    def named_models(self) -> dict[str, nn.Module]:
        """Models by attribute name, in order of assignment."""
        return self._runtime.registry.models()

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Optimizers by attribute name, in order of assignment."""
        return self._runtime.registry.optimizers()

    def named_schedulers(self) -> dict[str, Scheduler]:
        """Learning rate schedulers by attribute name, in order of assignment."""
        return self._runtime.registry.schedulers()

    def named_metrics(self) -> dict[str, Any]:
        """torchmetrics objects by attribute name, in order of assignment."""
        return self._runtime.registry.metrics()

    def get_module(self, fqn: str) -> nn.Module:
        """The module at a name such as `"model.layers.0"`, as one would write it after `self.`.

        Raises:
            AttributeError: There is none.
        """
        for name, model in self.named_models().items():
            if f"{fqn}.".startswith(f"{name}."):
                return model.get_submodule(fqn[len(name) + 1 :])
        raise AttributeError(f"no module {fqn!r}; the models are {list(self.named_models())}.")

    def get_optimizers_by_model(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers that update parameters of `model`."""
        return self._runtime.registry.optimizers_of(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The plain module out of `torch.compile`, DistributedDataParallel and AveragedModel wrappers.

        `fully_shard` does not wrap: it changes the class in place, and names stay as they were.
        """
        return unwrap(model)

    def get_callback(self, cls: type[C]) -> C:
        """The first callback of class `cls`.

        Raises:
            KeyError: There is none.
        """
        return self.callbacks.get(cls)

    # -- called by the user

    def request_stop(self, reason: str = "requested") -> None:
        """Asks that training end, on all ranks at the same step. Any rank may call it, at any time.

        All ranks stop after the running window: the others hear of it in the exchange before the next one, which is
        not trained. Asked for in a validation or at an epoch's end, they stop there.
        """
        self._runtime.coordinator.requests.stop_reason = reason

    def request_save(self) -> None:
        """Asks for a checkpoint (CheckpointMixin) as soon as all ranks know. Any rank may call it, at any time."""
        self._runtime.coordinator.requests.save_requested = True

    def set_limits(self, **limits: Unpack[Limits]) -> None:
        """Sets `n_epochs`, `max_steps`, `max_time`, `max_samples` or `max_tokens` of the whole run between two calls of
        `fit` or before the first, on every rank. Others stay, and None removes one; trainer/session.py has the rest.
        """
        set_limits(self._runtime, limits)

    def settle(self) -> None:
        """Checks the gradient norms not yet checked; raises, or counts skipped steps, as the policy says.

        Waits for the device. The trainer calls it before a validation, before a save, and at the end.

        Raises:
            NonFiniteError: The policy is "raise" and a norm was not finite.
        """
        if self._runtime.session.is_ready:
            self._runtime.schedule.update()
            self._runtime.optimizer_step.guard.settle()

    def close(self) -> None:
        """Closes loaders and loggers and leaves the process group; called by every rank, as the end of a `with` does.

        Safe to call twice. Everything is closed even if a part of it fails. The first exception is raised then, and the
        process group is left only at the end of the process, since the other ranks may not be closing. After an
        exception in `fit` or in the `with`, exceptions of closing are only logged.
        """
        close(self._runtime)

    def callback_is_due(self, callback: Timed) -> bool:
        """In `post_train_step`: whether `callback` was due before the window by rank 0's clock; equal on all ranks."""
        return self._runtime.coordinator.callback_is_due(callback)

    def warn_once(self, key: str, message: str) -> None:
        """Logs a warning on rank 0, the first time that it is asked for `key`; any rank may call it."""
        if key not in self._runtime.said_once:
            self._runtime.said_once.add(key)
            if self._runtime.launched is None or self._runtime.launched.is_main:
                logger.warning(message)

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Inside, you may change parameters in place; use it between windows, on every rank.

        No checkpoint is still copying the parameters then. Sharded models show the shards that the next forward will
        gather, not the last gathered values; also in events, where small models are whole otherwise.
        """
        self._runtime.saver.wait_for_copies()
        self._runtime.parallel.reshard()
        with self._runtime.parallel.as_shards():
            yield

    def register_state(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        *,
        scope: Literal["shared", "rank", "tensors"] = "shared",
    ) -> None:
        """Keeps the result of `save()` in every checkpoint under `name`, and calls `load` with it on a resume.

        For mixins, callbacks and objects that a trainer holds; a trainer's own class may override `state_dict`. Every
        rank calls it before the checkpoint is loaded: in `__init__`, a `configure_` method or the `post_setup` of a
        callback. `load` is not called if a checkpoint has nothing under this name. Only CheckpointMixin saves anything.

        Args:
            name: Unique within this trainer.
            save: Returns the state. "shared" and "rank": numbers, strings, small CPU tensors, containers of them.
                "tensors": a dict from names to tensors on any device, either sharded or equal on all ranks. A resume
                fills them in place.
            load: Restores it.
            scope: "shared": equal on all ranks; "rank": each rank's own, restored only on the same rank layout;
                "tensors": large tensors, on any number of ranks.

        Raises:
            HookError: The name is taken, or the checkpoint was loaded already.
        """
        self._runtime.state_registry.register(name, save, load, scope=scope)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of steps, for code that calls models outside them: sampling after `fit`, a callback.

        `torch.autocast` under `precision="bf16"` and `"fp16"`, otherwise a no-op.
        """
        return autocast(self.config.device_parameters, self.world.device)

    def frozen(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Keeps one model's turn out of another's gradients (GANs): inside, `models` take no gradients."""
        return frozen(*models)

    def gathered(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Keeps the full weights of sharded `models` on each rank, for forwards that ranks do not run together.

        For example to generate text, which ends sooner on some ranks than on others; it is also faster, since each
        forward would gather again. All ranks enter it together, gradients are off inside, and it takes the memory of
        the full models.
        """
        self.world.refuse_if_forbidden()
        return self._runtime.parallel.gathered(*models)

    def _notify(self, event: str, *args: Any) -> None:
        notify(self._runtime, event, *args)

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        step = super()._wrap_step(step)
        context: Any = autocast(self.config.device_parameters, self.world.device)
        return step if isinstance(context, nullcontext) else context(step)


@dataclass(slots=True, eq=False)
class AccumulationWindow:
    """The window that runs, or ran last: `trainer.accumulation_window`. Nothing here waits for the device. Before
    training is set up there is none: nothing is open, and everything else is None or empty."""

    _runtime: Runtime

    @property
    def is_open(self) -> bool:
        """Whether a window is running: no moment to save, load or move averages. In `post_train_step` it is over."""
        return self._runtime.session.is_ready and self._runtime.accumulation.is_open

    @property
    def batch(self) -> Any:
        """The micro-batch that runs, or ran last, on the device."""
        return self._runtime.window.batch

    @property
    def weight(self) -> Tensor | float:
        """Its weight in logged means: that of `backward`, otherwise its samples here. `training_step` may set it."""
        weight = self._runtime.accumulation.batch_weight
        return self._runtime.window.batch_samples if weight is None else weight

    @weight.setter
    def weight(self, weight: Tensor | float) -> None:
        self._runtime.accumulation.batch_weight = weight

    @property
    def data(self) -> Window | None:
        """Samples over all ranks, and the position after it; in `post_train_step` already the next's, or None."""
        return self._runtime.data.feed.window if self._runtime.session.is_ready else None

    def indices(self, epoch: int, first: int, end: int) -> list[list[int]] | None:
        """This rank's batches of positions `first` to `end` of a pass over the data, each as its samples' indices in
        the dataset; None if only the loader knows."""
        stream = self._runtime.data.stream
        reader = None if stream is None else stream.reader
        return None if reader is None else [*reader.sampler.indices(epoch, first, end)]

    @property
    def step_was_skipped(self) -> Tensor | None:
        """In `post_optimizer_step`: a 0-dim device tensor, nonzero if the step did not change the weights; None if it
        is known to have. Listeners can act on the tensor without a host read."""
        return self._runtime.optimizer_step.guard.maybe_skipped if self._runtime.session.is_ready else None

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss multiplier under fp16: a 0-dim device tensor that changes in place; otherwise None."""
        scale = self._runtime.accumulation.loss_scale if self._runtime.session.is_ready else None
        return None if scale is None else scale.scale

    @property
    def losses(self) -> Sequence[Tensor]:
        """Losses given to `backward` in the micro-batch, detached; empty unless `watch` was called."""
        return (self._runtime.accumulation.losses or ()) if self._runtime.session.is_ready else ()

    def watch(self, left_out: Callable[[Optimizer], None]) -> None:
        """Keeps `losses` and reports skipped steps, from this call (`post_setup` or later) to the end of the run.

        Args:
            left_out: Called with each optimizer whose step the host skips since its gradients are not finite, while
                they still exist; `post_optimizer_step` is not called then.
        """
        self._runtime.accumulation.losses = self._runtime.accumulation.losses or []
        self.watch_skipped(left_out)

    def watch_skipped(self, left_out: Callable[[Optimizer], None]) -> None:
        """As `watch`, without keeping `losses`."""
        self._runtime.optimizer_step.guard.left_out.append(left_out)
