"""Accumulation: the arithmetic of one window, from `backward` to the optimizer's step.

Gradients are summed as they come and normalised once, in `step`, by what the window really held: the number of its
micro-batches, or the sum of their weights over all ranks. So a short window needs no foresight, and unequal counts are
exact: derivation and measured error are in docs/measurements.md#exact-gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dream_trainer.compat.pytorch import foreach_clamp_max_, foreach_clamp_min_
from dream_trainer.distributed.gradients import (
    StepPlan,
    average,
    global_norm,
    gradients_of,
    group_sizes,
    local_norm,
    plan_step,
    scale_gradients,
)
from dream_trainer.errors import StepError
from dream_trainer.modules.precision import without_autocast
from dream_trainer.trainer.event_table import anyone_listens
from dream_trainer.trainer.step.loss_scale import LossScale
from dream_trainer.trainer.step.nonfinite import NonFiniteGuard
from dream_trainer.trainer.step.turns import Turns

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

Weight = Tensor | float


class Accumulation:
    """State of the running window.

    Args:
        trainer: Whose world, config and events are used.

    Attributes:
        size: Micro-batches of the window, agreed over ranks.
        is_last: Whether the running micro-batch is the window's last.
        batch_weight: The running micro-batch's backward weight, or None.
        loss_scale: Under fp16, what losses are multiplied by; else None.
        stepped: Whether `step` ran in the window.
        is_open: Whether a window is running.
        had_gradients: Whether any step so far had a gradient.
        losses: What `backward` was given in the running micro-batch; None, and not kept, unless a listener puts a list.
    """

    def __init__(self, trainer: AbstractTrainer) -> None:
        parameters = trainer.config.training_parameters
        self._trainer = trainer
        self._world = trainer.world
        self._device = trainer.world.parameter_device
        # MPS has no float64.
        self._scalar_dtype = torch.float32 if self._device.type == "mps" else torch.float64
        devices = trainer.config.device_parameters
        self.loss_scale = LossScale(self._device) if devices.precision == "fp16" else None
        # One each: a context that is entered again inside itself does not find its way out.
        self._backward_context = without_autocast(devices, self._world.device)
        self._step_context = without_autocast(devices, self._world.device)
        self._clip_norm = parameters.gradient_clip_val
        self._clip_constants: dict[torch.dtype, tuple[Tensor, ...]] = {}
        self._clip_value = parameters.gradient_clip_value
        self._guard = NonFiniteGuard(parameters.nonfinite, parameters.max_nonfinite, trainer, self.loss_scale)
        self._own = trainer._local_gradients
        self._turns = Turns(trainer)
        self._plans: dict[tuple[Optimizer, ...], StepPlan] = {}
        self._inverses: dict[int, Tensor] = {}
        self._before_step = trainer._events["pre_optimizer_step"]
        # Listeners may change gradients, so the norm is taken anew: on all ranks, also where only rank 0 listens.
        self._renormalises = anyone_listens(trainer, "pre_optimizer_step")
        self._after_step = trainer._events["post_optimizer_step"]
        self.losses: list[Tensor] | None = None
        self.size = 1
        self.is_last = True
        self.batch_weight: Weight | None = None
        self.stepped = False
        self.is_open = False
        self.had_gradients = False
        self._is_uneven = False
        self._weighted: bool | None = None
        self._totals: dict[int, Weight] = {}
        self._spent: set[int] = set()
        self._only_trained: int | None = None
        self._batch_is_empty = False
        self._backwards = self._stepped_backwards = 0
        self._batch_backwards = 0
        self._counted_batches = 0

    def start_window(self, size: int, *, is_uneven: bool) -> None:
        """A window of `size` micro-batches begins; `is_uneven` if ranks hold different sample counts in it."""
        self.size = size
        self.stepped = False
        self.is_open = True
        self._is_uneven = is_uneven
        self._weighted = None
        self._totals.clear()
        self._spent.clear()
        self._own.ran.clear()
        self._turns.start_window()
        self._backwards = self._stepped_backwards = 0
        self._counted_batches = size

    def start_batch(self, *, is_last: bool) -> None:
        """A micro-batch begins."""
        self.is_last = is_last
        self.batch_weight = None
        if self.losses is not None:
            self.losses.clear()
        self._batch_backwards = 0
        self._batch_is_empty = False

    def backward(self, loss: Tensor | None, weight: Weight | None, model: nn.Module | None) -> None:
        """Accumulates the gradients of `loss`; see `BaseTrainer.backward`."""
        if not self.is_open:
            raise StepError("backward() was called between two windows, where its gradients would leak into the next.")
        if loss is None:
            self._skip_batch()
            return
        if self.losses is not None:
            self.losses.append(loss.detach())
        if weight is None:
            if self._weighted:
                self._refuse_mixture()
            if self._is_uneven:
                raise StepError(
                    "the ranks hold different numbers of samples in this window, so micro-batches do not count alike. "
                    "Pass backward(loss, weight=number of samples), or use drop_last=True."
                )
            self._weighted = False
        else:
            if self._weighted is False:
                self._refuse_mixture()
            self._weighted = True
            key = self._total_key(model)
            if key in self._totals and key not in self._spent:
                self._totals[key] = self._totals[key] + weight
            else:  # the first of the window, or since this model's last step in it
                self._totals[key] = weight
                self._spent.discard(key)
            self.batch_weight = weight
            loss = loss * weight
        if self._batch_is_empty and self._batch_backwards == 0:
            self._counted_batches += 1
        self._backwards += 1
        self._batch_backwards += 1
        if self.loss_scale is not None:
            loss = self.loss_scale.scaled(loss, is_weighted=weight is not None)
        self._turns.before_backward()
        for group in self._own.graphs:
            group.hold()
        if self._backward_context is None:
            loss.backward()
        else:
            with self._backward_context:
                loss.backward()
        self._turns.after_backward()

    def _refuse_mixture(self) -> None:
        raise StepError(
            "backward was called with weight= and without it in one accumulation window. Weight every "
            "micro-batch, or none."
        )

    def _skip_batch(self) -> None:
        if self._world.dp_size > 1:
            raise StepError(
                "backward(None) with several data-parallel ranks would leave the others waiting in a collective. "
                "Call backward(loss, weight=0) on a batch that has nothing to learn from, and weight the others."
            )
        if self._batch_backwards == 0 and not self._batch_is_empty:
            self._counted_batches -= 1
        self._batch_is_empty = True

    def _total_key(self, model: nn.Module | None) -> int:
        if model is not None:
            return id(model)
        if self._only_trained is None:
            trained = {
                n: m for n, m in self._trainer.named_models().items() if self._trainer.get_optimizers_by_model(m)
            }
            if len(trained) > 1:
                raise StepError(
                    f"several models are trained ({', '.join(trained)}): say whose weight it is, "
                    "backward(loss, weight=..., model=...)."
                )
            self._only_trained = next((id(m) for m in trained.values()), 0)
        return self._only_trained

    def finish_window(self) -> bool:
        """Closes the window and returns whether it counts as an optimizer step.

        Raises:
            StepError: Gradients were accumulated and never stepped.
        """
        if self._backwards > self._stepped_backwards:
            raise StepError(
                "the accumulation window ended with backward() but no step() after it: its gradients would "
                "leak into the next. "
                "Call self.step(model, optimizer) when `not self.is_accumulating_gradients`."
            )
        if len(self._spent) < len(self._totals):
            unspent = self._totals.keys() - self._spent
            names = [name for name, model in self._trainer.named_models().items() if id(model) in unspent]
            raise StepError(f"the window ended with weighted gradients of {', '.join(names)} and no step() for them.")
        self._turns.finish_window(self.size)
        self.is_open = False
        if self.stepped and self.loss_scale is not None:
            self.loss_scale.update()
        self._guard.settle_when_full()
        return self.stepped

    def drop_window(self) -> None:
        """The window broke off; if nothing has stepped in it, it is as if it had not begun."""
        if not self.stepped:
            self.is_open = False

    @property
    def maybe_skipped(self) -> Tensor | None:
        """In `post_optimizer_step`: a 0-dim device tensor that is not 0 if the step left the weights as they were, so
        that a listener may follow without asking the host; None if it is known that it did not."""
        return self._guard.maybe_skipped

    def watch_left_out(self, listener: Callable[[Optimizer], None]) -> None:
        """From now on calls `listener` with each optimizer whose step the host leaves out, since its gradients are not
        finite, while they are there; `post_optimizer_step` does not come then."""
        self._guard.left_out.append(listener)

    def settle(self) -> None:
        """Reads the norms not yet looked at, counts what was skipped, and raises if the policy says so."""
        self._guard.settle()

    def loss_scale_state(self) -> dict[str, Any] | None:
        """For a checkpoint; None but under fp16."""
        return None if self.loss_scale is None else self.loss_scale.state_dict()

    def load_loss_scale_state(self, state: dict[str, Any] | None) -> None:
        """Takes back what `loss_scale_state` gave; a run that goes on in another precision has no use for it."""
        if self.loss_scale is not None and state is not None:
            self.loss_scale.load_state_dict(state)

    # -- the step

    def step(self, model: nn.Module, optimizers: tuple[Optimizer, ...], schedulers: Sequence[Any]) -> Tensor:
        """Normalises, clips, guards and steps; see `BaseTrainer.step`."""
        if self._step_context is None:
            return self._step(model, optimizers, schedulers)
        with self._step_context:
            return self._step(model, optimizers, schedulers)

    def _step(self, model: nn.Module, optimizers: tuple[Optimizer, ...], schedulers: Sequence[Any]) -> Tensor:
        self._check(schedulers)
        plan = self._plan(optimizers)
        if self._counted_batches == 0:
            return torch.zeros((), dtype=plan.dtype, device=self._device)
        can_rerun = not self.stepped
        self.stepped = True
        self._stepped_backwards = self._backwards
        self._own.let_graphs_go()
        self._trainer._reshard()
        self._trainer._before_update()
        with torch.no_grad():
            norm, empty = self._finish_gradients(model, optimizers, plan)
            skipped = self._guard.step(optimizers, norm, empty, can_rerun=can_rerun)
        if not skipped and self._after_step:
            for optimizer in optimizers:
                for listener in self._after_step:
                    listener(model, optimizer)
        for parameter in plan.parameters:
            parameter.grad = None
        self._turns.stepped(optimizers)
        for scheduler in schedulers:
            scheduler.step()
        return norm

    def _check(self, schedulers: Sequence[Any]) -> None:
        if not self.is_last:
            raise StepError(
                "step() was called in the middle of an accumulation window. Call it only when `not "
                "self.is_accumulating_gradients`."
            )
        if self._world.dp_size > 1 and self._backwards and not self._batch_backwards:
            raise StepError(
                "the window's last micro-batch had no backward(), and gradients are reduced over ranks there. "
                "Call backward for every batch; weight=0 where there is nothing to learn."
            )
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise StepError(
                    "ReduceLROnPlateau needs a metric: call scheduler.step(metrics[...]) in post_val_epoch instead."
                )

    def _plan(self, optimizers: tuple[Optimizer, ...]) -> StepPlan:
        plan = self._plans.get(optimizers)
        if plan is None or plan.n_groups != group_sizes(optimizers):
            plan = self._plans[optimizers] = plan_step(optimizers, self._world, self._own)
            if not plan.guards_itself:
                self._guard.read_on_the_host(optimizers)
        return plan

    def _finish_gradients(
        self, model: nn.Module, optimizers: Sequence[Optimizer], plan: StepPlan
    ) -> tuple[Tensor, Tensor | bool]:
        """Normalises and clips in place; returns the norm before clipping and whether the window weighed nothing."""
        if self._own.waiting:
            self._trainer._reduce_what_waits(plan.parameters)
        for bucket in plan.buckets:
            average(bucket, self._world)
        weight = self._weight_of(model)
        grads = gradients_of(plan)
        norm, total = self._norm(plan, grads, weight, self._lacking(plan))
        # A second turn in the window is made of its last micro-batch alone.
        n_batches = 1 if self._turns.has_stepped(optimizers) else self._counted_batches
        scale, empty = self._scale(weight, total, n_batches)
        if self.loss_scale is not None:
            inverse = self.loss_scale.inverse(is_weighted=weight is not None)
            scale = inverse if scale is None else scale * inverse
        if self._renormalises:
            if scale is not None:
                scale_gradients(plan, grads, scale)
            for optimizer in optimizers:
                for listener in self._before_step:
                    listener(model, optimizer)
            grads, scale = gradients_of(plan), None
            norm, _ = self._norm(plan, grads, None, ())
        elif scale is not None:
            norm = norm * scale.to(norm.dtype)
        if not self.had_gradients:  # by whatever means: `backward`, autograd's own, or by hand
            self.had_gradients = any(grads)
        factor = scale
        if self._clip_norm is not None:
            # fmin passes over NaN, so that a norm that is NaN leaves the good gradients good for whoever looks.
            limit, epsilon, one = self._clipping(norm, self._clip_norm)
            coefficient = torch.fmin(torch.div(limit, norm + epsilon), one)
            factor = coefficient if scale is None else coefficient * scale
        if factor is not None:
            scale_gradients(plan, grads, factor)
        if self._clip_value is not None:
            for own in filter(None, grads):
                foreach_clamp_min_(own, -self._clip_value)
                foreach_clamp_max_(own, self._clip_value)
        return norm, empty

    def _clipping(self, norm: Tensor, limit: float) -> tuple[Tensor, ...]:
        """The limit, 1e-6 and 1 as tensors like the norm: with Python numbers operations take 2 to 5 times as long."""
        found = self._clip_constants.get(norm.dtype)
        if found is None:
            found = tuple([torch.full_like(norm, value) for value in (limit, 1e-6, 1.0)])
            self._clip_constants[norm.dtype] = found
        return found

    def _weight_of(self, model: nn.Module) -> Weight | None:
        """The total weight of `model` in this window; from now on spent."""
        if not self._weighted:
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

    def _lacking(self, plan: StepPlan) -> list[int]:
        """Places in `plan.shared` of the parameters whose gradient, if there is one, is of other ranks' making."""
        used = self._own.used
        if plan.shared_ids <= used:
            lacking = []
        else:
            lacking = [i for i, p in enumerate(plan.shared) if p.requires_grad and id(p) not in used]
        used -= plan.shared_ids
        return lacking

    def _norm(
        self, plan: StepPlan, grads: list[list[Tensor]], weight: Weight | None, lacking: Sequence[int]
    ) -> tuple[Tensor, Weight | None]:
        if self._world.world_size == 1:
            own = grads[0] if len(grads) == 1 else [grad for group in grads for grad in group]
            return local_norm(plan, own, self._device), weight
        norm, total, unused = global_norm(plan, grads, weight, self._device, lacking)
        for place in unused:
            plan.shared[place].grad = None
        for place in set(lacking).difference(unused):
            if id(self._own.shared[id(plan.shared[place])]) not in self._own.ran:
                self._refuse_left_out_block(plan.shared[place])
        return norm, total

    def _refuse_left_out_block(self, parameter: nn.Parameter) -> None:
        names = [
            f"{model_name}.{name}"
            for model_name, model in self._trainer.named_models().items()
            for name, other in model.named_parameters()
            if other is parameter
        ]
        raise StepError(
            f"other ranks ran the block of {', '.join(names)} in this window, and rank {self._world.rank} did not. "
            "Blocks are gathered from all ranks: run each on every rank, times 0 where it is not wanted, draw the "
            "choice from a seed that all ranks share, or keep the model whole (dp_shard=1)."
        )

    def _scale(
        self, weight: Weight | None, total: Weight | None, n_batches: int
    ) -> tuple[Tensor | None, Tensor | bool]:
        """What the summed gradients are multiplied by (None: by one), and whether nothing was weighed."""
        if weight is None or total is None:
            if n_batches == 1:
                return None, False
            if n_batches not in self._inverses:
                self._inverses[n_batches] = self._scalar(1.0 / n_batches)
            return self._inverses[n_batches], False
        # The total is over all ranks. Those that see the same data each add it, and each see the same gradients.
        ranks = self._world.world_size
        if isinstance(total, Tensor):
            total = total.detach().to(device=self._device, dtype=self._scalar_dtype)
            empty = total == 0
            return torch.where(empty, torch.zeros_like(total), ranks / total), empty
        if total == 0 or not math.isfinite(total):
            return self._scalar(0.0), total == 0
        return self._scalar(ranks / total), False

    def _scalar(self, value: float) -> Tensor:
        """A 0-dim tensor on the device, made there: a copy from the host would wait."""
        return torch.full((), value, dtype=self._scalar_dtype, device=self._device)
