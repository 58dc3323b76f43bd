"""The command `dream-trainer`: work on runs without training.

A command is a dataclass with a `run()` that may return an exit code; tyro makes its parser. Torch is imported late, so
that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from dream_trainer.checks import spell
from dream_trainer.cli.checkpoints import Checkpoints
from dream_trainer.cli.new import New
from dream_trainer.cli.output import Shows, print_json
from dream_trainer.cli.plot import Plot
from dream_trainer.cli.runs import RunConfig, Runs, RunShow
from dream_trainer.cli.trainers import CheckTrainer, DescribeTrainer, PlanTrainer
from dream_trainer.errors import ConfigError, DreamTrainerError
from dream_trainer.screen import print_table, show


@dataclass(frozen=True, kw_only=True)
class Data:
    """Write text into token files, for TokenFile. The same command again continues after a kill."""

    command: Positional[Literal["tokenize"]]
    """The command."""
    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT [INPUT ...]", help_behavior_hint="")]
    """Files or patterns of files: .jsonl and .jsonl.gz (a document per line), .parquet (per row), others (per file); or
    hf:NAME of a Hugging Face dataset, hf:DIRECTORY of a saved one."""
    output: Annotated[Path, arg(metavar="DIRECTORY")]
    """Directory for the token files."""
    tokenizer: Annotated[str, arg(metavar="NAME")] = "bytes"
    """bytes; a tokenizer.json file; or a name or directory for transformers."""
    end: Annotated[str | None, arg(metavar="TOKEN", help_behavior_hint="")] = None
    """Token at a document's end. By default the tokenizer's own, if it has one."""
    field: Annotated[str, arg(metavar="NAME")] = "text"
    """Field of a line, or column of a row, that has the text."""
    split: Annotated[str, arg(metavar="NAME")] = "train"
    """Split of a Hugging Face dataset."""
    workers: Annotated[int, arg(metavar="N")] = 1
    """Number of processes; each makes one shard at a time."""

    def run(self) -> None:
        import numpy as np

        from dream_trainer.checks import check_integer
        from dream_trainer.data.sources.token_file import TokenFile, plan_tasks, tokenize

        check_integer("workers", self.workers, minimum=1)
        tasks = plan_tasks(self.inputs, self.field, self.split)
        made: list[int] = []

        def done(tokens: int) -> None:
            made.append(tokens)
            show(f"{len(made)} of {len(tasks)} shards, {sum(made):,} tokens", sys.stderr)

        tokenize(tasks, self.output, self.tokenizer, end=self.end, workers=self.workers, done=done)
        tokens = TokenFile(self.output)
        print(
            f"{self.output}: {len(tokens):,} documents, {tokens.num_tokens:,} tokens; tokens of a document: mean "
            f"{tokens.lengths.mean():,.0f}, median {np.median(tokens.lengths):,.0f}, longest "
            f"{tokens.lengths.max():,}. Vocabulary: {tokens.vocabulary_size}"
        )


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


GROUPS: dict[str, Callable[..., Any]] = {
    "new": New,
    "runs": Runs,
    "config": RunConfig,
    "checkpoints": Checkpoints,
    "data": Data,
    "plot": Plot,
    "describe": DescribeTrainer,
    "check": CheckTrainer,
    "plan": PlanTrainer,
    "env": Environment,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0; 1 if it failed, with one line on stderr, or found damage; 2 for wrong arguments."""
    try:
        command, others = _parse(sys.argv[1:] if argv is None else [*argv])
        code: int | None = command.run(*others)
        sys.stdout.flush()
        return code or 0
    except SystemExit as end:  # tyro's: after --help, or wrong arguments
        return end.code if isinstance(end.code, int) else 2
    except BrokenPipeError:  # of `... | head`; without this the interpreter complains when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (DreamTrainerError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _parse(words: list[str]) -> tuple[Any, list[str]]:
    """The command, and the words that it hands on to a program."""
    import tyro

    if words and words[0] not in GROUPS and not words[0].startswith("-"):  # tyro would say "unrecognized option"
        raise ConfigError(f"there is no command {words[0]!r}. Use {spell(GROUPS)}; --help describes them.")
    how = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    if words[:1] in (["check"], ["plan"]):
        at = words.index("--") if "--" in words else len(words)
        own, kind = words[1:at], GROUPS[words[0]]
        found = tyro.cli(kind, prog=f"dream-trainer {words[0]}", args=own, config=how, return_unknown_args=True)
        return found[0], [*found[1], *words[at + 1 :]]
    if words[:2] == ["runs", "show"]:  # without a verb it lists
        return tyro.cli(RunShow, prog="dream-trainer runs show", args=words[2:], config=how), []
    command = tyro.extras.subcommand_cli_from_dict(
        GROUPS,
        prog="dream-trainer",
        description="Dream Trainer's tools. They need no accelerator and no other process.",
        args=words,
        config=how,
    )
    return command, []
