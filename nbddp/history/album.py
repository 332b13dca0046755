"""``Album``: what the ranks of a run have shown, by name, thinned over the steps."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping

from nbddp.shown import Shown

MAX_NAMES = 20
MAX_STEPS = 24  # kept of one name
MAX_BYTES = 16 << 20  # kept of all names together


class Album(Mapping[str, tuple[Shown, ...]]):
    """The images of a run by name, each a tuple in the order of their steps: ``run.figures["samples"][-1]``.

    Of each name 24 steps are kept at most, always the first and the newest, and those between them as evenly as
    possible; 16 MB and the first 20 names in all. A step that is shown again, also after a restart, replaces the old
    image.

    Attributes:
        changes: grows whenever an image has been added.
        names_left_out: how many names there were beyond the first 20.
    """

    def __init__(self) -> None:
        self._images: dict[str, list[Shown]] = {}
        self._left_out: set[str] = set()
        self._repeated: set[str] = set()  # names that have shown nothing since the last restart
        self._lock = threading.Lock()
        self.changes = 0

    def __getitem__(self, name: str) -> tuple[Shown, ...]:
        """Raises KeyError for an unknown name; the message lists the known names."""
        with self._lock:
            if name not in self._images:
                raise KeyError(f"nothing was shown as {name!r}; the names are: {', '.join(self._images) or 'none'}")
            return tuple(self._images[name])

    def __contains__(self, name: object) -> bool:
        return name in self._images

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._images))

    def __len__(self) -> int:
        return len(self._images)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        names = (f"{name}: {_steps(images)}" for name, images in self.items())
        return f"<figures: {'; '.join(names) or 'none'}>"

    @property
    def names_left_out(self) -> int:
        return len(self._left_out)

    def add(self, shown: Shown) -> None:
        """Keep an image, and thin the others out if they are too many."""
        with self._lock:
            if shown.name not in self._images and len(self._images) >= MAX_NAMES:
                self._left_out.add(shown.name)
                return
            images = self._images.setdefault(shown.name, [])
            if shown.name in self._repeated:
                self._repeated.discard(shown.name)
                del images[_first_from(images, shown.step) :]
            at = _first_from(images, shown.step)
            images[at : at + (at < len(images) and images[at].step == shown.step)] = [shown]
            self._thin(images)
            self.changes += 1

    def restart(self) -> None:
        """The ranks start again: the next step of each name is followed by none of the old ones."""
        with self._lock:
            self._repeated = set(self._images)

    def _thin(self, images: list[Shown]) -> None:
        while len(images) > MAX_STEPS:
            _drop_one(images)
        while sum(len(each.data) for kept in self._images.values() for each in kept) > MAX_BYTES:
            largest = max(self._images.values(), key=lambda kept: sum(len(each.data) for each in kept[1:-1]))
            if len(largest) < 3:
                return
            _drop_one(largest)


def _first_from(images: list[Shown], step: int) -> int:
    return bisect.bisect_left([each.step for each in images], step)


def _drop_one(images: list[Shown]) -> None:
    """Drop the image whose neighbours are closest to each other, never the first or the last."""
    gaps = [after.step - before.step for before, after in zip(images, images[2:])]
    del images[1 + gaps.index(min(gaps))]


def _steps(images: tuple[Shown, ...]) -> str:
    first, last = images[0].step, images[-1].step
    return f"step {last:,}" if first == last else f"{len(images)} steps, {first:,} to {last:,}"
