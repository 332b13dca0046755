"""Numbers and durations as text."""

from __future__ import annotations

import math


def metric(value: float | None) -> str:
    """About five digits: ``0.4118``, ``92.41``, ``12,430``, ``3.1e-05``."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e7):
        return f"{value:.2e}"
    if value == int(value) or size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{4 if size < 10 else 2 if size < 100 else 1}f}"


def clock(seconds: float) -> str:
    """``00:38`` or ``2:03:04``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def size(count: float) -> str:
    units = ["B", "KB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1024
        del units[0]
    unit = units[0]
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"


def ticks(low: float, high: float, count: int = 5) -> list[tuple[float, str]]:
    """About ``count`` round numbers between the two, with their labels."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(step * times for times in (1, 2, 5, 10) if step * times * count >= high - low)
    values = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if max(map(abs, values), default=0.0) >= max(unit, 1e4):
            return [(value, f"{value / unit:.10g}{name}" if value else "0") for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(value, f"{value:.{digits}f}" if digits < 6 else f"{value:.4g}") for value in values]
