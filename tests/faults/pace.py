"""How busy the machine is. Limits are those of a machine with nothing else to do, and stretch with its load."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_PER_CORE = 2  # so many that can run are the suite's own
_LOOK_S = 0.05
_KEPT_S = 600.0


def slowness() -> float:
    """By what factor each process is slowed down at this moment; at least 1."""
    runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return max(1.0, runnable / _PER_CORE / len(os.sched_getaffinity(0)))


class Patience:
    """Seconds of a machine with nothing else to do."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def is_over(self) -> bool:
        """To be asked often."""
        now = time.monotonic()
        self._left -= (now - self._looked) / slowness()
        self._looked = now
        return self._left <= 0


class Pace:
    """Looks all the time, so that it can be asked of times that are over."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, float]] = [(time.monotonic(), slowness())]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._looks.append((time.monotonic(), slowness()))
            if self._looks[0][0] < time.monotonic() - 2 * _KEPT_S:
                self._looks = [look for look in self._looks if look[0] > time.monotonic() - _KEPT_S]

    def since(self, began: float) -> float:
        """The mean since then, or in the last second."""
        began = min(began, time.monotonic() - 1.0)
        found = [slow for at, slow in self._looks if at >= began] or [slowness()]
        return sum(found) / len(found)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
