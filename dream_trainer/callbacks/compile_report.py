"""CompileReport: what `torch.compile` made of the run: graphs, where and why they broke, what was compiled again."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TextIO

from dream_trainer.callbacks.tables import print_table
from dream_trainer.compat.compiler import compilations, compiled_graphs, told_of_graph_breaks
from dream_trainer.events.callback import Callback
from dream_trainer.screen import show

if TYPE_CHECKING:
    from dream_trainer.trainer.abstract import AbstractTrainer

# What is wrong, then why; PyTorch says a sentence that is the same for all before them.
_REASON = re.compile(r"^(\S.*)\n +Explanation: (.+)$", re.MULTILINE)


class Finding(NamedTuple):
    """Something that keeps a run from being one graph that is compiled once."""

    kind: str
    """"graph break" or "recompilation"."""
    where: str
    """`<file>:<line>`."""
    why: str


class CompileReport(Callback):
    """Prints how many graphs were compiled, each graph break with its line and reason, and what was compiled again.

    It does so after the first step in which nothing was compiled, which mostly is the second; again where more follows,
    for a validation or for other shapes; and what is left at the end. A run that compiles nothing says so in one line.
    Told is of all that rank 0's process compiles once setup is over, whoever asked for it.

    A graph break keeps kernels apart that could be one; `fullgraph=True` makes it an error. Of a function that runs
    eagerly nothing is compiled at all, as of one that PyTorch gave up after too many recompilations.

    Args:
        file: Where to; None is standard output.
    """

    main_process_only: ClassVar[bool] = True

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file
        self._listening = ExitStack()
        self._findings: list[Finding] = []
        self._last_us = 0
        self._graphs = 0
        self._has_printed = False

    def post_setup(self, trainer: AbstractTrainer) -> None:
        """Begins to listen."""
        self._look()
        self._findings, self._graphs = [], compiled_graphs()  # not those of others before
        self._has_printed = False
        self._listening.close()  # an earlier trainer may not have been closed
        self._listening.enter_context(told_of_graph_breaks(lambda text: self._findings.append(graph_break(text))))

    def post_train_step(self, trainer: AbstractTrainer) -> None:
        """Prints what is new, as soon as a step compiles nothing more."""
        if not self._look() and self._has_news():
            self._print(trainer.global_step)

    def post_fit(self, trainer: AbstractTrainer) -> None:
        """Prints what is left."""
        self._look()
        if self._has_news():
            self._print(trainer.global_step)

    def on_exception(self, trainer: AbstractTrainer, exc: BaseException) -> None:
        """Stops listening."""
        self._listening.close()

    def teardown(self, trainer: AbstractTrainer) -> None:
        """Stops listening."""
        self._listening.close()

    def _look(self) -> bool:
        """Notes what was compiled again; returns whether anything was compiled since the last look."""
        new = compilations(after_us=self._last_us)
        if not new:
            return False
        self._last_us = max(one.start_us for one in new)
        self._findings += [
            Finding("recompilation", one.where, _short(one.again_because, runs_eagerly=one.is_last))
            for one in new
            if one.again_because
        ]
        return True

    def _has_news(self) -> bool:
        return not self._has_printed or bool(self._findings) or compiled_graphs() > self._graphs

    def _print(self, step: int) -> None:
        graphs, counts = compiled_graphs() - self._graphs, Counter(self._findings)
        self._findings, self._graphs = [], self._graphs + graphs
        if not graphs and not counts:
            title = "nothing was compiled. device_parameters.compile=True compiles the blocks of the models"
        else:
            kinds = Counter(finding.kind for finding in counts.elements())
            title = f"{'more ' if self._has_printed else ''}compiled until step {step}: {_count(graphs, 'graph')}, " + (
                ", ".join(_count(kinds[kind], kind) for kind in ("graph break", "recompilation"))
            )
        self._has_printed = True
        rows = [(kind, f"{n}x", where, why) for (kind, where, why), n in counts.items()]
        if rows:
            print_table(title, ("what", "times", "where", "why"), rows, self._file)
        else:
            show(title, self._file)


def graph_break(text: str) -> Finding:
    """What PyTorch's own message says of a graph break, in short."""
    files = re.findall(r'File "(.+)", line (\d+)', text)
    place = re.search(r"in user code at (.+:\d+)", text)
    where = place[1] if place else ":".join(files[-1]) if files else "unknown"
    reason = _REASON.search(text)
    why = f"{reason[1]}: {reason[2]}" if reason else text.partition("Graph Break Reason: ")[2].partition("\n")[0]
    return Finding("graph break", where, _short(why, runs_eagerly=bool(re.search(r"fall(ing)? back to eager", text))))


def _short(why: str, *, runs_eagerly: bool) -> str:
    return " ".join(why.split()) + (" (the function runs eagerly)" if runs_eagerly else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
