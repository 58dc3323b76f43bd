"""Progress: a run's position, speed and remaining time; a live bar in a terminal or a notebook, and
plain lines elsewhere."""

from __future__ import annotations

import html
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TextIO

from dream_trainer.checks import check_between, check_names, check_positive
from dream_trainer.config.parameter_class import check_fields
from dream_trainer.events.callback import Callback
from dream_trainer.screen import draw, format_count, format_duration, format_metrics, is_in_notebook, show

if TYPE_CHECKING:
    from pathlib import Path

    from dream_trainer.events.collection import CallbackCollection
    from dream_trainer.trainer.abstract import AbstractTrainer

WARM_UP_STEPS = 3  # that do not show the pace: compilation, allocation, first touches of the data
NOTABLE_WAIT = 0.1  # share of the time spent waiting for data that is worth telling


class Look(NamedTuple):
    """Where training is."""

    clock: float  # seconds from any origin, without those of checkpoints and validations
    step: float
    samples: float
    tokens: float
    waiting: float  # seconds waited for data, since the process started

    def rates_since(self, first: Look) -> Look:
        """The seconds since then, and all else per second; zeros if there are none."""
        seconds = self.clock - first.clock
        rates = ((now - then) / seconds if seconds > 0 else 0.0 for now, then in zip(self[1:], first[1:], strict=True))
        return Look(seconds, *rates)


def look_at(trainer: AbstractTrainer, now: float) -> Look:
    clock = now - trainer.seconds_saving - trainer.seconds_validating
    return Look(clock, trainer.global_step, trainer.samples_seen, trainer.tokens_seen, trainer.seconds_waiting_for_data)


class Pace:
    """Rate of training only, over the last looks, and time left including validations and checkpoints."""

    def __init__(self, first: Look) -> None:
        self.origin: tuple[float, float, float] | None = None  # where the warm-up ended
        self._looks = deque([first], maxlen=50)  # the first is used until then

    def look(self, look: Look, now: float) -> None:
        if self.origin is None and look.step - self._looks[0].step >= WARM_UP_STEPS:
            self.origin = (now, look.step, look.tokens)
            self._looks.clear()
        self._looks.append(look)

    def rates(self) -> Look:
        return self._looks[-1].rates_since(self._looks[0])

    def seconds_left(self, total_steps: int | None, step: int, now: float, max_tokens: int | None) -> float | None:
        """Seconds until the first of these limits; None while unknown."""
        if self.origin is None:
            return None
        since, first_step, first_tokens = self.origin
        tokens, seconds = self._looks[-1].tokens, now - since
        left = [
            max(0, limit - done) * seconds / (done - first)
            for limit, done, first in ((total_steps, step, first_step), (max_tokens, tokens, first_tokens))
            if limit is not None and done > first and seconds > 0
        ]
        return min(left, default=None)


@dataclass(eq=False, repr=False)
class Progress(Callback):
    """Shows epoch, step, chosen metrics, rates and the time left, on rank 0; validations, saves and resumes, too.

    In a terminal it is a live bar, in a notebook an output that is replaced in place. Pipes, files and CI logs get
    plain lines without control codes. Metrics appear when LoggerMixin flushes them. The logger "console" is such a bar
    in a terminal or a notebook; your own Progress replaces it there.

    Args:
        metrics: Names of metrics to show, as the loggers know them; those that were not logged are left out.
        tokens_per_sample: Tokens in one sample; then tokens per second are shown instead of samples.
            Those that the trainer counts (`batch_tokens`) are shown without it.
        refresh_seconds: Least time between two refreshes of the live bar.
        line_seconds: Least time between two plain lines.
        file: Where to; None is the notebook, or standard output as it is when training starts.
        clock: Seconds from any origin; tests pass their own.
    """

    main_process_only: ClassVar[bool] = True

    metrics: Annotated[Sequence[str], partial(check_names, example="train/loss")] = ("train/loss",)
    _: KW_ONLY
    tokens_per_sample: Annotated[int, check_positive] | None = None
    refresh_seconds: Annotated[float, partial(check_between, low=0.0)] = 0.2
    line_seconds: Annotated[float, partial(check_between, low=0.0)] = 10.0
    file: InitVar[TextIO | None] = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, file: TextIO | None) -> None:
        check_fields(self, Progress)
        self._file = file
        self._pace = Pace(Look(0.0, 0, 0, 0, 0.0))
        self._shown: dict[str, float] = {}
        self._due = 0.0
        # When the validation and the evaluation that are running began, by a clock that stands still during saves.
        self._began: dict[str, float] = {}
        self._bar: TerminalBar | NotebookBar | None = None

    # -- events

    def pre_fit(self, trainer: AbstractTrainer) -> None:
        now = self.clock()
        self._shown, self._began = {}, {}  # a signal may have ended a validation in the middle of it
        self._pace = Pace(look_at(trainer, now))
        self._stop_bar()
        with suppress(OSError, ValueError):  # the terminal is gone
            self._bar = live_bar(self._file)
        self._draw_at(trainer, f"epoch {trainer.current_epoch}", "")
        # The first line comes with the first step, so that one sees that it runs.
        self._due = now

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        now = self.clock()
        if now >= self._due:
            self._show(trainer, now)
        elif self._pace.origin is None:
            # Else the first rates would wait for the second line after warm-up, which may be a long time.
            self._pace.look(look_at(trainer, now), now)

    def on_log(self, trainer: AbstractTrainer, metrics: dict[str, float], step: int) -> None:
        for name in self.metrics:
            if name in metrics:
                self._shown[name] = metrics[name]

    def pre_val_epoch(self, trainer: AbstractTrainer) -> None:
        # It is there if a signal interrupted a validation, which then started again after a save.
        self._began.setdefault(_kind(trainer), self.clock() - trainer.seconds_saving)
        if self._bar is not None:
            self._draw_at(trainer, "validating", self.status(trainer, self.clock()))

    def post_val_epoch(self, trainer: AbstractTrainer, metrics: dict[str, float]) -> None:
        kind, now = _kind(trainer), self.clock() - trainer.seconds_saving
        seconds = now - self._began.pop(kind, now)
        text = format_metrics(metrics) or "no metrics"
        self._print(f"{kind} | step {trainer.global_step} | {text} | took {seconds:.1f} s")

    def on_save(self, trainer: AbstractTrainer, path: Path) -> None:
        self._print(f"checkpoint | {path}")

    def on_load(self, trainer: AbstractTrainer, path: Path) -> None:
        self._print(f"resumed at step {trainer.global_step} from {path}")

    def post_fit(self, trainer: AbstractTrainer) -> None:
        self._show(trainer, self.clock())
        self._stop_bar()

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        self._stop_bar()

    # -- display

    def status(self, trainer: AbstractTrainer, now: float) -> str:
        """The numbers next to the bar: step, metrics, rates, time left."""
        _, steps, samples, tokens, waiting = self._pace.rates()
        total = "" if trainer.total_steps is None else f"/{trainer.total_steps}"
        parts = [f"step {trainer.global_step}{total}"]
        max_tokens = trainer.config.training_parameters.max_tokens
        if max_tokens is not None:
            parts.append(f"{format_count(trainer.tokens_seen)}/{format_count(max_tokens)} tokens")
        if self._shown:
            parts.append(format_metrics(self._shown))
        if steps > 0:
            tokens = tokens if self.tokens_per_sample is None else samples * self.tokens_per_sample
            parts.append(f"{format_count(steps)} steps/s")
            parts.append(f"{format_count(tokens)} tokens/s" if tokens else f"{format_count(samples)} samples/s")
        if waiting >= NOTABLE_WAIT and self._pace.origin is not None:
            parts.append(f"waits for data {waiting:.0%}")
        left = self._pace.seconds_left(trainer.total_steps, trainer.global_step, now, max_tokens)
        if left is not None:
            parts.append(f"eta {format_duration(left)}")
        return " | ".join(parts)

    def _show(self, trainer: AbstractTrainer, now: float) -> None:
        self._pace.look(look_at(trainer, now), now)
        status = self.status(trainer, now)
        epoch = f"epoch {trainer.current_epoch}"
        if self._draw_at(trainer, epoch, status):
            self._due = now + self.refresh_seconds
        else:
            self._due = now + self.line_seconds
            self._print(f"{epoch} | {status}")

    def _print(self, line: str) -> None:
        if not self._draw(lambda bar: bar.print(line)):
            show(line, self._file)

    def _draw_at(self, trainer: AbstractTrainer, description: str, status: str) -> bool:
        return self._draw(lambda bar: bar.show(description, trainer.global_step, trainer.total_steps, status))

    def _draw(self, act: Callable[[TerminalBar | NotebookBar], object]) -> bool:
        """Whether there is a bar that could do it. A terminal that cannot show it has plain lines from then on."""
        bar = self._bar
        if bar is not None and not draw(lambda: act(bar), self._file):
            draw(bar.stop, self._file)
            self._bar = None
        return self._bar is not None

    def _stop_bar(self) -> None:
        self._draw(lambda bar: bar.stop())
        self._bar = None


def _kind(trainer: AbstractTrainer) -> str:
    if trainer.is_evaluating:
        return "evaluation"
    return "sanity validation" if trainer.is_sanity_validation else "validation"


def shows_a_bar(callbacks: CallbackCollection) -> bool:
    """Whether a bar is shown on standard output or in a notebook: a Progress among the callbacks, or one that joins."""
    if live_bar(None) is None:
        return False
    found = [callback for callback in callbacks.in_order() if isinstance(callback, Progress)]
    if not found:
        callbacks.add_default(Progress())
    return all(callback._file is None for callback in found)


def live_bar(file: TextIO | None) -> TerminalBar | NotebookBar | None:
    """The bar for `file`, or for standard output and notebooks if it is None; None if nothing can be replaced."""
    if file is None and is_in_notebook():
        return NotebookBar()
    from rich.console import Console

    console = Console(file=file or sys.stdout)
    return TerminalBar(console) if console.is_interactive else None


class TerminalBar:
    """A line or two at the bottom of a terminal, from the first `show` on, with everything else above."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._bar = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=10)),
            BarColumn(bar_width=12, table_column=Column(no_wrap=True, min_width=12)),
            # In a narrow terminal the numbers take a second line rather than lose their end.
            TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=False)),
            console=console,
            # Refreshed from the steps, without another thread.
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=None, status="")

    def show(self, description: str, completed: int, total: int | None, status: str) -> None:
        self._bar.update(self._task, description=description, completed=completed, total=total, status=status)
        self._bar.start()
        self._bar.refresh()

    def print(self, line: str) -> None:
        """Prints above it, not folded at the terminal's width, so that paths can be copied."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()


class NotebookBar:
    """One output of a notebook's cell, replaced in place; its text is for notebooks shown without HTML."""

    _handle: Any = None

    def show(self, description: str, completed: int, total: int | None, status: str) -> None:
        # Without a value it moves to and fro.
        length = "" if total is None else f' max="{max(total, 1)}" value="{completed}"'
        text = " | ".join(filter(None, (description, status)))
        shown = f'<progress{length} style="width: 12em"></progress> <code>{html.escape(text)}</code>'
        if self._handle is None:
            from IPython.display import display  # type: ignore[import-not-found]  # pyright: ignore

            self._handle = display({"text/plain": ""}, raw=True, display_id=True)
        self._handle.update({"text/html": shown, "text/plain": text}, raw=True)

    def print(self, line: str) -> None:
        show(line)

    def stop(self) -> None:
        """Nothing is held."""
