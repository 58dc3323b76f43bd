"""Throughput: samples and tokens per second, how much of the device they use, and how long training waits for data."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, NamedTuple

import torch

from dream_trainer.checks import check_positive, refuse
from dream_trainer.compat.pytorch import tf32_is_allowed
from dream_trainer.config.parameter_class import NonNegativeInt, PositiveInt, check_fields
from dream_trainer.events.callback import LoggingCallback
from dream_trainer.loggers.progress import Look, look_at
from dream_trainer.trainer.abstract import AbstractTrainer

Flops = float | Callable[[Any], float]  # or a function of the trainer


@dataclass(eq=False, repr=False)
class Throughput(LoggingCallback):
    """Logs the speed of training, over all ranks and per device; under `throughput/`, or another name:

    - `samples_per_second`, `samples_per_second_per_device`
    - `tokens_per_second`, `tokens_per_second_per_device`, if `tokens_per_sample` is given or the trainer counts them
      (`batch_tokens`)
    - `data_wait`: share of the time that the step path waited for data
    - `mfu`: model FLOP/s over the peak of the device in the precision at work, if `flops_per_sample` or
      `flops_per_token` is given and the peak is known; never on a CPU

    It counts trained samples over training time, without the first steps, validations, and waits for checkpoints. The
    values of an interval carry its seconds as their weight, so a logged mean is exact over any number of intervals.

    Args:
        name: First part of the metrics' names.
        every_n_steps: Optimizer steps in an interval.
        warm_up_steps: First steps of each process, which are not measured.
        tokens_per_sample: Tokens in each sample.
        flops_per_sample: FLOPs of forward and backward for one sample, recomputation left out; or a function that gives
            them, called with the trainer when training starts.
        flops_per_token: The same for one token; 6 times the number of parameters, and attention.
        device_flops: Peak of one device in FLOP/s; None looks it up.
        clock: Seconds from any origin; tests pass their own.
    """

    name: str = "throughput"
    _: KW_ONLY
    every_n_steps: PositiveInt = 10
    warm_up_steps: NonNegativeInt = 3
    tokens_per_sample: Annotated[int, check_positive] | None = None
    flops_per_sample: Flops | None = None
    flops_per_token: Flops | None = None
    device_flops: Annotated[float, check_positive] | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        super().__init__(self.name)
        check_fields(self, Throughput)
        costs = (self.flops_per_sample, self.flops_per_token)
        for argument, flops in zip(("flops_per_sample", "flops_per_token"), costs, strict=True):
            if flops is not None and not callable(flops):
                check_positive(argument, flops, hint=" Or a function of the trainer.")
        refuse(None not in costs, "flops_per_sample and flops_per_token both say what a step costs. Pass one of them.")

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        self._start: Look | None = None
        self._due = trainer.global_step + self.warm_up_steps
        self._mfu_of_one = 0.0  # what one unit of work per second and device amounts to; 0 if it is not known
        flops = self.flops_per_token if self.flops_per_sample is None else self.flops_per_sample
        if flops is not None and (peak := self._peak(trainer)) is not None:
            self._mfu_of_one = (flops(trainer) if callable(flops) else flops) / peak
        if self.warm_up_steps == 0:
            self._begin(trainer)

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        if trainer.global_step >= self._due:
            before, now = self._start, self._begin(trainer)
            if before is not None:
                self._log(trainer, before, now)

    def _begin(self, trainer: AbstractTrainer) -> Look:
        self._start, self._due = look_at(trainer, self.clock()), trainer.global_step + self.every_n_steps
        return self._start

    def _log(self, trainer: AbstractTrainer, start: Look, end: Look) -> None:
        world = trainer.world
        seconds, _, samples, tokens, waiting = end.rates_since(start)
        if seconds <= 0:
            return
        rates = {
            "samples_per_second": samples,
            "samples_per_second_per_device": samples / world.world_size,
            "data_wait": waiting,
        }
        if self.tokens_per_sample is not None:
            tokens = samples * self.tokens_per_sample
        if tokens:
            rates["tokens_per_second"] = tokens
            rates["tokens_per_second_per_device"] = tokens / world.world_size
        if mfu := (tokens if self.flops_per_sample is None else samples) / world.world_size * self._mfu_of_one:
            rates["mfu"] = mfu
        for name, value in rates.items():
            trainer.log(f"{self.name}/{name}", value, weight=seconds)

    def _peak(self, trainer: AbstractTrainer) -> float | None:
        if self.device_flops is not None:
            return self.device_flops
        device = trainer.world.device
        if device.type != "cuda":
            return None
        name, dtype = torch.cuda.get_device_name(device), dtype_at_work(trainer)
        peak = peak_flops(name, dtype, tf32=tf32_is_allowed())
        if peak is None:
            trainer.warn_once(
                f"peak {name}",
                f"the peak of {name} in {dtype} is not known: no MFU. Pass Throughput(device_flops=...).",
            )
        return peak


def dtype_at_work(trainer: AbstractTrainer) -> torch.dtype:
    """Type of most of the models' products: the configured half precision, or the parameters' type without one."""
    precision = trainer.config.device_parameters.precision
    if precision in ("bf16", "fp16"):
        return torch.bfloat16 if precision == "bf16" else torch.float16
    sizes: dict[torch.dtype, int] = {}
    for model in trainer.named_models().values():
        for parameter in model.parameters():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


# Peak rates of matrix products of known accelerators, in TFLOP/s: dense (half of a datasheet's sparse figure), with
# float32 accumulation. From NVIDIA's and AMD's datasheets and NVIDIA's white papers on Ampere, Ada and Blackwell.


class _Peaks(NamedTuple):
    """TFLOP/s; None where the device lacks the format."""

    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float


# The first whose words are all in the device's name counts, so variants come before the plain name.
_PEAKS: tuple[tuple[str, _Peaks], ...] = (
    ("GB200", _Peaks(2500, 2500, 1250, 80)),
    ("B200", _Peaks(2250, 2250, 1125, 75)),
    ("GH200", _Peaks(989.4, 989.4, 494.7, 67)),
    ("H200 NVL", _Peaks(835.5, 835.5, 417.5, 60)),
    ("H200", _Peaks(989.4, 989.4, 494.7, 67)),
    ("H100 NVL", _Peaks(835.5, 835.5, 417.5, 60)),
    ("H100 PCIe", _Peaks(756, 756, 378, 51)),
    ("H100 HBM3", _Peaks(989.4, 989.4, 494.7, 67)),
    ("A100", _Peaks(312, 312, 156, 19.5)),
    ("A40", _Peaks(149.7, 149.7, 74.8, 37.4)),
    ("A30", _Peaks(165, 165, 82, 10.3)),
    ("A10", _Peaks(125, 125, 62.5, 31.2)),
    ("L40S", _Peaks(362.05, 362.05, 183, 91.6)),
    ("L40", _Peaks(181.05, 181.05, 90.5, 90.5)),
    ("L4", _Peaks(121, 121, 60, 30.3)),
    ("V100 SXM2", _Peaks(125, None, None, 15.7)),
    ("V100 PCIE", _Peaks(112, None, None, 14)),
    ("T4", _Peaks(65, None, None, 8.1)),
    ("RTX 6000 Ada", _Peaks(364.2, 364.2, 182.1, 91.1)),
    ("RTX A6000", _Peaks(154.8, 154.8, 77.4, 38.7)),
    ("RTX 5090", _Peaks(209.5, 209.5, 104.8, 104.8)),
    ("RTX 4090", _Peaks(165.2, 165.2, 82.6, 82.6)),
    ("RTX 3090", _Peaks(71, 71, 35.6, 35.6)),
    ("MI325X", _Peaks(1307.4, 1307.4, 653.7, 163.4)),
    ("MI300X", _Peaks(1307.4, 1307.4, 653.7, 163.4)),
)
_OTHERS = {"laptop", "mobile", "mig", "d", "ti"}  # cut-down or mobile chips that carry a bigger one's name
# End of the name of a part of a device under NVIDIA's vGPU software: GiB and kind, as in "GRID A100-10C".
_VIRTUAL = re.compile(r"-\d+[abcq](me)?$")


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """FLOP/s of one device, a multiply-add counted as two; None if the device or its rate is not known."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHERS or _VIRTUAL.search(device_name.lower()):
        return None
    for name, peaks in _PEAKS:
        if set(name.lower().split()) <= words:
            of_float32 = (peaks.tf32 or peaks.fp32) if tf32 else peaks.fp32
            peak = {torch.float16: peaks.fp16, torch.bfloat16: peaks.bf16, torch.float32: of_float32}.get(dtype)
            return None if peak is None else peak * 1e12
    return None
