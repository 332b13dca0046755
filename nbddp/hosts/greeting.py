"""Checks the facts in a host's first frame: all are there, and of the expected types."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from typing import Any

from nbddp.hosts.frames import Header, ProtocolError

_MAX_DEVICES = 1 << 16
_MAX_CHARS = 1000  # of a text


def check_facts(header: Header) -> None:
    """Check the facts that become ``Host.facts``. Raises ProtocolError, which names the fact."""
    for name, is_right in _FACTS.items():
        if name not in header:
            raise ProtocolError(f"a hello without {name}")
        if not is_right(header[name]):
            raise ProtocolError(f"a hello with {name} of the wrong type")


def check_clock(header: Header) -> None:
    """Raise ProtocolError unless the frame's clock is a number."""
    if not _is_clock(header["now"]):
        raise ProtocolError("a clock that is not a number")


def _is_clock(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARS


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_DEVICES


def _is_network(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and _is_text(entry.get("name"))
        and _parses(ipaddress.ip_address, entry.get("address"))
        and _parses(ipaddress.ip_network, entry.get("network"))
    )


def _parses(parse: Callable[[Any], object], text: object) -> bool:
    if not _is_text(text):
        return False
    try:
        parse(text)
    except ValueError:
        return False
    return True


_FACTS: dict[str, Callable[[Any], bool]] = {
    "versions": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "devices": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "networks": lambda value: isinstance(value, list) and all(map(_is_network, value)),
    "asked_at": lambda value: value == "" or _parses(ipaddress.ip_address, value),
    "identity": _is_text,
    "machine": _is_text,
    "now": _is_clock,
}
