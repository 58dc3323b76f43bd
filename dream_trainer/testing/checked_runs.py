"""Checked runs. Each rank is a process forked from this one, as many at a time as there are cores. It runs the user's
program with a changed config and a Probe among its callbacks, to the end of the first `fit`; its record is a file."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import gcd, prod
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn, cast
from unittest.mock import Mock

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from dream_trainer.callbacks.weight_average import WeightAverage
from dream_trainer.checkpoint.manifest import list_checkpoints
from dream_trainer.config import command_line
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.data.lane_stream import StreamLoader
from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.distributed.job import is_lost_connection
from dream_trainer.errors import ConfigError, DreamTrainerError, failing_frame, is_own, line_of
from dream_trainer.testing.program import Program, become_rank, change, interpreter, move, overridden
from dream_trainer.testing.run_probe import Probe
from dream_trainer.trainer.base import BaseTrainer
from dream_trainer.weights.adapters import adapters_of, load_adapters
from dream_trainer.weights.export import export_checkpoint
from dream_trainer.weights.load import load_weights

AXES = ("dp_replicate", "dp_shard", "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the program, on one or more ranks."""

    program: Program
    directory: str  # where its ranks write what they found
    runs_dir: str  # where the run itself is; a job with the same one resumes it
    sizes: dict[str, int] = field(default_factory=dict)  # of the mesh
    mode: str = ""  # of the Probe
    steps: int | None = None  # optimizer steps of the whole run; None leaves the program's own limits
    epoch: int | None = None  # optimizer steps after which an epoch ends; None leaves epochs as they are
    batch: int | None = None  # samples of an optimizer step over all ranks; None leaves what the program has
    loader_batch: int = 0  # loaders with batches of at most this size get others if these do not fit
    micro_batch: int | None = None  # most samples of a micro-batch
    validation: int | None = None  # batches of a validation over all ranks; None for all
    saves: int | None = None  # steps between saves; None saves only at the end, 0 never
    stop_at: int | None = None
    killed: tuple[int, int, int] | None = None  # a rank, the step after which it gets a signal, and the signal
    workers: int = 0
    spawns: bool = False  # whether workers are new interpreters, which live for the whole run
    port: int = 0
    hash_seed: str = ""  # if given, each rank is a new interpreter
    exported: str = ""  # another job's `runs_dir`: the export of its run is evaluated, and nothing is trained

    @property
    def ranks(self) -> int:
        return prod(size for name, size in self.sizes.items() if name != "expert_parallel")  # which divides others

    @property
    def parts(self) -> int:  # into which the samples of a step are cut
        return self.sizes.get("dp_replicate", 1) * self.sizes.get("dp_shard", 1)


def _change(config: Any, job: Job) -> None:
    """Gives a config, which no trainer has read, the job's values."""
    validation = None if job.validation is None else max(1, job.validation // job.ranks)
    limits: dict[str, Any] = {"train_steps_per_epoch": job.epoch, "val_steps_per_epoch": validation}
    limits |= {"global_batch_size": job.batch, "gradient_accumulation_steps": job.batch and 1, "max_steps": job.steps}
    limits = {name: value for name, value in limits.items() if value is not None}
    if job.steps is not None:
        limits |= dict.fromkeys(("max_time", "n_epochs", "max_samples", "max_tokens")) | {"fast_dev_run": False}
        training = config.training_parameters
        if training.val_every_n_epochs not in ("auto", None):
            limits["val_every_n_epochs"] = 1
        elif training.val_every_n_steps is not None or training.val_every_minutes is not None:
            limits |= {"val_every_n_steps": job.epoch or 3, "val_every_minutes": None}
    devices = {"device": "cpu", "compile": False, "float8": "none", "cpu_offload": False, **dict.fromkeys(AXES, 1)}
    change(config, training=limits, device=devices | job.sizes, logger={"log_every_n_steps": 1})
    saves = {"save_every_n_steps": job.saves or None, "save_at_end": job.saves != 0, "resume": "auto"}
    directory, rank = Path(job.directory), os.environ["RANK"]
    probe = Probe(job.mode, job.stop_at, directory / f"steps_{rank}", partial(note_error, directory, rank))
    move(config, job.runs_dir, probe, saves)


class _CheckedTrainer(BaseTrainer):
    """Stands before the user's class. The end of its `fit` is the end of the process."""

    _job: ClassVar[Job]
    _is_staged = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for config in (*args, *kwargs.values()):
            if isinstance(config, BaseTrainerConfig):
                _change(overridden(config, self._job.program), self._job)
        super().__init__(*args, **kwargs)

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        _CheckedTrainer._is_staged = True  # a pipeline can run it in stages
        of_user: Any = super()
        return of_user.forward_backward(*args, **kwargs)

    def _finish_setup(self) -> None:
        super()._finish_setup()
        if self._job.spawns:  # a worker that imports a program without `if __name__ == "__main__":` must not train it
            os.environ["WORLD_SIZE"] = "of a loader's worker"

    @override
    def fit(self) -> None:
        self._evaluate_exported() if self._job.exported else super().fit()
        self.close()
        # Of packages that the program has imported, which are imported once for all further runs.
        of_packages = [n for n, m in sorted(sys.modules.items()) if "-packages" in str(getattr(m, "__file__", ""))]
        probe: Any = self.config.callbacks.get(Probe)
        record = probe.record | {"modules": [name for name in of_packages if not name.startswith("_")]}
        record |= {"parses": vars(command_line)["parse"].called, "staged": self._is_staged}
        write_whole(Path(self._job.directory, f"record_{os.environ['RANK']}"), record)
        end(0)

    def _evaluate_exported(self) -> None:
        self.launch_and_resume()
        *_, newest = list_checkpoints(next(Path(self._job.exported).rglob("checkpoints")))
        weights = "model"
        for callback in self.callbacks:
            if isinstance(callback, WeightAverage) and callback.validate:
                weights, callback.validate = callback.export_name, False
        for name, model in self.named_models().items():
            export_checkpoint(newest.path, out := Path(self._job.directory, name), model=name, weights=weights)
            (load_weights if adapters_of(model) is None else load_adapters)(model, out)
        cast(Any, self).evaluate()


def _change_loaders(job: Job) -> None:
    """Loaders that the program builds serve micro-batches of the job's sizes, and have its workers."""

    def changed(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **options: Any) -> None:
            if isinstance(batch_size, int) and job.batch is not None:
                if is_small := batch_size <= job.loader_batch:  # as large as those of training at most
                    batch_size = gcd(batch_size, max(1, job.batch // job.parts))
                is_cut = is_small or job.validation is not None
                if is_cut and job.micro_batch is not None and batch_size > job.micro_batch:
                    batch_size = gcd(batch_size, job.micro_batch)
            if "num_workers" in options or job.workers:
                options["num_workers"] = job.workers
            for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
                options.pop(name, None)
            options |= {"multiprocessing_context": "spawn", "persistent_workers": True} if job.spawns else {}
            original(self, dataset, batch_size, *args, **options)

        return init

    kinds: tuple[Any, ...] = (DataLoader, DistributedDataLoader, StreamLoader)
    for kind in kinds:
        kind.__init__ = changed(kind.__init__)


def start_rank(job: Job, rank: int) -> int:
    if not job.hash_seed:
        return fork(Path(job.directory), rank, partial(_train, job, rank))
    words = interpreter(train_again, pickle.dumps(job), rank)
    return os.posix_spawn(sys.executable, words, os.environ | {"PYTHONHASHSEED": job.hash_seed})


def train_again(job: bytes, rank: int) -> None:
    unpickled: Job = pickle.loads(job)
    _live(Path(unpickled.directory), rank, partial(_train, unpickled, rank))


def _train(job: Job, rank: int) -> None:
    os.environ["RANK"] = str(rank)
    if job.ranks > 1:
        become_rank(rank, job.ranks, job.ranks)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    torch.set_num_threads(1)
    np.random.seed()  # a new process has other numbers, and a forked one would have those of its parent
    with open(Path(job.directory, f"stacks_{rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        _change_loaders(job)
        command_line.parse = Mock(wraps=command_line.parse)
        job.program.run(_CheckedTrainer, _job=job)


# -- processes of ranks, also of planned ones


def fork(directory: Path, rank: int, work: Callable[[], object]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        _live(directory, rank, work)
    return pid


def _live(directory: Path, rank: int, work: Callable[[], object]) -> NoReturn:
    """Does the work as the first process of a session, without input; what it prints, and its error, become files."""
    code = 1
    try:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(directory / f"output_{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        work()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        note_error(directory, rank, error)
    finally:
        end(code)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, even if it hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def note_error(directory: Path, rank: int | str, error: BaseException) -> None:
    """An error of the user's program: its own lines, without ours."""
    frame = failing_frame(error)
    place = "" if frame is None else f" ({line_of(frame[0].f_code, frame[1])})"
    kind = "" if isinstance(error, DreamTrainerError) else f"{type(error).__name__}: "
    ours = (str(Path(__file__).parent), "<frozen runpy>")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    told = {
        "text": f"{kind}{' '.join(str(error).split())}{place}",
        "is_argument": isinstance(error, ConfigError) and not place,  # of the command, not of the program
        "is_consequence": is_lost_connection(error),  # another rank failed first
        "trace": "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]),
    }
    write_whole(directory / f"error_{rank}", told)


def write_whole(file: Path, value: Any) -> None:
    """Pickled; the file is there when it is whole."""
    new = file.with_suffix(".new")
    new.write_bytes(pickle.dumps(value))
    new.rename(file)


def end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- all runs of a program


@dataclass
class Run:
    """A run: each rank's record, or the reason that it has none."""

    job: Job
    seconds: float = 0.0
    codes: dict[int, int] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None  # of the first rank that failed by itself
    waiting: list[str] = field(default_factory=list)  # where each rank was when time ran out

    @property
    def is_whole(self) -> bool:
        return len(self.records) == self.job.ranks and self.error is None

    def why(self) -> str:  # there is no record
        if self.waiting:
            return "it hangs: " + "; ".join(f"rank {rank} is at {place}" for rank, place in enumerate(self.waiting))
        if self.error is not None:
            return str(self.error["text"])
        return f"ranks ended with exit codes {[*self.codes.values()]}"


class Launcher:
    """Runs jobs of one program. They go on while one of them is waited for, until the asker is gone."""

    def __init__(self, program: Program, asker: Connection) -> None:
        self.program, self._asker = program, asker
        self.patience = 120.0  # seconds without a finished batch on any rank
        self.values: dict[str, Any] = {}  # of each Job
        self._scratch = TemporaryDirectory(prefix="dream-trainer-check-", ignore_cleanup_errors=True)
        self._cores = max(2, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 2)
        self._free, self._number = self._cores, count()
        self.runs: dict[str, list[Run]] = {}
        self._going: dict[str, Iterator[None]] = {}

    def close(self) -> None:
        self._going.clear()  # whose runs end their ranks
        self._scratch.cleanup()

    def start(self, name: str, *links: dict[str, Any], **values: Any) -> None:
        """Starts runs when cores are free, with these fields of a Job; each of the links continues the last."""
        if name not in self.runs:
            self.runs[name] = []
            self._going[name] = self._chain(name, [self.values | values | link for link in links or ({},)])

    def __getitem__(self, name: str) -> list[Run]:
        while name in self._going:
            for each, chain in [*self._going.items()]:
                if next(chain, self) is self:
                    del self._going[each]
            if self._asker.poll(0.01):
                raise EOFError
        return self.runs[name]

    def _chain(self, name: str, jobs: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        runs_dir = f"{self._scratch.name}/runs_{next(self._number)}"
        for values in jobs:
            directory = f"{self._scratch.name}/job_{next(self._number)}"
            os.mkdir(directory)
            job = Job(program=self.program, directory=directory, runs_dir=runs_dir, port=free_port(), **values)
            run, need = Run(job), min(job.ranks, self._cores)
            while self._free < need:
                yield
            self._free -= need
            yield from self._live(run)
            self._free += need
            self.runs[name].append(run)
            self._asker.send(f"{name}: {run.seconds:.1f} s")
            if not run.is_whole and job.killed is None:
                break

    def _live(self, run: Run) -> Iterator[None]:
        job, directory, began = run.job, Path(run.job.directory), time.monotonic()
        ranks = {rank: start_rank(job, rank) for rank in range(job.ranks)}  # that live, with their process ids
        progress, killed, deadline = 0, job.killed, began + self.patience
        try:
            while ranks:
                for rank, pid in [*ranks.items()]:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        run.codes[rank] = os.waitstatus_to_exitcode(status)
                        del ranks[rank]
                failed = any(run.codes.values())
                now = sum(file.stat().st_size for file in directory.glob("steps_*"))  # grows with each batch of any
                deadline = min(deadline, time.monotonic() + 20) if failed else deadline
                has_begun = len([*directory.glob("stacks_*")]) == job.ranks  # to import may take long
                if not failed and (now > progress or not has_begun):
                    progress, deadline = now, time.monotonic() + self.patience
                steps = directory / f"steps_{killed[0] if killed else 0}"
                if killed is not None and (steps.read_text().count("step") if steps.exists() else 0) >= killed[1]:
                    time.sleep(random.random() * (time.monotonic() - began) / (killed[1] + 5))
                    _send(ranks, killed[2], killed[0])
                    killed = None
                if ranks and time.monotonic() > deadline:
                    run.waiting = [] if failed else _where(directory, ranks)
                    break
                yield
        finally:
            _send(ranks, signal.SIGKILL)
            for rank, pid in ranks.items():
                run.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = (directory / f"record_{rank}" for rank in range(job.ranks))
        run.records = [pickle.loads(file.read_bytes()) for file in found if file.exists()]
        errors = [pickle.loads(file.read_bytes()) for file in sorted(directory.glob("error_?"))]
        own = [error for error in errors if not error["is_consequence"]]
        run.error, run.seconds = next(iter(own or errors), None), time.monotonic() - began


def _send(ranks: Mapping[int, int], number: int, *only: int) -> None:
    for rank in only or ranks:
        with suppress(KeyError, ProcessLookupError):
            os.kill(ranks[rank], number)


def _where(directory: Path, ranks: Mapping[int, int]) -> list[str]:
    """The line of the user's code that each rank is in."""
    _send(ranks, signal.SIGUSR2)
    time.sleep(1.0)
    places: list[str] = []
    for stacks in sorted(directory.glob("stacks_*")):
        lines = re.findall(r'File "(.+)", line (\d+) in (.+)', stacks.read_text())
        own = [f"{Path(file).name}:{number}, in {function}" for file, number, function in lines if is_own(file)]
        places.append(next(iter(own), "the trainer's own code, waiting for other ranks"))
    return places


def free_port() -> int:
    """A port of this host that nothing listens on, outside those of outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as held, suppress(OSError):
            held.bind(("127.0.0.1", port))
            return port
