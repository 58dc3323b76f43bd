"""`dream-trainer env`: versions, devices and settings for a bug report, without secrets."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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

    def run(self) -> int:
        import torch
        import torch.distributed as dist

        from dream_trainer.version import __version__

        packages = {}
        for name in _PACKAGES:
            with suppress(PackageNotFoundError):
                packages[name] = version(name)
        backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(name)]
        facts: dict[str, dict[str, Any]] = {
            "machine": {
                "dream_trainer": __version__,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.release()} {platform.machine()}",
                "cpus": len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count(),
            },
            "pytorch": {
                "torch": torch.__version__,
                "cuda": torch.version.cuda or "not built in",
                "backends": ", ".join(backends) or "none",
                "threads": torch.get_num_threads(),
                **_devices(),
            },
            "packages": packages,
            "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        }
        if self.as_json:
            print_json(facts)
            return 0
        for title, group in facts.items():
            print_table(title, [], [[name, str(value)] for name, value in group.items()])
        return 0


def _devices() -> dict[str, str]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {"devices": "cpu only"}
    found = {"devices": f"{torch.accelerator.device_count()} {accelerator.type}"}
    for index in range(torch.cuda.device_count() if accelerator.type == "cuda" else 0):
        gpu = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}"
    return found
