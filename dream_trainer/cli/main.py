"""The command `dream-trainer`: work on runs without training.

A command is a dataclass with a `run()` that may return an exit code; tyro makes its parser. Torch is imported late, so
that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dream_trainer.checks import spell
from dream_trainer.cli.checkpoints import Checkpoints
from dream_trainer.cli.data import Data
from dream_trainer.cli.environment import Environment
from dream_trainer.cli.new import New
from dream_trainer.cli.plot import Plot
from dream_trainer.cli.runs import RunConfig, Runs, RunShow
from dream_trainer.cli.trainers import CheckTrainer, DescribeTrainer, PlanTrainer
from dream_trainer.errors import ConfigError, DreamTrainerError

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
