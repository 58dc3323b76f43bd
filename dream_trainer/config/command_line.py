"""Any config as a command line: `--training-parameters.n-epochs 3`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

import tyro

from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.errors import ConfigError

T = TypeVar("T", bound=BaseTrainerConfig)


def parse(config: T | type[T], args: Sequence[str] | None = None) -> T:
    """Builds a config from command-line arguments; `--help` lists every field with its meaning and default.

    Callbacks are code and not on the command line: they stay as the given instance, or the class's default, has them.

    Args:
        config: an instance, whose values are the defaults, or a class, whose fields without default are then required.
        args: the arguments; `sys.argv[1:]` if None.

    Raises:
        SystemExit: with code 2 after a message on stderr, if an argument is unknown or a value cannot work; with code 0
            after `--help`.
    """
    hide_what_has_no_text = (tyro.conf.SuppressFixed,)
    try:
        if isinstance(config, type):
            return tyro.cli(config, args=args, config=hide_what_has_no_text)
        parsed = tyro.cli(type(config), args=args, default=config, config=hide_what_has_no_text)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    parsed.callbacks = config.callbacks  # tyro would build an empty collection of its own
    return parsed
