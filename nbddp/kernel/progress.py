"""Kernel side. How far each rank is, and how fast: loops, steps, samples."""

from __future__ import annotations

from dataclasses import dataclass, field

_RATE_WINDOW_S = 5.0


@dataclass
class Bar:
    """One ``progress()`` loop of one rank.

    Attributes:
        desc: what an item is, "" when the user did not say.
        total: number of items, None when not known.
        done: items finished.
        rate: items per second over the last seconds, None before there are two reports.
    """

    desc: str
    total: int | None = None
    done: int = 0
    rate: float | None = None
    _seen: list[tuple[float, int]] = field(default_factory=list, repr=False)

    def update(self, total: int | None, done: int, at: float) -> None:
        if done < self.done:  # the same loop again, one level further in
            self._seen.clear()
        self.total, self.done = total, done
        self.rate = _rate(self._seen, at, done) or self.rate

    @property
    def seconds_left(self) -> float | None:
        """By the present rate, or None when total or rate is not known."""
        if self.total is None or not self.rate:
            return None
        return max(0.0, (self.total - self.done) / self.rate)


@dataclass
class RankProgress:
    """How far one rank is.

    Attributes:
        step: the highest step it has logged, -1 before the first.
        advanced_at: unix time of its last record.
        step_seconds: mean time between its steps of late, None while unknown.
        bars: its open and last progress loops, outermost first.
    """

    step: int = -1
    advanced_at: float = 0.0
    step_seconds: float | None = None
    samples: int = 0
    samples_per_second: float | None = None
    bars: list[Bar] = field(default_factory=list)
    _steps_seen: list[tuple[float, int]] = field(default_factory=list, repr=False)
    _samples_seen: list[tuple[float, int]] = field(default_factory=list, repr=False)

    def saw_step(self, step: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        if step > self.step:
            self.step = step
            rate = _rate(self._steps_seen, at, step)
            self.step_seconds = 1 / rate if rate else self.step_seconds

    def saw_samples(self, samples: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        self.samples = samples
        self.samples_per_second = _rate(self._samples_seen, at, samples) or self.samples_per_second

    def saw_bar(self, level: int, desc: str, total: int | None, done: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        if level < len(self.bars) and self.bars[level].desc == desc:
            self.bars[level].update(total, done, at)
            return
        # Another loop on this level: what was inside the old one is over.
        self.bars[level:] = [Bar(desc)]
        self.bars[-1].update(total, done, at)


def _rate(seen: list[tuple[float, int]], at: float, count: int) -> float | None:
    """Counts per second over the last seconds; ``seen`` is the caller's memory."""
    seen.append((at, count))
    while len(seen) > 2 and at - seen[1][0] > _RATE_WINDOW_S:
        seen.pop(0)
    while len(seen) > 64:  # thin out, keeping the window's ends
        del seen[1]
    elapsed = at - seen[0][0]
    return (count - seen[0][1]) / elapsed if elapsed > 0 else None
