"""NonFiniteReport: where a NaN or an infinity came from: which step, rank, batch and parameters. Each rank writes its
own file, since only the rank whose loss it is can tell the batch."""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dream_trainer.checkpoint.model_state import parameter_fqns
from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import foreach_norm, local_tensor, local_tensors
from dream_trainer.config.parameter_class import PositiveInt, check_fields
from dream_trainer.data.window import DataPosition
from dream_trainer.errors import NonFiniteError
from dream_trainer.events.callback import Callback
from dream_trainer.loggers.buffer import is_scalar, keep
from dream_trainer.nested import map_tensors
from dream_trainer.screen import logger
from dream_trainer.trainer.abstract import AbstractTrainer

LOOK_EVERY = 25  # windows between two checks: half of the non-finite guard's interval, so that it seldom raises first


class _Gradients(NamedTuple):
    names: list[str]
    norms: Tensor
    loss_scale: Tensor | None


@dataclass
class _Window:
    """Data kept of an accumulation window until it is checked."""

    step: int = 0
    epoch: int = 0
    end: DataPosition = field(default_factory=lambda: DataPosition(0, 0, 0))
    samples: int = 0  # of all ranks
    # index in the epoch, and the training step's result
    batches: list[tuple[int, dict[str, Tensor | float]]] = field(default_factory=list)
    gradients: list[_Gradients] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class NonFiniteReport(Callback):
    """Writes `<run_dir>/nonfinite/step_<n>_rank_<r>.json` when a loss or a gradient is not finite, and logs once.

    A loss is a result of the training step with "loss" in its name. A report has the step's batches and results, and
    the parameters with non-finite gradients on this rank. It covers steps that `on_nonfinite="raise"` or `"skip"` left
    out, not overflows under fp16. Windows that `"retry"` runs again are only reported if they end the run.

    Args:
        max_reports: Files that each rank writes at most.
    """

    needs_whole_models: ClassVar[bool] = True
    sees_shards: ClassVar[bool] = True

    _: KW_ONLY
    max_reports: PositiveInt = 10

    def __post_init__(self) -> None:
        check_fields(self, NonFiniteReport)

    # -- kept data

    def post_setup(self, trainer: AbstractTrainer) -> None:
        self._n_reports, self._has_said = 0, False
        running = trainer.accumulation_window
        running.watch(lambda optimizer: self._take_norms(optimizer, running.loss_scale))

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        self._names = parameter_fqns(trainer.named_models())
        self._window, self._samples_seen = _Window(), trainer.samples_seen
        self._windows: list[_Window] = []

    def post_optimizer_step(self, trainer: AbstractTrainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._take_norms(optimizer, trainer.accumulation_window.loss_scale)

    def _take_norms(self, optimizer: Optimizer, loss_scale: Tensor | None) -> None:
        """Takes the gradients' norms; they are gone when `step` returns."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if parameters:
            names = [self._names.get(p, "(no model's)") for p in parameters]
            norms = torch.stack(foreach_norm(local_tensors([p.grad for p in parameters if p.grad is not None])))
            self._window.gradients.append(_Gradients(names, norms, None if loss_scale is None else loss_scale.clone()))

    def post_train_batch(self, trainer: AbstractTrainer, result: dict[str, Any], batch_idx: int) -> None:
        batches = self._window.batches
        if batches and batch_idx <= batches[-1][0]:  # the window runs again
            batches.clear()
        batches.append((batch_idx, {name: keep(name, value) for name, value in result.items() if is_scalar(value)}))

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        window, self._window = self._window, _Window()
        window.step, window.epoch, window.end = trainer.global_step, trainer.current_epoch, trainer.progress.data
        window.samples = trainer.samples_seen - self._samples_seen
        self._samples_seen = trainer.samples_seen
        self._windows.append(window)
        if len(self._windows) >= LOOK_EVERY:
            self._look_together(trainer)

    def post_fit(self, trainer: AbstractTrainer) -> None:
        self._look_together(trainer)

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        """Looks at the steps before a NonFiniteError, and at the gradients that raised it."""
        if not isinstance(exc, NonFiniteError):
            return
        reports = self._look(trainer)
        if self._window.gradients or trainer.accumulation_window.is_open:
            reports += self._look_at_open_window(trainer)
        for report in reports[:1]:
            if not self._has_said and (trainer.world.is_main or report["has_bad_values"]):
                _say(report)

    # -- looks

    def _look_together(self, trainer: AbstractTrainer) -> None:
        """On all ranks at the same step: rank 0 logs the finding of the first rank with a batch to blame."""
        reports = self._look(trainer)
        if not trainer.world.all_reduce(torch.tensor([len(reports)]), "max").item():
            return
        all_reports = [report for of_rank in trainer.world.all_gather_object(reports[:1]) for report in of_rank]
        if trainer.world.is_main and not self._has_said:
            self._has_said = True
            _say(next((report for report in all_reports if report["has_bad_values"]), all_reports[0]))
        trainer.settle()  # under "raise" the guard would notice up to 25 steps later

    def _look(self, trainer: AbstractTrainer) -> list[dict[str, Any]]:
        """Reports on the windows kept, written; waits for the device once if all is well."""
        windows, self._windows = self._windows, []
        values = [value for window in windows for _, values in window.batches for value in values.values()]
        values += [gradients.norms for window in windows for gradients in window.gradients]
        on_devices: dict[torch.device, list[Tensor]] = {}
        for value in values:
            if isinstance(value, Tensor):
                on_devices.setdefault(value.device, []).append(value.reshape(-1))
        is_well = all(math.isfinite(value) for value in values if not isinstance(value, Tensor))
        if is_well and all(bool(torch.cat(flat).isfinite().all()) for flat in on_devices.values()):
            return []
        return [report for window in windows for report in self._reports(trainer, window)]

    def _look_at_open_window(self, trainer: AbstractTrainer) -> list[dict[str, Any]]:
        """Reports on the window that broke off in `step`, whose gradients are still there."""
        window, running = self._window, trainer.accumulation_window
        window.step, window.epoch = trainer.global_step + 1, trainer.current_epoch
        # Its last batch: `backward` has its loss, but no listener got its result yet. It is counted already if the
        # guard checks after the step.
        losses = running.losses
        values: dict[str, Tensor | float] = {
            f"loss {number}" if len(losses) > 1 else "loss": local_tensor(loss) for number, loss in enumerate(losses)
        }
        window.batches.append((trainer.batch_idx - (not running.is_open), values))
        for optimizer in trainer.named_optimizers().values():
            self._take_norms(optimizer, None)
        data = running.data
        if data is not None and data.samples is not None:
            window.end, window.samples = data.end, data.samples
        # Inputs and weights of this moment that are not finite: of the last micro-batch, and before its step.
        inputs: list[dict[str, Any]] = []

        def look(tensor: Tensor) -> None:
            if tensor.is_floating_point():
                nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
                if nans or infs:
                    inputs.append({"shape": list(tensor.shape), "nan": nans, "inf": infs})

        map_tensors(look, running.batch)
        weights = [name for p, name in self._names.items() if not bool(torch.isfinite(local_tensor(p)).all())]
        return self._reports(trainer, window, inputs=inputs, weights=weights)

    # -- reports

    def _reports(self, trainer: AbstractTrainer, window: _Window, **more: Any) -> list[dict[str, Any]]:
        """The report of a window's non-finite values, written, if there are any."""
        gradients: dict[str, str] = {}
        for names, norms, loss_scale in window.gradients:
            if loss_scale is None or float(loss_scale) < 1:
                norm_of = zip(names, norms.tolist(), strict=True)
                gradients |= {name: str(norm) for name, norm in norm_of if not math.isfinite(norm)}
        batches: list[dict[str, Any]] = []
        bad: list[list[str]] = []
        for batch_idx, values in window.batches:
            numbers = {name: float(value) for name, value in values.items()}
            batches.append({"batch_idx": batch_idx, "values": {name: str(value) for name, value in numbers.items()}})
            bad.append([name for name, value in numbers.items() if not math.isfinite(value)])
        if not gradients and not any("loss" in name for names in bad for name in names):
            return []
        end = window.end
        indices = trainer.accumulation_window.indices(end.epoch, end.samples - window.samples, end.samples)
        for batch, samples in zip(batches, indices or [], strict=False):  # None if only the loader knows
            batch["indices"] = samples
        report = {
            "step": window.step,
            "rank": trainer.world.rank,
            "epoch": window.epoch,
            "has_bad_values": any(bad),
            "batches": [batch for batch, names in zip(batches, bad, strict=True) if names or not any(bad)],
            "gradients": gradients,
            "n_gradients": sum(len(of_optimizer.names) for of_optimizer in window.gradients),
            **more,
        }
        if self._n_reports < self.max_reports:
            path = trainer.run_dir / "nonfinite" / f"step_{window.step:08d}_rank_{trainer.world.rank}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=2) + "\n")
            report["path"] = str(path)
        self._n_reports += 1
        return [report]


def _say(report: dict[str, Any]) -> None:
    names = list(report["gradients"])
    some = f"{len(names)} of {report['n_gradients']} gradients are not finite ({listed(names, 3)})"
    parts = [some] if names else []
    for batch in report["batches"] if report["has_bad_values"] else []:
        bad = [f"{k}={v}" for k, v in batch["values"].items() if not math.isfinite(float(v))]
        samples = f" (samples {batch['indices']})" if "indices" in batch else ""
        parts.append(f"batch {batch['batch_idx']}{samples} gave {', '.join(bad)}")
    where = f" Reports of all ranks: {Path(report['path']).parent}" if "path" in report else ""
    logger.error("step %d, rank %d: %s.%s", report["step"], report["rank"], "; ".join(parts), where)
