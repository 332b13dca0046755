"""Host side. What the kernel must know of a host before it sends it anything."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import socket
import time
from typing import Any

import psutil

from nbddp.kernel.devices import accelerator
from nbddp.versions import versions


def facts() -> dict[str, Any]:
    """This host: versions, devices, addresses; JSON."""
    found = accelerator()
    return {
        "kind": "hello",
        "versions": versions(),
        "devices": dict([found]) if found is not None else {},
        "networks": networks(),
        "asked_at": asked_at(),
        "identity": identity(),
        "now": time.monotonic(),
    }


def networks() -> list[dict[str, str]]:
    """The IPv4 interfaces that are up, loopback left out: name, address, network."""
    stats = psutil.net_if_stats()
    return [
        {"name": name, "address": entry.address, "network": _network(entry.address, entry.netmask)}
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and stats.get(name) is not None and stats[name].isup
        if not ipaddress.ip_address(entry.address).is_loopback
    ]


def asked_at() -> str:
    """The address at which the kernel's ssh reached us; "" where it was something else."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    with contextlib.suppress(ValueError):  # "UNKNOWN" through a ProxyCommand
        return str(ipaddress.ip_address(parts[2])) if len(parts) == 4 else ""
    return ""


def identity() -> str:
    """The same for two names of one host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return f"{platform.node()} {os.getuid()}"


def _network(address: str, netmask: str | None) -> str:
    return str(ipaddress.ip_network(f"{address}/{netmask or '255.255.255.255'}", strict=False))
