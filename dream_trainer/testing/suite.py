"""Checks of a trainer as functions, for tests of a project's own, and as a list of findings."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from dream_trainer.errors import DreamTrainerError
from dream_trainer.screen import show
from dream_trainer.testing.program import MakeTrainer, Program, apart

CHECKS = ("deterministic", "parity", "resume", "kill", "order", "validation", "schedules", "cost")


@dataclass
class Finding:
    """One line of the report, and what is known about its cause."""

    check: str
    holds: bool | None  # None if it could not be checked, or is only informational
    text: str
    cause: Sequence[str] = ()

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}[self.holds]
        return "\n".join([f"{mark} {self.check}: {self.text}", *(f"       {line}" for line in self.cause)])


class ProgramError(DreamTrainerError):
    """The user's program fails by itself, on one rank."""


class TrainerCheckError(AssertionError):
    """Something that should hold of a trainer does not."""


def findings(
    program: Program, *, checks: Sequence[str] = CHECKS, meshes: Sequence[str] | None = None, quick: bool = False
) -> Iterator[Finding]:
    """Findings about a program's trainer, as `check_trainer` has them. A terminal shows a line after each run."""
    for found in apart("dream_trainer.testing.findings.send", program, checks, meshes, quick=quick):
        is_finding = isinstance(found, Finding)
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{'' if is_finding else found}", end="", file=sys.stderr, flush=True)
        if is_finding:
            yield found


def _check(program: MakeTrainer | str, checks: Sequence[str], meshes: Sequence[str] | None, *, quick: bool) -> None:
    found = findings(Program.of(program), checks=checks, meshes=meshes, quick=quick)
    if failed := [str(each) for each in found if each.holds is False]:
        raise TrainerCheckError("\n".join(failed))


def check_trainer(make_trainer: MakeTrainer | str, *, meshes: Sequence[str] | None = None, quick: bool = False) -> None:
    """Runs all checks.

    Args:
        make_trainer: A function of a module that returns a trainer, or "PROGRAM" or "PROGRAM:FUNCTION".
        meshes: Those on which parity is checked: "replicas", "shards", "hybrid", "tensor", "context", "pipeline",
            "expert". Default: all that the trainer supports.
        quick: Whether to leave out slower checks: four ranks, further places to stop at, SIGTERM, exports.

    Raises:
        ConfigError: The trainer cannot be checked on one of `meshes`.
        TrainerCheckError: Something does not hold; the message has one line for each, and the likely cause.
        ProgramError: The program fails by itself, in one process.

    Example:
        ```python
        from dream_trainer.testing import check_trainer

        def test_my_trainer():
            check_trainer("train.py", quick=True)
        ```
    """
    _check(make_trainer, CHECKS, meshes, quick=quick)


def check_deterministic(make_trainer: MakeTrainer | str) -> None:
    """Two equal runs are equal bit for bit; arguments and errors as in `check_trainer`."""
    _check(make_trainer, ("deterministic",), (), quick=True)


def check_parity(make_trainer: MakeTrainer | str, *, meshes: Sequence[str] | None = None) -> None:
    """Ranks and accumulation compute what one process does, to rounding; arguments and errors as in `check_trainer`."""
    _check(make_trainer, ("deterministic", "parity"), meshes, quick=False)


def check_resume(make_trainer: MakeTrainer | str, *, quick: bool = False) -> None:
    """A run that is stopped and resumed is the undisturbed one; arguments and errors as in `check_trainer`."""
    _check(make_trainer, ("deterministic", "resume"), None, quick=quick)


def check_kill(make_trainer: MakeTrainer | str, *, quick: bool = False) -> None:
    """A run with a killed rank ends like the undisturbed one; arguments and errors as in `check_trainer`."""
    _check(make_trainer, ("deterministic", "parity", "kill"), None, quick=quick)


def check_order(make_trainer: MakeTrainer | str) -> None:
    """Hashing and the number of workers change nothing; arguments and errors as in `check_trainer`."""
    _check(make_trainer, ("deterministic", "order"), (), quick=False)


def check_validation(make_trainer: MakeTrainer | str) -> None:
    """Validation changes nothing, and its values do not depend on ranks; arguments and errors as in `check_trainer`."""
    _check(make_trainer, ("validation",), None, quick=True)


def report(program: Program, checks: Sequence[str], *, quick: bool, as_json: bool) -> int:
    """Prints a line for each check; returns 1 if something does not hold."""
    began, found = time.monotonic(), []
    try:
        for finding in findings(program, checks=checks, quick=quick):
            found.append(finding)
            if not as_json:
                show(str(finding))
    except ProgramError as error:
        show(f"{error}\n\n{program.path} fails by itself, in one process: see above.", sys.stderr)
        return 1
    failed = sum(finding.holds is False for finding in found)
    verdict = f"{failed} of {len(found)} do not hold" if failed else "all that was checked holds"
    took = f"{time.monotonic() - began:.0f} s"
    show(json.dumps([asdict(finding) for finding in found], indent=2) if as_json else f"{verdict}\n{took}")
    return int(failed > 0)
