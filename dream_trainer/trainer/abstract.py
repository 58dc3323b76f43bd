"""AbstractTrainer: the state everybody may read, the registries, and the parts below as one interface.

It runs nothing. `BaseTrainer` brings the loop. What has state is an object of its own, under one name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, Unpack, cast

import torch.nn as nn
from torch.optim import Optimizer

from dream_trainer.config.trainer_config import BaseTrainerConfig, hold
from dream_trainer.errors import HookError, StepError
from dream_trainer.events.callback import Callback, TimedCallback
from dream_trainer.events.collection import CallbackCollection
from dream_trainer.loggers.records import Records
from dream_trainer.modules.metrics import updates
from dream_trainer.modules.parallel_models import ParallelModels
from dream_trainer.modules.precision import autocast, under_autocast
from dream_trainer.trainer.cooperation import Cooperation
from dream_trainer.trainer.coordinator import Coordinator
from dream_trainer.trainer.counters import Counters
from dream_trainer.trainer.data_setup import ConnectedData
from dream_trainer.trainer.event_table import anyone_listens, event_table
from dream_trainer.trainer.hooks import Hooks
from dream_trainer.trainer.limits import Limits, set_limits
from dream_trainer.trainer.registry import Registry, Scheduler
from dream_trainer.trainer.resumed_rates import ResumedRates
from dream_trainer.trainer.run_recorder import RunRecorder
from dream_trainer.trainer.schedule import Schedule
from dream_trainer.trainer.session import Session
from dream_trainer.trainer.step.accumulation_window import AccumulationWindow
from dream_trainer.trainer.unloaded_base import UnloadedBases
from dream_trainer.trainer.user_class.class_checks import check_trainer, note_assignment
from dream_trainer.trainer.window_state import WindowState

if TYPE_CHECKING:
    from dream_trainer.distributed.world import World
    from dream_trainer.trainer.prefetcher import Prefetcher
    from dream_trainer.trainer.step.accumulation import Accumulation
    from dream_trainer.trainer.step.optimizer_step import OptimizerStep

C = TypeVar("C", bound=Callback)
logger = logging.getLogger("dream_trainer")


class AbstractTrainer(Hooks, Cooperation):
    """What a trainer is: an interface. Build on `BaseTrainer` or `DreamTrainer`.

    Args:
        config: The run's configuration.
        *args: Handed on to `super()`.
        **kwargs: Handed on to `super()`.

    Raises:
        ConfigError: The config is invalid, or lacks the field of a mixin.
        HookError: A required hook is not overridden.

    Attributes:
        config: The run's configuration.
        world: Rank, device, mesh and collectives; exists from launch on.
        progress: All counters.
        accumulation_steps: Micro-batches in a whole accumulation window; known once data is set up.
        total_steps: Planned optimizer steps of the whole run; None if endless or unknown. Known once data is set up.
        steps_per_epoch: Optimizer steps of a whole epoch; None if only the end of the data tells. Known as above.
        train_dataloader: The training loader, as configured.
        val_dataloaders: Validation loaders by name; a single one is named "".
        training: Whether the trainer trains (True) or validates (False).
        is_padding_batch: Whether this validation batch only keeps collectives company and counts for nothing.
        is_sanity_validation: Whether the running validation is the one before training, which logs nothing.
        is_evaluating: Whether `evaluate()` runs, which is not a validation of the training (EvalMixin).
        val_name: Name of the validation loader at work; "" for a single one.
        best: Best value seen of each validation metric asked for (EvalMixin).
    """

    # Mixins and BaseTrainer name the hooks they cannot do without, and the config class that carries their field.
    _required_hooks: ClassVar[dict[str, str]] = {}
    _config_class: ClassVar[type | None] = None
    # Whether parameters and gradients are kept equal over ranks (SetupMixin) and whether "auto" shards them
    # (FSDPMixin).
    _keeps_ranks_equal: ClassVar[bool] = False
    _shards_parameters: ClassVar[bool] = False
    # Whether batches can be cut along sequences (ContextParallelMixin).
    _cuts_sequences: ClassVar[bool] = False
    # Whether a dict of named validation loaders is understood (EvalMixin).
    _names_validation_loaders: ClassVar[bool] = False
    # Whether the run can be saved, at any time (CheckpointMixin).
    _saves_checkpoints: ClassVar[bool] = False

    if TYPE_CHECKING:
        # Inferred and not declared, so that a user's class may say `config: MyConfig`: pyright takes no narrower
        # declaration of what is declared and can be assigned.
        config = cast(BaseTrainerConfig, ...)
    # Made when the trainer starts.
    _accumulation: Accumulation
    _optimizer_step: OptimizerStep
    _prefetcher: Prefetcher
    _unloaded_bases = UnloadedBases()  # SetupMixin looks for some

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_trainer(type(self), config)
        self.config = config
        hold(config, self)
        self._run_dir = config.run_dir  # as it is now: a closed trainer's config may be changed for the next one
        self.progress = Counters()
        self.total_steps: int | None = None
        self.steps_per_epoch: int | None = None
        self.accumulation_steps = config.training_parameters.gradient_accumulation_steps
        self.train_dataloader: Any = None
        self.val_dataloaders: dict[str, Any] = {}
        self.training = True
        self.is_padding_batch = False
        self.is_sanity_validation = False
        self.is_evaluating = False
        self.val_name = ""
        self._world: World | None = None
        self._data = ConnectedData()
        self._parallel = ParallelModels()
        self._window = WindowState()
        self._records = Records()
        self._schedule = Schedule(config.training_parameters, self.progress)
        self._rates = ResumedRates(self.named_optimizers, self.named_schedulers)
        self._coordinator = Coordinator(self._schedule, self.progress)
        self._session = Session(self)
        self._recorder = RunRecorder(self)
        self._events = event_table(self, is_main=True)
        self._said_once: set[str] = set()

    if not TYPE_CHECKING:  # for a checker any name would be an attribute, and a trainer a function

        def __setattr__(self, name: str, value: Any) -> None:
            note_assignment(self, name, value)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            cls = type(self).__name__
            if not name.startswith("__") and "progress" not in vars(self):
                raise HookError(f"{cls}.__init__ does not call super().__init__(config). Call it first.")
            raise AttributeError(f"{cls!r} object has no attribute {name!r}", name=name, obj=self)

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is a trainer and no module: call its model, self.model(x).")

    # -- state everybody may read

    @property
    def world(self) -> World:
        """Rank, device, mesh and collectives.

        Raises:
            HookError: Read before launch.
        """
        if self._world is None:
            raise HookError("self.world exists from launch on (fit, evaluate or predict). Do not read it in __init__.")
        return self._world

    @property
    def global_step(self) -> int:
        """Accumulation windows completed with at least one `step()`."""
        return self.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed, which is the 0-based number of the running one."""
        return self.progress.current_epoch

    @property
    def batch_idx(self) -> int:
        """Micro-batches of this rank completed in the epoch, which is the 0-based number of the running one."""
        return self.progress.batch_idx

    @property
    def local_batches(self) -> int:
        """Training batches processed since this process started."""
        return self._window.local_batches

    @property
    def is_accumulating_gradients(self) -> bool:
        """True unless this batch ends its accumulation window; an epoch's last batch ends one too."""
        return self._window.is_accumulating

    @property
    def accumulation_window(self) -> AccumulationWindow:
        """What there is to see of the micro-batches between two optimizer steps."""
        return AccumulationWindow(self)

    @property
    def steps_per_pass(self) -> int | None:
        """Optimizer steps of a whole pass over the data; None if only its end tells. An epoch may be shorter."""
        return None if self._data.stream is None else self._data.stream.steps_per_epoch

    @property
    def seconds_waiting_for_data(self) -> float:
        """Seconds that training has spent loading data, or waiting for what loads it, in this process."""
        return self._data.feed.seconds_waiting if self._session.is_ready else 0.0

    @property
    def seconds_waiting_by_loader(self) -> Mapping[str, float]:
        """The same for each of several training loaders, by name; of one loader nothing."""
        return {} if self._data.stream is None else self._data.stream.seconds_by_loader

    @property
    def seconds_loading(self) -> Mapping[tuple[int, str], float]:
        """Seconds that each worker of this rank has loaded each source of a mixture, by (worker, source); worker -1 is
        this process."""
        return {} if self._data.stream is None else self._data.stream.seconds_loading

    @property
    def seconds_saving(self) -> float:
        """Seconds that checkpoints have held training up in this process."""
        return self._saver.seconds

    @property
    def samples_seen(self) -> int:
        """Samples consumed by all ranks since the run began; independent of world size and accumulation."""
        return self.progress.samples_seen

    @property
    def tokens_seen(self) -> int:
        """Tokens of the batches consumed by all ranks since the run began, as `batch_tokens` counts them."""
        return self.progress.tokens_seen

    @property
    def tokens_before_next_step(self) -> int:
        """`tokens_seen`, and in a window those of its own: where a schedule by tokens is when `step` steps it."""
        return self.progress.tokens_seen + self._window.tokens

    @property
    def has_trained(self) -> bool:
        """Whether a step of this process had a gradient."""
        return self._session.is_ready and self._optimizer_step.had_gradients

    def times_stepped(self, stepped: Optimizer | Scheduler) -> int:
        """How often `step` has stepped this optimizer or scheduler in this process."""
        return self._optimizer_step.times_stepped[id(stepped)] if self._session.is_ready else 0

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far. Reading it waits for the device."""
        if self._session.is_ready:
            self._optimizer_step.settle()
        return self.progress.skipped_steps

    @property
    def callbacks(self) -> CallbackCollection:
        """The callbacks, as configured."""
        return self.config.callbacks

    @property
    def project(self) -> str:
        """Project name, as configured."""
        return self.config.project

    @property
    def group(self) -> str:
        """Group name, as configured."""
        return self.config.group

    @property
    def experiment(self) -> str:
        """Experiment name, as configured."""
        return self.config.experiment

    @property
    def run_dir(self) -> Path:
        """Where this run keeps its files: `<runs_dir>/<project>/<group>/<experiment>`."""
        return self._run_dir

    # -- registries

    @property
    def _registry(self) -> Registry:
        return Registry(vars(self))

    def named_models(self) -> dict[str, nn.Module]:
        """Models by attribute name, in order of assignment."""
        return self._registry.models()

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Optimizers by attribute name, in order of assignment."""
        return self._registry.optimizers()

    def named_schedulers(self) -> dict[str, Scheduler]:
        """Learning rate schedulers by attribute name, in order of assignment."""
        return self._registry.schedulers()

    def named_metrics(self) -> dict[str, Any]:
        """torchmetrics objects by attribute name, in order of assignment."""
        return self._registry.metrics()

    def _metrics_of_training(self) -> dict[str, Any]:
        updated = {name: metric for name, metric in self.named_metrics().items() if updates(metric)}
        return super()._metrics_of_training() | updated

    def get_module(self, fqn: str) -> nn.Module:
        """The module at a name such as `"model.layers.0"`, as one would write it after `self.`.

        Raises:
            AttributeError: There is none.
        """
        for name, model in self.named_models().items():
            if fqn == name:
                return model
            if fqn.startswith(f"{name}."):
                return model.get_submodule(fqn.removeprefix(f"{name}."))
        raise AttributeError(f"no module {fqn!r}; the models are {list(self.named_models())}.")

    def get_model_by_optimizer(self, optimizer: Optimizer) -> nn.Module:
        """The model whose parameters `optimizer` updates.

        Raises:
            KeyError: No model, or more than one, has them.
        """
        return self._registry.model_of(optimizer)

    def get_optimizers_by_model(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers that update parameters of `model`."""
        return self._registry.optimizers_of(model)

    def get_scheduler_from_optimizer(self, optimizer: Optimizer) -> Scheduler | None:
        """The scheduler that drives `optimizer`, or None."""
        return self._registry.scheduler_of(optimizer)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The plain module out of `torch.compile`, DistributedDataParallel and AveragedModel wrappers.

        `fully_shard` does not wrap: it changes the class in place, and names stay as they were.
        """
        from dream_trainer.modules.class_change import unwrap

        return unwrap(model)

    def get_callback(self, cls: type[C]) -> C:
        """The first callback of class `cls`.

        Raises:
            KeyError: There is none.
        """
        return self.callbacks.get(cls)

    # -- what the user calls

    def request_stop(self, reason: str = "requested") -> None:
        """Asks that training end, on all ranks at the same step. Any rank may call it, at any time.

        All ranks stop after the running window: the others hear of it in the exchange before the next one, which is
        not trained. Asked for in a validation or at an epoch's end, they stop there.
        """
        self._coordinator.requests.stop_reason = reason

    def request_save(self) -> None:
        """Asks for a checkpoint (CheckpointMixin) as soon as all ranks know. Any rank may call it, at any time."""
        self._coordinator.requests.save_requested = True

    def set_limits(self, **limits: Unpack[Limits]) -> None:
        """Sets `n_epochs`, `max_steps`, `max_time`, `max_samples` or `max_tokens` of the whole run between two calls of
        `fit` or before the first, on every rank. Others stay, and None removes one; trainer/limits.py has the rest.
        """
        set_limits(self, limits)

    def settle(self) -> None:
        """Looks at the gradient norms not yet looked at; raises, or counts skipped steps, as the policy says.

        Waits for the device. The trainer calls it before a validation, before a save, and at the end.

        Raises:
            NonFiniteError: The policy is "raise" and a norm was not finite.
        """
        if self._session.is_ready:
            self._schedule.update()
            self._optimizer_step.settle()

    def close(self) -> None:
        """Closes loaders and loggers and leaves the process group; called by every rank, as the end of a `with` does.

        Safe to call twice. Everything is closed even if a part of it fails. The first exception is raised then, and the
        process group is left only at the end of the process, since the other ranks may not be closing. After an
        exception in `fit` or in the `with`, exceptions of closing are only logged.
        """
        self._session.close()

    def callback_is_due(self, callback: TimedCallback) -> bool:
        """In `post_train_step`: whether it was time for `callback` before the window just completed, by rank 0's clock;
        the same on all ranks."""
        return self._coordinator.callback_is_due(callback)

    def warn_once(self, key: str, message: str) -> None:
        """Logs a warning on rank 0, the first time that it is asked for `key`; any rank may call it."""
        if key not in self._said_once:
            self._said_once.add(key)
            if self._world is None or self._world.is_main:
                logger.warning(message)

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Inside, parameters may be changed in place by hand; between windows, on every rank.

        No checkpoint is still copying them then, and those of sharded models are the shards that the next forward
        gathers, not what the last one left gathered; also in events, where small models are whole otherwise.
        """
        self._saver.before_update()
        self._parallel.reshard()
        with self._parallel.as_shards():
            yield

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that steps run in, for what calls models outside of them: sampling after `fit`, a callback.

        `torch.autocast` under `precision="bf16"` and `"fp16"`, else nothing.
        """
        return autocast(self.config.device_parameters, self.world.device)

    def frozen(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Keeps one model's turn out of another's gradients (GANs): inside, `models` take no gradients."""
        from dream_trainer.modules.sharding import frozen

        return frozen(*models)

    def gathered(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Keeps the full weights of sharded `models` on each rank, for forwards that the ranks do not run in step.

        To generate text, say, which ends sooner on one rank than on another; and faster, since each forward would
        gather again. All ranks enter it together, gradients are off inside, and it takes the memory of the full models.
        """
        from dream_trainer.modules.sharding import gathered

        self.world.refuse_if_forbidden()
        return _both(self._parallel.whole(), gathered(*models))

    # -- ours

    def _refuse_inside_window(self, what: str) -> None:
        """Raises StepError if an accumulation window is running, whose gradients are not in any state."""
        if self.accumulation_window.is_open:
            raise StepError(f"{what}() was called inside an accumulation window. Call it in post_train_step or later.")

    def _notify(self, event: str, *args: Any) -> None:
        """Calls everyone who listens to `event`."""
        if anyone_listens(self, event):  # on some rank; all ranks gather again, or none
            self._parallel.forget_whole()
        for listener in self._events[event]:
            listener(*args)

    def _wrap_step(self, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        return under_autocast(super()._wrap_step(step), self.config.device_parameters, self.world.device)

    def _parameterised_models(self) -> Iterator[nn.Module]:
        return (m for m in self.named_models().values() if next(m.parameters(), None) is not None)

    def _trainable_models(self) -> Iterator[nn.Module]:
        return (m for m in self.named_models().values() if any(p.requires_grad for p in m.parameters()))


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield
