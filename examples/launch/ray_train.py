"""Runs a training script with Ray Train, as torchrun would: one process for each worker, with the same variables.

    python examples/launch/ray_train.py --workers 16 --gpu examples/gpt/train.py --training.max-steps 5000

When a worker dies, or its node, Ray starts all of them again, and the run resumes from its newest checkpoint. The
script need not know of Ray. `pip install "ray[train]"`, and start this from a directory that all nodes share.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def run_script(config: dict[str, Any]) -> None:
    """What each worker does: `python SCRIPT ARGUMENTS` in the directory that this was started from."""
    os.chdir(config["directory"])
    sys.path.insert(0, str(Path(config["script"]).resolve().parent))
    sys.argv = [config["script"], *config["arguments"]]
    runpy.run_path(config["script"], run_name="__main__")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs a training script on the workers of a Ray cluster.")
    parser.add_argument("--workers", type=int, required=True, help="processes in all")
    parser.add_argument("--gpu", action="store_true", help="each worker gets a GPU")
    parser.add_argument("--max-restarts", type=int, default=3, help="how often all start again after a lost worker")
    parser.add_argument("script", help="as for python: path/to/train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]

    TorchTrainer(
        run_script,
        train_loop_config={"script": options.script, "arguments": options.arguments, "directory": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.max_restarts)),
    ).fit()


if __name__ == "__main__":
    main()
