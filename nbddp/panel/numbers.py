"""Numbers as text, as in ``js/src/numbers.js``; ``tests/panel/numbers.json`` has cases for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

_SMALLEST, _LARGEST = 1e-3, 1e7  # beyond, a number is written with an exponent
_DIGITS = 12  # that are looked at to tell two ticks apart
_MAX_CHARS = 9  # of a tick without an exponent


def metric(value: float | None) -> str:
    """A metric's value: about five digits, with an exponent only if it is very small or very large."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size != 0 and (size < _SMALLEST or size >= _LARGEST):
        return _exponent(value, 2)
    if value == math.floor(value) or size >= 1000:
        return f"{_half_up(value):,}"
    return _decimal(value, 1 if size >= 100 else 2 if size >= 10 else 4)


def ticks(values: Sequence[float]) -> list[str]:
    """The labels of an axis: as few digits as tell its values apart and give each of them exactly."""
    size = max(map(abs, values), default=0.0)
    if size == 0:
        return ["0"] * len(values)
    if all(value == math.floor(value) for value in values) and size < _LARGEST:
        return [_whole(value, values) for value in values]
    if _SMALLEST <= size < _LARGEST and max(map(len, plain := _fixed(values))) <= _MAX_CHARS:
        return plain
    digits = next((d for d in range(_DIGITS) if all(_same(f"{v:.{d}e}", v, size) for v in values)), _DIGITS)
    return ["0" if value == 0 else _exponent(value, digits) for value in values]


def log_ticks(values: Sequence[float]) -> list[str]:
    """The labels of a logarithmic axis, each by itself: 0.001, 1, 1e9."""
    return [ticks([value])[0] for value in values]


def step(value: float) -> str:
    """A step, which is a whole number."""
    return f"{_half_up(value):,}"


def _whole(value: float, values: Sequence[float]) -> str:
    """``200``, ``20k``, ``1.5M``: all ticks of an axis in one unit."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if max(map(abs, values)) >= max(unit, 1e4) and all(each % (unit / 1000) == 0 for each in values):
            return "0" if value == 0 else f"{_trimmed(value / unit)}{name}"
    return f"{int(value)}"


def _fixed(values: Sequence[float]) -> list[str]:
    size = max(map(abs, values))
    digits = next((d for d in range(_DIGITS) if all(_same(f"{v:.{d}f}", v, size) for v in values)), _DIGITS)
    return [_decimal(value, digits) for value in values]


def _same(text: str, value: float, size: float) -> bool:
    return abs(float(text) - value) <= size * 1e-9


def _decimal(value: float | Decimal, digits: int) -> str:
    """As JavaScript's ``toFixed``: of two equally near numbers the larger one, where Python's format takes the even."""
    return str(Decimal(value or 0.0).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def _trimmed(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _exponent(value: float, digits: int) -> str:
    power = int(f"{value:.{digits}e}".partition("e")[2])
    return f"{_decimal(Decimal(value).scaleb(-power), digits)}e{power}"


def _half_up(value: float) -> int:
    return math.floor(value + 0.5)
