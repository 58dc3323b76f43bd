"""The non-finite guard as on an accelerator: norms stay on the device and are read late. On a CPU it reads each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from dream_trainer.trainer.step import nonfinite


@contextmanager
def norms_are_read_late() -> Iterator[None]:
    """A run that is set up inside takes a host read of a norm for a wait, and avoids it."""
    with mock.patch.object(nonfinite, "reading_waits", return_value=True):
        yield
