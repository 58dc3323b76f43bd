"""Saver: when a run is saved, one save at a time, and the handling of failed saves; a thread that writes copies of the
snapshot while training continues.

It acts between windows, on all ranks at the same step. What only one rank knows, its clock and its thread, is exchanged
with the pulse (`flags`, `heard`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from dream_trainer.best_value import refuse_missing
from dream_trainer.cadence import Cadence
from dream_trainer.checkpoint.files import set_newer_aside
from dream_trainer.checkpoint.run_directory import claim, count_training, release, trainings
from dream_trainer.checkpoint.saving import Destination, HostSaves, Saving
from dream_trainer.checkpoint.store import KnownPlan, Snapshot, write_checkpoint
from dream_trainer.compat.pytorch import local_tensor, with_local
from dream_trainer.config.checkpoint_parameters import CheckpointParameters, OnSaveError
from dream_trainer.distributed.ranks import Ranks, on_all_ranks
from dream_trainer.errors import CheckpointError, StepError, call_each, in_a_line
from dream_trainer.screen import logger

T = TypeVar("T")


class Moment(NamedTuple):
    """How far a run is, between two windows."""

    step: int  # optimizer steps completed
    has_pending_work: bool  # whether a validation, or the end of an epoch, is still to be done after its last window


@dataclass(eq=False)
class Saver(Saving):
    """One run's saves; `snapshot` and `tensors` are collectives, and raise CheckpointError for unsupported state."""

    parameters: CheckpointParameters
    world: Ranks
    directory: Path  # where checkpoints are written
    beside: Ranks  # the same ranks, for the thread that writes
    copies: HostCopies | None  # None: snapshots are not copied
    settle: Callable[[], Moment]
    snapshot: Callable[[dict[str, float], HostCopies | None], Snapshot]
    tensors: Callable[[], Mapping[str, Tensor]]
    is_best: Callable[[int], bool]  # whether the validation after a step is the best so far, by `best_metric`
    on_save: Callable[[Path], None]
    on_lost: Callable[[], None]
    patience: Callable[[], AbstractContextManager[None]]
    say_once: Callable[[str, str], None]
    clock: Callable[[], float]
    only_when_called: bool = False
    local: HostSaves = field(default_factory=HostSaves)

    def __post_init__(self) -> None:
        parameters = self.parameters
        self.destination = Destination(self.directory, parameters, self.beside)
        self.writing: Background[Path | None] = Background("checkpoint writer")  # gives a checkpoint's directory
        self.warming: Background[None] = Background("checkpoint memory")  # so that the first save takes no longer
        self._plan = KnownPlan()
        self._is_telling = False
        self._cadence = Cadence(
            steps=parameters.save_every_n_steps,
            epochs=parameters.epochs_between_saves,
            minutes=parameters.save_every_n_minutes,
            clock=self.clock,
        )
        self._local_cadence = Cadence(steps=parameters.save_local_every_n_steps)
        self._writes_local = False  # whether the last save begun is a local one
        self._has_checkpoint = False  # whether the run has one that local ones can follow
        self._is_to_warm = parameters.saves
        self._ranks_writing = 0
        self._saved: Moment | None = None  # of the last save, which may still be written
        self._validation: tuple[int, dict[str, float]] = (-1, {})
        self._knows_best_metric = parameters.best_metric is None
        self._is_best = False
        # This run's saves after this step belong to an abandoned branch; None if there is no such branch.
        self._leaves_after: int | None = None
        self._leaves_at_first_save = False
        self._claimed: dict[Path, int] = {}  # how many trainings of each directory this trainer knows

    @property
    def is_overtaken(self) -> bool:
        return any(trainings(directory) != known for directory, known in self._claimed.items())

    def claim(self, directory: Path) -> None:
        """Claims the run's directory, or that of its checkpoints, for this job until `release`; every rank calls it."""
        claim(directory, self.world)
        self._claimed[directory] = trainings(directory)

    def send_to(self, destination: Destination) -> None:
        """Brings checkpoints there from now on, and waits for those that are on the disk; a collective."""
        self.destination = destination
        with self.patience():
            destination.begin(self.directory)
        self._wait_until_sent()

    def _wait_until_sent(self) -> None:
        with self.patience():
            on_all_ranks(self.beside, "send checkpoints", self.destination.finish)

    def release(self) -> None:
        self.destination.end()
        while self._claimed:
            release(self._claimed.popitem()[0])

    # -- when to save

    def expect_best_metric(self, metrics: Collection[str]) -> None:
        if not self._knows_best_metric:
            refuse_missing(self.parameters.best_metric or "", metrics, named_by="best_metric")
            self._knows_best_metric = True

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._validation = step, dict(metrics)
        name = self.parameters.best_metric
        if name is None:
            return
        if name not in metrics:
            self.say_once(
                "best_metric", f"best_metric={name!r} is not among the validation's metrics: {sorted(metrics)}."
            )
        self._is_best |= self.parameters.save_on_best and self.is_best(step)

    def save_if_due(self, *, step: int | None, epoch: int | None, is_last: bool, requested: bool) -> None:
        # After the first step, since optimizers create their state in it: one that cannot be saved is found now.
        if self._is_to_warm and step is not None:
            self._is_to_warm = False
            tensors = self.tensors()
            if self.copies is not None:
                self.warming.start(partial(self.copies.warm, tensors))
        if self.only_when_called:
            return
        parameters = self.parameters
        must = requested or self._is_best or (is_last and parameters.save_at_end)
        is_local = self._local_cadence.is_due(step)
        # A local one follows a checkpoint, so the run's first save is one.
        due = self._cadence.is_due(step, epoch) or (is_local and not self._has_checkpoint)
        self._is_best = False
        # No save follows the end of a run, so a state that is not on the disk is lost.
        on_error: OnSaveError = "raise" if is_last else parameters.on_save_error
        is_busy = self._ranks_writing > 0 and parameters.when_busy == "skip"  # the same on all ranks
        if must or (due and (self._writes_local or not is_busy)):
            self._finish(parameters.on_save_error)
            self._begin(on_error)
        elif due and self.world.is_main:
            what = "this epoch's end" if step is None else f"step {step}"
            logger.info("%s is not saved: the last checkpoint is still being written", what)
        elif is_local and not due and not is_busy:
            self._finish(parameters.on_save_error)
            self._begin(parameters.on_save_error, is_local=True)
        if is_last:
            self._finish(on_error)
            self.warming.collect()
            self._wait_until_sent()

    def flags(self) -> tuple[bool, bool, bool]:
        is_saving = self._ranks_writing > 0
        is_busy = (self.writing.is_busy or is_saving) and not self._writes_local
        due = (
            self._cadence.goes_by_the_clock
            and self.world.is_main
            and self._cadence.is_due_by_the_clock()
            and not (is_busy and self.parameters.when_busy == "skip")
        )
        return due, is_saving and self.writing.is_busy, is_saving and self.writing.has_failed

    def heard(self, saving: int, failed: int) -> None:
        were_writing, self._ranks_writing = self._ranks_writing, saving
        if were_writing and (failed or not saving):
            self._finish(self.parameters.on_save_error)

    def save_after_exception(self, step: int) -> None:
        if self.only_when_called or not self.parameters.save_on_exception:
            return
        try:
            self._finish("warn")
            self._begin("raise")
            self._finish("raise")
        except Exception as error:
            self.on_lost()
            self.say_once(in_a_line(error), f"step {step} could not be saved: {in_a_line(error)}")

    # -- how to save

    def save(self) -> None:
        if self._is_telling:
            raise StepError("save_checkpoint() was called in on_save, which it would bring about again, without end.")
        self._finish("raise")
        self._begin("raise", always=True)
        self._finish("raise")

    def finish(self) -> None:
        self._finish("raise")

    def wait_for_copies(self) -> None:
        if self._ranks_writing and self.copies is not None:
            self.copies.wait_before_update()

    def _begin(self, on_error: OnSaveError, *, is_local: bool = False, always: bool = False) -> None:
        """Saves where the run is, unless that has been saved; no save may be running."""
        self.warming.collect()
        now = self.settle()
        if self._saved in (Moment(now.step, has_pending_work=False), now) and not always:
            return
        if not is_local:
            self._cadence.restart()
            self._refuse_if_overtaken()
        started = self.clock()  # the device has finished the step: the time from here on is the save's
        validated_at, metrics = self._validation
        try:
            if not is_local:
                self._leave_branch()
            snapshot = self.snapshot(metrics if validated_at == now.step else {}, self.copies)
        except CheckpointError as error:
            self._failed(error, on_error)
            return
        finally:
            self.seconds += self.clock() - started
        replace = self._saved is not None and self._saved.step == now.step
        if not is_local:
            self._saved, self._has_checkpoint = now, True
        self._writes_local, self._ranks_writing = is_local, 1
        self.writing.start(partial(self._write, snapshot, replace=replace, is_local=is_local))
        if self.copies is None:
            self._finish(on_error)

    def _write(self, snapshot: Snapshot, *, replace: bool, is_local: bool) -> Path | None:
        """Writes a checkpoint, or a local one, in the thread of `writing`."""
        if self.copies is not None:
            self.copies.wait()
        path = None
        if not is_local:
            self.destination.refuse_if_lost(self.beside)
            path = write_checkpoint(self.directory, snapshot, world=self.beside, replace=replace, known=self._plan)
            self.local.follow(path)
            self.destination.put(path)
        self.local.write(snapshot)
        return path

    def _finish(self, on_error: OnSaveError) -> None:
        """Waits for the save that is running, if there is one, and reports it; on all ranks at the same step."""
        started = self.clock()
        try:
            with self.patience():
                path = self.writing.collect()
        except CheckpointError as error:
            self._failed(error, on_error)
        else:
            if path is not None:
                self._is_telling = True
                try:
                    self.on_save(path)
                finally:
                    self._is_telling = False
        finally:
            self.seconds += self.clock() - started

    def _failed(self, error: CheckpointError, on_error: OnSaveError) -> None:
        self._saved, self._has_checkpoint = None, False
        self.on_lost()
        if on_error == "raise":
            raise error
        if self.world.is_main:
            logger.error("a checkpoint could not be saved; training continues: %s", error)

    def close(self) -> None:
        call_each((self.warming.collect, self.finish, self._finish_sending))

    def _finish_sending(self) -> None:
        with self.patience():
            self.destination.finish()

    # -- resuming

    def goes_on_from(
        self, step: int, metrics: Mapping[str, Any], *, is_own: bool, has_pending_work: bool, is_local: bool = False
    ) -> None:
        self.lacks_checkpoint = False
        self._claimed = {directory: trainings(directory) for directory in self._claimed}
        self._saved = Moment(step, has_pending_work) if is_own and not is_local else None
        self._has_checkpoint = is_own
        self._leaves_after = step if is_own else step - 1
        self._leaves_at_first_save = not is_own
        self._validation = step, dict(metrics)

    def begin_training(self) -> None:
        self._refuse_if_overtaken()
        if not self._leaves_at_first_save:
            self._leave_branch()
        self.local.begin()

    def _refuse_if_overtaken(self) -> None:
        if self.is_overtaken:
            run = next(iter(self._claimed))
            raise CheckpointError(
                f"another trainer of this process has trained {run} since this one did, whose state is older. "
                "Build this one again, so that it resumes from the newest checkpoint, or give it another name."
            )
        self._claimed = {directory: count_training(directory) for directory in self._claimed}

    def _leave_branch(self) -> None:
        """Moves checkpoints of the abandoned branch away, since they look like this one's. Only training does this."""
        after = self._leaves_after
        if after is None:
            return
        for root in dict.fromkeys((self.directory, self.destination.directory)):
            move = partial(set_newer_aside, root, after)
            moved = on_all_ranks(self.world, "set newer checkpoints aside", move if self.world.is_main else list[Path])
            if moved:
                logger.warning("continuing from step %d; set aside: %s", after, ", ".join(path.name for path in moved))
        self.destination.look_again()
        self._leaves_after = None


# -- Saves in the background.


class Background(Generic[T]):
    """Runs a task in a thread that ends with the task. The interpreter waits for it before it exits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: Future[T] | None = None

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def has_failed(self) -> bool:
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def start(self, task: Callable[[], T]) -> None:
        """Starts `task`. The last one's outcome must have been collected."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._running = thread.submit(task)
        thread.shutdown(wait=False)

    def collect(self) -> T | None:
        """Waits for the task and returns what it returned, or raises what it raised; None if there is none."""
        if self._running is None:
            return None
        wait([self._running])
        ended, self._running = self._running, None
        return ended.result()


_WITH_STREAMS = ("cuda", "xpu")


class HostCopies:
    """Memory of the host that every save reuses, one snapshot at a time. On devices copies have their own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self._stream = torch.Stream(device) if device.type in _WITH_STREAMS else None
        self._copied: torch.Event | None = None
        self._delays_update: torch.Event | None = None  # the same, until an update has waited for it

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates memory for tensors of these shapes, so that the first save takes no longer than later ones."""
        for name, tensor in tensors.items():
            self._memory_for(name, local_tensor(tensor)).zero_()

    def copy(self, tensors: Mapping[str, Tensor], *, at_once: Collection[str]) -> dict[str, Tensor]:
        """Copies this rank's part of `tensors`. Until `wait_before_update` nothing may change the originals; those in
        `at_once`, which a forward may change, are copied in order with the device's other work."""
        later = [name for name, tensor in tensors.items() if tensor.device == self._device and name not in at_once]
        copies: dict[str, Tensor] = {}
        for name in tensors if self._stream is None else tensors.keys() - later:
            copies[name] = self._copy(name, tensors[name])
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                for name in later:
                    copies[name] = self._copy(name, tensors[name])
                self._copied = self._delays_update = self._stream.record_event()
        return copies

    def wait_before_update(self) -> None:
        """Right before parameters change in place: the device first finishes copying them. The host does not wait."""
        copied, self._delays_update = self._delays_update, None
        if copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = local_tensor(tensor).detach()
        copy = self._memory_for(name, local)
        copy.copy_(local, non_blocking=self._stream is not None)
        return with_local(tensor, copy)

    def _memory_for(self, name: str, local: Tensor) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.shape != local.shape or memory.dtype != local.dtype:
            memory = torch.empty(
                local.shape, dtype=local.dtype, device="cpu", pin_memory=local.device.type in _WITH_STREAMS
            )
            self._memory[name] = memory
        return memory
