"""What the ranks have shown, for the views: messages to the page within a data rate, and HTML within a size."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from nbddp import images
from nbddp.history.album import MAX_NAMES, Album
from nbddp.panel.summary import plain
from nbddp.shown import Shown

_BYTES_PER_S = 300_000  # to the page, on average; Jupyter servers drop messages above 1 MB/s
_AT_ONCE = 600_000
_LAST_BYTES = 1_500_000  # at the end, or to a page that has been reloaded afterwards
_HEIGHT = 280  # of an image in the picture, in pixels
_SMALL = 180  # an image with fewer pixels on its longer side is drawn larger


class FiguresFeed:
    """Messages that bring the images to the page, the newest of each name first. May be used from several threads."""

    def __init__(self, album: Album, clock: Callable[[], float] = time.monotonic) -> None:
        self._album = album
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: dict[int, Shown] = {}  # by id; the page keeps them as long as the album does
        self._steps: list[Any] = []
        self._allowance, self._counted_at = float(_AT_ONCE), clock()

    def message(self, *, over: bool = False) -> tuple[dict[str, Any], bytes] | None:
        """What the page lacks, as far as the data rate allows; None for nothing.

        Args:
            over: this is the last message, since no other will follow.
        """
        with self._lock:
            kept = dict(self._album)
            steps = [[plain(name), [each.step for each in shown]] for name, shown in kept.items()]
            chosen = self._choose(list(kept.values()), _LAST_BYTES if over else self._allowed())
            if not chosen and steps == self._steps:
                return None
            self._steps = steps
            alive = {id(each) for shown in kept.values() for each in shown}
            self._sent = {key: each for key, each in self._sent.items() if key in alive}
            self._sent |= {id(each): each for each in chosen}
        entries = [[plain(each.name), each.step, each.kind, len(each.data)] for each in chosen]
        return {"kind": "figures", "steps": steps, "images": entries}, b"".join(each.data for each in chosen)

    def again(self) -> None:
        """Another page is open, which has no image."""
        with self._lock:
            self._sent, self._steps = {}, []

    def _allowed(self) -> float:
        now = self._clock()
        self._allowance = min(_AT_ONCE, self._allowance + (now - self._counted_at) * _BYTES_PER_S)
        self._counted_at = now
        return self._allowance

    def _choose(self, names: list[tuple[Shown, ...]], allowed: float) -> list[Shown]:
        missing = [shown[-1] for shown in names if id(shown[-1]) not in self._sent]
        older = [each for shown in names for each in shown[:-1] if id(each) not in self._sent]
        chosen, nbytes = [], 0
        for each in [*missing, *sorted(older, key=lambda one: -one.step)]:
            if nbytes + len(each.data) > allowed:
                break  # and save up for it, or small ones would go before it for ever
            chosen.append(each)
            nbytes += len(each.data)
        self._allowance -= nbytes
        return chosen


def newest(album: Album) -> dict[str, Shown]:
    """The newest image of each name."""
    return {name: shown[-1] for name, shown in album.items()}


def line(shown: Shown) -> str:
    """``figure samples, step 30``."""
    name = plain(shown.name)
    return f"{name if name.startswith('figure') else f'figure {name}'}, step {shown.step:,}"


def html(album: Album, limit: int) -> Iterable[str]:
    """The newest image of each name in a saved picture, all together in at most ``limit`` bytes of base64."""
    shown = list(newest(album).values())
    fitted: dict[str, images.Encoded | None] = {}
    left = limit * 3 // 4
    for i, each in enumerate(sorted(shown, key=lambda one: len(one.data))):
        fitted[each.name] = found = _fitted(each, left // (len(shown) - i))
        left -= len(found[1]) if found else 0
    for each in shown:
        yield _block(each, fitted[each.name])
    if album.names_left_out:
        yield f"<p>Figures of {album.names_left_out:,} more names were left out: {MAX_NAMES} are kept.</p>"


def _fitted(shown: Shown, limit: int) -> images.Encoded | None:
    return None if shown.kind == "text/html" else images.refitted(shown.kind, shown.data, limit)


def _block(shown: Shown, encoded: images.Encoded | None) -> str:
    title = f"<b>{escape(plain(shown.name))}</b> &nbsp;step {shown.step:,}"
    if encoded is None:
        where = escape(f"run.figures[{shown.name!r}][-1]")
        what = "HTML" if shown.kind == "text/html" else f"{len(shown.data) / 1000:,.0f} kB"
        return f'<p>{title}: left out here ({what}); <code style="background:none">{where}</code> shows it</p>'
    kind, data = encoded
    source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    alt = escape(f"{plain(shown.name)}, step {shown.step:,}")
    image = f'<img src="{source}" alt="{alt}" style="{_style(data)}">'
    return f'<div style="display:inline-block;margin:8px 16px 8px 0;vertical-align:top"><div>{title}</div>{image}</div>'


def _style(data: bytes) -> str:
    width, height = images.size_of_png(data) or (0, 0)
    times = _SMALL // max(width, height, 1)
    if times > 1 and width:
        return f"width:{width * times}px;height:{height * times}px;image-rendering:pixelated"
    return f"max-width:100%;max-height:{_HEIGHT}px"
