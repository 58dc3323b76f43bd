"""LocalSGDMixin: groups of ranks train on their own for many steps, then their parameters are averaged.

For hosts whose network is too slow for a gradient in each step. Within a group (a worker) gradients are averaged or
sharded as ever; between groups parameters cross once in `every_n_steps`. Validations, checkpoints and exports speak of
the average, also in the middle of a round, where they change nothing. How: trainer/rounds.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch.nn as nn

from dream_trainer.config.parallel_parameters import LocalSGDConfigMixin
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback
from dream_trainer.modules.mixture_of_experts import MoE
from dream_trainer.trainer.abstract import AbstractTrainer
from dream_trainer.trainer.rounds import Rounds


class LocalSGDMixin(AbstractTrainer):
    """Local SGD (Stich, 2018, arXiv:1805.09767), and with `outer="sgd"` DiLoCo (Douillard et al., 2023,
    arXiv:2311.08105).

    The state of each worker's optimizers stays its own, as in the papers. Each worker counts the same in the average,
    whatever it has trained on.

    Example:
        ```python
        @dataclass
        class Config(dt.DreamTrainerConfig, dt.LocalSGDConfigMixin): ...

        class Trainer(dt.DreamTrainer, dt.LocalSGDMixin): ...

        Config(..., local_sgd_parameters=dt.LocalSGDParameters(every_n_steps=500, outer="sgd"))
        ```
    """

    _config_class: ClassVar[type | None] = LocalSGDConfigMixin

    if TYPE_CHECKING:
        config = cast(Any, ...)  # see AbstractTrainer

    def __init__(self, config: BaseTrainerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        _refuse_what_needs_all_ranks(self)
        self._workers = self.config.local_sgd_parameters.workers

    def _finish_setup(self) -> None:
        super()._finish_setup()
        if self.world.workers > 1:
            _refuse_what_crosses_workers(self)
        self._rounds = Rounds(self, self.config.local_sgd_parameters)

    def _window_started(self) -> None:
        super()._window_started()
        assert isinstance(self._rounds, Rounds)  # since setup
        self._rounds.begin_if_due()

    def _window_finished(self, *, is_last: bool) -> None:
        super()._window_finished(is_last=is_last)
        assert isinstance(self._rounds, Rounds)  # since setup
        self._rounds.end_if_due()
        if is_last and self._rounds.is_running and self.world.workers > 1:
            self.warn_once(
                "a round",
                f"training ends at step {self.global_step}, in the middle of a round of "
                f"{self.config.local_sgd_parameters.every_n_steps} steps. Validations, checkpoints and exports have "
                "the average of the workers, but the models of this process have the weights of its own worker.",
            )

    @contextmanager
    def _validation_context(self) -> Iterator[None]:
        with self._rounds.as_one_model(), super()._validation_context():
            yield

    # -- state

    def _mixin_state(self) -> dict[str, Any]:
        assert isinstance(self._rounds, Rounds)  # since setup
        return super()._mixin_state() | {"local_sgd": self._rounds.state()}

    def _load_mixin_state(self, state: dict[str, Any]) -> None:
        super()._load_mixin_state(state)
        assert isinstance(self._rounds, Rounds)  # since setup
        self._rounds.load_state(state.get("local_sgd", {}))


def _refuse_what_needs_all_ranks(trainer: LocalSGDMixin) -> None:
    """Raises ConfigError, on any number of ranks, where the config asks for what has not been made to work here."""
    devices, training = trainer.config.device_parameters, trainer.config.training_parameters
    asked = {
        f"tensor_parallel={devices.tensor_parallel}": devices.tensor_parallel > 1,
        f"context_parallel={devices.context_parallel}": devices.context_parallel > 1,
        f"expert_parallel={devices.expert_parallel}": devices.expert_parallel > 1,
        "cpu_offload=True": devices.cpu_offload,
        "overlap_reduce=True": devices.overlap_reduce,
        'precision="fp16", whose loss scale is one for all': devices.precision == "fp16",
        f'nonfinite="{training.nonfinite}", by which a worker would skip alone': training.nonfinite != "raise",
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"LocalSGDMixin does not work with {field}. Leave it at its default, or the mixin out.")
    for callback in trainer.callbacks:
        if type(callback).checkpoint_tensors is not Callback.checkpoint_tensors:
            raise ConfigError(
                f"LocalSGDMixin does not work with {type(callback).__name__}, which keeps tensors in checkpoints: each "
                "worker would have others. Leave one of the two out."
            )


def _refuse_what_crosses_workers(trainer: LocalSGDMixin) -> None:
    buffers = trainer._parallel.buffers
    taken = [] if buffers is None else buffers.with_policy("rank 0")
    if taken:
        raise ConfigError(
            f'the policy of buffer {taken[0]} is "rank 0", and workers have no rank in common. Use "mean" or "as is".'
        )
    for name, model in trainer.named_models().items():
        for path, module in model.named_modules(prefix=name):
            if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
                raise ConfigError(
                    f"{path} is a SyncBatchNorm over all ranks, and workers meet only every "
                    f"{trainer.config.local_sgd_parameters.every_n_steps} steps. Use BatchNorm, whose statistics are "
                    "averaged, or give it a process_group within a worker."
                )
            if isinstance(module, MoE) and module.balance_rate:
                raise ConfigError(
                    f"{path} balances its experts by the loads of all ranks, and workers meet only every "
                    f"{trainer.config.local_sgd_parameters.every_n_steps} steps. Use balance_rate=0."
                )
