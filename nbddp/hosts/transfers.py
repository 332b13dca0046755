"""How far the payload has come on its way to a host, or a large result on its way back, in words."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from nbddp.text import duration

_SHOWN_AFTER_S = 1.0
_LEAST_NBYTES = 1_000_000


@dataclass
class Transfer:
    """Bytes on their way between the notebook and a host.

    Attributes:
        words: ``"sending {} to gpu2"``.
        done: bytes so far.
        began: monotonic.
    """

    words: str
    nbytes: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        """Return the rest of the time, at the mean rate so far."""
        return (time.monotonic() - self.began) * (self.nbytes - self.done) / max(self.done, 1)

    def is_shown(self) -> bool:
        """Return whether it takes so long that the user should know."""
        slow = time.monotonic() - self.began > _SHOWN_AFTER_S
        return slow and self.nbytes >= _LEAST_NBYTES and self.done < self.nbytes

    def __str__(self) -> str:
        percent = 100 * self.done // self.nbytes
        left = f", {duration(self.seconds_left())} left" if self.done else ""
        return f"{self.words.format(f'{self.nbytes / 1e6:,.0f} MB')}: {percent} %{left}"


def in_words(transfers: Iterable[Transfer | None]) -> str:
    """Return the transfer that takes longest, and how many others there are; "" if none takes long."""
    shown = sorted((each for each in transfers if each is not None and each.is_shown()), key=Transfer.seconds_left)
    others = f" (and {len(shown) - 1} more)" if len(shown) > 1 else ""
    return f"{shown[-1]}{others}" if shown else ""
