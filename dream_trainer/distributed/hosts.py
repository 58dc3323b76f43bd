"""The hosts of a job: this host's place, and facts that must be equal on all, compared before they connect.

They meet in the job's store, which every host reaches by `MASTER_ADDR`, independent of gloo's interface."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import json
import os
import platform
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch

from dream_trainer.checks import listed
from dream_trainer.compat.pytorch import Store
from dream_trainer.distributed.job import PACKAGE, all_arrive
from dream_trainer.errors import ConfigError, RanksDifferError, is_own
from dream_trainer.version import __version__

_HEARD_SECONDS = 5.0  # how long ranks stay after a refusal, so that every one reads why


class HostPlace(NamedTuple):
    """This process's place among its job's hosts; host 0 has rank 0, and the first of `ranks` represents a host."""

    number: int  # this host, 0-based
    n_hosts: int
    rank: int
    ranks: range
    meeting: int  # which process group of these processes the hosts meet for, 1-based

    @property
    def name(self) -> str:
        return host_name(self.number, socket.gethostname())

    def key(self, what: str) -> str:
        return f"{self.meeting}/{what}"


def host_name(number: int, name: str) -> str:
    """A host's name in messages, with its number, since several hosts may have the same name."""
    return f"host {number} ({name})"


def place_among_hosts(meeting: int) -> HostPlace | None:
    """This process's place, as torchrun sets it; None if the job has one host, or an unknown number."""
    world_size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not 0 < local < world_size:
        return None
    rank = int(os.environ["RANK"])
    first = rank - int(os.environ.get("LOCAL_RANK", rank % local))
    number = int(os.environ.get("GROUP_RANK", rank // local))
    count = int(os.environ.get("GROUP_WORLD_SIZE", -(-world_size // local)))
    return HostPlace(number, count, rank, range(first, first + local), meeting)


def meet_hosts(store: Store, place: HostPlace, world_size: int, *, timeout_seconds: float) -> None:
    """Compares the hosts and picks the address where they reach one another; every rank calls it."""
    problem = None
    try:
        take_reachable_interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except ConfigError as error:
        problem = str(error)
    if place.rank == place.ranks.start:
        of_host = {"name": socket.gethostname(), "problem": problem, "facts": _facts(place)}
        store.set(place.key(f"hosts/{place.number}"), json.dumps(of_host))
    if place.rank == 0:
        refusal = _refusal(store, place, timeout_seconds)
        told = None if refusal is None else [type(refusal).__name__, str(refusal)]
        store.set(place.key("hosts/verdict"), json.dumps(told))
    store.wait([place.key("hosts/verdict")], timedelta(seconds=2 * timeout_seconds))
    verdict = json.loads(store.get(place.key("hosts/verdict")))
    if verdict is not None:
        all_arrive(place.key("know"), world_size, _HEARD_SECONDS)  # the store may go with the process of rank 0
        kind, text = verdict
        raise {"ConfigError": ConfigError, "RanksDifferError": RanksDifferError}[kind](text)


def _refusal(store: Store, place: HostPlace, timeout_seconds: float) -> ConfigError | RanksDifferError | None:
    keys = [place.key(f"hosts/{number}") for number in range(place.n_hosts)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError:
        missing = ", ".join(str(number) for number, key in enumerate(keys) if not store.check([key]))
        return ConfigError(
            f"of the job's {place.n_hosts} hosts number {missing} did not come within {timeout_seconds:.0f} s "
            "(start_timeout_seconds). Look at what their processes say."
        )
    hosts = [json.loads(value) for value in store.multi_get(keys)]
    names = [host_name(number, host["name"]) for number, host in enumerate(hosts)]
    problems = [f"{name}: {host['problem']}" for name, host in zip(names, hosts, strict=True) if host["problem"]]
    if problems:
        return ConfigError("\n".join(problems))
    facts = [host["facts"] for host in hosts]
    different = []
    for key in facts[0]:
        values = [own[key] for own in facts if key in own]
        if len(values) == len(facts) and len(set(values)) > 1:
            own_values = (f"{value} on {name}" for value, name in zip(values, names, strict=True))
            different.append(f"{key} is {', '.join(own_values)}")
    if different:
        return RanksDifferError(
            f"the hosts of this job differ: {listed(different, 3)}. Start every host with the same --nproc-per-node, "
            "versions and files."
        )
    return None


def _facts(place: HostPlace) -> dict[str, str]:
    """Facts that must be equal on all hosts; of code, the package and imported modules that are not installed."""
    code = {name: digest for name, (_, digest) in own_code().items()}
    code["dream_trainer"] = digest_of_code(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))
    return {
        "the number of its processes": str(len(place.ranks)),
        "Python": ".".join(platform.python_version_tuple()[:2]),  # a patch changes nothing that ranks share
        "torch": torch.__version__,
        "dream_trainer": __version__,
    } | {f"the digest of {name}'s code": digest for name, digest in code.items()}


def take_reachable_interface(master_address: str, master_port: int) -> None:
    """Sets `GLOO_SOCKET_IFNAME` to an interface that other hosts reach, if gloo would take the loopback, to which many
    systems resolve a host's own name. Between hosts that ends in time-outs, at different times on the ranks."""
    if not sys.platform.startswith("linux"):
        return
    addresses = interface_addresses()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        _refuse_unreachable(variable, addresses, master_address, master_port)
    if "GLOO_SOCKET_IFNAME" in os.environ or not _is_loopback(_address_of_own_name()):
        return
    name = _interface_towards(master_address, master_port, addresses)
    if name is None:
        raise ConfigError(
            f"this host's name {socket.gethostname()!r} resolves to {_address_of_own_name()}, which gloo would take "
            f"and no other host reaches, and several interfaces could be meant ({_spelled(addresses)}). Set "
            "GLOO_SOCKET_IFNAME to the one that joins the hosts."
        )
    os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_addresses() -> dict[str, list[str]]:
    """Maps this host's network interfaces to their addresses; only the first IPv4 address of each (Linux)."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name, addresses in found.items():
            try:
                answer = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:  # it has none
                continue
            addresses.append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return {name: addresses for name, addresses in found.items() if addresses}


def _refuse_unreachable(variable: str, addresses: dict[str, list[str]], master: str, port: int) -> None:
    """Raises if `variable` names exactly one interface, and no other host can be reached by it."""
    value = os.environ.get(variable, "")
    name = value.removeprefix("=")
    if not name or value.startswith("^") or "," in name:
        return
    matching = [own for own in addresses if own == name or (variable.startswith("NCCL") and own.startswith(name))]
    if any(not _is_loopback(address) for own in matching for address in addresses[own]):
        return
    way = _interface_towards(master, port, addresses)
    raise ConfigError(
        f"{variable}={value}: "
        + ("only this host is reached by it" if matching else "this host has no such interface with an address")
        + f", and the job has several hosts. Interfaces here: {_spelled(addresses)}. "
        + (f"Unset it, or set it to {way!r}, on the way to {master}." if way else "Name the one that joins the hosts.")
    )


def _interface_towards(master: str, port: int, addresses: dict[str, list[str]]) -> str | None:
    """The interface that reaches `master`; if that is this host itself, its only interface."""
    try:
        family, _, _, _, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(target)  # sends nothing: the system says which address it would send from
            own_address = str(asking.getsockname()[0])
    except OSError:
        own_address = ""
    outward = [name for name, own in addresses.items() if not all(map(_is_loopback, own))]
    by_route = [name for name in outward if own_address in addresses[name]]
    if by_route:
        return by_route[0]
    return outward[0] if len(outward) == 1 else None


def _address_of_own_name() -> str:
    """Addresses that this host's name resolves to and that a socket can be bound to, as gloo checks."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _spelled(addresses: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({own[0]})" for name, own in addresses.items()) or "none"


def own_code() -> dict[str, tuple[Path, str]]:
    """Files by module, with digests, without this package, the standard library and installed packages."""
    found = {}
    for name, module in list(sys.modules.items()):
        path = str(vars(module).get("__file__") or "") if module is not None else ""
        if not path.endswith(".py") or not is_own(path):
            continue
        try:
            found[name] = (Path(path), digest_of_code(Path(path).read_bytes()))
        except OSError:  # of an archive, or gone since
            continue
    return found


def digest_of_code(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
