"""The checks of a trainer: the runs they need, what differs in two of them, and likely causes."""

from __future__ import annotations

import math
import random
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache, cached_property, partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from dream_trainer.errors import ConfigError
from dream_trainer.testing.checked_runs import Launcher, Run
from dream_trainer.testing.program import Program
from dream_trainer.testing.run_probe import Summary, Values
from dream_trainer.testing.suite import CHECKS, Finding, ProgramError

DATA = ("replicas", "shards")  # meshes that are checked with --quick too
SLOW = 0.25  # seconds of CPU time of a step above which there are fewer of them, with smaller batches
RANDOM = ("logged", "gradients", "weights", "optimizer", "buffers")  # stages that random numbers change
OF_STAGE = {  # what a difference between ranks and one process means, if nothing else explains it
    "samples": "Give each rank the whole dataset in the same order; the trainer deals it.",
    "rates": "Step a scheduler once for each optimizer step, by self.step(model, optimizer, scheduler).",
    "logged": (
        "Either the loss of a sample depends on the others of its rank's batch: gather them by "
        "self.world.all_gather_with_gradient. Or parts of unequal numbers of tokens or samples count alike: give "
        "self.backward(loss, weight=...) and logged values their weight."
    ),
    "gradients": (
        "Give self.backward(loss, weight=...) the number of tokens or samples, if micro-batches have unequal ones. "
        "Until self.reduce_gradients(optimizer) or self.step, gradients are this rank's and this micro-batch's own: "
        "nothing may read, change or clear p.grad before."
    ),
}


class TrainerChecks:
    """The checks of one program. `quick` leaves out four ranks, further stops, SIGTERM, workers, exports."""

    def __init__(self, launcher: Launcher, *, quick: bool = False) -> None:
        self._launcher, self._quick = launcher, quick
        self._compared: dict[str, tuple[Run, Run, Run]] = {}  # what parity was seen on: one process, ranks, rounding
        self.parity_of = cache(self._parity_of)

    def findings(self, checks: Sequence[str] = CHECKS, meshes: Sequence[str] | None = None) -> Iterator[Finding]:
        """Runs the program once, to learn how long it is, and then as these checks need it."""
        self._launcher.start("first look", stop_at=2, saves=0)
        scout = self["first look"]
        if scout.error is not None and scout.error["is_argument"]:
            raise ConfigError(scout.error["text"])
        if not scout.is_whole:
            printed = [file.read_text(errors="replace") for file in sorted(Path(scout.job.directory).glob("output_*"))]
            told = "\n".join([scout.why(), *printed])
            raise ProgramError((scout.error["trace"] if scout.error else told).strip())
        record = scout.records[0]
        for name in record["modules"]:  # once, and not in each run
            with suppress(Exception):
                import_module(name)
        self._launcher.patience = 20 + 3 * scout.seconds
        self.facts = record["facts"]
        arguments = " ".join(self._launcher.program.arguments)
        if arguments and not record["parses"]:
            told = "changed no config: the program does not call dream_trainer.config.parse, nor from_cli"
            yield Finding("arguments", None, f"{arguments} {told}")
        self._plan(record)
        self.meshes = self._meshes(record["staged"], meshes)
        self._start(checks)
        for run in (self["alone"], self["again"]):
            if not run.is_whole:
                yield Finding("deterministic", False, f"one process fails. {run.why()}")
                return
        can_export = self.facts["saves"] and self.facts["evaluates"] and not self._quick
        if "validation" in checks and can_export and self["alone"].records[0]["validated"][-1:] == [self.steps]:
            self._launcher.start("exported", exported=self["alone"].job.runs_dir)
        for name in CHECKS:
            if name in checks:
                yield from getattr(self, name)()

    # -- which runs

    def _plan(self, record: Mapping[str, Any]) -> None:
        facts, seconds = self.facts, [*record["steps"].values()][-1]["seconds"]
        per_pass, total = facts["steps_per_pass"], facts["total_steps"]
        self.epoch: int | None = 2 if seconds > SLOW else 3
        wanted = self.epoch * (4 - self._quick - (seconds > SLOW))  # an epoch less for each reason
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
        batch, micro_batch = facts["batch_size"], None
        while batch is not None and seconds > SLOW and batch % 2 == 0 and batch > (2 if self._quick else 4):  # ranks
            batch, seconds, micro_batch = batch // 2, seconds / 2, batch // 2
        self.batch = None if batch is None else batch * facts["accumulation"]
        validation = (1 if micro_batch else 4) if self.cuts_validation else None
        given = {"steps": self.steps, "epoch": self.epoch, "batch": self.batch, "micro_batch": micro_batch}
        self._launcher.values = given | {"validation": validation, "loader_batch": facts["batch_size"] or 0}

    def _meshes(self, is_staged: bool, wanted: Sequence[str] | None) -> dict[str, dict[str, int]]:
        facts, batch = self.facts, self.batch
        if not facts["ranks"] or batch is None:
            return {}
        data = "dp_shard" if facts["shards"] else "dp_replicate"
        has_experts = facts["experts"] or "apply_expert_parallel" in facts["hooks"]
        possible: dict[str, tuple[str, bool, dict[str, int]]] = {
            "2 replicas": ("replicas", batch % 2 == 0, {"dp_replicate": 2}),
            "2 shards": ("shards", batch % 2 == 0 and facts["shards"], {"dp_shard": 2}),
            "2 x 2 shards": ("hybrid", batch % 4 == 0 and facts["shards"], {"dp_replicate": 2, "dp_shard": 2}),
            "tensor_parallel=2": ("tensor", "apply_tensor_parallel" in facts["hooks"], {"tensor_parallel": 2}),
            "context_parallel=2": ("context", "cut_batch" in facts["hooks"], {"context_parallel": 2}),
            "pipeline_parallel=2": ("pipeline", is_staged, {"pipeline_parallel": 2}),
            "expert_parallel=2": ("expert", batch % 2 == 0 and has_experts, {data: 2, "expert_parallel": 2}),
        }
        known = [mesh for mesh, is_possible, _ in possible.values() if is_possible]
        if others := [mesh for mesh in wanted or () if mesh not in known]:
            raise ConfigError(f"meshes has {others}, and this trainer can be checked on {known}. Use some of them.")
        return {
            name: sizes
            for name, (mesh, is_possible, sizes) in possible.items()
            if is_possible and (mesh in wanted if wanted is not None else not self._quick or mesh in DATA)
        }

    def _start(self, checks: Sequence[str]) -> None:
        facts, start = self.facts, self._launcher.start
        size = self._launcher.values["micro_batch"] or facts["batch_size"]
        is_compared = "parity" in checks or "validation" in checks
        self.two = next((name for name in ("2 shards", "2 replicas") if name in self.meshes), "alone")  # by default
        needs_two = "kill" in checks or ("resume" in checks and not self._quick)
        start("alone")
        start("again")
        if is_compared or needs_two:
            start("moved", mode="noise")
        for name, sizes in self.meshes.items():
            if is_compared or (needs_two and name == self.two):
                start(name, sizes=sizes)
        if is_compared and self.batch is not None and size is not None and size % 2 == 0:
            start("accumulation", micro_batch=size // 2)
        if "order" in checks:
            start("hash", hash_seed="1")
            if not self._quick:
                start("workers", workers=2)
                start("spawned", workers=1, spawns=True)
        two = self.meshes.get(self.two, {})
        if facts["saves"] and "resume" in checks:
            start("resume", *({"stop_at": stop} for stop in self.stops), {})
            if two and not self._quick:
                start("resume on other ranks", {"sizes": two, "stop_at": self.stops[0]}, {})
        for name in ("SIGKILL", "SIGTERM")[: 1 if self._quick else 2] if facts["saves"] and "kill" in checks else ():
            place = random.randrange(2 if two else 1), random.randrange(2, max(3, self.steps - 1))
            start(name, {"killed": (*place, getattr(signal, name))}, {}, saves=2, sizes=two)

    # -- what differs, and why

    def __getitem__(self, name: str) -> Run:
        return self._launcher[name][-1]

    @cached_property
    def unstable(self) -> set[tuple[int, str]]:
        """Logged values that two equal runs have otherwise, as times are."""
        one, other = (self[name].records[0]["values"] for name in ("alone", "again"))
        return {(each.step, each.name) for each in differences(one, other, ("logged",))}

    @cached_property
    def is_deterministic(self) -> bool:
        return first_difference(self["alone"], [self["again"]], self.unstable) is None

    def _same(
        self, what: str, text: str, runs: Sequence[Run], cause: Callable[[], list[str]], of: Run | None = None
    ) -> Finding:
        """Whether runs are bit for bit as the undisturbed one."""
        failed = next((run for run in runs if not run.is_whole), None)
        if failed is not None:
            return Finding(what, False, f"{text}: {failed.why()}")
        if not self.is_deterministic and what != "deterministic":
            return Finding(what, None, f"{text}: not compared, since two equal runs differ")
        found = first_difference(of or self["alone"], runs, self.unstable if of is None else None)
        if found is None:
            return Finding(what, True, f"{text}, bit for bit")
        text = f"{text}: step {found.step} differs in {self._place(found, 'before', 'now')}"
        return Finding(what, False, text, cause())

    @cached_property
    def _is_of_micro_batches(self) -> bool:
        """Whether training_step draws random numbers or changes a buffer, so that evaluation mode may be another."""
        record = self["alone"].records[0]
        buffers = {name for _, stage, name in record["values"] if stage == "buffers"}
        return record["is_random"] or any("training_step" in record["written"].get(name, {}) for name in buffers)

    def _beyond(self, one: Run, other: Run, moved: Run) -> Difference | None:
        """The first difference beyond rounding, but of values of a validation."""
        return beyond_rounding(one, other, moved, lambda each: each.stage != "logged" or bool(self._is_of_steps(each)))

    def _is_of_steps(self, logged: Difference) -> bool | None:
        """Whether a value is logged at steps without a validation too; None if equal runs differ in it."""
        record = self["alone"].records[0]
        if (logged.step, logged.name) in self.unstable:
            return None
        steps = {step for step, stage, name in record["values"] if (stage, name) == ("logged", logged.name)}
        return not steps <= {*record["validated"]}

    def hook(self, name: str) -> str:
        place = self.facts["hooks"].get(name)
        return f"{self.facts['class']}.{name}" + (f" ({place})" if place else "")

    def _hooks(self, *names: str) -> list[str]:
        return [self.hook(name) for name in names if name in self.facts["hooks"]]

    def _place(self, difference: Difference, one: str, other: str) -> str:
        """Where in the user's code a difference of a stage comes from."""
        names = {name: self.hook(name) for name in ("training_step", "configure_optimizers")}
        names["setup"] = " or ".join(self._hooks("configure_models", "init_weights", "load_pretrained") or ["setup"])
        stage = STAGES[difference.stage].format(**names, dataset=self.facts["dataset"])
        return f"{stage} [{difference.told(one, other)}]"

    def _told(self, paths: Sequence[str], run: Run, what: str) -> list[str]:
        """Attributes and weights, with the methods after which they were others; `{}` is their owner's state_dict."""
        lines, record = [], run.records[0]
        for path in paths[:4]:
            events = [*record["changes"].get(path, {})] or _between(record["written"].get(path, {}))
            hooks = self._hooks(*(event for event in events if event != "pre_fit"))
            hooks += self._hooks("post_train_batch") if "training_step" in events else []
            owner = path.partition(".")[0]
            of_owner = "the trainer's state_dict()" if owner == "self" or ":" in path else f"a state_dict() of {owner}"
            lines.append(f"`{path}` changes in {' or '.join(hooks[:2] or events[:2])} and {what.format(of_owner)}.")
        return lines

    def _apart_at_start(self, name: str, cause: str) -> list[str]:
        one, other = (self[each].records[0]["start"] for each in ("alone", name))
        paths = [path for path, value in one.items() if other.get(path, value) != value]
        return [*(f"`{path}` is another one in each process, from the start." for path in paths[:3]), cause]

    def _lost(self, resumed: Run) -> list[str]:
        records = (run.records[0] for run in (self["alone"], resumed, self["again"]))
        what = "is not restored. Return it from {}, and take it back in load_state_dict()"
        return self._told(attributes_apart(*records), self["alone"], what)

    def _moved(self, run: Run) -> list[str]:
        """Weights that change between two steps."""
        paths = [path for path, events in run.records[0]["written"].items() if _between(events)]
        return self._told(paths[:1], run, "is not what its optimizer has made of it")

    # -- findings

    def deterministic(self) -> Iterator[Finding]:
        cause = (
            "It comes from the clock, the system or an unseeded generator. Draw from the global generators, which the "
            "trainer seeds from config.seed, or from a generator with a seed."
        )
        causes = partial(self._apart_at_start, "again", cause)
        yield self._same("deterministic", f"{self.steps} steps twice", [self["again"]], causes)

    def order(self) -> Iterator[Finding]:
        causes = partial(self._apart_at_start, "hash", "Iterate over a list or sorted(...), not over a set.")
        yield self._same("hash", f"{self.steps} steps with PYTHONHASHSEED=1", [self["hash"]], causes)
        if "workers" in self._launcher.runs:
            cause = (
                f"{self.facts['dataset']} has its own state, which each worker copies, or draws from its own "
                "generator. Draw from the global generators, which are seeded for each sample."
            )
            text = f"{self.steps} steps with 2 workers of the loader"
            yield self._same("workers", text, [self["workers"]], lambda: [cause])
        if "spawned" in self._launcher.runs:
            cause = "It imports the program above `if __name__ == '__main__':`, and unpickles dataset and functions."
            text, is_whole = f"{self.steps} steps with a spawned worker", self["spawned"].is_whole
            nothing = Finding("workers, spawned", None, f"not checked: {self['spawned'].why()}", [cause])
            yield self._same("workers, spawned", text, [self["spawned"]], lambda: [cause]) if is_whole else nothing

    def parity(self) -> Iterator[Finding]:
        if not self.facts["ranks"] or self.batch is None:
            why = "its loader has no batch size" if self.batch is None else "only SetupMixin trains on several ranks"
            yield Finding("parity", None, f"not checked: {why}")
            return
        yield from (self.parity_of(name) for name in (*self.meshes, "accumulation") if name in self._launcher.runs)

    def _parity_of(self, name: str) -> Finding:
        what, alone, run, moved = f"parity, {name}", self["alone"], self[name], self["moved"]
        turns = alone.records[0]["turns"].values()
        if name == "accumulation" and any(count > len(alone.records[0]["steps"]) for count in turns):
            return Finding(what, None, "not checked: an optimizer steps several times on one batch")
        if not run.is_whole:
            order = "All ranks have to call a collective (all_reduce, gathered, barrier, save) in the same order."
            return Finding(what, False, run.why(), [order] if run.waiting else [])
        if not self.is_deterministic or not moved.is_whole:
            return Finding(what, None, "not checked: one process is not deterministic, or fails with other weights")
        if run.job.parts > 1 and (apart := ranks_differ(run)) is not None:
            text = f"ranks differ after step {apart.step}: {self._place(apart, 'on rank 0', 'on another')}"
            return Finding(what, False, text, self._about_ranks(run, apart))
        self._compared[name], why = (alone, run, moved), ""
        difference = self._beyond(alone, run, moved)
        together = difference is not None and difference.stage == "samples"  # such as padded to the longest of a batch
        if together or (difference is not None and difference.stage in RANDOM and self._is_of_micro_batches):
            mode, micro = ("still" if self._is_of_micro_batches else ""), {}
            cause = "samples depend on others of their batch" if together else ""
            if mode:
                why = "; with models in evaluation mode, since dropout and batch statistics are of a micro-batch"
                self._launcher.start("alone, still", mode="still")
                still = self["alone, still"]
                if not cause and still.is_whole and still.records[0]["is_random"]:
                    cause = "training_step draws random numbers"
            if cause and name == "accumulation":
                return Finding(what, None, f"not checked: {cause}")
            if cause:
                parts = run.job.parts * run.records[0]["facts"]["accumulation"]
                micro = {"micro_batch": max(1, (alone.job.batch or 1) // parts)}
                why += f"; with micro-batches of one size and equal random numbers, since {cause}"
            own = {"micro_batch": run.job.micro_batch} if name == "accumulation" else {"sizes": self.meshes[name]}
            each = f"{mode}{micro or ''}"
            self._launcher.start(f"alone, {each}", mode=mode, **micro)
            self._launcher.start(f"{name}, {each}", mode=mode, **own | micro)
            self._launcher.start(f"moved, {each}", mode=f"{mode} noise", **micro)
            one, other, near = (self[f"{which}, {each}"] for which in ("alone", name, "moved"))
            if one.is_whole and other.is_whole and near.is_whole:
                self._compared[name] = alone, run, _ = one, other, near
                difference = self._beyond(one, other, near)
                if micro and difference is not None and difference.stage == "buffers":
                    difference = None
        if difference is None:
            return Finding(what, True, f"{len(run.records[0]['steps'])} steps as in one process, to rounding{why}")
        where = self._place(difference, "in one process", f"with {name}")
        if name == "accumulation" and difference.stage == "logged" and not _is_mean(alone, run, difference.step):
            return Finding(what, None, f"accumulation changes the loss, in {where}", [OF_STAGE["logged"]])
        text = f"step {difference.step} differs beyond rounding, in {where}"
        return Finding(what, False, text, self._about_parity(alone, run, difference))

    def _about_parity(self, alone: Run, run: Run, difference: Difference) -> list[str]:
        if difference.stage in ("logged", "gradients"):
            changes = alone.records[0]["changes"]
            records = alone.records[0], run.records[0], self["again"].records[0]
            paths = [path for path in attributes_apart(*records) if "training_step" in changes.get(path, ())]
            if paths:
                return self._told(paths, alone, "ends with another value")
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
        paths = dict.fromkeys(path for record in others for path in attributes_apart(first, record, first))
        return cause + self._told([*paths], run, "differs between ranks")

    def resume(self) -> Iterator[Finding]:
        if not self.facts["saves"]:
            yield Finding("resume", None, "not checked: the trainer has no CheckpointMixin")
            return
        runs = self._launcher["resume"]
        text = f"stopped after step {', '.join(map(str, self.stops))} and continued"
        found = self._same("resume", text, runs, lambda: self._lost(runs[-1]))
        if found.holds and (lost := self._lost(runs[-1])):
            found = Finding("resume", False, f"{text}: weights are equal bit for bit, and attributes are not", lost)
        if found.holds and (files := other_files(self["alone"], self["again"], runs[-1])):
            found = Finding("resume", False, f"{text}: files in the run's directory differ: {', '.join(files)}")
        yield found
        if "resume on other ranks" in self._launcher.runs:
            yield self._on_other_ranks("resume on other ranks")

    def _on_other_ranks(self, what: str) -> Finding:
        runs = self._launcher[what]
        text = f"stopped on {runs[0].job.ranks} ranks at step {self.stops[0]}, continued on 1"
        if not runs[-1].is_whole:
            return Finding(what, False, f"{text}: {runs[-1].why()}")
        if (begins := runs[-1].records[0]["begins"]) != self.stops[0]:
            return Finding(what, False, f"{text}: it begins at step {begins}")
        if not self.parity_of(self.two).holds:
            return Finding(what, None, f"{text}: not compared, since {self.two} have no parity")
        found = self._beyond(self["alone"], runs[-1], self["moved"])
        if found is None:
            return Finding(what, True, f"{text}, to rounding")
        if found.stage in (*RANDOM, "samples") and self._compared[self.two][0] is not self["alone"]:
            return Finding(what, True, f"{text}; what depends on micro-batches is not compared")
        text = f"{text}: step {found.step} differs in {self._place(found, 'undisturbed', 'resumed')}"
        return Finding(what, False, text, self._lost(runs[-1]))

    def kill(self) -> Iterator[Finding]:
        for name in [name for name in ("SIGKILL", "SIGTERM") if name in self._launcher.runs]:
            what, (first, second), undisturbed = f"kill, {name}", self._launcher[name], self[self.two]
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
        for name, events in record["written"].items():
            if "validation_step" in events:
                text = f"{name} changes in {self.hook('validation_step')}, at step {events['validation_step']}"
                cause = "Leave models in evaluation mode (no model.train()), and write to nothing that is trained."
                yield Finding("validation", False, text, [cause])
                return
        yield Finding("validation", True, "changes no weight and no buffer")
        if "exported" in self._launcher.runs:
            yield self._of_exported("validation of what is exported", record["metrics"])
        names = [name for name in self.meshes if self[name].job.parts > 1 and self[name].is_whole]
        if names and self.is_deterministic and self["moved"].is_whole:
            yield self._validated_by_ranks("validation on ranks", names[0], record["validated"][0])

    def _of_exported(self, what: str, metrics: Mapping[str, float]) -> Finding:
        run = self["exported"]
        if not run.is_whole:
            return Finding(what, None, f"not checked: {run.why()}")
        found = run.records[0]["metrics"]
        for name, value in metrics.items():
            other = found.get(name, math.nan)
            if not abs(other - value) <= LEAST * max(abs(value), 1.0) and (self.steps, name) not in self.unstable:
                text = f"{name} is {value:.6g} in the run and {other:.6g} from its export alone"
                cause = "Validation uses what is in checkpoints and in no export, such as averages, or counts of steps."
                return Finding(what, None, text, [cause])
        return Finding(what, True, "a new trainer with its weights has the same values, to rounding")

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
        cause = (
            f"{self.hook('validation_step')} or {self.hook('post_val_epoch')} computes it over this rank's samples, or "
            "weighs batches of unequal size alike. Return the value and its weight, or use a torchmetrics object."
        )
        return Finding(what, False, text, [cause])

    def schedules(self) -> Iterator[Finding]:
        for name, (taken, handed, steps) in self["alone"].records[0]["schedules"].items():
            if taken > steps > 0:
                text = f"self.{name} makes {taken} steps in {steps} of its optimizer, {handed} by self.step(...)"
                cause = "self.step(model, optimizer, scheduler) steps what it is handed: leave out the other call."
                yield Finding("schedules", False, text, [cause])

    def cost(self) -> Iterator[Finding]:
        record = self["alone"].records[0]
        step, inside = (
            1000 * median(found[name] for found in record["steps"].values()) for name in ("seconds", "seconds_inside")
        )
        text = f"{step:.2f} ms of CPU time a step, {inside:.2f} of them in training_step"
        yield Finding("cost", None, f"{text}; {record['reads']} reads of device values in a step")


def send(program: Program, checks: Sequence[str], meshes: Any, asker: Connection, *, quick: bool) -> None:
    with closing(Launcher(program, asker)) as launcher:
        for found in TrainerChecks(launcher, quick=quick).findings(checks, meshes):
            asker.send(found)


def _between(events: Mapping[str, int]) -> list[str]:
    """Those after which a weight is another one that no step of an optimizer has changed."""
    return [event for event in events if event not in ("pre_fit", "training_step", "validation_step")]


def _is_mean(alone: Run, run: Run, step: int) -> bool:
    """Whether the results of a micro-batch lie between those of its parts, so that only their weights can be wrong."""
    whole, parts = (each.records[0]["steps"][step]["results"] for each in (alone, run))
    n = len(parts) // len(whole)
    of_each = [(one, parts[place * n : (place + 1) * n]) for place, one in enumerate(whole)]
    values = [(value, [part.get(name, value) for part in own]) for one, own in of_each for name, value in one.items()]
    return all(min(of_parts) <= value <= max(of_parts) for value, of_parts in values)


# -- two runs side by side: what differs in them, in the order of their computation


FACTOR = 30.0  # how much farther than a run with weights moved by rounding another one may go
LEAST = 64 * 2.0**-23  # rounding of float32, in the shortest sums
HELD = ("rates", "trained", "weights", "optimizer", "buffers")
STAGES = {  # in the order of their computation
    "order": "the order of modules, of {setup}",
    "initial weights": "initial weights, of {setup}",
    "samples": "the samples, of {dataset} or its loader",
    "logged": "{training_step}, from equal weights and samples",
    "gradients": "gradients, of {training_step}",
    "rates": "learning rates, of {configure_optimizers} or a scheduler",
    "trained": "which parameters are trained (requires_grad)",
    "weights": "weights, though gradients and learning rates agree",
    "optimizer": "the optimizer's state",
    "buffers": "buffers",
    "steps": "the number of steps",
}


class Difference(NamedTuple):
    step: int
    stage: str
    name: str
    one: Any  # None: it has no such value
    other: Any
    distance: float

    def told(self, one: str, other: str) -> str:
        if isinstance(self.one, Summary) or isinstance(self.other, Summary):
            return self.name
        if isinstance(self.one, tuple) and isinstance(self.other, tuple):
            others = (Counter(self.one) - Counter(self.other)).total()
            return f"{self.name}: {f'{others} of {len(self.one)} samples are others' if others else 'another order'}"
        a, b = (f"{each:.6g}" if isinstance(each, float) else str(each) for each in (self.one, self.other))
        return f"{self.name}: {a} {one}, {b} {other}"


def joined(run: Run) -> Values:
    """With the samples of all ranks, and with the parts of the model that other ranks hold."""
    found: Values = {}
    samples: dict[int, list[int]] = defaultdict(list)
    for rank, record in reversed([*enumerate(run.records)]):
        for (step, stage, name), value in record["values"].items():
            if stage != "samples":
                found[step, stage, name] = value
            elif rank < run.job.parts:
                samples[step] += value
    return found | {(step, "samples", "samples"): tuple(sorted(each)) for step, each in samples.items()}


def differences(one: Values, other: Values, stages: Collection[str] = STAGES) -> Iterator[Difference]:
    """Of steps that both have trained, and of their number. A run may begin with a validation that a stop put off."""
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for (_, stage, name), value in one.items():
        if stage in ("logged", "rates"):
            largest[stage, name] = max(abs(value), largest[stage, name])
    ours, theirs = ({step for step, stage, _ in values if stage != "logged"} for values in (one, other))
    both = ours & theirs
    for key in sorted({**one, **other}, key=lambda key: (key[0], [*STAGES].index(key[1]))):
        step, stage, name = key
        is_of_both = step in both if stage != "logged" else key in one and (step in both or key in other)
        if is_of_both and stage in stages:
            a, b = one.get(key), other.get(key)
            if repr(a) != repr(b):
                yield Difference(*key, a, b, _distance(a, b, largest[stage, name]))
    if max(ours) != max(theirs):
        yield Difference(min(max(ours), max(theirs)), "steps", "steps trained", max(ours), max(theirs), math.inf)


def _distance(one: Any, other: Any, largest: float) -> float:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / (largest or 1.0)
    if not isinstance(one, Summary) or not isinstance(other, Summary) or one.values.shape != other.values.shape:
        return math.inf
    size = float(np.linalg.norm(one.values)) or float(np.linalg.norm(other.values)) or 1.0
    return float(np.linalg.norm(one.values - other.values)) / size


def first_difference(one: Run, parts: Sequence[Run], unstable: Collection[tuple[int, str]] | None) -> Difference | None:
    """The first bit that differs on any rank, except in unstable logged values, such as times; None leaves out all."""
    for rank, record in enumerate(one.records):
        values = {key: value for part in parts for key, value in part.records[rank]["values"].items()}
        for found in differences(record["values"], values):
            if found.stage != "logged" or (unstable is not None and (found.step, found.name) not in unstable):
                return found
    return None


def beyond_rounding(one: Run, other: Run, moved: Run, counts: Callable[[Difference], bool]) -> Difference | None:
    """The first value that differs by more than rounding does in `moved`, whose weights were moved a little more."""
    values, stages = joined(one), STAGES.keys() - {"order"}
    reached: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for each in differences(values, joined(moved), stages):
        reached[each.stage, each.name].append(each)
    for found in differences(values, joined(other), stages):
        near = (each.distance for each in reached[found.stage, found.name] if each.step <= found.step)
        is_in_both = found.one is not None and found.other is not None
        if is_in_both and counts(found) and not found.distance <= LEAST + FACTOR * max(near, default=0.0):
            return found
    return None


def ranks_differ(run: Run) -> Difference | None:
    """The first thing that ranks should hold alike, and do not."""
    first, *others = (record["values"] for record in run.records)
    found = [next(differences(first, other, HELD), None) for other in others]
    return min((each for each in found if each is not None), key=lambda each: each.step, default=None)


def attributes_apart(one: Mapping[str, Any], other: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """Plain attributes that training changes, and that end with other values in another run, but not in `again`. Dicts
    of which the other run has a part are none: those of caches, and of records by step."""
    found: list[str] = []
    for path, value in one["end"].items():
        theirs = other["end"].get(path)
        is_part = isinstance(value, dict) and isinstance(theirs, dict) and theirs.items() <= value.items()
        is_steady = again["end"].get(path) == value
        if value not in (theirs, one["start"].get(path)) and is_steady and not is_part:
            found.append(path)
    return found


def other_files(alone: Run, again: Run, resumed: Run) -> list[str]:
    """Files of the user's in the run's directory that undisturbed runs have alike, and the resumed one has not."""
    ours, same, theirs = (_files(Path(run.job.runs_dir)) for run in (alone, again, resumed))
    return [name for name, content in ours.items() if same.get(name) == content != theirs.get(name)]


def _files(directory: Path) -> dict[str, list[bytes]]:
    """Lines by file; without numbers where they are logged, since some are times."""
    found: dict[str, list[bytes]] = {}
    for file in sorted(directory.rglob("*")):
        name, is_log = str(file.relative_to(directory)), file.suffix == ".jsonl"
        if file.is_file() and (is_log or "checkpoints" not in Path(name).parts):
            lines = file.read_bytes().splitlines()
            found[name] = sorted(re.sub(rb"-?\d[\d.e+-]*", b"0", line) for line in lines) if is_log else lines
    return found
