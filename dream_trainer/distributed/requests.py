"""Requests: what this rank was asked for, by training code or by a signal, until all ranks have heard of it."""

from __future__ import annotations

from dream_trainer.distributed.pulse import Flags


class Requests:
    """What this rank was asked for, a stop or a save, until all ranks have heard of it."""

    __slots__ = (
        "hung_up",
        "interrupted",
        "save_is_known",
        "save_is_owed",
        "save_requested",
        "save_signalled",
        "stop_reason",
        "terminated",
    )

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.terminated = self.hung_up = self.interrupted = False
        self.save_requested = self.save_signalled = self.save_is_owed = self.save_is_known = False

    @property
    def ends_by_signal(self) -> bool:
        return self.terminated or self.interrupted

    def heard_of_save(self) -> None:
        """All ranks have heard that one of them wants a save."""
        self.save_requested = self.save_signalled = False
        self.save_is_known = self.save_is_owed = True

    def take_save(self) -> bool:
        owed, self.save_is_owed = self.save_is_owed, False
        return owed

    def why_stopped(self, flags: Flags) -> str:
        """Why training ends before its limits, in words; `flags` are those of all ranks."""
        if flags.terminate or flags.interrupt:
            return ("SIGHUP" if self.hung_up else "SIGTERM") if flags.terminate else "Ctrl-C"
        if flags.stop:
            return self.stop_reason or "requested on another rank"
        return "max_time has passed"

    def forget_signals(self) -> None:
        """What signals asked for so far is done."""
        self.terminated = self.hung_up = self.interrupted = self.save_signalled = False
