"""Kernel side. What a host tells of itself in its first frame: is it all there, and of the kinds that it should be?"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from typing import Any

from nbddp.frames import Garbled, Head

_MOST_DEVICES = 1 << 16
_MOST_CHARS = 1000  # of a text


def check_facts(head: Head) -> None:
    """See ``host.facts``. Raises Garbled, naming the fact."""
    for name, is_right in _FACTS.items():
        if name not in head:
            raise Garbled(f"a hello without {name}")
        if not is_right(head[name]):
            raise Garbled(f"a hello with {name} of another kind")
    check_clock(head)


def check_clock(head: Head) -> None:
    """Raises Garbled unless its clock is a number."""
    now = head["now"]
    if isinstance(now, bool) or not isinstance(now, (int, float)) or not math.isfinite(now):
        raise Garbled("a clock that is not a number")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_CHARS


def _are_versions(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _are_devices(value: object) -> bool:
    return isinstance(value, dict) and all(_is_count(count) for count in value.values())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_DEVICES


def _are_networks(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_network, value))


def _is_network(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and _is_text(entry.get("name"))
        and _is(ipaddress.ip_address, entry.get("address"))
        and _is(ipaddress.ip_network, entry.get("network"))
    )


def _is_reached_at(value: object) -> bool:
    return value == "" or _is(ipaddress.ip_address, value)


def _is(kind: Callable[[Any], object], text: object) -> bool:
    if not _is_text(text):
        return False
    try:
        kind(text)
    except ValueError:
        return False
    return True


_FACTS: dict[str, Callable[[Any], bool]] = {
    "versions": _are_versions,
    "devices": _are_devices,
    "networks": _are_networks,
    "asked_at": _is_reached_at,
    "identity": _is_text,
    "now": lambda _: True,  # as in any frame: check_clock
}
