"""Several hosts on one machine: network namespaces joined by a bridge, and what can happen to their wires.

It takes root and iproute2. All addresses are private to the namespaces, which have no way out, and everything is gone
when the context ends.
"""

import ctypes
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

NETWORK = "10.77.0"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_NOBODY = "02:00:00:00:00:01"


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"dt{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


def enter(namespace: Path) -> None:
    """Moves the calling thread, and those that it starts, into a network namespace."""
    with namespace.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"could not enter {namespace}")


class Hosts:
    """Hosts with an interface `eth0` each, joined by one switch; a context that makes and removes them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"dt{secrets.token_hex(3)}"

    def __enter__(self) -> Self:
        switch = self._switch
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.count):
            own, wire = self._host(host), f"p{host}"
            _ip("netns", "add", own)
            _ip("link", "add", f"e{host}", "netns", own, "type", "veth", "peer", "name", wire, "netns", switch)
            _ip("-n", own, "link", "set", "lo", "up")
            _ip("-n", own, "link", "set", f"e{host}", "name", "eth0")
            _ip("-n", own, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", wire, "master", "br0", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in (*map(self._host, range(self.count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def namespace(self, host: int) -> Path:
        return Path("/run/netns") / self._host(host)

    def cut(self, host: int) -> None:
        """The wire of a host is pulled: what others send it is lost, and it is told nothing."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        """The wire is in again."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def silence(self, host: int) -> None:
        """What a host and the others send each other goes to an address that nobody has; all links stay up."""
        for one, other in self._pairs(host):
            way = ["dev", "eth0", "lladdr", _NOBODY, "nud", "permanent"]
            _ip("-n", self._host(one), "neigh", "replace", self.address(other), *way)

    def hear(self, host: int) -> None:
        """The end of a silence."""
        for one, other in self._pairs(host):
            _ip("-n", self._host(one), "neigh", "del", self.address(other), "dev", "eth0")

    def restore(self, host: int) -> None:
        """Undoes whatever befell the host's wire."""
        self.mend(host)
        for one, other in self._pairs(host):
            own = ["ip", "-n", self._host(one), "neigh", "del", self.address(other), "dev", "eth0"]
            subprocess.run(own, capture_output=True)  # an error where there is nothing to undo

    def _pairs(self, host: int) -> list[tuple[int, int]]:
        others = [other for other in range(self.count) if other != host]
        return [(host, other) for other in others] + [(other, host) for other in others]

    @property
    def _switch(self) -> str:
        return f"{self.name}-sw"

    def _host(self, host: int) -> str:
        return f"{self.name}-h{host}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
