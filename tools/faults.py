"""The many kills of `tools/faults.sh`: trials of random plans, and a table of what they did."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from tests.faults.kills import KINDS, RANDOM, Kill, Plan, job_for, straight, trial

KILLS_PER_TRIAL = 6
CASES = [(ranks, is_async) for ranks in (1, 2) for is_async in (False, True)]


def plans(rng: random.Random) -> Iterator[list[Plan]]:
    """Plans of trial after trial: every second kill comes at a random instant, the others at the phases in turn."""
    phases = cycle(kind for kind in KINDS if kind != RANDOM)
    while True:
        found = [RANDOM if rng.random() < 0.5 else next(phases) for _ in range(KILLS_PER_TRIAL)]
        yield [Plan(kind, one_rank=rng.random() < 0.5) for kind in found]


def table(kills: list[Kill]) -> str:
    """One row for each kind of kill, by ranks and who was killed."""
    lines = [
        f"{'SIGKILL':<28}{'to':<14}{'kills':>6}{'steps lost at most':>28}{'others end within':>20}",
        f"{'':<28}{'':<14}{'':>6}{'saving sync':>16}{'async':>12}",
    ]
    for kind in KINDS:
        for whom, of_kind in {
            "the only rank": [kill for kill in kills if kill.plan.kind == kind and kill.ranks == 1],
            "one of 2": [k for k in kills if k.plan.kind == kind and k.ranks == 2 and k.plan.one_rank],
            "both": [k for k in kills if k.plan.kind == kind and k.ranks == 2 and not k.plan.one_rank],
        }.items():
            lost = [
                str(max((kill.lost for kill in of_kind if kill.is_async is is_async), default="-"))
                for is_async in (False, True)
            ]
            ends = f"{max(kill.seconds_to_end for kill in of_kind):.1f} s" if whom == "one of 2" and of_kind else ""
            lines.append(f"{kind:<28}{whom:<14}{len(of_kind):>6}{lost[0]:>16}{lost[1]:>12}{ends:>20}")
    return "\n".join(lines)


def main(n_kills: int, seed: int) -> int:
    """Runs trials until `n_kills` kills have come; the number of failed trials."""
    rng, started = random.Random(seed), time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    truths = {ranks: straight(job_for(ranks=ranks, is_async=False), root / f"straight-{ranks}") for ranks in (1, 2)}
    kills: list[Kill] = []
    failures = trials = 0
    for (ranks, is_async), planned in zip(cycle(CASES), plans(rng), strict=False):
        directory = root / f"trial-{trials}"
        try:
            job = job_for(ranks=ranks, is_async=is_async)
            kills += trial(job, directory, truths[ranks], planned[: n_kills - len(kills)], rng.randrange(2**32))
        except (AssertionError, TimeoutError) as error:
            failures += 1
            print(f"FAILED {directory}: {planned}\n{error}", file=sys.stderr)
        trials += 1
        print(f"\r{len(kills)} kills in {trials} trials, {failures} failed", end="", file=sys.stderr, flush=True)
        if len(kills) >= n_kills or failures > 10:
            break
    print(f"\n{table(kills)}\n")
    print(f"{len(kills)} kills in {trials} runs, {time.monotonic() - started:.0f} s, seed {seed}.")
    if failures:
        print(f"{failures} runs lost something; their files are in {root}.")
    else:
        shutil.rmtree(root)
        print("Every run ended bit for bit as the undisturbed one; every listed checkpoint was whole after every kill.")
    return failures


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]] + [200, 0][len(sys.argv) - 1 :]
    sys.exit(1 if main(*arguments) else 0)
