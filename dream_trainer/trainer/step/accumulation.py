"""Accumulation: one window from start to end, with the contribution of each `backward`. Gradients are summed as they
come and normalised once, in `step`, by what the window really contained, so unequal counts are exact
(docs/measurements/step.md#exact-gradients)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointError as RecomputationMismatch

from dream_trainer.compat.pytorch import local_tensor, write_count
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.distributed.world import World
from dream_trainer.errors import StepError
from dream_trainer.gradient_state import GradientState
from dream_trainer.modules.precision import without_autocast
from dream_trainer.modules.recompute import mismatch
from dream_trainer.parallel.parallel_models import ParallelModels
from dream_trainer.trainer.registry import Registry, parameters_of
from dream_trainer.trainer.step.gradients import Averaging, OverlappedAveraging
from dream_trainer.trainer.step.nonfinite import LossScale


class GradientOrigins:
    """Which gradients each optimizer's parameters have in the running window."""

    def __init__(self, registry: Registry, gradients: GradientState) -> None:
        self._registry, self._local_gradients = registry, gradients
        self.optimizers = list(dict.fromkeys(registry.optimizers().values()))
        self._origins: dict[Optimizer, int] = {}  # the backward that gave an optimizer its first gradients
        self._stepped: set[Optimizer] = set()
        # Optimizers with gradients of a loss that also trained another optimizer, which has stepped since.
        self._left: dict[Optimizer, Optimizer] = {}
        self._marks: dict[Optimizer, list[tuple[int, int]]] = {}

    def number_of(self, optimizers: Sequence[Optimizer]) -> int:
        """A number that encodes which of the trainer's optimizers these are, and their order."""
        numbers = {id(optimizer): number for number, optimizer in enumerate(self.optimizers, start=1)}
        return sum(numbers.get(id(optimizer), 0) * 64**place for place, optimizer in enumerate(optimizers))

    def start_window(self) -> None:
        self._stepped.clear()
        self._origins.clear()
        self._left.clear()

    def before_backward(self) -> None:
        if self._left:
            self._left = {optimizer: other for optimizer, other in self._left.items() if self._has_gradients(optimizer)}
            self._marks = {optimizer: self._mark(optimizer) for optimizer in self._left}

    def after_backward(self, number: int) -> None:
        """The window's backward `number`, from 1, has run."""
        if len(self.optimizers) < 2:
            return
        for optimizer, other in self._left.items():
            if self._mark(optimizer) != self._marks[optimizer]:
                raise StepError(
                    f"a loss that trained {self._name(other)} left gradients in {self._name(optimizer)}, and after "
                    f"{self._name(other)} was stepped another loss was added to them. {self._remedy(optimizer)} If one "
                    "loss is meant to train both, step both before the next backward."
                )
        for optimizer in self.optimizers:
            if optimizer not in self._origins and self._has_gradients(optimizer):
                self._origins[optimizer] = number

    def one_with_gradient(self) -> nn.Parameter | None:
        """A parameter with a gradient; None if there is none, or several optimizers, which `finish_window` looks at."""
        if len(self.optimizers) > 1:
            return None
        return next((p for p in parameters_of(*self.optimizers) if p.grad is not None), None)

    def has_stepped(self, optimizers: Sequence[Optimizer]) -> bool:
        return not self._stepped.isdisjoint(optimizers)

    def stepped(self, optimizers: Sequence[Optimizer]) -> None:
        self._stepped.update(optimizers)
        self.optimizers += [optimizer for optimizer in optimizers if optimizer not in self.optimizers]
        if len(self.optimizers) > 1:
            origins = {self._origins.pop(o): o for o in optimizers if o in self._origins}
            for optimizer in optimizers:
                self._left.pop(optimizer, None)
            for optimizer, origin in self._origins.items():
                if origin in origins:
                    self._left.setdefault(optimizer, origins[origin])

    def finish_window(self, n_batches: int, n_backwards: int) -> None:
        if len(self.optimizers) < 2:
            return
        for optimizer in self.optimizers:
            if self._has_gradients(optimizer):
                if not n_backwards and not self._stepped:
                    raise StepError(
                        f"the window ended with gradients in {self._name(optimizer)}. Call self.backward(loss) instead "
                        "of loss.backward(), and self.step(model, optimizer) instead of optimizer.step()."
                    )
                raise StepError(
                    f"the window ended with gradients in {self._name(optimizer)} that no step() used: they would leak "
                    f"into the next. Another model's loss may have left them there. {self._remedy(optimizer)}"
                )
            if n_batches > 1 and optimizer in self._stepped and optimizer in self._origins:
                raise StepError(
                    f"a loss left gradients in {self._name(optimizer)} after that was stepped, and zero_grad() dropped "
                    f"them; but in the window's other micro-batches they were added to its own, and stepped. "
                    f"{self._remedy(optimizer)}"
                )

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        return self._local_gradients.has_gradients(parameters_of(optimizer))

    def _mark(self, optimizer: Optimizer) -> list[tuple[int, int]]:
        """Changes when gradients are added."""
        grads = [local_tensor(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        return [(id(grad), write_count(grad)) for grad in grads]

    def _models(self, optimizer: Optimizer) -> list[str]:
        parameters = {id(p) for p in parameters_of(optimizer)}
        models = self._registry.models().items()
        return [name for name, model in models if any(id(p) in parameters for p in model.parameters())]

    def _name(self, optimizer: Optimizer) -> str:
        return " and ".join(self._models(optimizer)) or type(optimizer).__name__

    def _remedy(self, optimizer: Optimizer) -> str:
        models = ", ".join(f"self.{name}" for name in self._models(optimizer))
        return f"Keep that loss out of it: `with self.frozen({models}): self.backward(...)`."


Weight = Tensor | float


class Accumulation:
    def __init__(
        self,
        devices: DeviceParameters,
        world: World,
        registry: Registry,
        parallel: ParallelModels,
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._world, self._registry, self._warn_once = world, registry, warn_once
        self.loss_scale = LossScale(world.parameter_device) if devices.precision == "fp16" else None  # under fp16
        self._backward_context = without_autocast(devices, world.device)()
        self._stages, self._divided_samples = world.stages, world.divided_samples
        self._call = "forward_backward" if self._stages > 1 else "backward"  # the user's call, for messages
        self._parallel, self._local_gradients = parallel, parallel.gradients
        self.origins = GradientOrigins(registry, parallel.gradients)
        self.own = OwnGradients(self._local_gradients)
        self.reduced: dict[Optimizer, int] = {}  # by `reduce_gradients`, each with the backwards before it
        self.losses: list[Tensor] | None = None  # None, and not kept, unless a listener sets a list
        self.goes_back_here = True  # whether backwards of models that no stage divides run on this rank
        self.trains_whole_models = False  # whether there are such models in addition to stages
        self._only_trained: int | None = None
        self._averagings: list[Averaging] = []
        self.start_window(1, is_uneven=False)
        self.start_batch(is_last=True)
        self.is_open = False  # there is no window yet

    def averages(self, averaging: Averaging, former: Averaging | None) -> None:
        """Notifies `averaging` instead of `former` of backwards and last micro-batches from now on."""
        if isinstance(former, OverlappedAveraging):
            former.close()
        # They are falsy if there is nothing to average, as in a single process.
        self._averagings = [one for one in (*self._averagings, averaging) if one and one is not former]

    @property
    def _overlapping(self) -> list[OverlappedAveraging]:
        return [one for one in self._averagings if isinstance(one, OverlappedAveraging)]

    def forget_what_left(self) -> None:
        """The window runs again: drops gradients that left for other ranks; all ranks call it."""
        for averaging in self._overlapping:
            averaging.forget()

    def start_window(self, size: int, *, is_uneven: bool) -> None:
        """A window of `size` micro-batches begins; `is_uneven` if ranks hold different sample counts in it."""
        self.size = size  # agreed over ranks
        self.stepped = False  # whether `step` ran in the window
        self.is_open = True
        self.is_uneven = is_uneven
        self._kept: nn.Parameter | None = None  # one whose gradient the next backward adds to
        self._totals: dict[int, Weight] = {}
        self._spent: set[int] = set()
        self._local_gradients.ran.clear()
        self._local_gradients.zeros.clear()
        if self.reduced:
            self.reduced.clear()
            self.own.forget()
        self.origins.start_window()
        self._backwards = self._stepped_backwards = 0
        self.counted_batches = size  # all but those of `backward(None)`

    def start_batch(self, *, is_last: bool) -> None:
        self.is_last = is_last  # whether the running micro-batch is the window's last
        self.batch_weight: Weight | None = None  # the running micro-batch's backward weight, or None
        if self.losses is not None:
            self.losses.clear()
        self._batch_backwards = 0
        self._batch_is_empty = False
        self._waiting: set[Optimizer] = set()  # those that were to step in the running micro-batch, and wait
        if is_last and self._averagings:
            for averaging in self._overlapping:
                averaging.begin_last_batch()

    def backward(self, loss: Tensor | None, weight: Weight | None, model: nn.Module | None) -> None:
        if not self.is_open or (self._stages > 1 and not self.trains_whole_models):
            self._refuse_backward()
        if loss is None:
            self._skip_batch()
            return
        if self.losses is not None:
            self.losses.append(loss.detach())
        if self._kept is not None and self._kept.grad is None and self.origins.one_with_gradient() is None:
            raise StepError(
                "the gradients of this accumulation window's earlier micro-batches are gone, as after "
                "optimizer.zero_grad(). Leave zero_grad() out: step() drops gradients after the last micro-batch."
            )
        self._begin_backward(weight, model)
        watches = self.is_last and self._world.data_size > 1
        if self.reduced or watches:
            self._begin_own_backward()
        if weight is not None:
            loss = loss * weight
        if self.loss_scale is not None:
            loss = self.loss_scale.scaled(loss, is_weighted=weight is not None)
        for group in self._local_gradients.graphs:
            group.hold()
        try:
            if self.goes_back_here:  # otherwise the last stage's ranks do, and `step` brings the gradients here
                with self._backward_context:
                    loss.backward()
        except RecomputationMismatch as error:
            raise mismatch(error) from error
        if self._local_gradients.groups:
            self._parallel.end_backward()
        self.origins.after_backward(self._backwards)
        if watches:
            self.own.note(self.origins.optimizers)
        if not self.is_last and (self._kept is None or self._kept.grad is None):
            self._kept = self.origins.one_with_gradient()

    def wait_for_last(self, optimizers: Sequence[Optimizer]) -> None:
        """They were to step in the middle of the window, and do at its end: one step each, so one call each."""
        if not self._waiting.isdisjoint(optimizers):
            raise StepError(
                "step() was called twice for an optimizer in a micro-batch before the window's last. Use "
                "gradient_accumulation_steps=1, or make further turns `if not self.is_accumulating_gradients`."
            )
        self._waiting.update(optimizers)

    def _begin_own_backward(self) -> None:
        if not self.reduced:
            self.own.refuse_changed_weights()
        if any(p.grad is not None for p in parameters_of(*self.reduced)):
            raise StepError(
                "backward() was called after reduce_gradients(), whose gradients are those of all ranks. Call "
                "zero_grad() before it, as for SAM's second pass, or reduce_gradients() after the last backward()."
            )

    def finish_reduction(self, optimizers: Sequence[Optimizer]) -> None:
        """The gradients of `optimizers` are those of the global batch now."""
        self.reduced.update(dict.fromkeys(optimizers, self._backwards))
        if self._world.data_size > 1:
            self.own.note(self.origins.optimizers)

    def is_reduced(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether `reduce_gradients` has made the gradients of `optimizers` final."""
        final = [self.reduced.get(optimizer) == self._backwards for optimizer in optimizers]
        if any(final) and not all(final):
            raise StepError(
                "step() was given optimizers that reduce_gradients() had only some of. Give it all of them together."
            )
        if not all(final):
            if not self.reduced:
                self.own.refuse_changed_weights()
            self.own.refuse_changed_gradients(optimizers)
        return all(final)

    def run_schedule(self, run: Callable[[], Tensor], weight: Weight | None, model: nn.Module) -> Tensor:
        """Accumulates the gradients that `run` gives, which are those of the loss that it returns times `weight`."""
        if not self.is_open:
            self._refuse_backward()
        self._begin_backward(weight, model)
        try:
            loss = run()
        except RecomputationMismatch as error:
            raise mismatch(error) from error
        if self.losses is not None:
            self.losses.append(loss)
        self.origins.after_backward(self._backwards)
        return loss

    def _begin_backward(self, weight: Weight | None, model: nn.Module | None) -> None:
        if self._backwards and bool(self._totals) is (weight is None):
            raise StepError(
                f"{self._call}() was called with and without weight= in one window. Weight every micro-batch, or none."
            )
        if weight is None:
            if self._divided_samples:
                raise StepError(
                    f"{self._call}() was called without weight= under {self._divided_samples}, but ranks have "
                    "different numbers of labels in their parts of a sequence. Pass weight=their number in this part."
                )
            if self.is_uneven:
                raise StepError(
                    "the ranks have different numbers of samples in this window, so micro-batches do not count the "
                    f"same. Pass weight=number of samples to {self._call}(), or use drop_last=True."
                )
        else:
            if isinstance(weight, Tensor):
                weight = weight.detach().clone()  # the user may count on in the same tensor
            key = self._total_key(model)
            if key in self._totals and key not in self._spent:
                self._totals[key] = self._totals[key] + weight
            else:  # the first of the window, or since this model's last step in it
                self._totals[key] = weight
                self._spent.discard(key)
            self.batch_weight = weight
        if self._batch_is_empty and self._batch_backwards == 0:
            self.counted_batches += 1
        self._backwards += 1
        self._batch_backwards += 1
        self.origins.before_backward()
        for averaging in self._averagings:
            averaging.before_backward()

    def _refuse_backward(self) -> NoReturn:
        if not self.is_open:
            raise StepError(f"{self._call}() was called between two windows: its gradients would leak into the next.")
        raise StepError(
            f"backward() was called under {self._world.mesh_shape.setting('pp')}, but no rank has the whole graph. "
            "Call self.forward_backward(model, inputs, targets, loss_fn, weight=...), also in one process."
        )

    def _skip_batch(self) -> None:
        if self._world.data_size > 1:
            raise StepError(
                "backward(None) with several data-parallel ranks would leave the others waiting in a collective. "
                "Call backward(loss, weight=0) on a batch that has nothing to learn from, and weight the others."
            )
        if self._batch_backwards == 0 and not self._batch_is_empty:
            self.counted_batches -= 1
        self._batch_is_empty = True

    def _total_key(self, model: nn.Module | None) -> int:
        if model is not None:
            return id(model)
        if self._only_trained is None:
            trained = {n: m for n, m in self._registry.models().items() if self._registry.optimizers_of(m)}
            if len(trained) > 1:
                raise StepError(
                    f"several models are trained ({', '.join(trained)}): say whose weight it is, "
                    "backward(loss, weight=..., model=...)."
                )
            self._only_trained = next((id(m) for m in trained.values()), 0)
        return self._only_trained

    def finish_window(self) -> bool:
        """Closes the window and returns whether it counts as an optimizer step."""
        if self._backwards > self._stepped_backwards:
            raise StepError(
                "the accumulation window ended with backward() but no step() after it: its gradients would leak into "
                "the next. Call self.step(model, optimizer) after backward()."
            )
        if len(self._spent) < len(self._totals):
            unspent = self._totals.keys() - self._spent
            names = [name for name, model in self._registry.models().items() if id(model) in unspent]
            raise StepError(f"the window ended with weighted gradients of {', '.join(names)} and no step() for them.")
        self.origins.finish_window(self.size, self._backwards)
        self.is_open = False
        if self.stepped and self.loss_scale is not None:
            self.loss_scale.update()
        return self.stepped

    def drop_window(self) -> None:
        """The window was interrupted; if nothing has stepped or left for other ranks, it is as if it had not begun."""
        if not self.stepped and not any(averaging.is_on_the_way for averaging in self._overlapping):
            self.is_open = False

    # -- what a step needs of the window

    def check_step(self) -> None:
        if self._world.data_size > 1 and self._backwards and not self._batch_backwards:
            raise StepError(
                "the window's last micro-batch had no backward(), and gradients are reduced over ranks there. "
                "Call backward for every batch; weight=0 where there is nothing to learn."
            )

    def look_at_own_backward(self) -> None:
        """A step found gradients; looks whether `backward` made any of them. Called until a step has some."""
        if self._backwards or self._world.data_size == 1:
            return
        found = f"step() found gradients that self.{self._call}() has not made"
        if self._divided_samples:
            raise StepError(
                f"{found}, under {self._divided_samples}. Call it instead of loss.backward(), with weight=the number "
                "of labels in this part of the sequence."
            )
        self._warn_once(
            "own backward",
            f"{found}, as loss.backward() does. They are averaged over {self._world.data_size} ranks that all count "
            f"alike, with however many tokens or samples. Call self.{self._call}(loss, weight=their number) instead.",
        )

    def begin_step(self) -> bool:
        """A step of the window's gradients begins; returns whether it is the first of the window."""
        is_first = not self.stepped
        self.stepped = True
        self._stepped_backwards = self._backwards
        return is_first

    def spend_weight(self, model: nn.Module) -> Weight | None:
        """The total weight of `model` in this window on this rank, marked as spent. None in an unweighted window."""
        if not self._totals:
            return None
        key = id(model)
        if key not in self._totals:
            if len(self._totals) != 1:
                raise StepError(
                    "step() was given a model without a weight in this window. Pass backward(..., model=model)."
                )
            key = next(iter(self._totals))
        self._spent.add(key)
        return self._totals[key]


_WATCHED = 8  # parameters of each optimizer: clipping, noise and perturbations change all of them
_FIX = "Call self.reduce_gradients(optimizer) after the last backward() and before this code"


# -- OwnGradients: code that uses gradients before they are those of the global batch.
#
# Until `step`, the gradients of replicas, and of sharded models that are whole in steps, are this rank's own. A norm
# that is clipped by hand between `backward` and `step`, or weights that are moved along a gradient there, would differ
# by rank without an error. `reduce_gradients` makes them equal first; this notices where it was not called.


class _Mark(NamedTuple):
    parameter: nn.Parameter
    gradient: Tensor | None
    writes_to_gradient: int
    writes_to_parameter: int


class OwnGradients:
    """Gradients that a backward left on some parameters of each optimizer."""

    def __init__(self, gradients: GradientState) -> None:
        self._gradients = gradients
        self._marks: dict[Optimizer, list[_Mark]] = {}

    def note(self, optimizers: Iterable[Optimizer]) -> None:
        """A backward ran, or gradients were reduced: looks at them as they are now."""
        self._marks = {optimizer: self._look_at(optimizer) for optimizer in optimizers}

    def forget(self) -> None:
        self._marks.clear()

    def refuse_changed_weights(self) -> None:
        for marks in self._marks.values():
            for mark in marks:
                if write_count(mark.parameter) != mark.writes_to_parameter:
                    raise StepError(
                        f"parameters of shape {tuple(mark.parameter.shape)} were changed between two backward() calls "
                        f"or before step(), while gradients are this rank's own. {_FIX}; or change them after step()."
                    )

    def refuse_changed_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Raises StepError if gradients of `optimizers` have changed since the last backward."""
        for optimizer in optimizers:
            for mark in self._marks.get(optimizer, ()):
                now = mark.parameter.grad
                if now is None or mark.gradient is None:
                    continue  # dropped, or set by hand
                if now is not mark.gradient or write_count(local_tensor(now)) != mark.writes_to_gradient:
                    raise StepError(
                        f"a gradient of shape {tuple(now.shape)} was changed between backward() and step(), when it "
                        f"is this rank's own. {_FIX}; or change it in pre_optimizer_step."
                    )

    def _look_at(self, optimizer: Optimizer) -> list[_Mark]:
        sharded = self._gradients.sharded
        parameters = [p for p in parameters_of(optimizer) if id(p) not in sharded and p.requires_grad]
        return [
            _Mark(p, p.grad, 0 if p.grad is None else write_count(local_tensor(p.grad)), write_count(p))
            for p in parameters[:: len(parameters) // _WATCHED + 1]
        ]
