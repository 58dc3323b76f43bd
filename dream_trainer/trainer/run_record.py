"""`run.json`: a run's record of its progress, its state, and why it ended, which `dream-trainer runs` reads."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch

from dream_trainer.checkpoint.files import named_step, step_directories
from dream_trainer.checkpoint.manifest import MANIFEST_NAME, is_checkpoint, read_manifest
from dream_trainer.checkpoint.run_directory import is_claimed
from dream_trainer.checks import listed
from dream_trainer.config.config_files import RECORD_NAME, SAVED_NAME as CONFIG_NAME, read_plain
from dream_trainer.config.serialize import leaves, to_dict
from dream_trainer.distributed.hosts import own_code
from dream_trainer.distributed.job import dead_ranks, describe, is_lost_connection, is_running, job_store
from dream_trainer.errors import CheckpointError, ConfigError, in_a_line
from dream_trainer.loggers.buffer import Stamp
from dream_trainer.loggers.line_files import json_ready, replace_file
from dream_trainer.screen import format_duration, show
from dream_trainer.trainer.runtime import Runtime
from dream_trainer.version import __version__

LOG_NAME = "metrics.jsonl"
_DEPTH = 3  # levels below the directory of runs: project, group, experiment
_LAST_BYTES = 1 << 14

BRANCH = "checkpoint_parameters.branch."

RunState = Literal["running", "stopped", "finished", "failed"]


@dataclass(kw_only=True)
class RunRecord:
    """A run when it last wrote this record: its start, a validation, a checkpoint, or its end."""

    state: RunState = "running"
    """"stopped": asked to, by code, a signal or `max_time`, before its limits; "finished": it reached them."""
    why: str | None = None  # why it was stopped, or the line of the exception that it failed with
    failed_rank: int | None = None  # the rank that failed first; None if unknown
    error: str | None = None  # for a failed run: the full exception, its place, and the calls that led there
    started: float = 0.0  # when it was first started, in seconds since 1970
    seen: float = 0.0  # when this was written
    starts: int = 0  # how often training started or resumed in a new process
    times: list[dict[str, Any]] = field(default_factory=list)  # of each of these starts a Start (below)
    step: int = 0  # optimizer steps completed
    epoch: int = 0
    samples: int = 0  # samples consumed by all ranks
    seconds: float = 0.0  # of training, all processes together
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    best: dict[str, dict[str, Any]] = field(default_factory=dict)  # by metric: `value`, `step`, `mode` ("min" or "max")
    parent: dict[str, Any] | None = None  # of a fork: the `checkpoint` it began from, its `step`, the `words` for that
    resumed_from: str | None = None  # the checkpoint that the last process resumed from, its own or another
    argv: list[str] = field(default_factory=list)  # how the last process was started
    host: str = ""  # on which host rank 0 ran last
    pid: int = 0  # its process there
    world_size: int = 1  # number of ranks
    versions: dict[str, str] = field(default_factory=dict)  # of torch and dream_trainer
    code: dict[str, str] = field(default_factory=dict)  # digests of the user's modules, by paths from where it ran


def write_record(run_dir: Path, record: RunRecord) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    # One entry a line: `indent` would have all of it written by Python's own encoder, several times as slow.
    entries = [f'  "{name}": {json.dumps(json_ready(value))}' for name, value in vars(record).items()]
    replace_file(run_dir / RECORD_NAME, "{\n" + ",\n".join(entries) + "\n}\n")


def read_record(run_dir: Path) -> RunRecord | None:
    """The record of a run; None if there is none, or none that can be read."""
    try:
        found = {**json.loads((run_dir / RECORD_NAME).read_text())}
        record = RunRecord(**{part.name: found[part.name] for part in fields(RunRecord) if part.name in found})
        record.metrics = {name: float(value) for name, value in record.metrics.items()}
        record.best = {
            name: {"value": float(best["value"]), "step": int(best["step"]), "mode": str(best["mode"])}
            for name, best in record.best.items()
        }
        record.times = [asdict(Start.of(one)) for one in record.times]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return record


def read_config(path: Path) -> dict[str, Any]:
    """The config of a run, a checkpoint or a file."""
    if is_checkpoint(path):
        return read_manifest(path).config
    file = path / CONFIG_NAME if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"{file} does not exist. Give a run's directory, such as runs/project/group/experiment.")
    config = read_plain(file)
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no config but a {type(config).__name__}. Give a run's directory.")
    return config


def config_fields(config: Mapping[str, Any], record: RunRecord | None) -> dict[str, Any]:
    """The config's fields by dotted names; of a branch with the words that it began by."""
    values = dict(leaves(config))
    words: dict[str, Any] = {} if record is None or record.parent is None else record.parent.get("words", {})
    return values | {BRANCH + name: word for name, word in words.items() if BRANCH + name in values}


def is_alive(run_dir: Path, record: RunRecord) -> bool | None:
    """Whether a job still trains the run; None if that cannot be known from this host."""
    claimed = is_claimed(run_dir)
    if claimed is not None:  # a trainer that writes no checkpoints claims no directory
        return claimed
    return is_running(record.pid) if record.host == socket.gethostname() else None


@dataclass(kw_only=True)
class ListedRun:
    """A run as `dream-trainer runs` shows it."""

    name: str  # its path below the listed directory
    path: Path
    state: str
    """The record's; "dead": it says "running", and nothing runs; "unknown": it ran on another host; "-": no record."""
    record: RunRecord
    config: dict[str, Any]
    last: dict[str, dict[str, Any]]  # the newest value of each metric, with its step
    best: dict[str, Any] | None = None  # the metric shown: its name, value, step and mode, and whether it is the last

    def set_best(self, metric: str | None, mode: str | None) -> None:
        """Shows a metric: its best value, or its last if none was kept. None shows the first whose best was kept."""
        name = metric or next(iter(self.record.best), None)
        if name in self.record.best:
            self.best = {"name": name, **self.record.best[name], "is_last": False}
        elif name in self.last:
            self.best = {"name": name, **self.last[name], "mode": mode, "is_last": True}


def run_directories(root: Path) -> list[Path]:
    """The directories at or below `root` that a run has written to; runs inside a run are not searched."""
    found = []
    for place, directories, files in os.walk(root, followlinks=True):
        path = Path(place)
        directories.sort()
        saves = step_directories(path / "checkpoints")  # a group may have that name too
        is_run = any((save / MANIFEST_NAME).exists() for _, save in saves)
        if is_run or {RECORD_NAME, CONFIG_NAME, LOG_NAME}.intersection(files):
            found.append(path)
            directories.clear()
        elif len(path.relative_to(root).parts) >= _DEPTH:
            directories.clear()
    return found


def read_run(path: Path, root: Path) -> ListedRun:
    record = read_record(path)
    try:
        config = read_config(path)
    except ConfigError:
        config = {}
    state = "-"  # of a version that kept no record
    if record is not None:
        alive = is_alive(path, record) if record.state == "running" else True
        state = record.state if alive else "dead" if alive is False else "unknown"
    record = record or RunRecord()
    last = {name: {"value": value, "step": record.step} for name, value in record.metrics.items()}
    last |= _follow_log(record, path / LOG_NAME)
    name = path.name if path == root else path.relative_to(root).as_posix()
    return ListedRun(name=name, path=path, state=state, record=record, config=config, last=last)


def _follow_log(record: RunRecord, file: Path) -> dict[str, dict[str, Any]]:
    """The last logged values; they may be of later steps than the record, which is brought up to date."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().split(b"\n")[:-1]  # the last may still be written
    except OSError:
        return found
    for text in lines:
        try:
            line = json.loads(text)
            step, seen = int(line["step"]), float(line["time"])
        except (ValueError, KeyError, TypeError):  # the first may begin before the bytes read
            continue
        record.step, record.seen = max(record.step, step), max(record.seen, seen)
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        found |= {n: {"value": float(value), "step": step} for n, value in numbers.items() if n not in Stamp._fields}
    return found


WORTH_TELLING = 60.0  # seconds: a shorter run is mostly its start
LONGEST_ERROR = 20_000  # characters of an exception, with its calls, that are kept


class RunRecorder:
    """Keeps `config.json` and `run.json` in the run's directory. A failed write is one warning."""

    _made_here: ClassVar[bool] = False  # whether a trainer was made before in this process, which began for that one

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._record: RunRecord | None = None
        self._made = time.time()
        self._began = self._made if RunRecorder._made_here else process_began()
        RunRecorder._made_here = True
        self._times: list[dict[str, Any]] = []  # of the starts before this one
        self._start: Start | None = None
        self._is_new = False

    def listeners(self, event: str, *, is_main: bool) -> tuple[Callable[..., None], ...]:
        """Functions to call at `event` on this rank: ranks other than 0 only write about their failures."""
        listeners: dict[str, Callable[..., None]] = {"on_exception": self._failed}
        if is_main:
            listeners |= {"post_setup": self._is_set_up, "pre_fit": self._starts, "post_val_epoch": self._validated}
            listeners |= {"on_save": self._saved, "on_interrupt": self._ends, "post_fit": self._has_ended}
        is_kept = event in listeners and not self._runtime.config.training_parameters.fast_dev_run
        return (listeners[event],) if is_kept else ()

    def _is_set_up(self) -> None:
        runtime = self._runtime
        record = read_record(runtime.run_dir)
        if record is not None and record.times:
            # The last start may have died and only left lines in the log, whose end a resume drops.
            last = Start.of(record.times[-1])
            _follow_log(record, runtime.run_dir / LOG_NAME)
            last.seen, last.last_step = max(last.seen, record.seen), max(last.last_step, record.step)
            self._times = [*record.times[:-1], asdict(last)]
        if runtime.coordinator.trains and record is None:
            self._is_new = not (runtime.run_dir / CONFIG_NAME).exists()
            self._write_config()  # of a run that was there before, only once it has resumed

    def _starts(self) -> None:
        runtime, now = self._runtime, time.time()
        self._write_config()
        before = read_record(runtime.run_dir)
        is_new_process = self._record is None
        if before is not None and is_new_process and runtime.saver.lacks_checkpoint:
            runtime.warn_once("step 0", "the run starts at step 0 again: its last start left no complete checkpoint.")
        if before is None or (before.step > 0 and runtime.progress.global_step == 0):
            before, self._times = RunRecord(started=now, starts=0), []
        code: dict[str, str] = {} if self._record is None else self._record.code
        if is_new_process:
            with suppress(OSError):  # the working directory is gone
                code = {os.path.relpath(path): digest for path, digest in own_code().values()}
        self._record = RunRecord(
            started=before.started,
            starts=before.starts + is_new_process,
            metrics=before.metrics,
            best=self._best(),
            parent=runtime.parent or before.parent,
            resumed_from=runtime.resumed_from,
            argv=sys.argv,
            host=socket.gethostname(),
            pid=os.getpid(),
            world_size=runtime.world.world_size,
            versions={"torch": torch.__version__, "dream_trainer": __version__},
            code=code,
        )
        if self._start is None:
            step = runtime.progress.global_step
            self._start = Start(began=self._began, trained_from=now, seen=now, first_step=step, last_step=step)
        changed = sorted(path for path in code.keys() & before.code.keys() if code[path] != before.code[path])
        if changed and is_new_process and (step := runtime.progress.global_step) > 0:
            said = f"the run resumes at step {step} with other code than its last start: {listed(changed, 5)}."
            runtime.warn_once("code", said)
        self._write("running")

    def _best(self) -> dict[str, dict[str, Any]]:
        best, modes = self._runtime.best, self._runtime.hooks._best_modes()
        return {
            name: {"value": value, "step": best.steps.get(name, 0), "mode": modes[name]}
            for name, value in best.values.items()
            if name in modes
        }

    def _validated(self, metrics: dict[str, float]) -> None:
        runtime, record = self._runtime, self._record
        if record is None or runtime.state.is_sanity_validation or runtime.state.is_evaluating:
            return
        record.metrics, record.best = dict(metrics), self._best()
        self._write("running")
        if runtime.log is not None and (told := self._receipt()):
            runtime.hooks.log("run/goodput", told.goodput)

    def _saved(self, path: Path) -> None:
        if self._record is not None:
            if self._start is not None and (step := named_step(path)) is not None:
                self._start.saved = [*self._start.saved, [step, time.time()]][-_MARKS:]
            self._write(self._record.state, self._record.why)

    def nothing_to_train(self, because: str) -> None:
        """Called on every rank of a run that had reached its limits before its first step."""
        runtime = self._runtime
        said = f"nothing to train at step {runtime.progress.global_step}: {because}, or use another experiment name."
        runtime.warn_once("finished", said)
        is_written = runtime.world.is_main and not runtime.config.training_parameters.fast_dev_run
        if is_written and self._is_the_first_to_tell():
            self._write("finished", f"nothing to train: {because}")

    def _is_the_first_to_tell(self) -> bool:
        """Whether a run that ends before its first step leaves a record: where none is from when it trained."""
        if self._record is None and read_record(self._runtime.run_dir) is None:
            self._starts()
            return True
        return False

    def _ends(self) -> None:
        self._is_the_first_to_tell()
        coordinator = self._runtime.coordinator
        self._write("stopped" if coordinator.stopped else "finished", coordinator.stopped_because)

    def _has_ended(self) -> None:
        self._ends()
        if self._runtime.log is None or "console" not in self._runtime.config.logger_parameters.loggers:
            return
        if told := self._receipt():
            show(told.words())

    def _receipt(self) -> Receipt | None:
        told = None if self._record is None else receipt(self._record.times)
        return told if told is not None and told.total >= WORTH_TELLING else None

    def _failed(self, exc: BaseException) -> None:
        """Any rank may fail, and rank 0 may not live to hear of it."""
        runtime = self._runtime
        if runtime.launched is None or not runtime.coordinator.trains or isinstance(exc, SystemExit):
            return
        if runtime.saver.is_overtaken or (not runtime.session.is_resumed and is_claimed(runtime.run_dir)):
            return  # another job's: this one claims the directory before a resume
        found = read_record(runtime.run_dir)
        is_consequence = runtime.world.world_size > 1 and is_lost_connection(exc)
        if found is not None and found.seen >= self._made:  # of this job
            if found.state == "failed" and (is_consequence or found.failed_rank is not None):
                return  # that came first
        elif found is not None and self._record is None:
            return  # a start that is refused says nothing of the run that was there before
        elif self._record is None and isinstance(exc, ConfigError | CheckpointError):
            if self._is_new:  # nothing has begun that the list of runs should show
                (runtime.run_dir / CONFIG_NAME).unlink(missing_ok=True)
            return
        self._record = self._record or found or RunRecord(started=time.time())
        rank = f"rank {runtime.world.rank}: " if runtime.world.world_size > 1 else ""
        if isinstance(exc, KeyboardInterrupt):
            self._write("stopped", "Ctrl-C, without a save")
            return
        record = self._record
        record.failed_rank, record.error = runtime.world.rank, f"{describe(exc).rstrip()[:LONGEST_ERROR]}\n"
        if is_consequence:
            record.failed_rank, rank = None, f"a rank is gone that said nothing: {rank}"
        self._write("failed", rank + in_a_line(exc))
        # This takes a while, so a message comes first.
        gone: dict[int, str] = {}
        if is_consequence and (store := job_store()) is not None:
            with suppress(RuntimeError):  # the store went away with the rank that hosted it
                gone = dead_ranks(store, runtime.world.world_size)
        if gone:
            record.failed_rank = next(iter(gone))
            named = ", ".join(f"rank {number} ({process})" for number, process in gone.items())
            self._write("failed", f"{named} is gone without an error: killed (out of memory?), or ended by native code")

    def _write(self, state: RunState, why: str | None = None) -> None:
        runtime, record, start = self._runtime, self._record, self._start
        if record is None:
            return
        progress = runtime.progress
        record.state, record.why, record.seen = state, why, time.time()
        record.step, record.epoch, record.samples = progress.global_step, progress.current_epoch, progress.samples_seen
        record.seconds = progress.elapsed_seconds
        if start is not None:  # on rank 0, once it has begun to train
            start.seen, start.last_step = record.seen, progress.global_step
            start.validation, start.saving = runtime.window.validation_seconds, runtime.saver.seconds
            start.data, start.ranks = runtime.data.feed.seconds_waiting, runtime.parallel.gradients.own_time.waited
            record.times = [*self._times, asdict(start)]
        with self._guarded():
            write_record(runtime.run_dir, record)

    def _write_config(self) -> None:
        with self._guarded():
            path = self._runtime.run_dir / CONFIG_NAME
            text = json.dumps(to_dict(self._runtime.config), indent=2, default=str) + "\n"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                replace_file(path, text)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ConfigError) as error:
            self._runtime.warn_once("run record", f"the run's record of itself is not written: {in_a_line(error)}")


_MARKS = 20  # checkpoints of a start whose times are kept: a later start may fall back by some
_LOADED = time.time()
PARTS = {
    "training": "training",
    "again": "steps done twice",
    "validation": "validation",
    "saving": "saving",
    "data": "waiting for data",
    "ranks": "waiting for ranks",
    "starting": "starting up",
    "idle": "idle between starts",
}
"""The parts of a run's time, with their labels."""


@dataclass(kw_only=True)
class Start:
    """One start of a run. Times are in seconds since 1970, durations in seconds of rank 0."""

    began: float  # its process
    trained_from: float  # its loop
    seen: float  # its last sign of life
    first_step: int  # optimizer steps completed when its loop began
    last_step: int  # and at the last sign
    validation: float = 0.0
    saving: float = 0.0  # while training waited for it
    data: float = 0.0
    ranks: float = 0.0  # in collectives of gradients and of sharded weights
    saved: list[list[float]] = field(default_factory=list)  # [step, time] of its checkpoints

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """Of JSON, which may have been written by another version."""
        return cls(**{name: plain[name] for name in cls.__dataclass_fields__ if name in plain})

    def parts(self, following: Start | None) -> dict[str, float]:
        """Its time by part, and the time until the following start."""
        looped = max(self.seen - self.trained_from, 0.0)
        spent = {name: getattr(self, name) for name in ("validation", "saving", "data", "ranks")}
        spent["training"] = max(looped - sum(spent.values()), 0.0)
        again = 0.0
        if following is not None and following.first_step < self.last_step:
            # when it had trained that step, as far as its checkpoints tell
            reached = (then for saved, then in self.saved if saved <= following.first_step)
            again = max(self.seen - max(reached, default=self.trained_from), 0.0)
        # Steps trained again later take all of the loop's time since then, in equal shares of its parts.
        stays = 1 - min(again, looped) / looped if looped else 1.0
        idle = 0.0 if following is None else max(following.began - self.seen, 0.0)
        spent = {name: seconds * stays for name, seconds in spent.items()}
        return {**spent, "again": again, "starting": max(self.trained_from - self.began, 0.0), "idle": idle}


@dataclass(frozen=True)
class Receipt:
    """How a run spent its time."""

    seconds: dict[str, float]  # by part, as in PARTS
    starts: int

    @property
    def total(self) -> float:
        """From the first start to the last sign of life."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time spent on steps that are in the final weights."""
        return self.seconds["training"] / self.total if self.total else 0.0

    def words(self) -> str:
        """One line: the goodput, and every part of at least 1% of the time."""
        shown = {name: words for name, words in PARTS.items() if self.seconds[name] > self.total / 100}
        others = [f"{words} {self.seconds[name] / self.total:.0%}" for name, words in shown.items()]
        took = f"{format_duration(self.total)} in {self.starts} start{'s' * (self.starts > 1)}"
        return f"{took}, goodput {self.goodput:.1%}: {', '.join(others)}"


def receipt(starts: Sequence[dict[str, Any]]) -> Receipt | None:
    """From the entries of each start in `run.json`; None without any, as in files of older versions."""
    known = [Start.of(start) for start in starts]
    seconds = dict.fromkeys(PARTS, 0.0)
    for start, following in zip_longest(known, known[1:]):
        for name, spent in start.parts(following).items():
            seconds[name] += spent
    return Receipt(seconds, len(known)) if known else None


def process_began() -> float:
    """When this process began, in seconds since 1970; where the system does not tell, when this module was loaded."""
    try:
        after_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)
    except (OSError, ValueError, AttributeError, IndexError):
        return _LOADED
