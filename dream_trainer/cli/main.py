"""The command `dream-trainer`: work on runs without training.

A command is a dataclass with a `run()`; tyro makes its parser. Torch is imported late, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dream_trainer.checks import spell
from dream_trainer.cli.checkpoints import Checkpoints
from dream_trainer.cli.data import Data
from dream_trainer.cli.environment import Environment
from dream_trainer.cli.new import New
from dream_trainer.cli.plot import Plot
from dream_trainer.cli.runs import RUN_VERBS, RunConfig, Runs
from dream_trainer.cli.trainers import FLAGS, CheckTrainer, DescribeTrainer, PlanTrainer, own_words
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
        words = sys.argv[1:] if argv is None else argv
        own = words
        if words and words[0] in FLAGS:
            own = own_words(words)
        command = _parse(own)
        code: int = command.run(*words[len(own) :])
        sys.stdout.flush()
        return code
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


def _parse(words: Sequence[str]) -> Any:
    import tyro

    if words and words[0] not in GROUPS and not words[0].startswith("-"):  # tyro would say "unrecognized option"
        raise ConfigError(f"there is no command {words[0]!r}. Use {spell(GROUPS)}; --help describes them.")
    how = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    if [*words[:1]] == ["runs"] and RUN_VERBS.keys() & words[1:2]:  # without a verb it lists
        return tyro.cli(RUN_VERBS[words[1]], prog=f"dream-trainer runs {words[1]}", args=words[2:], config=how)
    if [*words[:1]] == ["runs"] and words[1:] and not words[1].startswith("-") and not Path(words[1]).is_dir():
        raise ConfigError(f"{words[1]} is not a directory, and no verb of runs. Use {spell(RUN_VERBS)}.")
    return tyro.extras.subcommand_cli_from_dict(
        GROUPS,
        prog="dream-trainer",
        description="Dream Trainer's tools. They need no accelerator and no other process.",
        args=words,
        config=how,
    )


if __name__ == "__main__":
    sys.exit(main())
