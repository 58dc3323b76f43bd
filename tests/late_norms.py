"""As on an accelerator: norms and logged numbers stay on the device and wait there. On a CPU they are read at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from dream_trainer.loggers import buffer
from dream_trainer.trainer.step import nonfinite


@contextmanager
def norms_are_read_late() -> Iterator[None]:
    """A run inside takes a host read of a norm, or of a number that is logged, for a wait, and avoids it."""
    with (
        mock.patch.object(nonfinite, "reading_waits", return_value=True),
        mock.patch.object(buffer, "reading_waits", return_value=True),
    ):
        yield
