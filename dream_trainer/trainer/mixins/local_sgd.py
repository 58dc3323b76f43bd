"""LocalSGDMixin: groups of ranks train independently for many steps, then their parameters are averaged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from dream_trainer.checkpoint.model_state import model_buffers, model_parameters
from dream_trainer.compat.pytorch import foreach_copy_, local_tensor, local_tensors, storage_id, with_local
from dream_trainer.config.device_parameters import LocalSGDConfigMixin, LocalSGDParameters
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError, StepError
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.hooks import NoRounds
from dream_trainer.trainer.registry import parameters_of
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.trainer.step.gradients import in_buckets


class LocalSGDMixin(AbstractTrainer):
    """Local SGD (Stich, 2018, arXiv:1805.09767), and with `outer="sgd"` DiLoCo (Douillard et al., 2023,
    arXiv:2311.08105).

    The state of each worker's optimizers stays its own, as in the papers. Each worker counts the same in the average,
    with any amount of data.
    """

    _config_class: ClassVar[type | None] = LocalSGDConfigMixin

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._runtime.workers = self._runtime.config.local_sgd_parameters.workers

    def _finish_setup(self) -> None:
        super()._finish_setup()
        if self.world.workers > 1:
            _refuse_what_crosses_workers(self._runtime)
        rounds = self.__rounds = self._runtime.rounds = Rounds(self._runtime)
        self._runtime.state_registry.register("local_sgd", rounds.state, rounds.load_state, goes_with_counters=True)

    def _resume(self) -> None:
        if kept := next(iter(self._runtime.state_registry.tensors()), None):
            raise ConfigError(
                f"LocalSGDMixin does not work with {kept}, a tensor that checkpoints keep: each worker would have "
                'another. Leave one of the two out, or keep a small one by register_state(..., scope="rank").'
            )
        super()._resume()

    def _window_started(self) -> None:
        super()._window_started()
        self.__rounds.begin_if_due()

    def _window_finished(self, *, is_last: bool) -> None:
        super()._window_finished(is_last=is_last)
        self.__rounds.end_if_due()
        if is_last and self.__rounds.is_running and self.world.workers > 1:
            self.warn_once(
                "a round",
                f"training ends at step {self.global_step}, in the middle of a round of "
                f"{self.__rounds.steps} steps. Validations, checkpoints and exports have the average of the "
                "workers, but the models of this process have its own worker's weights.",
            )

    @contextmanager
    def _validation_context(self) -> Iterator[None]:
        with self.__rounds.as_one_model(), super()._validation_context():
            yield


def _refuse_what_crosses_workers(runtime: Runtime) -> None:
    buffers = runtime.parallel.buffers
    taken = {} if buffers is None else buffers.with_policy("rank 0")
    if taken:
        raise ConfigError(
            f'the policy of buffer {next(iter(taken))} is "rank 0", and workers have no rank in common. Use "mean" or '
            '"as is".'
        )
    for name, model in runtime.registry.models().items():
        for path, module in model.named_modules(prefix=name):
            if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
                raise ConfigError(
                    f"{path} is a SyncBatchNorm over all ranks, and workers meet only every "
                    f"{runtime.config.local_sgd_parameters.every_n_steps} steps. Use BatchNorm, whose statistics are "
                    "averaged, or give it a process_group within a worker."
                )


_START, _MOMENTUM = "local_sgd.start.", "local_sgd.momentum."


class Rounds(NoRounds):
    """All workers begin a round with the same parameters, which are kept. At its end the workers' changes are averaged,
    in flat buckets, and an outer SGD takes the mean as its gradient: at a learning rate of 1 without momentum this is
    the average of the parameters, to the bit if unchanged. Buffers whose policy is the mean are averaged as well."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._world, self._progress = runtime, runtime.world, runtime.progress
        parameters: LocalSGDParameters = runtime.config.local_sgd_parameters
        self.steps = parameters.every_n_steps
        self._began_at: int | None = None
        self._start: dict[str, Tensor] = {}  # this rank's part of each tensor at the round's beginning, by its name
        self._options: dict[str, Any] = {"lr": 1.0}
        if parameters.outer == "sgd":
            momentum = {"momentum": parameters.outer_momentum, "nesterov": parameters.nesterov}
            self._options = {"lr": parameters.outer_lr} | (momentum if parameters.outer_momentum else {})
        self._outer: torch.optim.SGD | None = None

    @property
    def is_running(self) -> bool:
        """Whether workers have stepped independently since their parameters were averaged."""
        return self._began_at is not None and self._progress.global_step > self._began_at

    @torch.no_grad()
    def begin_if_due(self) -> None:
        """A window begins; if no round is running, this is its first."""
        if self._began_at is not None:
            return
        self._began_at = self._progress.global_step
        averaged = self._averaged()
        self._make_room(averaged)
        foreach_copy_(list(self._start.values()), _parts(averaged))

    @torch.no_grad()
    def end_if_due(self) -> None:
        """A window is complete; if it is a round's last, the workers are averaged; a collective then."""
        if not self.is_running or self._progress.global_step % self.steps:
            return
        averaged = self._averaged()
        if averaged.keys() != self._start.keys():
            raise StepError(
                f"an optimizer was given other parameters in the middle of a round of {self.steps} steps. Change its "
                "groups where global_step is a multiple of every_n_steps."
            )
        assert self._outer is not None  # since the round began
        with self._runtime.hooks.changing_weights():
            parts = _parts(averaged)
            starts = self._start.values()
            for tensor, start, difference in zip(averaged.values(), starts, self._mean_differences(parts), strict=True):
                if isinstance(tensor, nn.Parameter):
                    start.grad = difference
                else:
                    start -= difference
            self._outer.step()
            self._outer.zero_grad()
            foreach_copy_(parts, list(starts))
        self._began_at = None

    @contextmanager
    def as_one_model(self) -> Iterator[None]:
        """Inside, all workers have the average of their parameters; each gets its own back. A collective."""
        if not self._is_apart():
            yield
            return
        with torch.no_grad(), self._runtime.hooks.changing_weights():
            parts = _parts(self._averaged())
            own = [part.clone() for part in parts]
            foreach_copy_(parts, self._averages(parts))
        try:
            yield
        finally:
            with torch.no_grad(), self._runtime.hooks.changing_weights():
                foreach_copy_(_parts(self._averaged()), own)

    def _is_apart(self) -> bool:
        return self.is_running and self._world.workers > 1

    # -- checkpoints: the model's names hold the average; within a round, each worker's weights are saved as well

    @torch.no_grad()
    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        saved, averaged = dict(tensors), self._averaged()
        for name, start in self._start.items():
            if name in tensors and (momentum := self._momentum(start)) is not None:
                saved[_MOMENTUM + name] = with_local(averaged[name], momentum)
            if name in tensors and self.is_running:
                saved[_START + name] = with_local(averaged[name], start)
        if not self._is_apart():
            return saved
        for (name, tensor), average in zip(averaged.items(), self._averages(_parts(averaged)), strict=True):
            if name in tensors:
                saved[f"workers.{self._world.worker}.{name}"], saved[name] = tensors[name], with_local(tensor, average)
        return saved

    def tensors_to_load(self, tensors: dict[str, Tensor], saved: Collection[str], *, is_own: bool) -> dict[str, Tensor]:
        """Targets for loading a checkpoint: this worker's own weights; another run's only has the average."""
        self._began_at, self._outer, self._start = None, None, {}
        if not is_own:
            return tensors
        averaged = self._averaged()
        self._make_room(averaged)
        targets: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = f"workers.{self._world.worker}.{name}"
            targets[own if own in saved else name] = tensor
        for name, start in self._start.items():
            if _START + name in saved:
                targets[_START + name] = with_local(averaged[name], start)
            if _MOMENTUM + name in saved and (momentum := self._momentum(start)) is not None:
                targets[_MOMENTUM + name] = with_local(averaged[name], momentum)
        return targets

    def state(self) -> dict[str, Any]:
        return {"began_at": self._began_at if self.is_running else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._began_at = state.get("began_at")

    def _averaged(self) -> dict[str, Tensor]:
        """The tensors that workers hold separately and average, keyed by their names in checkpoints."""
        models = self._runtime.registry.models()
        owned = {id(parameter) for parameter in parameters_of(*self._runtime.registry.optimizers().values())}
        averaged: dict[str, Tensor] = {name: p for name, p in model_parameters(models).items() if id(p) in owned}
        if self._world.workers == 1:
            return averaged
        buffers = self._runtime.parallel.buffers
        joined = set() if buffers is None else {*map(storage_id, buffers.with_policy("mean").values())}
        return averaged | {name: b for name, b in model_buffers(models).items() if storage_id(b) in joined}

    def _make_room(self, averaged: Mapping[str, Tensor]) -> None:
        """For what each round keeps of `averaged`, and for the outer momentum, which stays."""
        former = self._start
        self._start = {
            name: former[name] if name in former else local_tensor(tensor).detach().clone()
            for name, tensor in averaged.items()
        }
        state = {} if self._outer is None else dict(self._outer.state)
        trained = [self._start[name] for name, tensor in averaged.items() if isinstance(tensor, nn.Parameter)]
        self._outer = torch.optim.SGD(trained, **self._options)
        if "momentum" in self._options:
            for start in trained:
                self._outer.state[start] = state.get(start) or {"momentum_buffer": torch.zeros_like(start)}

    def _momentum(self, start: Tensor) -> Tensor | None:
        return None if self._outer is None else self._outer.state.get(start, {}).get("momentum_buffer")

    def _averages(self, parts: list[Tensor]) -> list[Tensor]:
        """`parts`, averaged over the workers; a collective."""
        differences = self._mean_differences(parts)
        return [start - difference for start, difference in zip(self._start.values(), differences, strict=True)]

    def _mean_differences(self, parts: list[Tensor]) -> list[Tensor]:
        """How far the workers went from the round's beginning to `parts`, on average and backwards; a collective."""
        differences = [start - part for start, part in zip(self._start.values(), parts, strict=True)]
        if self._world.workers == 1:
            return differences
        for _, bucket in in_buckets(differences, lambda tensor: tensor.dtype):
            flat = torch.cat([difference.flatten() for difference in bucket])
            dist.all_reduce(flat, group=self._world.across_workers)
            flat /= self._world.workers
            means = flat.split([difference.numel() for difference in bucket])
            foreach_copy_(bucket, [mean.view(d.shape) for mean, d in zip(means, bucket, strict=True)])
        return differences


def _parts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [local.detach() for local in local_tensors(list(tensors.values()))]
