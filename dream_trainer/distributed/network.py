"""By which address the other hosts reach this one: found, or refused, before a process group waits for it in vain.

Gloo takes the address of `GLOO_SOCKET_IFNAME`, else the one that this host's name resolves to, which on many systems is
the loopback. Between hosts that ends in time-outs, minutes later on some ranks than on others.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

from dream_trainer.errors import ConfigError

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface to take: of gloo, which agreement and the CPU use everywhere, and of NCCL."""


def take_reachable_interface(master_address: str, master_port: int) -> None:
    """Has gloo take an address that other hosts reach: sets `GLOO_SOCKET_IFNAME` where its own choice is the loopback.

    Args:
        master_address: `MASTER_ADDR`, a name or an address; the interface on the way there is the one that is set.
        master_port: `MASTER_PORT`.

    Raises:
        ConfigError: A variable names an interface that is missing or reached by this host only, or none can be told.
    """
    if not sys.platform.startswith("linux"):
        return
    addresses = interface_addresses()
    for variable in _INTERFACES:
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
    """The addresses of this host's network interfaces, by name; of IPv4 the first of each (Linux)."""
    import fcntl

    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name, addresses in found.items():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking, 0x8915, request)  # SIOCGIFADDR
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
    """The interface by which this host reaches `master`; where that is this host itself, the only one there is."""
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
    """What this host's name resolves to, as far as a socket can be bound there, which is what gloo asks; the loopback
    otherwise."""
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
