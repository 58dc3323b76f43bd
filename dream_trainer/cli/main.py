"""The command `dream-trainer`: what one does with a run without training.

A command is a dataclass with a `run()`, and a group of commands one whose `command` is one of several of them; tyro
makes the parser and the help texts from their fields. `run()` imports what it needs, so that `--help` need not wait for
torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dream_trainer.checks import spell
from dream_trainer.cli.checkpoints import Checkpoints
from dream_trainer.cli.data import Data
from dream_trainer.cli.environment import Environment
from dream_trainer.cli.experiments import RunConfig, Runs
from dream_trainer.cli.new import New
from dream_trainer.cli.plot import Plot
from dream_trainer.cli.trainer_description import DescribeTrainer
from dream_trainer.errors import ConfigError, DreamTrainerError

GROUPS: dict[str, Callable[..., Any]] = {
    "new": New,
    "runs": Runs,
    "config": RunConfig,
    "checkpoints": Checkpoints,
    "data": Data,
    "plot": Plot,
    "describe": DescribeTrainer,
    "env": Environment,
}
DESCRIPTION = "Dream Trainer's tools. They need no accelerator and no other process."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments; `sys.argv[1:]` if None.

    Returns:
        The exit code: 0; 1 if the command failed, with one line on stderr, or found damage; 2 if the arguments are
        wrong.
    """
    try:
        code: int = _parse(argv).run()
        sys.stdout.flush()
        return code
    except SystemExit as end:  # tyro's: after --help, or wrong arguments
        return end.code if isinstance(end.code, int) else 2
    except ConfigError as error:
        return _failed(error, code=2)
    except BrokenPipeError:
        # `... | head`: nobody reads on, and the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (DreamTrainerError, OSError) as error:
        return _failed(error, code=1)
    except KeyboardInterrupt:
        return 130


def _parse(argv: Sequence[str] | None) -> Any:
    import tyro

    words = sys.argv[1:] if argv is None else argv
    if words and words[0] not in GROUPS and not words[0].startswith("-"):  # of which tyro says "unrecognized option"
        raise ConfigError(f"there is no command {words[0]!r}. Use {spell(GROUPS)}; --help says what they do.")
    return tyro.extras.subcommand_cli_from_dict(
        GROUPS,
        prog="dream-trainer",
        description=DESCRIPTION,
        args=argv,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
    )


def _failed(error: Exception, *, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
