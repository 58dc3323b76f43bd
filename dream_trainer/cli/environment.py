"""`dream-trainer env`: what a bug report needs to say of a machine, and nothing that is secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, arg

# Of the environment only what changes a run: by name, for no other variable may be shown.
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
class Environment:
    """Print versions, devices and settings of this machine, for a bug report."""

    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print JSON."""

    def run(self) -> int:
        """Prints."""
        from dream_trainer.cli.output import print_json

        facts = environment()
        if self.json:
            print_json(facts)
            return 0
        for title, group in facts.items():
            print(title)
            width = max(map(len, group), default=0)
            for name, value in group.items():
                print(f"  {name:<{width}}  {value}")
        return 0


def environment() -> dict[str, dict[str, Any]]:
    """What there is, by group: machine, PyTorch, packages that are installed, and variables that are set."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from dream_trainer.version import __version__

    def version_of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    versions = {package: version_of(package) for package in _PACKAGES}
    return {
        "machine": {
            "dream_trainer": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpus": len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count(),
        },
        "pytorch": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "not built in",
            "backends": ", ".join(_backends()) or "none",
            "threads": torch.get_num_threads(),
            **_devices(),
        },
        "packages": {name: found for name, found in versions.items() if found is not None},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, is_there in known.items() if is_there()]


def _devices() -> dict[str, str]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {"devices": "cpu only"}
    found = {"devices": f"{torch.accelerator.device_count()} {accelerator.type}"}
    if accelerator.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            found[f"cuda:{index}"] = (
                f"{properties.name}, {properties.total_memory / 1024**3:.1f} GiB, capability {capability}"
            )
    return found
