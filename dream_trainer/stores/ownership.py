"""Ownership: which job a run in an object store belongs to. Jobs take rising numbers by creating owners/00000001.json
and so on, which only one can do; the highest owns the run and renews its object. Clocks of hosts are never compared."""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from dream_trainer.errors import CheckpointError
from dream_trainer.screen import logger
from dream_trainer.stores.store_path import StorePath, without_secrets

OWNERS_NAME = "owners"
TOKEN_NAME = "store_owner"
RENEW_SECONDS = 15.0
_NUMBERED = re.compile(r"(\d{8,})\.json")


def is_owned(run: StorePath) -> bool:
    """Whether a live job has the run; takes up to 20 s to see one live that was not given back."""
    owners = run / OWNERS_NAME
    first = _record_of(owners, _highest(owners))
    if first is None or first.get("released"):
        return False
    return _renewed(owners, None, first, RENEW_SECONDS + 5) is not None


def _renewed(owners: StorePath, number: int | None, first: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """Waits until a claim, by default the newest, differs from `first`; None if it is given back, gone or silent."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, seconds / 10))
        now = _record_of(owners, _highest(owners) if number is None else number)
        if now is None or now.get("released"):
            return None
        if now != first:
            return now
    return None


class Ownership:
    """A job's claim on a run in a store, until `release`; `lived_here` is a directory that no other live job has."""

    def __init__(
        self, run: StorePath, lived_here: Path, *, lease_seconds: float = 60.0, renew_seconds: float = RENEW_SECONDS
    ) -> None:
        self._run = run
        self._owners = run / OWNERS_NAME
        self.token, self.goes_on_here, self._renewals = secrets.token_hex(8), False, 0
        self._mark = lived_here / TOKEN_NAME
        self._number = self._take(lease_seconds)
        self._mark.write_text(self.token)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, args=(renew_seconds,), name="run's owner", daemon=True)
        self._thread.start()

    def is_lost(self) -> bool:
        return _highest(self._owners) > self._number

    def release(self) -> None:
        """Releases the run for the next job. If the store does not answer, that job waits for a minute."""
        self._ended.set()
        self._thread.join()
        try:
            _object(self._owners, self._number).put(self._content(released=True))
        except OSError as error:
            logger.warning("%s stays claimed for a while: %s", self._run, error)

    def _take(self, lease_seconds: float) -> int:
        while True:
            number = _highest(self._owners)
            if number:
                self._wait_until_free(number, lease_seconds)
            number += 1
            if self._create(number):
                break
        place = _object(self._owners, number)
        if place.create(self._content()):
            place.remove()
            raise CheckpointError(
                f"the store of {self._run} overwrites an object in spite of If-None-Match, so two "
                "jobs could write to one run. Use a store that honours conditional writes; "
                "`rclone serve s3` does not."
            )
        for entry in self._owners.iterdir():
            if entry.name < place.name:
                entry.remove()
        return number

    def _wait_until_free(self, number: int, lease_seconds: float) -> None:
        """Returns once the claim with this number is no longer renewed; it may be gone by then."""
        first = _record_of(self._owners, number)
        if first is None:
            return
        self.goes_on_here = self._mark.exists() and self._mark.read_text() == first.get("token")
        if first.get("released") or self.goes_on_here:
            return
        warning = "%s was claimed by a job on %s; waiting up to %.0f s for a sign that it lives"
        logger.warning(warning, self._run, first.get("host"), lease_seconds)
        now = _renewed(self._owners, number, first, lease_seconds)
        if now is not None:
            raise CheckpointError(
                f"another live job, on {now.get('host')}, writes to {self._run}. Stop it, or give this run another "
                "experiment name."
            )

    def _create(self, number: int) -> bool:
        try:
            return _object(self._owners, number).create(self._content())
        except ConnectionError:
            # It may have arrived all the same. If not, this raises again, or another job was first.
            record = _record_of(self._owners, number)
            if record is None:
                raise
            return record.get("token") == self.token

    def _renew(self, seconds: float) -> None:
        place = _object(self._owners, self._number)
        while not self._ended.wait(seconds):
            self._renewals += 1
            try:
                if self.is_lost():
                    return
                place.put(self._content())
            except OSError as error:
                logger.debug("could not renew the claim on %s: %s", self._run, without_secrets(error))

    def _content(self, *, released: bool = False) -> bytes:
        record = {"token": self.token, "host": socket.gethostname(), "renewals": self._renewals, "released": released}
        return json.dumps(record).encode()


def _object(owners: StorePath, number: int) -> StorePath:
    return owners / f"{number:08d}.json"


def _highest(owners: StorePath) -> int:
    numbers = [int(match[1]) for entry in owners.iterdir() if (match := _NUMBERED.fullmatch(entry.name))]
    return max(numbers, default=0)


def _record_of(owners: StorePath, number: int) -> dict[str, Any] | None:
    try:
        record = json.loads(_object(owners, number).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
