"""Kernel side. Where the hosts of a run meet: an address and an interface on each that the others can reach."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbddp.errors import LaunchError

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """By host.

    Attributes:
        address: at which the others reach it.
        interface: that has this address, for gloo and NCCL; None for loopback.
    """

    address: dict[str, str]
    interface: dict[str, str | None]


def meeting_of(facts: Mapping[str, Mapping[str, Any]]) -> Meeting:
    """Choose one address per host, by what each has told of itself.

    A network that all hosts are on, else the address at which the notebook's ssh reached each; gloo by itself takes
    the one that the host's own name resolves to, which Debian makes 127.0.1.1.

    Raises:
        LaunchError: there is none for a host.
    """
    if len(facts) == 1:
        return Meeting(dict.fromkeys(facts, _LOOPBACK), dict.fromkeys(facts, None))
    common = _common_network(facts)
    chosen = {
        host: _on_network(told, common) if common else _as_reached(host, told, _addresses_but(facts, host))
        for host, told in facts.items()
    }
    return Meeting(
        {host: entry["address"] for host, entry in chosen.items()},
        {host: entry["name"] for host, entry in chosen.items()},
    )


def _common_network(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """One that every host has an address of its own on, if possible the one that ssh came by; "" for none."""
    shared = [entry["network"] for entry in next(iter(facts.values()))["networks"]]
    shared = [network for network in shared if all(_addresses_on(told, network) for told in facts.values())]
    # Docker gives every host the same 172.17.0.1: the same address twice is no way to each other.
    shared = [net for net in shared if len({_addresses_on(told, net)[0] for told in facts.values()}) == len(facts)]
    reached = [told["asked_at"] for told in facts.values() if told["asked_at"]]
    return max(shared, key=lambda network: sum(_is_in(address, network) for address in reached), default="")


def _addresses_on(told: Mapping[str, Any], network: str) -> list[str]:
    return [entry["address"] for entry in told["networks"] if entry["network"] == network]


def _addresses_but(facts: Mapping[str, Mapping[str, Any]], host: str) -> set[str]:
    return {entry["address"] for other, told in facts.items() if other != host for entry in told["networks"]}


def _on_network(told: Mapping[str, Any], network: str) -> dict[str, str]:
    found: dict[str, str] = next(entry for entry in told["networks"] if entry["network"] == network)
    return found


def _as_reached(host: str, told: Mapping[str, Any], elsewhere: set[str]) -> dict[str, str]:
    """Hosts on networks of their own, with routers between; an address that is also another's is no way to one."""
    found: list[dict[str, str]] = [entry for entry in told["networks"] if entry["address"] == told["asked_at"]]
    found = found or [entry for entry in told["networks"] if entry["address"] not in elsewhere]
    if not found:
        raise LaunchError(f"{host} has no network interface but loopback, so the other hosts cannot reach it")
    return found[0]


def _is_in(address: str, network: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network)
