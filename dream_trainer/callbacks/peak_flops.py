"""The peak rate of matrix products of accelerators we know, by the precision at work.

Dense figures (no structured sparsity; where a datasheet prints only the sparse one, half of it), with float32
accumulation, in TFLOP/s, from the makers' documents:

- Data centre, NVIDIA: datasheets of T4, V100, A10, A30, A40, A100, L4, L40, L40S, H100, H200, GH200, HGX B200 and GB200
- Workstation and GeForce, NVIDIA: RTX A6000 datasheet; the architecture white papers "NVIDIA Ampere GA102", "NVIDIA Ada
  GPU Architecture" and "NVIDIA RTX Blackwell GPU Architecture", appendix tables
- AMD: data sheets of Instinct MI300X and MI325X
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


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
# Cut-down or mobile chips that carry a bigger one's name.
_OTHERS = {"laptop", "mobile", "mig", "d", "ti"}
# What ends the name of a part of a device that NVIDIA's vGPU software lends: GiB and kind, as in "GRID A100-10C".
_VIRTUAL = re.compile(r"-\d+[abcq](me)?$")


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """The peak of one device.

    Args:
        device_name: As `torch.cuda.get_device_name` says it.
        dtype: What products are computed in.
        tf32: Whether float32 products may use TF32.

    Returns:
        FLOP/s, a multiply-add counted as two; None if the device or its rate in this precision is not known.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHERS or _VIRTUAL.search(device_name.lower()):
        return None
    for name, peaks in _PEAKS:
        if set(name.lower().split()) <= words:
            by_dtype = {
                torch.float16: peaks.fp16,
                torch.bfloat16: peaks.bf16,
                torch.float32: (peaks.tf32 or peaks.fp32) if tf32 else peaks.fp32,
            }
            peak = by_dtype.get(dtype)
            return None if peak is None else peak * 1e12
    return None
