"""The settings of a measurement: rounds, ranks, sizes and candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.measure import Table
from tests.benchmarks.peers import CANDIDATES, Peer, installed


@dataclass(frozen=True)
class Settings:
    """What a part may be told.

    Attributes:
        rounds: how often each candidate is asked.
        ranks: numbers of ranks, where a part goes through several; None: the part's own.
        nbytes: sizes of data, likewise.
        steps: of training, relative to the part's own number.
        peers: the candidates; the parts leave out those that cannot do a thing.
        keep: called with a table that fills over time, before its first value: what is cut off is not lost.
        show: called with each table as soon as it is complete.
    """

    rounds: int = 5
    ranks: Sequence[int] | None = None
    nbytes: Sequence[int] | None = None
    steps: float = 1.0
    peers: Sequence[Peer] = field(default_factory=lambda: installed(CANDIDATES))
    keep: Callable[[Table], None] = lambda table: None
    show: Callable[[Table], None] = lambda table: None
