"""WeightTransfer: one model's weights follow another's on schedule (target networks, teachers)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.callbacks.weight_average import ModelAverage
from dream_trainer.checkpoint.model_state import model_buffers, parameter_fqns
from dream_trainer.checks import check_between, check_name, listed, refuse
from dream_trainer.compat.pytorch import local_tensor
from dream_trainer.config.parameter_class import PositiveInt, check_fields
from dream_trainer.events.callback import Callback
from dream_trainer.trainer.abstract import AbstractTrainer


@dataclass(eq=False, repr=False)
class WeightTransfer(Callback):
    """Copies the weights of `source` into `target`, or moves `target` towards them, right after optimizer steps.

    With `decay=0` (DQN's target network) the target becomes a copy. With more (BYOL's and MoCo's teacher)
    `target = decay * target + (1 - decay) * source`. It happens at most once per window, and not for a skipped step.
    Floating-point parameters and buffers move, integer buffers are copied. `requires_grad_(False)` the target, and give
    it to no optimizer.

    Args:
        source: Name of the model to follow, such as "online" for `self.online`, or of a part of one, "online.encoder".
        target: Name of the model that follows, with tensors of the same names and shapes.
        every_n_steps: Optimizer steps (`global_step`) between two transfers. `decay` is per transfer.
        decay: Share of the target that a transfer keeps; from 0 to below 1.
        copy_at_start: Whether a run that starts, and does not resume, begins with a copy.
        buffers: Whether buffers, such as BatchNorm's statistics, are transferred too; False leaves the target its own.

    Raises:
        ConfigError: A value cannot work; when setup ends, also if no optimizer trains the source, or the two do not
            match.
        AttributeError: When setup ends, a model is not there.
    """

    needs_whole_models: ClassVar[bool] = True
    sees_shards: ClassVar[bool] = True

    source: Annotated[str, partial(check_name, example="online")]
    target: Annotated[str, partial(check_name, example="target")]
    _: KW_ONLY
    every_n_steps: PositiveInt = 1
    decay: Annotated[float, partial(check_between, low=0.0, high=1.0, below=True)] = 0.0
    copy_at_start: bool = True
    buffers: bool = True

    def __post_init__(self) -> None:
        check_fields(self, WeightTransfer)
        refuse(self.source == self.target, f"source and target are both {self.source!r}. Name two models.")

    def post_setup(self, trainer: AbstractTrainer) -> None:
        self._trainer = trainer
        source, target = trainer.get_module(self.source), trainer.get_module(self.target)
        self._optimizers = trainer.get_optimizers_by_model(source)
        refuse(not self._optimizers, f"WeightTransfer: no optimizer trains {self.source!r}, so nothing is transferred.")
        followed, following = self._tensors(source), self._tensors(target)
        kinds = [{n: (t.shape, local_tensor(t).shape) for n, t in one.items()} for one in (followed, following)]
        unlike = sorted(n for n in followed.keys() | following.keys() if kinds[0].get(n) != kinds[1].get(n))
        refuse(
            unlike,
            f"WeightTransfer: {self.source!r} and {self.target!r} do not have the same tensors: {listed(unlike, 5)} "
            "are missing in one, or differ in their shapes or in this rank's part of them. Build and shard both alike.",
        )
        moving = [name for name, tensor in followed.items() if tensor.is_floating_point()]
        self._pairs = ModelAverage({n: followed[n] for n in moving}, {n: following[n] for n in moving})
        self._counters = [(following[n], followed[n]) for n in followed.keys() - set(moving)]

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        if trainer.global_step == 0 and self.copy_at_start:
            self._transfer(trainer, copies=True)

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        if optimizer in self._optimizers:
            self._pairs.note_step(trainer.accumulation_window.step_was_skipped)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        is_due = not trainer.accumulation_window.is_open and trainer.global_step % self.every_n_steps == 0
        if is_due and self._pairs.has_stepped:
            self._transfer(trainer, copies=self.decay == 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Whether the source has changed since the last transfer."""
        WeightTransfer.post_train_step(self, self._trainer)  # a checkpoint may be asked for before that event comes
        return {"has_stepped": self._pairs.will_move()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pairs.resume(0, has_stepped=state["has_stepped"])

    @torch.no_grad()
    def _transfer(self, trainer: AbstractTrainer, *, copies: bool) -> None:
        with trainer.changing_weights():
            if copies:
                self._pairs.start()
            else:
                self._pairs.update(lambda _: 1.0 - self.decay)
            for counter, followed in self._counters:
                local_tensor(counter).copy_(local_tensor(followed))

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Maps names to parameters, and to buffers if they count."""
        tensors = {fqn.removeprefix("model."): tensor for tensor, fqn in parameter_fqns({"model": model}).items()}
        buffers = model_buffers({"model": model}) if self.buffers else {}
        return tensors | {name.removeprefix("models.model."): tensor for name, tensor in buffers.items()}
