"""The progress and speed of each rank: loops, steps, samples."""

from __future__ import annotations

from dataclasses import dataclass, field

_RATE_WINDOW_S = 5.0


@dataclass
class Bar:
    """One ``progress()`` loop of one rank.

    Attributes:
        desc: what an item is; "" if the user gave no description.
        total: number of items, None if not known.
        done: number of items finished.
        rate: items per second over the last 5 s, None before the second report.
    """

    desc: str
    total: int | None = None
    done: int = 0
    rate: float | None = None
    _times: list[tuple[float, int]] = field(default_factory=list, repr=False)

    def update(self, total: int | None, done: int, at: float) -> None:
        if done < self.done:  # an inner loop that starts again
            self._times.clear()
        self.total, self.done = total, done
        self.rate = _rate(self._times, at, done) or self.rate

    @property
    def seconds_left(self) -> float | None:
        """The remaining time at the present rate; None if the total or the rate is not known."""
        if self.total is None or not self.rate:
            return None
        return max(0.0, (self.total - self.done) / self.rate)


@dataclass
class RankProgress:
    """The progress of one rank.

    Attributes:
        step: the highest step that the rank has logged, -1 before the first.
        advanced_at: unix time of its last record.
        step_seconds: mean time between its last steps, None if not known.
        samples: how many samples its data loaders have yielded.
        bars: its open and last progress loops, outermost first.
        totals: by description, the number of items of each outermost loop over all restarts.
    """

    step: int = -1
    advanced_at: float = 0.0
    step_seconds: float | None = None
    samples: int = 0
    samples_per_second: float | None = None
    bars: list[Bar] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    _earlier_totals: dict[str, int] = field(default_factory=dict)
    _step_times: list[tuple[float, int]] = field(default_factory=list, repr=False)
    _sample_times: list[tuple[float, int]] = field(default_factory=list, repr=False)

    def after_restart(self) -> RankProgress:
        """The progress of the process that takes this rank's place, and that may skip what this one has done."""
        return RankProgress(_earlier_totals=self.totals)

    def add_step(self, step: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        if step > self.step:
            self.step = step
            rate = _rate(self._step_times, at, step)
            self.step_seconds = 1 / rate if rate else self.step_seconds

    def add_samples(self, samples: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        self.samples = samples
        self.samples_per_second = _rate(self._sample_times, at, samples) or self.samples_per_second

    def add_bar(self, level: int, desc: str, total: int | None, done: int, at: float) -> None:
        self.advanced_at = max(self.advanced_at, at)
        if level == 0 and total is not None:
            # range(3, 6) in place of range(6): three items were done before the restart.
            skipped = max(0, self._earlier_totals.get(desc, 0) - total)
            total, done = total + skipped, done + skipped
            self.totals[desc] = total
        if level < len(self.bars) and self.bars[level].desc == desc:
            self.bars[level].update(total, done, at)
            return
        # A new loop on this level: the old loop and the loops inside it are over.
        self.bars[level:] = [Bar(desc)]
        self.bars[-1].update(total, done, at)


def _rate(times: list[tuple[float, int]], at: float, count: int) -> float | None:
    """Counts per second over the last 5 s; ``times`` is kept by the caller and updated here."""
    times.append((at, count))
    while len(times) > 2 and at - times[1][0] > _RATE_WINDOW_S:
        times.pop(0)
    while len(times) > 64:  # keep both ends of the window
        del times[1]
    elapsed = at - times[0][0]
    return (count - times[0][1]) / elapsed if elapsed > 0 else None
