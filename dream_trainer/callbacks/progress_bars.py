"""Where Progress shows itself live: a bar in a terminal, a piece of HTML in a notebook. Neither has a thread."""

from __future__ import annotations

import html
import sys
from abc import ABC, abstractmethod
from typing import Any, TextIO

from dream_trainer.notebook import is_in_notebook
from dream_trainer.screen import show


class ProgressBar(ABC):
    """A display that is changed in place: an interface."""

    @abstractmethod
    def show(self, description: str, completed: int, total: int | None, status: str) -> None:
        """Replaces what is shown; `total` is None where nobody knows it."""

    @abstractmethod
    def describe(self, description: str) -> None:
        """Replaces the description alone."""

    @abstractmethod
    def print(self, line: str) -> None:
        """Shows a line that stays."""

    @abstractmethod
    def stop(self) -> None:
        """Leaves it as it is, and the place to others."""


def live_bar(file: TextIO | None) -> ProgressBar | None:
    """The bar for `file`, or for standard output and notebooks if it is None; None where nothing can be changed in
    place, as in pipes and files."""
    if file is None and is_in_notebook():
        return NotebookBar()
    from rich.console import Console

    console = Console(file=file or sys.stdout)
    return TerminalBar(console) if console.is_interactive else None


class TerminalBar(ProgressBar):
    """A line or two at the bottom of a terminal, with everything else above.

    Args:
        console: Of rich, on the terminal.
    """

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._bar = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=10)),
            BarColumn(bar_width=12, table_column=Column(no_wrap=True, min_width=12)),
            # In a narrow terminal the numbers take a second line rather than lose their end.
            TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=False)),
            console=console,
            # Refreshed from the steps: no thread beside the training.
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=None, status="")
        self._bar.start()

    def show(self, description: str, completed: int, total: int | None, status: str) -> None:
        """Draws it again."""
        self._bar.update(
            self._task, description=description, completed=completed, total=total, status=status, refresh=True
        )

    def describe(self, description: str) -> None:
        """Draws it again with another description."""
        self._bar.update(self._task, description=description, refresh=True)

    def print(self, line: str) -> None:
        """Prints above it, not folded at the terminal's width, so that paths can be copied."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Gives the terminal back."""
        self._bar.stop()


class NotebookBar(ProgressBar):
    """One output of a notebook's cell, which is replaced in place; lines are printed below.

    It has a text beside the HTML, for notebooks that are shown where there is none.
    """

    def __init__(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # pyright: ignore

        self._shown: tuple[str, int, int | None, str] = ("", 0, None, "")
        self._handle: Any = display(self._data(), raw=True, display_id=True)

    def show(self, description: str, completed: int, total: int | None, status: str) -> None:
        """Replaces the output."""
        self._shown = (description, completed, total, status)
        self._handle.update(self._data(), raw=True)

    def describe(self, description: str) -> None:
        """Replaces the output, with another description."""
        self.show(description, *self._shown[1:])

    def print(self, line: str) -> None:
        """Prints below."""
        show(line)

    def stop(self) -> None:
        """Nothing is held."""

    def _data(self) -> dict[str, str]:
        description, completed, total, status = self._shown
        # Without a value it moves to and fro.
        length = "" if total is None else f' max="{max(total, 1)}" value="{completed}"'
        text = " | ".join(filter(None, (description, status)))
        return {
            "text/html": f'<progress{length} style="width: 12em"></progress> <code>{html.escape(text)}</code>',
            "text/plain": text,
        }
