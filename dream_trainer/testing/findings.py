"""The checks of a trainer: the runs they need, their findings, and likely causes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dream_trainer.errors import ConfigError, DreamTrainerError
from dream_trainer.testing.comparison import (
    Difference,
    Rounding,
    all_logged,
    beyond_rounding,
    first_difference,
    lost_attributes,
    other_files,
    ranks_differ,
    stable_values,
    steps_of,
    weights_apart,
)
from dream_trainer.testing.launcher import Launcher, Run
from dream_trainer.testing.rank_process import Mesh

DATA = ("replicas", "shards", "hybrid")
SLOW = 0.25
"""Seconds of CPU time of a step above which batches are made smaller."""
SETS = "Iterate over a list or sorted(...), not over a set."
OWN_STATE = (
    "has its own state, which each worker copies, or draws from its own generator. Draw from the global "
    "generators, which are seeded for each sample."
)
LOCAL_VALUE = (
    "computes it over this rank's samples, or weighs batches of unequal size alike. Return the value and its weight, "
    "or use a torchmetrics object."
)
TWICE = "self.step(model, optimizer, scheduler) steps what it is handed: leave out the other call."
CHECKS = ("deterministic", "parity", "resume", "kill", "order", "validation", "schedules", "cost")


@dataclass
class Finding:
    """One line of the report, and what is known about its cause."""

    check: str
    holds: bool | None
    """None if it could not be checked, or is only informational."""
    text: str
    cause: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}[self.holds]
        return "\n".join([f"{mark} {self.check}: {self.text}", *(f"       {line}" for line in self.cause)])


class ProgramError(DreamTrainerError):
    """The user's program fails by itself, on one rank."""


class TrainerChecks:
    """The checks of one program.

    Args:
        launcher: Starts its runs.
        quick: Whether to leave out four ranks, further places to stop at, SIGTERM, and other checks that take longer.
    """

    def __init__(self, launcher: Launcher, *, quick: bool = False) -> None:
        self._launcher, self._quick = launcher, quick
        self._futures: dict[str, Future[Run]] = {}
        self._chains: dict[str, Future[list[Run]]] = {}  # of runs that resume another
        self.epoch: int | None = None
        self._pairs: dict[str, tuple[Run, Run, Run]] = {}  # the runs that parity was checked on
        self._seen: dict[str, Finding] = {}

    def start(self, checks: Sequence[str] = CHECKS, meshes: Sequence[str] | None = None) -> None:
        """Runs the program once, to learn how long it is, and starts the runs that these checks need."""
        scout = self._launcher.start("first look", stop_at=2, saves=0).result()
        if scout.error is not None and scout.error["is_argument"]:
            raise ConfigError(scout.error["message"])
        if not scout.is_whole:
            output = "" if scout.error is not None else self._launcher.output(scout)
            raise ProgramError(scout.error["trace"].strip() if scout.error else f"{scout.why()}\n{output}".strip())
        self._launcher.preload(scout.records[0]["modules"])
        self.facts = facts = scout.records[0]["facts"]
        self._reads_arguments = scout.records[0]["parses"]
        self._launcher.patience = 20 + 3 * scout.seconds
        self._plan(scout)
        self.meshes = self._meshes(scout, meshes)
        self._run("alone")
        if not self._quick or "order" not in checks:
            self._run("again")
        is_compared = "parity" in checks or "validation" in checks
        needs_two = "kill" in checks or ("resume" in checks and not self._quick)
        if is_compared or needs_two:
            self._run("moved", mode="noise")
        for name, (mesh, ranks) in self.meshes.items():
            if is_compared or (needs_two and (mesh, ranks) == self._two):
                self._run(name, mesh=mesh, ranks=ranks)
        if is_compared and (micro := self._half_micro_batch()) is not None:
            self._run("accumulation", micro_batch=micro)
        if "order" in checks:
            self._run("hash", fresh=True, environment={"PYTHONHASHSEED": "1"})
            if not self._quick:
                self._run("workers", workers=2)
        if facts["saves"] and "resume" in checks:
            self._chains["resume"] = self._launcher.begin(self._resumed, "stopped", self.stops, [("alone", 1)])
            if self._two is not None and not self._quick:
                self._chains["fewer"] = self._launcher.begin(
                    self._resumed, "stopped on other ranks", self.stops[:1], [self._two, ("alone", 1)]
                )
        if facts["saves"] and "kill" in checks:
            for name, number in (("SIGKILL", signal.SIGKILL), ("SIGTERM", signal.SIGTERM))[: 1 if self._quick else 2]:
                self._chains[name] = self._launcher.begin(self._killed, name, number)
        if "cost" in checks:
            self._run("cost", mode="timed", stop_at=self.steps)

    # -- which runs

    def _plan(self, scout: Run) -> None:
        facts = self.facts
        per_pass, total = facts["steps_per_pass"], facts["total_steps"]
        is_slow = scout.records[0]["step_seconds"] > SLOW
        wanted, self.epoch = ((6, 2) if is_slow else (9, 3)) if self._quick else (12, 3)
        flags = [word.partition("=")[0].replace("_", "-") for word in self._launcher.program.arguments]
        if total is not None and self._reads_arguments and any(flag.endswith(".max-steps") for flag in flags):
            wanted = total  # as the user says
        elif per_pass is not None and per_pass <= (3 if self._quick else 8):
            wanted, self.epoch = max(wanted // per_pass, 3 if per_pass < 8 else 2) * per_pass, None
        length = self.epoch or per_pass or 3
        self.steps = wanted if total is None else min(wanted, max(1, total))
        self.steps -= self.steps % length if self.steps > length else 0  # so that it ends with a validation
        places = [2 * length + 1] if self._quick else [2, length, length + 1, 2 * length + 1]
        self.stops = sorted({place for place in places if 0 < place < self.steps}) or [max(1, self.steps - 1)]
        batch, accumulation = facts["batch_size"], facts["accumulation"]
        self.batch, self.micro_batch = None if batch is None else batch * accumulation, None
        self.cuts_validation = facts["val_batches"] > 16
        seconds = scout.records[0]["step_seconds"]
        while batch is not None and seconds > SLOW and batch % 2 == 0 and batch > 4:
            batch, seconds, self.micro_batch = batch // 2, seconds / 2, batch // 2
            self.batch = batch * accumulation

    def _meshes(self, scout: Run, wanted: Sequence[str] | None) -> dict[str, tuple[Mesh, int]]:
        facts = self.facts
        if not facts["ranks"] or self.batch is None:
            return {}
        known: dict[str, tuple[Mesh, int]] = {}
        if self.batch % 2 == 0:
            known["2 replicas"] = ("replicas", 2)
            if facts["shards"]:
                known["2 shards"] = ("shards", 2)
            if facts["shards"] and self.batch % 4 == 0 and not self._quick:
                known["2 x 2 shards"] = ("hybrid", 4)
        for mesh in ("tensor", "context") if not self._quick else ():
            if facts[mesh]:
                known[f"{mesh}_parallel=2"] = (mesh, 2)
        if not self._quick and scout.records[0]["staged"]:
            known["pipeline_parallel=2"] = ("pipeline", 2)
        return {name: each for name, each in known.items() if wanted is None or each[0] in wanted}

    @property
    def _two(self) -> tuple[Mesh, int] | None:
        """The default mesh of two ranks."""
        return self.meshes.get("2 shards") or self.meshes.get("2 replicas")

    def _half_micro_batch(self) -> int | None:
        size = self.micro_batch or self.facts["batch_size"]
        return None if self.batch is None or size is None or size % 2 else size // 2

    def _run(self, name: str, *, mode: str = "", **values: Any) -> Future[Run]:
        key = f"{name} {mode}".strip()
        if key not in self._futures:
            self._futures[key] = self._launcher.start(key, mode=mode, **self._same(values.get("ranks", 1)) | values)
        return self._futures[key]

    def _same(self, ranks: int) -> dict[str, Any]:
        validation = max(1, (2 if self.micro_batch else 4) // ranks) if self.cuts_validation else None
        return {
            "steps": self.steps,
            "epoch": self.epoch,
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "validate_every": self.epoch or 3,
            "validation": validation,
        }

    def __getitem__(self, name: str) -> Run:
        return self._futures[name].result()

    def _resumed(self, what: str, stops: Sequence[int], ranks: Sequence[tuple[Mesh, int]]) -> list[Run]:
        """Stopped at each of these places, and continued by a new process."""
        runs_dir, runs = self._launcher.runs_dir(), []
        for number, stop in enumerate([*stops, None]):
            mesh, count = ranks[min(number, len(ranks) - 1)]
            values = self._same(count) | {"mesh": mesh, "ranks": count, "runs_dir": runs_dir, "stop_at": stop}
            where = "resumed" if stop is None else f"{what} at step {stop}"
            runs.append(self._launcher.start(where, **values).result())
            if not runs[-1].is_whole:
                break
        return runs

    def _killed(self, name: str, number: int) -> list[Run]:
        """A run whose rank gets a signal at a random moment, and the same run started again."""
        mesh, ranks = self._two or ("alone", 1)
        values = self._same(ranks) | {"mesh": mesh, "ranks": ranks, "saves": 2, "runs_dir": self._launcher.runs_dir()}
        rng = random.Random()
        at, rank = rng.randrange(2, max(3, self.steps - 1)), rng.randrange(ranks)

        def kill(send: Callable[[int, int], None], steps: Callable[[int], int]) -> None:
            deadline, began = time.monotonic() + self._launcher.patience, time.monotonic()
            while steps(rank) < at and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.random() * (time.monotonic() - began) / (at + 5))
            send(rank, number)

        first = self._launcher.start(f"{name} to one rank", killed=kill, **values).result()
        return [first, self._launcher.start(f"started again after {name}", **values).result()]

    # -- findings

    @cached_property
    def again(self) -> Run:
        """A second run that is equal to the first: under another PYTHONHASHSEED, if that changes nothing."""
        is_run = self._quick and "hash" in self._futures and self["hash"].is_whole
        if is_run and first_difference([self["alone"]], [self["hash"]]) is None:
            return self["hash"]
        return self._run("again").result()

    @cached_property
    def stable(self) -> dict[tuple[int, str], float]:
        return stable_values(self["alone"], self.again)

    @cached_property
    def is_deterministic(self) -> bool:
        return first_difference([self["alone"]], [self.again]) is None

    def hook(self, name: str) -> str:
        """A user's method, and its place."""
        place = self.facts["hooks"].get(name)
        return f"{self.facts['class']}.{name}" + (f" ({place})" if place else "")

    def deterministic(self) -> list[Finding]:
        for run in (self["alone"], self.again):
            if not run.is_whole:
                return [Finding("deterministic", False, f"one process fails. {run.why()}")]
        difference = first_difference([self["alone"]], [self.again])
        if difference is None:
            return [Finding("deterministic", True, f"{self.steps} steps twice, bit for bit")]
        text = f"two equal runs differ, at step {difference.step} in {self._place(difference)}"
        return [Finding("deterministic", False, text, self._unsteady(self["alone"], self.again, difference))]

    def unread(self) -> list[Finding]:
        """Of arguments that nothing may have read."""
        given = " ".join(self._launcher.program.arguments)
        if not given or self._reads_arguments:
            return []
        told = f"{given} changed no config: the program does not call dream_trainer.config.parse, nor from_cli"
        return [Finding("arguments", None, told)]

    def _unsteady(self, one: Run, other: Run, difference: Difference) -> list[str]:
        a, b = one.records[0], other.records[0]
        apart = [path for path, value in a["start"].items() if b["start"].get(path, value) != value]
        cause = [f"`{path}` is another one in each process, from the start." for path in apart[:3]]
        fix = (
            "It comes from the clock, the system or an unseeded generator. Draw from the global generators, which the "
            "trainer seeds from config.seed, or from a generator with a seed."
        )
        return [*cause, fix]

    def _place(self, difference: Difference, one: str = "once", other: str = "then") -> str:
        """Where in the user's code a difference of a stage comes from."""
        told = difference.told(one, other)
        makers = [
            name for name in ("configure_models", "init_weights", "load_pretrained") if name in self.facts["hooks"]
        ]
        stage = {
            "initial weights": "initial weights, of " + " or ".join(map(self.hook, makers or ["setup"])),
            "order": "the order of modules, of " + " or ".join(map(self.hook, makers or ["setup"])),
            "samples": f"the samples, of {self.facts['dataset']} or its loader",
            "results": f"{self.hook('training_step')}, from equal weights and samples",
            "logged": f"{self.hook('training_step')}, from equal weights and samples",
            "gradients": f"gradients, of {self.hook('training_step')}, though losses agree",
            "rates": f"learning rates, of {self.hook('configure_optimizers')} or a scheduler",
            "trained": "which parameters are trained (requires_grad)",
            "weights": "weights, though gradients and learning rates agree",
            "optimizer": "the optimizer's state",
            "buffers": "buffers",
            "steps": "the number of steps",
        }[difference.stage]
        return f"{stage} [{told}]"

    def parity(self) -> list[Finding]:
        found = []
        if not self["alone"].is_whole:
            return []
        if not self.facts["ranks"] or self.batch is None:
            why = (
                "only SetupMixin trains on several ranks" if self.batch is not None else "its loader has no batch size"
            )
            return [Finding("parity", None, f"not checked: {why}")]
        for name in [*self.meshes, *(["accumulation"] if "accumulation" in self._futures else [])]:
            found.append(self._parity_of(name))
        return found

    def _parity_of(self, name: str) -> Finding:
        if name not in self._seen:
            self._seen[name] = self._compared(name)
        return self._seen[name]

    def _compared(self, name: str) -> Finding:
        what, run, alone = f"parity, {name}", self[name], self["alone"]
        mesh, ranks = self.meshes.get(name, ("alone", 1))
        values: dict[str, Any] = {"mesh": mesh, "ranks": ranks}
        if name == "accumulation":
            values = {"micro_batch": self._half_micro_batch()}
            if any(turns > len(alone.records[0]["steps"]) for turns in alone.records[0]["turns"].values()):
                return Finding(what, None, "not checked: an optimizer steps several times on one batch")
        if not run.is_whole:
            return Finding(what, False, run.why(), self._about_failure(run))
        if not self["moved noise"].is_whole:
            return Finding(what, None, f"not checked: rounding could not be measured. {self['moved noise'].why()}")
        if not self.is_deterministic:
            return Finding(what, None, "not checked, since one process is not deterministic")
        if mesh in DATA and (apart := ranks_differ(run)) is not None:
            text = f"ranks differ after step {apart.step}: {self._place(apart, 'on rank 0', 'on another')}"
            return Finding(what, False, text, self._about_ranks(run, apart))
        self._pairs[name] = alone, run, self["moved noise"]
        difference = beyond_rounding(alone, run, Rounding(alone, self["moved noise"]), self.stable)
        if difference is None:
            return Finding(what, True, f"{len(steps_of([run]))} steps as in one process, to rounding")
        if difference.stage not in ("samples", "trained", "rates", "initial weights"):
            mode, why = (
                "still",
                "with models in evaluation mode, since dropout and batch statistics are of a micro-batch",
            )
            first = self._run("alone", mode=mode).result()
            if first.is_whole and _is_random(first):
                mode, why = "seeded", "with equal micro-batches and random numbers, since training_step draws some"
                if name == "accumulation":
                    return Finding(what, None, "not checked: training_step draws random numbers")
            if mode == "seeded":
                size = alone.job.batch or 1
                parts = run.records[0]["facts"]["accumulation"] * (ranks if mesh in DATA else 1)
                values["micro_batch"] = max(1, size // parts)
                first = self._run(f"alone in {parts}", mode=mode, micro_batch=values["micro_batch"]).result()
                moved = self._run(f"moved in {parts}", mode=f"{mode} noise", micro_batch=values["micro_batch"]).result()
            else:
                moved = self._run("moved", mode=f"{mode} noise").result()
            second = self._run(name, mode=mode, **values).result()
            if first.is_whole and second.is_whole and moved.is_whole:
                self._pairs[name] = first, second, moved
                found = beyond_rounding(first, second, Rounding(first, moved), self.stable)
                if mode == "seeded":
                    found = found if found is None or found.stage != "buffers" else None
                if found is None:
                    return Finding(what, True, f"{len(steps_of([second]))} steps as in one process, to rounding; {why}")
                difference, alone, run = found, first, second
        where = self._place(difference, "in one process", f"with {name}")
        text = f"step {difference.step} differs beyond rounding, in {where}"
        return self._told_parity(what, name, text, difference, alone, run)

    def _told_parity(self, what: str, name: str, text: str, difference: Difference, alone: Run, run: Run) -> Finding:
        cause: list[str] = []
        if difference.stage == "samples":
            cause = ["Give each rank the whole dataset in the same order; the trainer deals it."]
        elif difference.stage in ("logged", "gradients"):
            cause = self._own_state(alone, run)
            counts_unlike = _counts_unlike(alone, run, difference.step)
            if name == "accumulation" and not counts_unlike and difference.stage == "logged":
                text = "the loss depends on which samples share a micro-batch, so accumulation changes it"
                return Finding(what, None, text, [self._place(difference, "in one", "in two")])
            if cause:
                pass
            elif counts_unlike and difference.stage == "logged":
                cause.append(
                    "Each part of the batch has the loss that it should have, and parts of unequal numbers of tokens "
                    "or samples count alike. Give self.backward(loss, weight=...) and logged values their weight."
                )
            elif difference.stage == "logged":
                cause.append(
                    "The loss of a sample depends on the others of its rank's batch. Gather them: "
                    "self.world.all_gather_with_gradient."
                )
            else:
                cause.append(
                    "Give self.backward(loss, weight=...) the number of tokens or samples, if micro-batches have "
                    "unequal ones. Until self.reduce_gradients(optimizer) or self.step, gradients are this rank's and "
                    "this micro-batch's own: nothing may read, change or clear p.grad before."
                )
        elif difference.stage == "rates":
            cause = ["Step a scheduler once for each optimizer step, by self.step(model, optimizer, scheduler)."]
        elif difference.stage in ("weights", "optimizer", "buffers"):
            cause = self._moved(run)
        return Finding(what, False, text, cause)

    def _own_state(self, alone: Run, run: Run) -> list[str]:
        """Attributes that steps change, to other values than in one process."""
        start, end, theirs = alone.records[0]["start"], alone.records[0]["end"], run.records[0]["end"]
        found = [
            path
            for path, events in alone.records[0]["changes"].items()
            if "training_step" in events and end.get(path) not in (start.get(path), theirs.get(path))
        ]
        return [
            f"`{path}` changes in {self._changed_in(alone, path)}, and ends with another value." for path in found[:3]
        ]

    def _moved(self, run: Run) -> list[str]:
        moved = {name for found in steps_of([run]).values() for name in found["moved"]}
        if not moved:
            return []
        hooks = [
            self.hook(n)
            for n in ("post_train_step", "pre_train_batch", "post_epoch", "pre_epoch")
            if n in self.facts["hooks"]
        ]
        return [f"{sorted(moved)[0]} is changed between two steps: {', '.join(hooks) or 'by a callback'}."]

    def _about_ranks(self, run: Run, apart: Difference) -> list[str]:
        changes = run.records[0]["changes"]
        cause = self._moved(run)
        if apart.stage == "buffers":
            cause.append(
                f"Each rank changes it from its own samples. Choose how ranks join it in buffer_policies(): "
                f'{{"{apart.name}": "mean"}} or "rank 0".'
            )
        theirs = [record["end"] for record in run.records[1:]]
        for path, value in run.records[0]["end"].items():
            if path in changes and any(end.get(path, value) != value for end in theirs):
                cause.append(f"`{path}` differs between ranks; it changes in {self._changed_in(run, path)}.")
        return cause[:4]

    def _about_failure(self, run: Run) -> list[str]:
        if run.waiting:
            return ["All ranks have to call a collective (all_reduce, gathered, barrier, save) in the same order."]
        return []

    def _changed_in(self, run: Run, path: str) -> str:
        """The methods after which an attribute was another one."""
        events = [*run.records[0]["changes"].get(path, {})]
        events += ["post_train_batch"] if "training_step" in events else []
        hooks = [self.hook(event) for event in events if event in self.facts["hooks"] and event != "pre_fit"]
        return " or ".join(hooks[:2]) or " or ".join(events[:2])

    def resume(self) -> list[Finding]:
        if not self.facts["saves"]:
            return [Finding("resume", None, "not checked: the trainer has no CheckpointMixin")]
        if not self["alone"].is_whole:
            return []
        found = [self._resume_of("resume", self._chains["resume"].result(), self["alone"], self.again)]
        if "fewer" in self._chains:
            runs = self._chains["fewer"].result()
            failed = next((run for run in runs if not run.is_whole), None)
            what = "resume on other ranks"
            if failed is not None:
                found.append(Finding(what, False, failed.why()))
            else:
                found.append(self._other_ranks(what, runs))
        return found

    def _other_ranks(self, what: str, runs: list[Run]) -> Finding:
        counts = f"stopped on {runs[0].job.ranks} ranks at step {runs[0].records[0]['ends']}, continued on 1"
        resumed = runs[-1]
        if resumed.records[0]["begins"] != runs[0].records[0]["ends"]:
            return Finding(what, False, f"{counts}: it begins at step {resumed.records[0]['begins']}")
        name = next(name for name, each in self.meshes.items() if each == self._two)
        if not self.is_deterministic or not self._parity_of(name).holds:
            return Finding(what, None, f"{counts}: not compared, since {name} have no parity")
        if _is_random(self["alone"]) or not self["moved noise"].is_whole:
            return Finding(what, True, f"{counts}; steps draw random numbers and are not compared")
        difference = beyond_rounding(self["alone"], resumed, Rounding(self["alone"], self["moved noise"]), self.stable)
        if difference is None:
            return Finding(what, True, f"{counts}, to rounding")
        if difference.stage not in ("samples", "trained", "rates") and self._draws_statistics(name):
            return Finding(what, True, f"{counts}; batch statistics are of a micro-batch and are not compared")
        text = f"{counts}: step {difference.step} differs in {self._place(difference, 'undisturbed', 'resumed')}"
        return Finding(what, False, text, self._lost(self["alone"], self.again, resumed))

    def _draws_statistics(self, name: str) -> bool:
        """Whether parity was seen in evaluation mode only."""
        return f"{name} still" in self._futures or f"{name} seeded" in self._futures

    def _resume_of(self, what: str, runs: list[Run], alone: Run, again: Run) -> Finding:
        stops = ", ".join(str(run.job.stop_at) for run in runs[:-1])
        text = f"stopped after step {stops} and continued" if stops else "started again"
        failed = next((run for run in runs if not run.is_whole), None)
        if failed is not None:
            return Finding(what, False, f"{text}: {failed.why()}")
        if not self.is_deterministic:
            return Finding(what, None, "not compared, since two equal runs differ")
        last = runs[-1]
        lost = self._lost(alone, again, last)
        difference = first_difference([alone], runs)
        if difference is not None:
            where = self._place(difference, "undisturbed", "resumed")
            return Finding(what, False, f"{text}: step {difference.step} is another one, in {where}", lost)
        values, theirs = self.stable, [all_logged([run]) for run in runs]
        for key, value in values.items():
            if not any(found.get(key) == value for found in theirs):
                told = next((found[key] for found in reversed(theirs) if key in found), "missing")
                text = f"{text}: {key[1]} logged at step {key[0]} is {told}, and {value} undisturbed"
                return Finding(what, False, text, lost)
        if lost:
            return Finding(what, False, f"{text}: weights are equal bit for bit, and attributes are not restored", lost)
        files = other_files(alone, again, last)
        if files:
            return Finding(what, False, f"{text}: files in the run's directory differ: {', '.join(files)}")
        _, parts = lost_attributes(alone, again, last)
        note = [f"`{path}` has less in it than without the stop; a cache may." for path in parts[:2]]
        return Finding(what, True, f"{text}, bit for bit", note)

    def _lost(self, alone: Run, again: Run, resumed: Run) -> list[str]:
        lost, parts = lost_attributes(alone, again, resumed)
        return (
            [
                f"`{path}` changes in {self._changed_in(alone, path)} and is not restored. {_how_to_keep(path)}"
                for path in [*lost, *parts][:4]
                if path in lost or not lost
            ]
            if lost
            else []
        )

    def kill(self) -> list[Finding]:
        found = []
        for name in ("SIGKILL", "SIGTERM"):
            if name not in self._chains or not self["alone"].is_whole:
                continue
            what, (first, second) = f"kill, {name}", self._chains[name].result()
            mesh = next((n for n, each in self.meshes.items() if each == self._two), "alone")
            undisturbed = self[mesh]
            if not undisturbed.is_whole:
                found.append(Finding(what, None, f"not checked: {mesh} fails by itself"))
            elif first.waiting:
                found.append(Finding(what, False, f"after it {first.why()}"))
            elif not second.is_whole:
                found.append(Finding(what, False, f"the run started again fails: {second.why()}"))
            else:
                begins = second.records[0]["begins"]
                text = f"one of {first.job.ranks} ranks, started again at step {begins}"
                if not self.is_deterministic:
                    found.append(Finding(what, None, f"{text}; not compared, since two equal runs differ"))
                    continue
                apart = None
                if second.records[0]["steps"]:
                    apart = next(
                        filter(None, (first_difference([undisturbed], [second], r) for r in range(first.job.ranks))),
                        None,
                    )
                if apart is not None and apart.stage != "steps":
                    where = self._place(apart, "undisturbed", "resumed")
                    found.append(Finding(what, False, f"{text}: step {apart.step} is another one, in {where}"))
                else:
                    found.append(Finding(what, True, f"{text}, equal to the undisturbed run bit for bit"))
        return found

    def order(self) -> list[Finding]:
        found = []
        if not self["alone"].is_whole or not self.is_deterministic:
            return []
        for name, key, told in (
            ("hash", "hash", "PYTHONHASHSEED=1"),
            ("workers", "workers", "2 workers of the loader"),
        ):
            if key not in self._futures:
                continue
            run = self[key]
            if not run.is_whole:
                found.append(Finding(name, False, f"{told}: {run.why()}"))
                continue
            difference = first_difference([self["alone"]], [run])
            if difference is None:
                found.append(Finding(name, True, f"{told}: the same bit for bit"))
                continue
            where = self._place(difference, "before", "now")
            cause = [SETS if key == "hash" else f"{self.facts['dataset']} {OWN_STATE}"]
            if key == "hash":
                a, b = self["alone"].records[0]["start"], run.records[0]["start"]
                cause = [f"`{p}` is another one." for p, v in a.items() if b.get(p, v) != v][:3] + cause
            found.append(Finding(name, False, f"{told}: step {difference.step} differs in {where}", cause))
        return found

    def validation(self) -> list[Finding]:
        alone = self["alone"]
        if not alone.is_whole:
            return []
        if not alone.records[0]["validated"]:
            return [Finding("validation", None, "not checked: nothing is validated")]
        changed = alone.records[0]["in_validation"]
        if changed:
            name, step = next(iter(changed.items()))
            text = f"{name} changes in {self.hook('validation_step')}, at step {step}"
            cause = ["Leave models in evaluation mode there (no model.train()), and write to nothing that is trained."]
            return [Finding("validation", False, text, cause)]
        found = [Finding("validation", True, "changes no weight and no buffer")]
        compared = [name for name, (mesh, _) in self.meshes.items() if mesh in DATA and self[name].is_whole]
        if compared and self.is_deterministic and self["moved noise"].is_whole:
            found.append(self._validated_by_ranks(compared[0]))
        return found

    def _validated_by_ranks(self, name: str) -> Finding:
        what = "validation on ranks"
        if self.cuts_validation:
            return Finding(what, None, "not compared: the validation set is large, and was cut")
        self._parity_of(name)
        if name not in self._pairs:
            return Finding(what, None, f"not compared, since {name} differ in training")
        one, other, moved = self._pairs[name]
        step = min(one.records[0]["validated"])
        ours, theirs, near = (run.records[0]["validated"].get(step, {}) for run in (one, other, moved))
        for run, values in ((one, ours), (other, theirs), (moved, near)):
            values |= {n: v for (at, n), v in all_logged([run]).items() if at == step and n not in self._of_steps}
        if weights_apart(one, other, Rounding(one, moved), step):
            return Finding(what, None, f"not compared, since {name} differ in training")
        for metric, value in ours.items():
            if (step, metric) not in self.stable:
                continue
            reach = 1e-5 * max(1e-3, abs(value)) + 30 * abs(near.get(metric, value) - value)
            if metric in theirs and abs(theirs[metric] - value) > reach:
                text = f"{metric} at step {step} is {value:.6g} in one process and {theirs[metric]:.6g} with {name}"
                cause = [f"{self.hook('validation_step')} or {self.hook('post_val_epoch')} {LOCAL_VALUE}"]
                return Finding(what, False, text, cause)
        return Finding(what, True, f"{len(ours)} values as in one process, to rounding")

    @property
    def _of_steps(self) -> set[str]:
        """Names of values that are logged at steps without a validation too."""
        record = self["alone"].records[0]
        return {name for step, name in record["logged"] if step not in record["validated"]}

    def schedules(self) -> list[Finding]:
        alone = self["alone"]
        found = []
        for name, (taken, handed, steps) in (alone.records[0]["schedules"] if alone.is_whole else {}).items():
            if taken > steps > 0:
                text = (
                    f"self.{name} makes {taken} steps in {steps} of its optimizer, {handed} of them by self.step(...)"
                )
                found.append(Finding("schedules", False, text, [TWICE]))
        return found

    def cost(self) -> list[Finding]:
        run = self["cost timed"]
        if not run.is_whole:
            return []
        record = run.records[0]
        steps = max(1, record["ends"])
        text = (
            f"{1000 * record['spent'] / steps:.2f} ms of CPU time a step, {1000 * record['inside'] / steps:.2f} of "
            f"them in training_step; {record['reads']} reads of device values in a step"
        )
        return [Finding("cost", None, text)]


def _is_random(run: Run) -> bool:
    return any(found["random"] for found in steps_of([run]).values())


def _counts_unlike(alone: Run, run: Run, step: int) -> bool:
    """Whether results of the parts of a batch are what they should be, so that only their weights can be wrong."""
    whole = steps_of([alone])[step]["results"]
    parts = [result for record in run.records for result in record["steps"][step]["results"]]
    names = [name for name in whole[0] if all(name in part for part in (*whole, *parts))]
    each = len(parts) // len(whole)
    if len(run.records) == 1 and each > 1:  # of each micro-batch in turn
        groups = [(whole[index : index + 1], parts[index * each : (index + 1) * each]) for index in range(len(whole))]
    else:
        groups = [(whole, parts)]
    for name, (one, other) in ((name, group) for name in names for group in groups):
        ours, theirs = sorted(part[name] for part in one), sorted(part[name] for part in other)
        near = 1e-5 * max(map(abs, (*ours, *theirs)))
        if len(ours) == len(theirs):
            if any(abs(a - b) > near for a, b in zip(ours, theirs, strict=True)):
                return False
        elif not theirs[0] - near <= sum(ours) / len(ours) <= theirs[-1] + near or theirs[-1] - theirs[0] <= near:
            return False
    return bool(names)


def _how_to_keep(path: str) -> str:
    owner = path.partition(".")[0]
    if owner == "self" or ":" in path:
        return "Return it from the trainer's state_dict(), and take it back in load_state_dict()."
    return f"Return it from a state_dict() of {owner} or of the trainer, and take it back in load_state_dict()."
