"""The checks of a trainer: the runs they need, their findings, and likely causes."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import median
from typing import Any

from dream_trainer.errors import ConfigError, DreamTrainerError
from dream_trainer.testing.comparison import (
    DATA,
    Difference,
    attributes_apart,
    beyond_rounding,
    differences,
    first_difference,
    other_files,
    ranks_differ,
    steps_of,
)
from dream_trainer.testing.launcher import Launcher, Run

CHECKS = ("deterministic", "parity", "resume", "kill", "order", "validation", "schedules", "cost")
SLOW = 0.25
"""Seconds of CPU time of a step above which batches are made smaller."""
RANDOM = ("logged", "gradients", "weights", "optimizer", "buffers")
"""Stages that random numbers and statistics of micro-batches change."""
UNSEEDED = (
    "It comes from the clock, the system or an unseeded generator. Draw from the global generators, which the trainer "
    "seeds from config.seed, or from a generator with a seed."
)
SETS = "Iterate over a list or sorted(...), not over a set."
OWN_STATE = (
    "has its own state, which each worker copies, or draws from its own generator. Draw from the global "
    "generators, which are seeded for each sample."
)
COLLECTIVES = "All ranks have to call a collective (all_reduce, gathered, barrier, save) in the same order."
LOCAL_VALUE = (
    "computes it over this rank's samples, or weighs batches of unequal size alike. Return the value and its weight, "
    "or use a torchmetrics object."
)
TWICE = "self.step(model, optimizer, scheduler) steps what it is handed: leave out the other call."
STILL = "with models in evaluation mode, since dropout and batch statistics are of a micro-batch"
SEEDED = "with equal micro-batches and random numbers, since training_step draws some"
WEIGHTS = (
    "Each part of the batch has the loss that it should have, and parts of unequal numbers of tokens or samples count "
    "alike. Give self.backward(loss, weight=...) and logged values their weight."
)
OF_STAGE = {
    "samples": "Give each rank the whole dataset in the same order; the trainer deals it.",
    "rates": "Step a scheduler once for each optimizer step, by self.step(model, optimizer, scheduler).",
    "logged": (
        "The loss of a sample depends on the others of its rank's batch. Gather them: "
        "self.world.all_gather_with_gradient."
    ),
    "gradients": (
        "Give self.backward(loss, weight=...) the number of tokens or samples, if micro-batches have unequal ones. "
        "Until self.reduce_gradients(optimizer) or self.step, gradients are this rank's and this micro-batch's own: "
        "nothing may read, change or clear p.grad before."
    ),
}
"""What a difference between ranks and one process means, if nothing else explains it."""


@dataclass
class Finding:
    """One line of the report, and what is known about its cause."""

    check: str
    holds: bool | None
    """None if it could not be checked, or is only informational."""
    text: str
    cause: Sequence[str] = field(default_factory=list)

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
        self._runs: dict[str, Future[list[Run]]] = {}
        self._compared: dict[str, tuple[Run, Run, Run]] = {}  # what parity was seen on: one process, ranks, rounding
        self.parity_of = cache(self._parity_of)

    def findings(self, checks: Sequence[str] = CHECKS, meshes: Sequence[str] | None = None) -> Iterator[Finding]:
        """Runs the program once, to learn how long it is, and then as these checks need it."""
        (scout,) = self._launcher.start("first look", {"stop_at": 2, "saves": 0}).result()
        if scout.error is not None and scout.error["is_argument"]:
            raise ConfigError(scout.error["message"])
        if not scout.is_whole:
            raise ProgramError((scout.error["trace"] if scout.error else f"{scout.why()}\n{scout.output()}").strip())
        record = scout.records[0]
        self._launcher.preload(record["modules"])
        self._launcher.patience = 20 + 3 * scout.seconds
        self.facts = record["facts"]
        arguments = self._launcher.program.arguments
        if arguments and not record["parses"]:
            told = "changed no config: the program does not call dream_trainer.config.parse, nor from_cli"
            yield Finding("arguments", None, f"{' '.join(arguments)} {told}")
        self._plan(record)
        self.meshes = self._meshes(record["staged"], meshes)
        self._start(checks)
        for run in (self["alone"], self["again"]):
            if not run.is_whole:
                yield Finding("deterministic", False, f"one process fails. {run.why()}")
                return
        for name in CHECKS:
            if name in checks:
                yield from getattr(self, name)()

    # -- which runs

    def _plan(self, record: Mapping[str, Any]) -> None:
        facts, seconds = self.facts, [*record["steps"].values()][-1]["seconds"]
        per_pass, total = facts["steps_per_pass"], facts["total_steps"]
        self.epoch: int | None = 2 if self._quick and seconds > SLOW else 3
        wanted = 3 * self.epoch if self._quick else 12
        flags = [word.partition("=")[0].replace("_", "-") for word in self._launcher.program.arguments]
        if total is not None and record["parses"] and any(flag.endswith(".max-steps") for flag in flags):
            wanted = total  # as the user says
        elif per_pass is not None and per_pass <= (3 if self._quick else 8):
            wanted, self.epoch = max(wanted // per_pass, 3 if per_pass < 8 else 2) * per_pass, None
        length = self.epoch or per_pass or 3
        self.steps = wanted if total is None else min(wanted, max(1, total))
        self.steps -= self.steps % length if self.steps > length else 0  # so that it ends with a validation
        places = [2 * length + 1] if self._quick else [2, length, length + 1, 2 * length + 1]
        self.stops = sorted({place for place in places if 0 < place < self.steps}) or [max(1, self.steps - 1)]
        self.cuts_validation = facts["val_batches"] > 16
        batch, self.micro_batch = facts["batch_size"], None
        while batch is not None and seconds > SLOW and batch % 2 == 0 and batch > 4:
            batch, seconds, self.micro_batch = batch // 2, seconds / 2, batch // 2
        self.batch = None if batch is None else batch * facts["accumulation"]

    def _meshes(self, is_staged: bool, wanted: Sequence[str] | None) -> dict[str, dict[str, Any]]:
        facts, batch = self.facts, self.batch
        if not facts["ranks"] or batch is None:
            return {}
        possible = {
            "2 replicas": ("replicas", batch % 2 == 0),
            "2 shards": ("shards", batch % 2 == 0 and facts["shards"]),
            "2 x 2 shards": ("hybrid", batch % 4 == 0 and facts["shards"] and not self._quick),
            "tensor_parallel=2": ("tensor", facts["tensor"] and not self._quick),
            "context_parallel=2": ("context", facts["context"] and not self._quick),
            "pipeline_parallel=2": ("pipeline", is_staged and not self._quick),
        }
        return {
            name: {"mesh": mesh, "ranks": 4 if mesh == "hybrid" else 2}
            for name, (mesh, is_possible) in possible.items()
            if is_possible and (wanted is None or mesh in wanted)
        }

    def _start(self, checks: Sequence[str]) -> None:
        facts, size = self.facts, self.micro_batch or self.facts["batch_size"]
        is_compared = "parity" in checks or "validation" in checks
        #: The default mesh of two ranks.
        self.two = next((name for name in ("2 shards", "2 replicas") if name in self.meshes), "alone")
        needs_two = "kill" in checks or ("resume" in checks and not self._quick)
        self._begin("alone")
        self._begin("again")
        if is_compared or needs_two:
            self._begin("moved", mode="noise")
        for name, values in self.meshes.items():
            if is_compared or (needs_two and name == self.two):
                self._begin(name, **values)
        if is_compared and self.batch is not None and size is not None and size % 2 == 0:
            self._begin("accumulation", micro_batch=size // 2)
        if "order" in checks:
            self._begin("hash", hash_seed="1")
            if not self._quick:
                self._begin("workers", workers=2)
        two = self.meshes.get(self.two, {})
        if facts["saves"] and "resume" in checks:
            self._begin("resume", *({"stop_at": stop} for stop in self.stops), {})
            if two and not self._quick:
                self._begin("resume on other ranks", two | {"stop_at": self.stops[0]}, {})
        for name in ("SIGKILL", "SIGTERM")[: 1 if self._quick else 2] if facts["saves"] and "kill" in checks else ():
            place = random.randrange(two.get("ranks", 1)), random.randrange(2, max(3, self.steps - 1))
            self._begin(name, {"killed": (*place, getattr(signal, name))}, {}, saves=2, **two)

    def _begin(self, name: str, *links: Mapping[str, Any], **values: Any) -> None:
        """Starts runs in one directory, of which each continues the last."""
        if name not in self._runs:
            jobs = [self._job(**values, **link) for link in links or ({},)]
            self._runs[name] = self._launcher.start(name, *jobs)

    def _job(self, **values: Any) -> dict[str, Any]:
        validation = max(1, (2 if self.micro_batch else 4) // values.get("ranks", 1)) if self.cuts_validation else None
        lengths = {
            "steps": self.steps,
            "epoch": self.epoch,
            "validate_every": self.epoch or 3,
            "validation": validation,
        }
        return lengths | {"batch": self.batch, "micro_batch": self.micro_batch} | values

    def __getitem__(self, name: str) -> Run:
        return self._runs[name].result()[-1]

    # -- what differs, and why

    @cached_property
    def unstable(self) -> set[tuple[int, str]]:
        """Logged values that two equal runs have otherwise, as times are."""
        one, other = (steps_of([self[name]]) for name in ("alone", "again"))
        return {(each.step, each.name) for each in differences(one, other, ("logged",))}

    @cached_property
    def is_deterministic(self) -> bool:
        return first_difference([self["alone"]], [self["again"]], self.unstable) is None

    def _same(
        self,
        what: str,
        text: str,
        runs: Sequence[Run],
        cause: Callable[[], list[str]],
        of: Run | None = None,
    ) -> Finding:
        """Whether runs are bit for bit as the undisturbed one."""
        failed = next((run for run in runs if not run.is_whole), None)
        if failed is not None:
            return Finding(what, False, f"{text}: {failed.why()}")
        if not self.is_deterministic and what != "deterministic":
            return Finding(what, None, f"{text}: not compared, since two equal runs differ")
        found = first_difference([of or self["alone"]], runs, self.unstable if of is None else None)
        if found is None:
            return Finding(what, True, f"{text}, bit for bit")
        return Finding(
            what, False, f"{text}: step {found.step} differs in {self._place(found, 'before', 'now')}", cause()
        )

    def _beyond(self, one: Run, other: Run, moved: Run) -> Difference | None:
        """The first difference beyond rounding, but of values of a validation."""
        return beyond_rounding(
            one, other, moved, lambda each: each.stage != "logged" or self._is_of_steps(each) is True
        )

    def _is_of_steps(self, logged: Difference) -> bool | None:
        """Whether a value is logged at steps without a validation too; None if equal runs differ in it."""
        record = self["alone"].records[0]
        if (logged.step, logged.name) in self.unstable:
            return None
        return any(name == logged.name and step not in record["validated"] for step, name in record["logged"])

    def hook(self, name: str) -> str:
        """A user's method, and its place."""
        place = self.facts["hooks"].get(name)
        return f"{self.facts['class']}.{name}" + (f" ({place})" if place else "")

    def _hooks(self, *names: str) -> list[str]:
        return [self.hook(name) for name in names if name in self.facts["hooks"]]

    def _place(self, difference: Difference, one: str, other: str) -> str:
        """Where in the user's code a difference of a stage comes from."""
        made_by = " or ".join(self._hooks("configure_models", "init_weights", "load_pretrained") or ["setup"])
        stage = {
            "initial weights": f"initial weights, of {made_by}",
            "order": f"the order of modules, of {made_by}",
            "samples": f"the samples, of {self.facts['dataset']} or its loader",
            "logged": f"{self.hook('training_step')}, from equal weights and samples",
            "gradients": f"gradients, of {self.hook('training_step')}",
            "rates": f"learning rates, of {self.hook('configure_optimizers')} or a scheduler",
            "trained": "which parameters are trained (requires_grad)",
            "weights": "weights, though gradients and learning rates agree",
            "optimizer": "the optimizer's state",
            "buffers": "buffers",
            "steps": "the number of steps",
        }[difference.stage]
        return f"{stage} [{difference.told(one, other)}]"

    def _told(self, paths: Sequence[str], run: Run, what: Callable[[str], str]) -> list[str]:
        """Attributes, with the methods after which they were others."""
        lines = []
        for path in paths[:4]:
            events = [*run.records[0]["changes"].get(path, {})]
            hooks = self._hooks(*(event for event in events if event != "pre_fit"))
            hooks += self._hooks("post_train_batch") if "training_step" in events else []
            lines.append(f"`{path}` changes in {' or '.join(hooks[:2] or events[:2])} and {what(path)}.")
        return lines

    def _apart_at_start(self, run: Run) -> list[str]:
        one, other = (each.records[0]["start"] for each in (self["alone"], run))
        paths = [path for path, value in one.items() if other.get(path, value) != value]
        return [f"`{path}` is another one in each process, from the start." for path in paths[:3]]

    def _lost(self, resumed: Run) -> list[str]:
        def what(path: str) -> str:
            owner = path.partition(".")[0]
            where = "the trainer's state_dict()" if owner == "self" or ":" in path else f"a state_dict() of {owner}"
            return f"is not restored. Return it from {where}, and take it back in load_state_dict()"

        records = (run.records[0] for run in (self["alone"], resumed, self["again"]))
        return self._told(attributes_apart(*records), self["alone"], what)

    def _moved(self, run: Run) -> list[str]:
        moved = {name for found in steps_of([run]).values() for name in found.get("moved", ())}
        hooks = self._hooks("post_train_step", "pre_train_batch", "post_epoch", "pre_epoch")
        return [
            f"{name} is changed between two steps: {', '.join(hooks) or 'by a callback'}." for name in sorted(moved)[:1]
        ]

    # -- findings

    def deterministic(self) -> Iterator[Finding]:
        again = self["again"]
        yield self._same(
            "deterministic", f"{self.steps} steps twice", [again], lambda: [*self._apart_at_start(again), UNSEEDED]
        )

    def order(self) -> Iterator[Finding]:
        if "hash" in self._runs:
            run = self["hash"]
            text = f"{self.steps} steps with PYTHONHASHSEED=1"
            yield self._same("hash", text, [run], lambda: [*self._apart_at_start(run), SETS])
        if "workers" in self._runs:
            text, cause = f"{self.steps} steps with 2 workers of the loader", f"{self.facts['dataset']} {OWN_STATE}"
            yield self._same("workers", text, [self["workers"]], lambda: [cause])

    def parity(self) -> Iterator[Finding]:
        if not self.facts["ranks"] or self.batch is None:
            why = "its loader has no batch size" if self.batch is None else "only SetupMixin trains on several ranks"
            yield Finding("parity", None, f"not checked: {why}")
            return
        yield from map(self.parity_of, [*self.meshes, *({"accumulation"} & self._runs.keys())])

    def _parity_of(self, name: str) -> Finding:
        what, alone, run, moved = f"parity, {name}", self["alone"], self[name], self["moved"]
        mesh, turns = run.job.mesh, alone.records[0]["turns"].values()
        if name == "accumulation" and any(count > len(alone.records[0]["steps"]) for count in turns):
            return Finding(what, None, "not checked: an optimizer steps several times on one batch")
        if not run.is_whole:
            return Finding(what, False, run.why(), [COLLECTIVES] if run.waiting else [])
        if not self.is_deterministic or not moved.is_whole:
            return Finding(
                what, None, "not checked, since one process is not deterministic, or fails with other weights"
            )
        if mesh in DATA and (apart := ranks_differ(run)) is not None:
            text = f"ranks differ after step {apart.step}: {self._place(apart, 'on rank 0', 'on another')}"
            return Finding(what, False, text, self._about_ranks(run, apart))
        self._compared[name], why = (alone, run, moved), ""
        difference = self._beyond(alone, run, moved)
        if difference is not None and difference.stage in RANDOM:
            self._begin("alone, still", mode="still")
            mode, micro, why = "still", {}, f"; {STILL}"
            if self["alone, still"].is_whole and _is_random(self["alone, still"]):
                if name == "accumulation":
                    return Finding(what, None, "not checked: training_step draws random numbers")
                parts = run.records[0]["facts"]["accumulation"] * (run.job.ranks if mesh in DATA else 1)
                mode, why = "seeded", f"; {SEEDED}"
                micro = {"micro_batch": max(1, (alone.job.batch or 1) // parts)}
            own = {"micro_batch": run.job.micro_batch} if name == "accumulation" else self.meshes[name]
            again = {
                f"alone, {mode}{micro or ''}": {"mode": mode},
                f"{name}, {mode}{micro or ''}": {"mode": mode, **own},
                f"moved, {mode}{micro or ''}": {"mode": f"{mode} noise"},
            }
            for each, values in again.items():
                self._begin(each, **values | micro)
            one, other, near = (self[each] for each in again)
            if one.is_whole and other.is_whole and near.is_whole:
                self._compared[name] = alone, run, _ = one, other, near
                difference = self._beyond(one, other, near)
                if mode == "seeded" and difference is not None and difference.stage == "buffers":
                    difference = None
        if difference is None:
            return Finding(what, True, f"{len(run.records[0]['steps'])} steps as in one process, to rounding{why}")
        where = self._place(difference, "in one process", f"with {name}")
        if name == "accumulation" and difference.stage == "logged" and not _counts_unlike(alone, run, difference.step):
            text = "the loss depends on which samples share a micro-batch, so accumulation changes it"
            return Finding(what, None, text, [where])
        text = f"step {difference.step} differs beyond rounding, in {where}"
        return Finding(what, False, text, self._about_parity(alone, run, difference))

    def _about_parity(self, alone: Run, run: Run, difference: Difference) -> list[str]:
        if difference.stage in ("logged", "gradients"):
            changes = alone.records[0]["changes"]
            records = alone.records[0], run.records[0], self["again"].records[0]
            paths = [path for path in attributes_apart(*records) if "training_step" in changes.get(path, ())]
            if paths:
                return self._told(paths, alone, lambda path: "ends with another value")
            if difference.stage == "logged" and _counts_unlike(alone, run, difference.step):
                return [WEIGHTS]
        cause = OF_STAGE.get(difference.stage)
        return self._moved(run) if cause is None else [cause]

    def _about_ranks(self, run: Run, apart: Difference) -> list[str]:
        cause = self._moved(run)
        if apart.stage == "buffers":
            cause.append(
                f"Each rank changes it from its own samples. Choose how ranks join it in buffer_policies(): "
                f'{{"{apart.name}": "mean"}} or "rank 0".'
            )
        first, *others = run.records
        paths = dict.fromkeys(path for record in others for path in attributes_apart(first, record))
        return cause + self._told([*paths], run, lambda path: "differs between ranks")

    def resume(self) -> Iterator[Finding]:
        if not self.facts["saves"]:
            yield Finding("resume", None, "not checked: the trainer has no CheckpointMixin")
            return
        runs = self._runs["resume"].result()
        text = f"stopped after step {', '.join(map(str, self.stops))} and continued"
        found = self._same("resume", text, runs, lambda: self._lost(runs[-1]))
        if found.holds and (lost := self._lost(runs[-1])):
            found = Finding(
                "resume", False, f"{text}: weights are equal bit for bit, and attributes are not restored", lost
            )
        if found.holds and (files := other_files(self["alone"], self["again"], runs[-1])):
            found = Finding("resume", False, f"{text}: files in the run's directory differ: {', '.join(files)}")
        yield found
        if "resume on other ranks" in self._runs:
            yield self._on_other_ranks("resume on other ranks")

    def _on_other_ranks(self, what: str) -> Finding:
        runs = self._runs[what].result()
        text = f"stopped on {runs[0].job.ranks} ranks at step {self.stops[0]}, continued on 1"
        if not runs[-1].is_whole:
            return Finding(what, False, f"{text}: {runs[-1].why()}")
        begins, ends = runs[-1].records[0]["begins"], runs[0].records[0]["ends"]
        if begins != ends:
            return Finding(what, False, f"{text}: it begins at step {begins}, and not at {ends}")
        if not self.parity_of(self.two).holds:
            return Finding(what, None, f"{text}: not compared, since {self.two} have no parity")
        found = self._beyond(self["alone"], runs[-1], self["moved"])
        if found is None:
            return Finding(what, True, f"{text}, to rounding")
        if found.stage in RANDOM and self._compared[self.two][0] is not self["alone"]:
            return Finding(what, True, f"{text}; random numbers and statistics of a micro-batch are not compared")
        text = f"{text}: step {found.step} differs in {self._place(found, 'undisturbed', 'resumed')}"
        return Finding(what, False, text, self._lost(runs[-1]))

    def kill(self) -> Iterator[Finding]:
        for name in [name for name in ("SIGKILL", "SIGTERM") if name in self._runs]:
            what, (first, second), undisturbed = f"kill, {name}", self._runs[name].result(), self[self.two]
            if not undisturbed.is_whole:
                yield Finding(what, None, f"not checked: {self.two} fails by itself")
            elif first.waiting:
                yield Finding(what, False, f"after it {first.why()}")
            else:
                begins = f" at step {second.records[0]['begins']}" if second.is_whole else ""
                text = f"one of {first.job.ranks} ranks, started again{begins}"
                yield self._same(what, text, [second], list, undisturbed)

    def validation(self) -> Iterator[Finding]:
        record = self["alone"].records[0]
        if not record["validated"]:
            yield Finding("validation", None, "not checked: nothing is validated")
            return
        for name, step in [*record["in_validation"].items()][:1]:
            text = f"{name} changes in {self.hook('validation_step')}, at step {step}"
            cause = "Leave models in evaluation mode there (no model.train()), and write to nothing that is trained."
            yield Finding("validation", False, text, [cause])
            return
        yield Finding("validation", True, "changes no weight and no buffer")
        names = [name for name, values in self.meshes.items() if values["mesh"] in DATA and self[name].is_whole]
        if names and self.is_deterministic and self["moved"].is_whole:
            yield self._validated_by_ranks("validation on ranks", names[0], record["validated"][0])

    def _validated_by_ranks(self, what: str, name: str, step: int) -> Finding:
        if self.cuts_validation:
            return Finding(what, None, "not compared: the validation set is large, and was cut")
        self.parity_of(name)
        runs = self._compared.get(name)
        if runs is None or beyond_rounding(*runs, lambda each: each.step == step and each.stage == "weights"):
            return Finding(what, None, f"not compared, since {name} differ in training")

        found = beyond_rounding(
            *runs, lambda each: each.step == step and each.stage == "logged" and self._is_of_steps(each) is False
        )
        if found is None:
            return Finding(what, True, "values as in one process, to rounding")
        text = f"{found.name} at step {step} is {found.one:.6g} in one process and {found.other:.6g} with {name}"
        return Finding(
            what, False, text, [f"{self.hook('validation_step')} or {self.hook('post_val_epoch')} {LOCAL_VALUE}"]
        )

    def schedules(self) -> Iterator[Finding]:
        for name, (taken, handed, steps) in self["alone"].records[0]["schedules"].items():
            if taken > steps > 0:
                text = f"self.{name} makes {taken} steps in {steps} of its optimizer, {handed} by self.step(...)"
                yield Finding("schedules", False, text, [TWICE])

    def cost(self) -> Iterator[Finding]:
        record = self["alone"].records[0]
        step, inside = (
            1000 * median(found[name] for found in record["steps"].values()) for name in ("seconds", "seconds_inside")
        )
        text = f"{step:.2f} ms of CPU time a step, {inside:.2f} of them in training_step"
        yield Finding("cost", None, f"{text}; {record['reads']} reads of device values in a step")


def _is_random(run: Run) -> bool:
    return any(found["is_random"] for found in run.records[0]["steps"].values())


def _counts_unlike(alone: Run, run: Run, step: int) -> bool:
    """Whether results of the parts of a batch are what they should be, so that only their weights can be wrong."""
    whole = alone.records[0]["steps"][step]["results"]
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
