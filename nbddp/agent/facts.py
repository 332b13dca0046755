"""The facts of a host that the agent sends to the notebook kernel first: versions, devices, addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import socket
import time
from typing import Any

import psutil

from nbddp.launch.devices import accelerator
from nbddp.versions import versions


def facts() -> dict[str, Any]:
    """Return the facts of this host as the first frame."""
    found = accelerator()
    return {
        "kind": "hello",
        "versions": versions(),
        "devices": dict([found]) if found is not None else {},
        "networks": networks(),
        "asked_at": asked_at(),
        "identity": f"{identity()} {os.environ.get('NBDDP_NODE', '')}",  # two nodes of Ray may be one machine
        "machine": identity(),
        "now": time.monotonic(),
    }


def networks() -> list[dict[str, str]]:
    """Return name, address and network of the IPv4 interfaces that are up, without loopback."""
    stats = psutil.net_if_stats()
    return [
        {
            "name": name,
            "address": entry.address,
            "network": str(ipaddress.ip_network(f"{entry.address}/{entry.netmask or '255.255.255.255'}", strict=False)),
        }
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and stats.get(name) is not None and stats[name].isup
        if not ipaddress.ip_address(entry.address).is_loopback
    ]


def asked_at() -> str:
    """Return the address at which the notebook kernel's ssh reached this host; "" if the login was not by ssh."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    with contextlib.suppress(ValueError):  # "UNKNOWN" through a ProxyCommand
        return str(ipaddress.ip_address(parts[2])) if len(parts) == 4 else ""
    return ""


def identity() -> str:
    """Return a text that is the same for two names of one host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return f"{platform.node()} {os.getuid()}"
