"""FSDPParameters: how models are sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dream_trainer.checks import check_boolean
from dream_trainer.config.parameter_class import parameters
from dream_trainer.errors import ConfigError


@parameters
class FSDPParameters:
    """How models are sharded.

    Raises:
        ConfigError: A value cannot work.
    """

    min_group_mib: float = 256
    """Models with fewer MiB of parameters are sharded as one group, which is gathered for whole steps: inside a step
    their parameters are whole, plain tensors. Larger ones are gathered block by block, as are all models with 0, and
    with tensor, pipeline or expert parallelism, float8, `cpu_offload` or the options below."""

    reshard_after_forward: bool | int = True
    """Whether blocks give their gathered parameters back after forward: True saves memory, False saves a second gather
    in backward, an int keeps them sharded over that many ranks of a host."""

    separate_reduce_group: bool = False
    """Whether shards of gradients cross ranks in a process group of their own, so that on GPUs they and the parameters
    that are gathered meanwhile need not wait for each other, at the price of another communicator's memory. From
    PyTorch 2.13 on, where it is experimental."""

    symmetric_memory: bool = False
    """Whether gathered parameters lie in memory that GPUs read from each other, for NCCL's copy engines and symmetric
    kernels (`FSDPModule.set_symm_mem_for_comm`). From PyTorch 2.13 on, where it is experimental; refused by name on
    devices that have no such memory."""

    def __post_init__(self) -> None:
        newer = {"separate_reduce_group": self.separate_reduce_group, "symmetric_memory": self.symmetric_memory}
        for name, is_on in newer.items():
            check_boolean(name, is_on)
            if is_on and torch.__version__ < "2.13":
                raise ConfigError(f"{name}=True needs PyTorch 2.13, and this is {torch.__version__}. Leave it out.")
        if not self.min_group_mib >= 0:
            raise ConfigError(f"min_group_mib={self.min_group_mib!r} is no size. Use 0 or more, such as 256.")
        value = self.reshard_after_forward
        if not isinstance(value, bool) and (not isinstance(value, int) or value < 2):
            raise ConfigError(
                f"reshard_after_forward={value!r} is not understood. Use True, False or an integer above 1."
            )


@dataclass(kw_only=True)
class FSDPConfigMixin:
    """Config of FSDPMixin."""

    fsdp_parameters: FSDPParameters = field(default_factory=FSDPParameters)
    """How models are sharded."""
