"""Numbers as text, and the ticks of an axis."""

import math
from collections.abc import Sequence

_SMALLEST, _LARGEST = 1e-3, 1e7  # beyond, a number is written with an exponent
_TICK_CHARS = 9


def metric(value: float) -> str:
    """About five digits: ``0.4118``, ``92.41``, ``12,430``, ``3.10e-5``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size and not _SMALLEST <= size < _LARGEST:
        return _exponent(value, 2)
    if value == int(value) or size >= 1000:
        return f"{int(value) if value == int(value) else value:,.0f}"
    return f"{value:.{4 if size < 10 else 2 if size < 100 else 1}f}"


def size(count: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1000 and len(units) > 1:
        count /= 1024
        del units[0]
    unit = units[0]
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers between the two; ``whole``: only whole ones."""
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= rough * (1 - 1e-9))
    step = max(1.0, math.ceil(step)) if whole else step
    return [float(f"{i * step:.12g}") for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """About five round numbers between 10^low and 10^high."""
    if high - low >= 2:
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, math.ceil((high - low) / 5))
        return [float(f"1e{power}") for power in powers]
    found = [float(f"{n}e{power}") for power in range(math.floor(low), math.ceil(high) + 1) for n in (1, 2, 5)]
    found = [tick for tick in found if tick and low - 1e-9 <= math.log10(tick) <= high + 1e-9]
    return found if len(found) > 1 else [tick for tick in ticks(10**low, 10**high) if tick > 0]


def labels(values: Sequence[float]) -> list[str]:
    """Of an axis: as few digits as give each of its ticks exactly, and one unit: ``50k``, ``100k``."""
    size = max(map(abs, values), default=0.0)
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if max(unit, 1e4) <= size < 1e8 and all(value % (unit / 1000) == 0 for value in values):
            return [f"{value / unit:g}{name}" if value else "0" for value in values]
    if size < _LARGEST and (size >= _SMALLEST or not size):
        fixed = [f"{value + 0.0:.{_digits('f', values, size)}f}" for value in values]
        if max(map(len, fixed), default=0) <= _TICK_CHARS:
            return fixed
    digits = _digits("e", values, size)
    return [_exponent(value, digits) if value else "0" for value in values]


def _digits(kind: str, values: Sequence[float], size: float) -> int:
    for digits in range(12):
        if all(abs(float(f"{value:.{digits}{kind}}") - value) <= size * 1e-9 for value in values):
            return digits
    return 12


def _exponent(value: float, digits: int) -> str:
    number, _, power = f"{value:.{digits}e}".partition("e")
    return f"{number}e{int(power)}"
