"""`dream-trainer env`: versions, settings and PyTorch's report on the machine for a bug report, without secrets."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from dream_trainer.cli.output import Shows, print_json
from dream_trainer.screen import print_table

# Only these are shown, so that no key or password is.
_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME"),
    *("TORCH_LOGS", "TORCHDYNAMO_DISABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "WANDB_MODE", "DREAM_TRAINER_RUNS"),
)
_PACKAGES = (
    *("torch", "torchdata", "numpy", "safetensors", "rich", "tyro", "cattrs", "xxhash", "PyYAML"),
    *("torchmetrics", "transformers", "datasets", "pyarrow", "peft", "accelerate", "optuna", "huggingface_hub"),
    *("wandb", "tensorboard", "mlflow-skinny", "mlflow", "trackio", "matplotlib", "pillow"),
)


@dataclass(frozen=True, kw_only=True)
class Environment(Shows):
    """Print versions, devices and settings of this machine, for a bug report."""

    def run(self) -> None:
        from torch.utils.collect_env import get_env_info, pretty_str

        from dream_trainer.version import __version__

        packages = {"dream_trainer": __version__}
        for name in _PACKAGES:
            with suppress(PackageNotFoundError):
                packages[name] = version(name)
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        machine = get_env_info()
        if self.as_json:
            print_json({"packages": packages, "variables": variables, "machine": machine._asdict()})
            return
        print_table("packages", [], list(packages.items()))
        print_table("variables", [], list(variables.items()))
        print(pretty_str(machine))
