"""OptimizerStep: the work of `step` on a window's gradients: reduce, normalise, clip, guard, step, and zero."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dream_trainer.compat.pytorch import foreach_clamp_max_, foreach_clamp_min_, foreach_div_, plain_beside_dtensors
from dream_trainer.config.device_parameters import DeviceParameters
from dream_trainer.config.training_parameters import TrainingParameters
from dream_trainer.distributed.world import World
from dream_trainer.errors import StepError
from dream_trainer.modules.precision import without_autocast
from dream_trainer.parallel.parallel_models import ParallelModels
from dream_trainer.trainer.registry import Registry, parameters_of
from dream_trainer.trainer.step.accumulation import Accumulation, Weight
from dream_trainer.trainer.step.gradients import (
    StepPlan,
    global_norm,
    gradients_of,
    group_sizes,
    local_norm,
    norm_over_stages,
    plan_step,
    scale_gradients,
)
from dream_trainer.trainer.step.nonfinite import NonFiniteGuard
from dream_trainer.trainer.step.tied_gradients import TiedGradients

_NOTHING: AbstractContextManager[None] = nullcontext()


class OptimizerStep:
    """Steps optimizers, once per call of `BaseTrainer.step`. `before` and `after` are this rank's listeners; `is_heard`
    tells for each whether some rank has one."""

    def __init__(
        self,
        parameters: TrainingParameters,
        devices: DeviceParameters,
        world: World,
        registry: Registry,
        parallel: ParallelModels,
        accumulation: Accumulation,
        guard: NonFiniteGuard,
        *,
        before: tuple[Callable[..., None], ...],
        after: tuple[Callable[..., None], ...],
        is_heard: tuple[bool, bool],
    ) -> None:
        gradients = parallel.gradients
        self._registry, self._accumulation = registry, accumulation
        self._loss_scale = accumulation.loss_scale
        self._origins = accumulation.origins
        self._world, self._stages, self._device = world, world.stage_group(), world.parameter_device
        stages = self._stages
        self._ties = None if stages is None else TiedGradients(registry, world, stages, gradients, accumulation)
        # MPS has no float64.
        self._scalar_dtype = torch.float32 if self._device.type == "mps" else torch.float64
        # Of each `step` a new one: a listener may call another, and such a context cannot be entered inside itself.
        self.context = without_autocast(devices, world.device)
        self._clip_norm = parameters.gradient_clip_norm
        self._clip_constants: dict[torch.dtype, tuple[Tensor, ...]] = {}
        self._clip_value = parameters.gradient_clip_value
        self.guard = guard  # of steps that are skipped
        self._devices, self._parallel = devices, parallel
        self._local_gradients, self._own_time = gradients, gradients.own_time
        self._plans: dict[tuple[Optimizer, ...], StepPlan] = {}
        self._inverses: dict[int, Tensor] = {}
        self._before_step, self._after_step = before, after
        # Listeners may change gradients, so the norm is computed again: on all ranks, even if only rank 0 listens.
        self._renormalises, self._others_may_change = is_heard
        self.wait_for_copies: Callable[[], None] = lambda: None  # called before weights change
        self.had_gradients = False  # whether any step so far had a gradient
        self.times_stepped: Counter[int] = Counter()  # by `id` of an optimizer or scheduler
        self._pairs: set[tuple[nn.Module, tuple[Optimizer, ...]]] = set()  # that belong together

    def reduce_gradients(self, optimizers: tuple[Optimizer, ...]) -> None:
        if not self._accumulation.is_last:
            raise StepError(
                "reduce_gradients() was called in the middle of an accumulation window. Call it when `not "
                "self.is_accumulating_gradients`."
            )
        self._accumulation.check_step()
        plan = self._plan(optimizers)
        models = self._registry.models().values()
        trained = [m for m in models if not set(self._registry.optimizers_of(m)).isdisjoint(optimizers)]
        if self._accumulation.counted_batches == 0 or not trained or self._accumulation.is_reduced(optimizers):
            return
        with torch.no_grad():
            grads, _, scale, _ = self._reduce(trained[0], optimizers, plan)
            if scale is not None:
                scale_gradients(plan, grads, scale)
        self._accumulation.finish_reduction(optimizers)

    def step(self, model: nn.Module, optimizers: tuple[Optimizer, ...], schedulers: Sequence[Any]) -> Tensor:
        self._accumulation.check_step()
        if (model, optimizers) not in self._pairs:
            self._registry.refuse_another_model(model, optimizers)
            self._pairs.add((model, optimizers))
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise StepError("ReduceLROnPlateau needs a metric: call its step(metrics[...]) in post_val_epoch.")
        plan = self._plan(optimizers)
        if self._accumulation.counted_batches == 0:
            return torch.zeros((), dtype=plan.dtype, device=self._device)
        can_rerun = self._accumulation.begin_step()
        if self._world.world_size > 1:
            self._local_gradients.let_graphs_go()
        with self._parallel.stepping() if self._parallel.changes_in_steps else _NOTHING:
            norm = self._advance(model, optimizers, plan, can_rerun=can_rerun)
        self._origins.stepped(optimizers)
        for optimizer in optimizers:
            self.times_stepped[id(optimizer)] += 1
        if self._world.data_size > 1 or self._accumulation.reduced:
            self._accumulation.own.forget()
        for scheduler in schedulers:
            scheduler.step()
            self.times_stepped[id(scheduler)] += 1
        return norm

    def _advance(
        self, model: nn.Module, optimizers: tuple[Optimizer, ...], plan: StepPlan, *, can_rerun: bool
    ) -> Tensor:
        self.wait_for_copies()
        has_graphs = torch.is_grad_enabled()
        with torch.no_grad():
            norm, empty = self._finish_gradients(model, optimizers, plan)
            shards = values = _NOTHING
            if self._parallel.changes_in_steps:
                shards = self._parallel.shards(optimizers, others_may_change=self._others_may_change)
                values = self._parallel.as_values(optimizers, someone_listens=bool(self._after_step))
            with shards, values:
                with plain_beside_dtensors() if plan.is_mixed else _NOTHING:
                    skipped = self.guard.try_step(optimizers, norm, empty, can_rerun=can_rerun)
                if not skipped and self._after_step:
                    with torch.set_grad_enabled(has_graphs):
                        for optimizer in optimizers:
                            for listener in self._after_step:
                                listener(model, optimizer)
        for parameter in plan.parameters:
            parameter.grad = None
        return norm

    def _plan(self, optimizers: tuple[Optimizer, ...]) -> StepPlan:
        plan = self._plans.get(optimizers)
        if plan is None or plan.n_groups != group_sizes(optimizers):
            former = None if plan is None else plan.averaging
            devices = self._devices
            if devices.overlap_reduce and (sharing := self._sharing(optimizers)):
                # A backward cannot tell which of them will be stepped, so neither sends within it.
                devices = replace(devices, overlap_reduce=False)
                for others in sharing:
                    other = plan_step(others, self._world, self._local_gradients, devices)
                    self._accumulation.averages(other.averaging, self._plans[others].averaging)
                    self._plans[others] = other
            plan = self._plans[optimizers] = plan_step(optimizers, self._world, self._local_gradients, devices)
            self._accumulation.averages(plan.averaging, former)
            if not plan.guards_itself:
                self.guard.read_on_the_host(optimizers)
        return plan

    def _sharing(self, optimizers: tuple[Optimizer, ...]) -> list[tuple[Optimizer, ...]]:
        own = {id(p) for p in parameters_of(*optimizers)}
        plans = [(others, plan) for others, plan in self._plans.items() if others != optimizers]
        return [others for others, plan in plans if any(id(p) in own for p in plan.parameters)]

    def _finish_gradients(
        self, model: nn.Module, optimizers: Sequence[Optimizer], plan: StepPlan
    ) -> tuple[Tensor, Tensor | bool]:
        """Normalises and clips in place; returns the norm before clipping, and whether the total weight is 0."""
        empty: Tensor | bool = False
        if (self._world.data_size > 1 or self._accumulation.reduced) and self._accumulation.is_reduced(optimizers):
            grads, scale = gradients_of(plan), None
            norm = self._norm_of_changed(plan, grads)
        else:
            grads, norm, scale, empty = self._reduce(model, optimizers, plan)
        if self._renormalises:
            if scale is not None:
                scale_gradients(plan, grads, scale)
            with self._parallel.as_values(optimizers, someone_listens=True):
                for optimizer in optimizers:
                    for listener in self._before_step:
                        listener(model, optimizer)
            grads, scale = gradients_of(plan), None
            norm = self._norm_of_changed(plan, grads)
        elif scale is not None:
            norm = norm * scale.to(norm.dtype)
        if not self.had_gradients:  # by whatever means: `backward`, autograd's own, or by hand
            self.had_gradients = any(grads)
            if self.had_gradients:
                self._accumulation.look_at_own_backward()
        factor = scale
        limit = self._clip_norm
        # On the host it may be known that clipping would multiply by exactly 1.
        if limit is not None and not (self.guard.reads_the_host and 1.001 * (norm.item() + 1e-6) < limit):
            # fmin ignores NaN: so a norm that is NaN does not spoil the finite gradients for those who look at them.
            most, epsilon, one = self._clipping(norm, limit)
            coefficient = torch.fmin(torch.div(most, norm + epsilon), one)
            factor = coefficient if scale is None else coefficient * scale
        if factor is not None:
            scale_gradients(plan, grads, factor)
        if self._clip_value is not None:
            for group_gradients in filter(None, grads):
                foreach_clamp_min_(group_gradients, -self._clip_value)
                foreach_clamp_max_(group_gradients, self._clip_value)
        return norm, empty

    def _reduce(
        self, model: nn.Module, optimizers: Sequence[Optimizer], plan: StepPlan
    ) -> tuple[list[list[Tensor]], Tensor, Tensor | None, Tensor | bool]:
        if self._local_gradients.waiting:
            self._parallel.reduce_what_waits(plan.parameters)
        weight = self._accumulation.spend_weight(model)
        with self._own_time if self._world.world_size > 1 else _NOTHING:
            carried = plan.averaging.run(weight if plan.is_whole else None) if plan.averaging else None
            if self._ties is not None:
                self._ties.add_up(plan.tied, number := self._origins.number_of(optimizers))
                self._local_gradients.note_step(number)
            grads = gradients_of(plan)
            for group, of_group in zip(plan.groups, grads, strict=True):
                if group.divisor != 1 and of_group:
                    foreach_div_(of_group, float(group.divisor))
            lacking: list[int] = []  # positions of parameters whose gradients, if any, come only from other ranks
            if plan.sharded:
                used = self._local_gradients.used
                lacking = [place for place, p in enumerate(plan.sharded) if p.requires_grad and id(p) not in used]
                used.difference_update(map(id, plan.sharded))
            norm, total = self._norm(plan, grads, weight, carried, lacking)
            if self._stages is not None:
                norm = norm_over_stages(norm, self._stages)
        # A second turn in the window only consists of its last micro-batch.
        is_again = self._origins.has_stepped(optimizers) or not self._accumulation.reduced.keys().isdisjoint(optimizers)
        scale, empty = self._scale(weight, total, 1 if is_again else self._accumulation.counted_batches)
        if self._loss_scale is not None:
            inverse = self._loss_scale.inverse(is_weighted=weight is not None)
            scale = inverse if scale is None else scale * inverse
        return grads, norm, scale, empty

    def _clipping(self, norm: Tensor, limit: float) -> tuple[Tensor, ...]:
        """The limit, 1e-6 and 1 as tensors like the norm: with Python numbers operations take 2 to 5 times as long."""
        if norm.dtype not in self._clip_constants:
            self._clip_constants[norm.dtype] = tuple([torch.full_like(norm, value) for value in (limit, 1e-6, 1.0)])
        return self._clip_constants[norm.dtype]

    def _norm(
        self,
        plan: StepPlan,
        grads: list[list[Tensor]],
        weight: Weight | None,
        total: Tensor | None,
        lacking: Sequence[int],
    ) -> tuple[Tensor, Weight | None]:
        """The gradients' norm, and all ranks' weight: `total`, or summed here if nothing carried it."""
        if self._world.step_size == 1 or plan.is_whole:
            return self._local_norm(plan, grads), weight if self._world.step_size == 1 else total
        norm, total, unused = global_norm(plan, grads, weight, self._device, lacking)
        for place in unused:
            parameter = plan.sharded[place]
            if parameter.grad is not None and id(parameter) not in self._local_gradients.zeros:
                raise StepError(
                    f"{self._name_of(parameter)} has a gradient of code that took its shard "
                    "(to_local, redistribute), no part of the whole gradient. Compute with the parameter itself."
                )
            parameter.grad = None
        for place in set(lacking).difference(unused):
            parameter = plan.sharded[place]
            if id(self._local_gradients.sharded[id(parameter)]) not in self._local_gradients.ran:
                raise StepError(
                    f"other ranks ran the block of {self._name_of(parameter)} in this window, "
                    f"and rank {self._world.rank} did not. Blocks are gathered from all ranks: run each on every rank "
                    "(times 0 if unwanted), choose by a seed that all ranks share, or keep the model whole "
                    "(dp_shard=1)."
                )
        return norm, total

    def _name_of(self, parameter: nn.Parameter) -> str:
        return self._registry.parameter_names().get(id(parameter), "a parameter")

    def _norm_of_changed(self, plan: StepPlan, grads: list[list[Tensor]]) -> Tensor:
        """The norm, computed again; one for all ranks, even if a listener on one of them changed its gradients."""
        is_alone = self._world.step_size == 1
        norm = self._local_norm(plan, grads) if is_alone else global_norm(plan, grads, None, self._device)[0]
        return norm if self._stages is None else norm_over_stages(norm, self._stages)

    def _local_norm(self, plan: StepPlan, grads: list[list[Tensor]]) -> Tensor:
        if len(grads) == 1 and plan.groups[0].is_counted:
            return local_norm(plan, grads[0], self._device)
        groups = zip(plan.groups, grads, strict=True)
        return local_norm(plan, [grad for group, own in groups if group.is_counted for grad in own], self._device)

    def _scale(
        self, weight: Weight | None, total: Weight | None, n_batches: int
    ) -> tuple[Tensor | None, Tensor | bool]:
        """The factor for the summed gradients (None is one), and whether the total weight is 0."""
        if weight is None or total is None:
            if n_batches == 1:
                return None, False
            if n_batches not in self._inverses:
                self._inverses[n_batches] = self._scalar(1.0 / n_batches)
            return self._inverses[n_batches], False
        # The total is over a step's ranks. Those of the same data each add its weight, and have the same gradients.
        ranks = self._world.step_size
        if isinstance(total, Tensor):
            total = total.detach().to(device=self._device, dtype=self._scalar_dtype)
            empty = total == 0
            return torch.where(empty, torch.zeros_like(total), ranks / total), empty
        if total == 0 or not math.isfinite(total):
            return self._scalar(0.0), total == 0
        return self._scalar(ranks / total), False

    def _scalar(self, value: float) -> Tensor:
        """A 0-dim tensor, created on the device: a copy from the host would wait."""
        return torch.full((), value, dtype=self._scalar_dtype, device=self._device)
