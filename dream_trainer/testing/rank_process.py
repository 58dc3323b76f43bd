"""A rank of a checked run, of a job's file and a number.

Without arguments its process serves: it imports PyTorch and the framework once, and forks a rank for each line that it
reads. A rank runs the user's program with a changed config and a Probe among its callbacks, and ends when the first
`fit` of the checked trainer has ended.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from dream_trainer.config import command_line
from dream_trainer.config.trainer_config import BaseTrainerConfig
from dream_trainer.data.lane_stream import StreamLoader
from dream_trainer.data.loader import DistributedDataLoader
from dream_trainer.distributed.failure import is_lost_connection
from dream_trainer.errors import ConfigError
from dream_trainer.testing.program import Program, become_rank, move, overridden
from dream_trainer.testing.run_probe import Probe
from dream_trainer.trainer.base import BaseTrainer
from dream_trainer.users_code import failing_frame, line_of

Mesh = Literal["alone", "replicas", "shards", "hybrid", "tensor", "context", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the program, on one or more ranks."""

    program: Program
    directory: str  # where its ranks write what they found
    runs_dir: str  # where the run itself is; a job with the same one resumes it
    ranks: int = 1
    mesh: Mesh = "alone"
    mode: str = ""  # of the Probe
    steps: int | None = None  # optimizer steps of the whole run; None leaves the program's own limits
    epoch: int | None = None  # optimizer steps after which an epoch ends; None leaves epochs as they are
    batch: int | None = None  # samples of an optimizer step over all ranks; None leaves what the program has
    micro_batch: int | None = None  # most samples of a micro-batch
    validation: int | None = None  # batches of a validation on each rank; None for all
    validate_every: int | None = None
    saves: int | None = None  # steps between saves; None saves only at the end, 0 never
    stop_at: int | None = None
    killed: tuple[int, int, int] | None = None  # a rank, the step after which it gets a signal, and the signal
    workers: int = 0
    port: int = 0
    hash_seed: str = ""  # if given, each rank is a new interpreter

    def per_rank(self) -> int | None:
        """Samples of an optimizer step on one data-parallel rank."""
        split = self.ranks if self.mesh in ("replicas", "shards", "hybrid") else 1
        return None if self.batch is None else max(1, self.batch // split)


def _change(config: Any, job: Job) -> None:
    """Gives a config, which no trainer has read, the job's values."""
    training, devices = config.training_parameters, config.device_parameters
    limits: dict[str, Any] = {}
    if job.steps is not None:
        limits = {"max_steps": job.steps, **dict.fromkeys(("max_time", "n_epochs", "max_samples", "max_tokens"))}
        limits["fast_dev_run"] = False
    if job.epoch is not None:
        limits["train_steps_per_epoch"] = job.epoch
    if job.batch is not None:
        limits |= {"global_batch_size": job.batch, "gradient_accumulation_steps": 1}
    if job.validation is not None:
        limits["val_steps_per_epoch"] = job.validation
    if job.validate_every is not None and training.val_every_n_epochs in ("auto", None):
        if training.val_every_n_steps is not None or training.val_every_minutes is not None:
            limits |= {"val_every_n_steps": job.validate_every, "val_every_minutes": None}
    elif training.val_every_n_epochs is not None and job.steps is not None:
        limits["val_every_n_epochs"] = 1
    config.training_parameters = replace(training, **limits)
    meshes: dict[Mesh, dict[str, Any]] = {
        "alone": {},
        "replicas": {"dp_replicate": job.ranks},
        "shards": {"dp_shard": job.ranks},
        "hybrid": {"dp_replicate": job.ranks // 2, "dp_shard": 2},
        **{name: {f"{name}_parallel": job.ranks} for name in ("tensor", "context", "pipeline")},
    }
    axes = ("dp_replicate", "dp_shard", *(f"{name}_parallel" for name in ("tensor", "context", "pipeline", "expert")))
    single = dict.fromkeys(axes, 1) | {"device": "cpu", "compile": False, "float8": "none", "cpu_offload": False}
    config.device_parameters = replace(devices, **single | meshes[job.mesh])
    saves = {"save_every_n_steps": job.saves or None, "save_at_end": job.saves != 0, "resume": "auto"}
    rank = os.environ.get("RANK", "0")
    probe = Probe(job.mode, job.stop_at, Path(job.directory, f"steps_{rank}"), lambda error: _note(job, error))
    move(config, job.runs_dir, probe, saves)
    if "logger_parameters" in {each.name for each in fields(config)}:
        config.logger_parameters = replace(config.logger_parameters, log_every_n_steps=1)


def _note(job: Job, error: BaseException) -> None:
    Path(job.directory, f"error_{os.environ.get('RANK', '0')}").write_text(json.dumps(told(error)))


def _validating_as_before(make_loaders: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook, with loaders of validation as the program has built them."""

    @functools.wraps(make_loaders)
    def configure_dataloaders(self: Any) -> Any:
        _Changed.is_on = True
        loaders = make_loaders(self)
        _Changed.is_on = False
        if not isinstance(loaders, tuple) or len(loaders) != 2:
            return loaders
        train, val = loaders
        if isinstance(val, Mapping):
            return train, {name: _Changed.as_before(loader) for name, loader in val.items()}
        return train, _Changed.as_before(val)

    return configure_dataloaders


class _CheckedTrainer(BaseTrainer):
    """Stands before the user's class. The end of its `fit` is the end of the process."""

    _job: ClassVar[Job]
    _around: ClassVar = {"configure_dataloaders": _validating_as_before}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for config in (*args, *kwargs.values()):
            if isinstance(config, BaseTrainerConfig):
                _change(overridden(config, self._job.program), self._job)
        super().__init__(*args, **kwargs)

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._probe.record["staged"] = True  # a pipeline can run it in stages
        of_user: Any = super()
        return of_user.forward_backward(*args, **kwargs)

    @property
    def _probe(self) -> Any:
        return self.config.callbacks.get(Probe)

    @override
    def fit(self) -> None:
        code = 0
        try:
            super().fit()
            self.close()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
            self._probe.finish(self)
        files = {name: str(getattr(module, "__file__", "")) for name, module in sorted(sys.modules.items())}
        # Of packages that the program has imported; a server may import them once for all runs.
        modules = [name for name, file in files.items() if "-packages" in file and not name.startswith("_")]
        self._probe.record |= {"modules": modules, "parses": _Changed.has_parsed}
        write_whole(Path(self._job.directory, f"record_{os.environ['RANK']}"), self._probe.record)
        end(code)


class _Changed:
    """What is changed in this process: loaders that the program builds serve the job's micro-batches and workers."""

    is_on = True
    """Whether loaders that are built get other batch sizes: not those that ours are made into."""
    has_parsed = False
    """Whether the program has read its arguments."""
    made: ClassVar[dict[int, tuple[tuple[Any, ...], dict[str, Any]]]] = {}
    """Arguments of loaders whose batch size was changed."""

    @classmethod
    def as_before(cls, loader: Any) -> Any:
        args, options = cls.made.get(id(loader), ((), {}))
        return type(loader)(*args, **options) if args else loader

    @classmethod
    def begin(cls, job: Job) -> None:
        parse, per_rank = command_line.parse, job.per_rank()

        def noted(*args: Any, **kwargs: Any) -> Any:
            cls.has_parsed = True
            return parse(*args, **kwargs)

        def with_other_batches(original: Callable[..., None]) -> Callable[..., None]:
            def init(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **options: Any) -> None:
                wanted = batch_size
                if cls.is_on and isinstance(batch_size, int):
                    if per_rank is not None and per_rank % batch_size:
                        batch_size = gcd(batch_size, per_rank)
                    if job.micro_batch is not None and batch_size > job.micro_batch:
                        batch_size = gcd(batch_size, job.micro_batch)
                if wanted != batch_size:
                    cls.made[id(self)] = (dataset, wanted, *args), dict(options)
                if "num_workers" in options or job.workers:
                    options["num_workers"] = job.workers
                if not job.workers:
                    for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
                        options.pop(name, None)
                original(self, dataset, batch_size, *args, **options)

            return init

        command_line.parse = noted
        kinds: tuple[Any, ...] = (DataLoader, DistributedDataLoader, StreamLoader)
        for kind in kinds:
            kind.__init__ = with_other_batches(kind.__init__)


def told(error: BaseException) -> dict[str, Any]:
    """An error of the user's program: its own lines, without ours."""
    frame = failing_frame(error)
    place = None if frame is None else line_of(frame[0].f_code, frame[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(Path(__file__).parent)
    ]
    return {
        "message": str(error),
        "place": f" ({place})" if place else "",
        "text": f"{type(error).__name__}: {' '.join(str(error).split())}{f' ({place})' if place else ''}",
        "is_argument": isinstance(error, ConfigError) and place is None,  # of the command, not of the program
        "is_consequence": is_lost_connection(error),  # another rank failed first
        "trace": "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error)),
    }


# -- processes


def preload() -> None:
    """Imports what trainers need."""
    for name in (
        *("dream_trainer.trainer.dream", "dream_trainer.callbacks", "dream_trainer.checkpoint.store", "torch._dynamo"),
        *("torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    ):
        importlib.import_module(name)


def serve() -> None:
    """Imports once what all ranks need; forks a rank for each line `JOB RANK`, imports for each line `import NAMES`."""
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        first, *rest = line.rstrip("\n").split("\t")
        if first == "import":
            for name in rest:
                with suppress(Exception):
                    importlib.import_module(name)
        elif os.fork() == 0:
            watch(first, rest[0])


def watch(path: str, rank: str) -> None:
    """Forks the rank and waits for it; files of the job have its process id and, in the end, its exit code."""
    server = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        _live(path, rank)
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()
    write_whole(Path(path).with_name(f"pid_{rank}"), pid)
    write_whole(Path(path).with_name(f"code_{rank}"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _live(path: str, rank: str) -> None:
    """The work of a rank, to the end of its process."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.path[:], directory, job = pickle.loads(Path(path).read_bytes())
    os.chdir(directory)
    os.environ["RANK"] = rank
    if job.ranks > 1:
        become_rank(int(rank), job.ranks, job.ranks)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    stand_apart(Path(job.directory, f"output_{rank}"))
    torch.set_num_threads(1)
    np.random.seed()  # a new process has other numbers, and a forked one would have its server's
    with open(Path(job.directory, f"stacks_{rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        try:
            _Changed.begin(job)
            job.program.run(_CheckedTrainer, _job=job)
        except SystemExit as left:
            end(left.code if isinstance(left.code, int) else int(left.code is not None))
        except BaseException as error:
            _note(job, error)
            end(1)


def stand_apart(output: Path) -> None:
    """Makes this process the first of a session, without input, that prints to a file."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, even if it hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def write_whole(file: Path, value: Any) -> None:
    """Pickled; the file is there when it is whole."""
    new = file.with_suffix(".new")
    new.write_bytes(pickle.dumps(value))
    new.rename(file)


def end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serves, or with arguments is a rank."""
    watch(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
