"""Profiler: PyTorch's profiler on chosen steps and ranks, as trace files in the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from dream_trainer.config.parameter_class import NonNegativeInt, PositiveInt, check_fields
from dream_trainer.errors import ConfigError
from dream_trainer.events.callback import Callback
from dream_trainer.trainer.abstract import AbstractTrainer


@dataclass(eq=False, repr=False)
class Profiler(Callback):
    """Records some steps with `torch.profiler` and writes `<run_dir>/profiles/step_<first>_rank_<rank>.json.gz`.

    Open the files in https://ui.perfetto.dev. Steps are counted over the whole run, as in the loggers. A run that
    resumes after `first_step` records nothing. If a run ends or fails while it records, the part so far is written.

    Args:
        first_step: First step to record; far enough from the start of the process, or you only see compilation.
        n_steps: Number of steps to record.
        warm_up_steps: Steps before `first_step` that the profiler runs without keeping anything, so that its own start
            is not in the trace.
        ranks: Ranks that record. None for all.
        record_shapes: Whether to record shapes of inputs.
        profile_memory: Whether to record allocations.
        with_stack: Whether to record where in the code each operation comes from; slow.

    Raises:
        ConfigError: A number is invalid; when training starts, also if two profilers would record at once.
    """

    first_step: PositiveInt = 10
    n_steps: PositiveInt = 3
    _: KW_ONLY
    warm_up_steps: NonNegativeInt = 1
    ranks: Sequence[int] | None = (0,)
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    def __post_init__(self) -> None:
        check_fields(self, Profiler)
        ranks = () if self.ranks is None else self.ranks
        if not isinstance(ranks, Sequence) or not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
            raise ConfigError(f"ranks={ranks!r} is not a list of ranks. Use ranks=[0], or None for all.")
        self.warm_up_steps = min(self.warm_up_steps, self.first_step - 1)
        self._profile: torch.profiler.profile | None = None

    @property
    def _steps(self) -> range:
        """Steps completed while the profiler runs, its warm-up included."""
        return range(self.first_step - 1 - self.warm_up_steps, self.first_step - 1 + self.n_steps)

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        for other in trainer.callbacks:
            if isinstance(other, Profiler) and other is not self and set(self._steps) & set(other._steps):
                raise ConfigError(
                    f"two Profilers record steps {self.first_step} and {other.first_step} at once, warm-up included, "
                    "which PyTorch cannot. Set their first_step further apart."
                )
        self._start_if_due(trainer)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if self._profile is None:
            self._start_if_due(trainer)
        elif trainer.global_step == self._steps.stop:
            self._stop()
        else:
            self._profile.step()

    def post_fit(self, trainer: AbstractTrainer) -> None:
        self._stop()

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        self._stop()

    def _start_if_due(self, trainer: AbstractTrainer) -> None:
        # A run may resume in the middle of the warm-up, but not of the recording.
        warm_up_steps, rank = self.first_step - 1 - trainer.global_step, trainer.world.rank
        if not 0 <= warm_up_steps <= self.warm_up_steps or (self.ranks is not None and rank not in self.ranks):
            return
        path = trainer.run_dir / "profiles" / f"step_{self.first_step:08d}_rank_{rank}.json.gz"

        def write(profile: torch.profiler.profile) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))

        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=warm_up_steps, active=self.n_steps, repeat=1),
            on_trace_ready=write,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        self._profile.start()

    def _stop(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
