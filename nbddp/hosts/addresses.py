"""Chooses the address and network interface at which each host of a run is reached by the others."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbddp.errors import LaunchError

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Addresses:
    """How the hosts of a run reach each other.

    Attributes:
        address: by host, the address at which the others reach it.
        interface: by host, the interface that has this address, for gloo and NCCL; None for loopback.
    """

    address: dict[str, str]
    interface: dict[str, str | None]


def choose_addresses(facts: Mapping[str, Mapping[str, Any]]) -> Addresses:
    """Choose one address per host, from the facts that it has sent.

    This is the address on a network that all hosts share, else the one that the notebook's ssh reached, else a unique
    one. Not gloo's default, the host name's address: on Debian it is 127.0.1.1.

    Raises:
        LaunchError: a host has no such address.
    """
    if len({each["machine"] for each in facts.values()}) == 1:
        return Addresses(dict.fromkeys(facts, _LOOPBACK), dict.fromkeys(facts, None))
    common = _common_network(facts)
    chosen = {host: _interface(host, facts, common) for host in facts}
    return Addresses(
        {host: entry["address"] for host, entry in chosen.items()},
        {host: entry["name"] for host, entry in chosen.items()},
    )


def _common_network(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a network on which each host has a distinct address, preferably that of the ssh logins; "" for none."""
    machines = len({each["machine"] for each in facts.values()})
    shared = [entry["network"] for entry in next(iter(facts.values()))["networks"]]
    shared = [network for network in shared if all(_addresses_on(network, each) for each in facts.values())]
    # Docker gives every host the same 172.17.0.1, at which no host can reach another.
    shared = [net for net in shared if len({_addresses_on(net, each)[0] for each in facts.values()}) == machines]
    reached = [ipaddress.ip_address(each["asked_at"]) for each in facts.values() if each["asked_at"]]
    return max(shared, key=lambda net: sum(address in ipaddress.ip_network(net) for address in reached), default="")


def _addresses_on(network: str, facts: Mapping[str, Any]) -> list[str]:
    return [entry["address"] for entry in facts["networks"] if entry["network"] == network]


def _interface(host: str, facts: Mapping[str, Mapping[str, Any]], common: str) -> dict[str, str]:
    """Return an interface: on the common network, else the one that ssh reached, else one with a unique address."""
    networks: list[dict[str, str]] = facts[host]["networks"]
    if common:
        return next(entry for entry in networks if entry["network"] == common)
    others = [each for each in facts.values() if each["machine"] != facts[host]["machine"]]
    elsewhere = {entry["address"] for each in others for entry in each["networks"]}
    found = [entry for entry in networks if entry["address"] == facts[host]["asked_at"]]
    found = found or [entry for entry in networks if entry["address"] not in elsewhere]
    if not found:
        raise LaunchError(f"{host} has no network interface except loopback, so the other hosts cannot reach it")
    return found[0]
