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
from dataclasses import asdict, dataclass, field, fields, replace
from math import gcd
from pathlib import Path
from typing import Any, Literal, NoReturn

from dream_trainer.testing.program import Program, become_rank, move, overridden

Mesh = Literal["alone", "replicas", "shards", "hybrid", "tensor", "context", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the program, on one or more ranks."""

    program: Program
    directory: str
    """Where its ranks write what they found."""
    runs_dir: str
    """Where the run itself is; a job with the same one resumes it."""
    ranks: int = 1
    mesh: Mesh = "alone"
    mode: str = ""
    """An additional action of the Probe."""
    steps: int | None = None
    """Optimizer steps of the whole run; None leaves the program's own limits."""
    epoch: int | None = None
    """Optimizer steps after which an epoch ends; None leaves epochs as they are."""
    batch: int | None = None
    """Samples of an optimizer step over all ranks; None leaves what the program has."""
    micro_batch: int | None = None
    """Most samples of a micro-batch."""
    validation: int | None = None
    """Batches of a validation on each rank; None for all."""
    validate_every: int | None = None
    saves: int | None = None
    """Steps between saves; None saves only at the end, 0 never."""
    stop_at: int | None = None
    workers: int = 0
    port: int = 0
    fresh: bool = False
    """Whether each rank is a new interpreter."""
    environment: dict[str, str] = field(default_factory=dict)

    def per_rank(self) -> int | None:
        """Samples of an optimizer step on one data-parallel rank."""
        split = self.ranks if self.mesh in ("replicas", "shards", "hybrid") else 1
        return None if self.batch is None else max(1, self.batch // split)


def changed(config: Any, job: Job) -> None:
    """Gives a config, which no trainer has read, the job's values."""
    training, devices = config.training_parameters, config.device_parameters
    limits: dict[str, Any] = {} if job.steps is None else {"max_steps": job.steps, "max_time": None}
    if job.steps is not None:
        limits |= {"n_epochs": None, "max_samples": None, "max_tokens": None, "fast_dev_run": False}
    if job.epoch is not None:
        limits["train_steps_per_epoch"] = job.epoch
    if job.batch is not None:
        limits |= {"global_batch_size": job.batch, "gradient_accumulation_steps": 1}
    if job.validation is not None:
        limits["val_steps_per_epoch"] = job.validation
    if job.validate_every is not None and training.val_every_n_epochs in ("auto", None):
        by_steps = training.val_every_n_steps is not None or training.val_every_minutes is not None
        if by_steps:
            limits |= {"val_every_n_steps": job.validate_every, "val_every_minutes": None}
    elif training.val_every_n_epochs is not None and job.steps is not None:
        limits["val_every_n_epochs"] = 1
    config.training_parameters = replace(training, **limits)
    split = job.ranks
    meshes: dict[Mesh, dict[str, Any]] = {
        "alone": {"dp_replicate": 1, "dp_shard": 1},
        "replicas": {"dp_replicate": split, "dp_shard": 1},
        "shards": {"dp_replicate": 1, "dp_shard": split},
        "hybrid": {"dp_replicate": split // 2, "dp_shard": 2},
        "tensor": {"dp_replicate": 1, "dp_shard": 1, "tensor_parallel": split},
        "context": {"dp_replicate": 1, "dp_shard": 1, "context_parallel": split},
        "pipeline": {"dp_replicate": 1, "dp_shard": 1, "pipeline_parallel": split},
    }
    names = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    single = dict.fromkeys(names, 1) | {"device": "cpu", "compile": False, "float8": "none"}
    config.device_parameters = replace(devices, **single | {"cpu_offload": False} | meshes[job.mesh])
    saves = {"save_every_n_steps": job.saves or None, "save_at_end": job.saves != 0, "resume": "auto"}
    move(config, job.runs_dir, _probe(job), saves)
    if "logger_parameters" in {each.name for each in fields(config)}:
        config.logger_parameters = replace(config.logger_parameters, log_every_n_steps=1)


def _probe(job: Job) -> Any:
    from dream_trainer.testing.run_probe import Probe

    rank = os.environ.get("RANK", "0")

    def failed(error: BaseException) -> None:
        (Path(job.directory) / f"error_{rank}").write_text(json.dumps(told(error)))

    return Probe(job.mode, job.stop_at, Path(job.directory) / f"steps_{rank}", failed)


def live(job: Job, rank: int) -> NoReturn:
    """The work of a rank, to the end of its process."""
    directory = Path(job.directory)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.environ |= job.environment | {"RANK": str(rank)}
    if job.ranks > 1:
        become_rank(rank, job.ranks, job.ranks)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    output = os.open(directory / f"output_{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(directory / f"stacks_{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        try:
            _run(job, rank)
        except SystemExit as end:
            _end(end.code if isinstance(end.code, int) else int(end.code is not None))
        except BaseException as error:
            (directory / f"error_{rank}").write_text(json.dumps(told(error)))
            _end(1)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, even if it hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _run(job: Job, rank: int) -> NoReturn:
    import numpy as np
    import torch

    from dream_trainer.config import command_line
    from dream_trainer.config.trainer_config import BaseTrainerConfig
    from dream_trainer.trainer.abstract import AbstractTrainer
    from dream_trainer.trainer.base import BaseTrainer
    from dream_trainer.trainer.mixins.pipeline_parallel import PipelineParallelMixin

    torch.set_num_threads(1)
    np.random.seed()  # a new process has other numbers, and a forked one would have its server's
    program, fit, staged = job.program, BaseTrainer.fit, PipelineParallelMixin.forward_backward

    parsed: list[bool] = []  # whether the arguments were read
    named: list[str] = []  # the class to check, since a script may build others before it

    def is_checked(kind: type) -> bool:
        return not named or any(part.__name__ == named[0] for part in kind.__mro__)

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        configs = [each for each in (*args, *kwargs.values()) if isinstance(each, BaseTrainerConfig)]
        if configs and is_checked(kind):
            changed(overridden(configs[0], program), job)
            hooks: Any = kind
            hooks.configure_dataloaders = _validating_as_before(hooks.configure_dataloaders)
        return object.__new__(kind)

    def fit_and_end(trainer: Any) -> None:
        if not is_checked(type(trainer)):
            return fit(trainer)
        probe = trainer.config.callbacks.get(_kind_of_probe())
        code = 0
        try:
            fit(trainer)
            trainer.close()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            probe.finish(trainer)
        if rank == 0:
            # Modules that the program has imported by now; a server may import them once for all runs.
            probe.record["modules"] = sorted(sys.modules)
        probe.record["parses"] = bool(parsed)
        temporary = Path(job.directory) / f"record_{rank}.new"
        temporary.write_bytes(pickle.dumps(probe.record))
        temporary.rename(temporary.with_suffix(""))
        _end(code)

    def forward_backward(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        trainer.config.callbacks.get(_kind_of_probe()).record["staged"] = True  # a pipeline can run it in stages
        return staged(trainer, *args, **kwargs)

    parse = command_line.parse

    def noted(*args: Any, **kwargs: Any) -> Any:
        parsed.append(True)
        return parse(*args, **kwargs)

    command_line.parse = noted
    PipelineParallelMixin.forward_backward = forward_backward  # type: ignore[method-assign, assignment]
    AbstractTrainer.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]
    BaseTrainer.fit = fit_and_end  # type: ignore[method-assign, assignment]
    _change_loaders(job)
    trainer = program.make() if program.pickled or program.name else None
    if trainer is None:
        named += [program.name] * bool(program.name)
        program.run_as_script()
    else:
        with trainer:
            trainer.fit()
    from dream_trainer.errors import ConfigError

    raise ConfigError(f"{program.path} has ended without fit() of {program.name or 'a trainer'}.")


def _kind_of_probe() -> Any:
    from dream_trainer.testing.run_probe import Probe

    return Probe


def _validating_as_before(make_loaders: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook, with loaders of validation as the program has built them."""

    @functools.wraps(make_loaders)
    def configure_dataloaders(self: Any) -> Any:
        _changes.append("loaders")
        loaders = make_loaders(self)
        _changes.clear()
        if not isinstance(loaders, tuple) or len(loaders) != 2:
            return loaders
        train, val = loaders
        if isinstance(val, Mapping):
            return train, {name: _as_before(loader) for name, loader in val.items()}
        return train, _as_before(val)

    return configure_dataloaders


def _as_before(loader: Any) -> Any:
    made = _made.get(id(loader))
    return loader if made is None else type(loader)(*made[0], **made[1])


_changes = ["loaders"]  # whether loaders that are built get other batch sizes: not those that ours are made into
_made: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # arguments of loaders whose batch size was changed


def _change_loaders(job: Job) -> None:
    """Has loaders that the program builds serve the job's micro-batches, with the job's workers."""
    from torch.utils.data import DataLoader

    from dream_trainer.data.lane_stream import StreamLoader
    from dream_trainer.data.loader import DistributedDataLoader

    per_rank = job.per_rank()

    def with_other_batches(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **options: Any) -> None:
            wanted = batch_size
            if _changes and isinstance(batch_size, int):
                if per_rank is not None and per_rank % batch_size:
                    batch_size = gcd(batch_size, per_rank)
                if job.micro_batch is not None and batch_size > job.micro_batch:
                    batch_size = gcd(batch_size, job.micro_batch)
            if wanted != batch_size:
                _made[id(self)] = (dataset, wanted, *args), dict(options)
            if "num_workers" in options or job.workers:
                options["num_workers"] = job.workers
            if not job.workers:
                for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
                    options.pop(name, None)
            original(self, dataset, batch_size, *args, **options)

        return init

    kinds: tuple[Any, ...] = (DataLoader, DistributedDataLoader, StreamLoader)
    for kind in kinds:
        kind.__init__ = with_other_batches(kind.__init__)


def told(error: BaseException) -> dict[str, Any]:
    """An error of the user's program: its own lines, without ours."""
    from dream_trainer.distributed.failure import is_lost_connection
    from dream_trainer.errors import ConfigError
    from dream_trainer.users_code import failing_frame, line_of

    place = failing_frame(error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}testing{os.sep}" not in frame.filename or "dream_trainer" not in frame.filename
    ]
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "place": None if place is None else line_of(place[0].f_code, place[1]),
        "is_argument": isinstance(error, ConfigError) and place is None,  # of the command, not of the program
        "is_consequence": is_lost_connection(error),  # another rank failed first
        "trace": "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error)),
    }


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- the server


def serve() -> None:
    """Imports once what all ranks need; forks a rank for each line `JOB RANK`, imports for each line `import NAMES`."""
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        first, *rest = line.rstrip("\n").split("\t")
        if first == "import":
            for name in rest:
                with suppress(Exception):
                    importlib.import_module(name)
        elif os.fork() == 0:
            watch(first, int(rest[0]))


def watch(path: str, rank: int) -> NoReturn:
    """Forks the rank and waits for it; files of the job have its process id and, in the end, its exit code."""
    server = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.setsid()
        live(read_job(path), rank)
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()
    write_number(Path(path).with_name(f"pid_{rank}"), pid)
    write_number(Path(path).with_name(f"code_{rank}"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def write_number(file: Path, number: int) -> None:
    new = file.with_suffix(".new")
    new.write_text(str(number))
    new.rename(file)


def read_number(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


PRELOADED = (
    *(
        "dream_trainer.trainer.dream",
        "dream_trainer.callbacks",
        "dream_trainer.testing.run_probe",
        "torch.distributed.fsdp",
    ),
    *("dream_trainer.checkpoint.store", "dream_trainer.config.command_line", "torch.distributed.tensor.parallel"),
    "torch._dynamo",
)


def write_job(job: Job) -> str:
    path = Path(job.directory) / "job"
    path.write_bytes(pickle.dumps((sys.path, os.getcwd(), asdict(replace(job, program=Program())), job.program)))
    return str(path)


def read_job(path: str) -> Job:
    paths, directory, values, program = pickle.loads(Path(path).read_bytes())
    sys.path[:] = paths
    os.chdir(directory)
    return Job(**values | {"program": program})


def main() -> None:
    """Serves, or with arguments is a rank."""
    if len(sys.argv) > 1:
        watch(sys.argv[1], int(sys.argv[2]))
    serve()
