"""RunRecorder: keeps `config.json` and `run.json` in the run's directory, whatever the trainer's mixins and loggers.

Nothing here is worth a run: a failed write is one warning.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dream_trainer.best_value import is_better
from dream_trainer.checkpoint.run_directory import is_claimed
from dream_trainer.cleanup import in_a_line
from dream_trainer.config.serialize import to_dict
from dream_trainer.distributed.failure import dead_ranks, describe, is_lost_connection
from dream_trainer.distributed.hosts import own_code
from dream_trainer.distributed.job_store import job_store
from dream_trainer.errors import CheckpointError, ConfigError
from dream_trainer.loggers.line_files import replace_file
from dream_trainer.trainer.run_record import CONFIG_NAME, RunRecord, RunState, read_record, write_record
from dream_trainer.version import __version__

if TYPE_CHECKING:
    from dream_trainer.trainer.runtime import Runtime

LONGEST_ERROR = 20_000  # characters of an exception, with its calls, that are kept


class RunRecorder:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._record: RunRecord | None = None
        self._made = time.time()
        self._has_directory = self._is_new = False

    def listeners(self, event: str, *, is_main: bool) -> tuple[Callable[..., None], ...]:
        """What is called at `event` on this rank: ranks other than 0 write of their failures alone."""
        if self._runtime.config.training_parameters.fast_dev_run:
            return ()
        if event == "on_exception":
            return (self._failed,)
        if event == "post_setup":
            return (self._is_set_up,)
        on_main: dict[str, Callable[..., None]] = {
            "pre_fit": self._starts,
            "post_val_epoch": self._validated,
            "on_save": self._saved,
            "on_interrupt": self._ends,
            "post_fit": self._ends,
        }
        return (on_main[event],) if is_main and event in on_main else ()

    def _is_set_up(self) -> None:
        self._has_directory = True  # claimed, if the trainer claims one
        runtime = self._runtime
        if runtime.world.is_main and runtime.coordinator.trains and read_record(runtime.run_dir) is None:
            self._is_new = not (runtime.run_dir / CONFIG_NAME).exists()
            self._write_config()  # of a run that was there before, only once it has resumed

    def _starts(self) -> None:
        runtime, now = self._runtime, time.time()
        self._write_config()
        before = read_record(runtime.run_dir)
        if before is None or (before.step > 0 and runtime.progress.global_step == 0):
            before = RunRecord(started=now, starts=0)
        is_new_process = self._record is None
        code = _own_code() if self._record is None else self._record.code
        self._record = RunRecord(
            started=before.started,
            starts=before.starts + is_new_process,
            metrics=before.metrics,
            best=self._best_before(before),
            parent=runtime.origin.parent or before.parent,
            resumed_from=runtime.origin.resumed_from,
            kept_options=runtime.origin.kept_options,
            argv=sys.argv,
            host=socket.gethostname(),
            pid=os.getpid(),
            world_size=runtime.world.world_size,
            versions={"torch": torch.__version__, "dream_trainer": __version__},
            code=code,
        )
        if is_new_process and runtime.progress.global_step > 0:
            self._say_what_code_changed(before.code, code)
        self._write("running")

    def _say_what_code_changed(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        changed = sorted(path for path in now.keys() & before.keys() if now[path] != before[path])
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            self._runtime.warn_once(
                "code",
                f"the run goes on from step {self._runtime.progress.global_step} with other code than it was started "
                f"with last: {', '.join(changed[:5])}{more}.",
            )

    def _best_before(self, before: RunRecord) -> dict[str, dict[str, Any]]:
        """What a checkpoint brought along, of another run's too, and what the record knows of no later step."""
        runtime = self._runtime
        best = {name: found for name, found in before.best.items() if found["step"] <= runtime.progress.global_step}
        modes = runtime.hooks._best_modes()
        for name, (value, step) in runtime.origin.best_of_checkpoint.items():
            if name in modes:
                best[name] = {"value": value, "step": step, "mode": modes[name]}
        runtime.origin.best_of_checkpoint = {}  # from now on the record knows better
        return best

    def _validated(self, metrics: dict[str, float]) -> None:
        runtime, record = self._runtime, self._record
        if record is None or runtime.state.is_sanity_validation or runtime.state.is_evaluating:
            return
        record.metrics = dict(metrics)
        for name, mode in runtime.hooks._best_modes().items():
            before = record.best[name]["value"] if name in record.best else None
            if is_better(metrics.get(name), before, mode):
                record.best[name] = {"value": metrics[name], "step": runtime.progress.global_step, "mode": mode}
        self._write("running")

    def _saved(self, path: Path) -> None:
        if self._record is not None:
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
        if coordinator.stopped:
            self._write("stopped", coordinator.stopped_because)
        else:
            self._write("finished")

    def _failed(self, exc: BaseException) -> None:
        """Any rank may fail, and rank 0 may not live to hear of it."""
        runtime = self._runtime
        if runtime.launched is None or not runtime.coordinator.trains or isinstance(exc, SystemExit):
            return
        is_another_jobs = not self._has_directory and is_claimed(runtime.run_dir)
        if is_another_jobs or runtime.saver.is_overtaken:
            return
        found = read_record(runtime.run_dir)
        is_of_this_job = found is not None and found.seen >= self._made
        is_consequence = runtime.world.world_size > 1 and is_lost_connection(exc)
        has_failed = found is not None and is_of_this_job and found.state == "failed"
        if found is not None and has_failed and (is_consequence or found.failed_rank is not None):
            return  # that came first
        if found is not None and self._record is None and not is_of_this_job:
            return  # a start that is refused says nothing of the run that was there before
        if found is None and self._record is None and isinstance(exc, ConfigError | CheckpointError):
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
        gone = (
            _gone(runtime.world.world_size) if is_consequence else {}
        )  # it takes a while, so something is told before
        if gone:
            record.failed_rank = next(iter(gone))
            named = ", ".join(f"rank {number} ({process})" for number, process in gone.items())
            self._write("failed", f"{named} is gone without a word: killed (out of memory?), or ended by native code")

    def _write(self, state: RunState, why: str | None = None) -> None:
        record, progress = self._record, self._runtime.progress
        if record is None:
            return
        record.state, record.why, record.seen = state, why, time.time()
        record.step, record.epoch, record.samples = progress.global_step, progress.current_epoch, progress.samples_seen
        record.seconds = progress.elapsed_seconds
        self._guarded(lambda: write_record(self._runtime.run_dir, record))

    def _write_config(self) -> None:
        def write() -> None:
            path = self._runtime.run_dir / CONFIG_NAME
            text = json.dumps(to_dict(self._runtime.config), indent=2, default=str) + "\n"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                replace_file(path, text)

        self._guarded(write)

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ConfigError) as error:
            self._runtime.warn_once("run record", f"the run's record of itself is not written: {in_a_line(error)}")


def _gone(world_size: int) -> dict[int, str]:
    """The ranks on this host whose processes have ended, each with which process it was."""
    store = job_store()
    try:
        return {} if store is None else dead_ranks(store, world_size)
    except RuntimeError:  # the store went away with the rank that hosted it
        return {}


def _own_code() -> dict[str, str]:
    try:
        return {os.path.relpath(file.path): file.digest for file in own_code().values()}
    except (OSError, ValueError):  # the working directory is gone, or a file is on another drive
        return {}
