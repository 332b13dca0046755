"""What the ranks have shown, in the views: messages to the page, the saved picture, lines of text."""

from __future__ import annotations

import base64
import io
import re
import time
from html import unescape

import numpy as np
import pytest
from fakes import FakeRun, Rank, status

from nbddp import images, shown
from nbddp.history.album import Album
from nbddp.panel import figures
from nbddp.panel.figures import FiguresFeed
from nbddp.panel.live_picture import PictureView
from nbddp.panel.picture import Picture
from nbddp.panel.text import TextView
from nbddp.shown import Shown

image_module = pytest.importorskip("PIL.Image", reason="Pillow, which makes images smaller, is not installed")

NOISE = np.random.default_rng(0)


def photo(step: int = 0, name: str = "photo", side: int = 300) -> Shown:
    """An image of noise: about 250 kB for a side of 300."""
    encoded = images.encoded(NOISE.integers(0, 256, (side, side, 3), np.uint8), shown.MAX_BYTES)
    assert encoded is not None
    return Shown(name, step, *encoded)


def run_with(*all_shown: Shown) -> FakeRun:
    run = FakeRun()
    Rank(run.history).log("loss", range(10), [1.0] * 10)
    for each in all_shown:
        run.history.figures.add(each)
    return run


# ---------------------------------------------------------------------------- the live panel


class Page:
    """What a page has, by name and step."""

    def __init__(self, feed: FiguresFeed) -> None:
        self.feed = feed
        self.has: dict[str, dict[int, bytes]] = {}
        self.nbytes: list[int] = []

    def receive(self, *, over: bool = False) -> None:
        message = self.feed.message(over=over)
        self.nbytes.append(len(message[1]) if message else 0)
        if message is None:
            return
        content, data = message
        for name, step, _, size in content["images"]:
            self.has.setdefault(name, {})[step], data = data[:size], data[size:]
        assert data == b""
        for name, steps in content["steps"]:
            self.has[name] = {step: each for step, each in self.has.get(name, {}).items() if step in steps}


def kept(album: Album) -> dict[str, dict[int, bytes]]:
    return {name: {each.step: each.data for each in all_shown} for name, all_shown in album.items()}


def test_the_page_gets_every_image_that_is_kept_within_the_data_rate() -> None:
    now, album = [0.0], Album()
    page = Page(FiguresFeed(album, lambda: now[0]))
    for step in range(60):
        now[0] += 0.2
        if step < 30:
            album.add(photo(step, f"name {step % 3}", side=100 + step))
        page.receive()
        if step % 3 == 2 and step < 30:
            assert list(page.has["name 2"])[-1] == step, "the newest goes first"
    assert page.has == kept(album)
    seconds = np.arange(1, 61) * 0.2
    assert (np.cumsum(page.nbytes) <= 600_000 + 300_000 * seconds).all()
    page.receive()
    assert page.nbytes[-1] == 0, "nothing is sent twice"


def test_a_page_that_is_reloaded_gets_the_images_again() -> None:
    album = Album()
    feed = FiguresFeed(album)
    for step in range(8):
        album.add(photo(step))
    Page(feed).receive(over=True)
    feed.again()
    page = Page(feed)
    page.receive(over=True)
    assert max(page.has["photo"]) == 7, "the newest"
    assert len(page.has["photo"]) >= 4
    assert page.nbytes[0] <= 1_500_000


def test_images_that_are_thinned_out_leave_the_page() -> None:
    now, album = [0.0], Album()
    page = Page(FiguresFeed(album, lambda: now[0]))
    for step in range(100):
        now[0] += 1.0
        album.add(Shown("x", step, "image/png", b"%d" % step))
        page.receive()
    assert page.has == kept(album)


# ---------------------------------------------------------------------------- the saved picture


def sources(html: str) -> list[tuple[str, bytes]]:
    found = re.findall(r'src="data:(image/(?:png|jpeg));base64,([^"]*)"', html)
    return [(kind, base64.b64decode(data)) for kind, data in found]


def html_of(run: FakeRun) -> str:
    run.now = status("finished")
    return Picture(run.history, run.now, run).bundle()["text/html"]


def test_the_picture_has_the_newest_of_each_name_within_200_kb() -> None:
    run = run_with(*(photo(step, f"name {i}") for i in range(8) for step in range(2)))
    html = html_of(run)
    assert len(html.encode()) < 300_000
    assert len(sources(html)) == 8
    assert sum(len(data) for _, data in sources(html)) * 4 / 3 <= 200_000
    for kind, data in sources(html):
        assert kind == "image/jpeg"
        assert min(image_module.open(io.BytesIO(data)).size) >= 100
    assert html.count("&nbsp;step 1</div>") == 8


def test_what_does_not_fit_is_named_in_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_pillow", lambda: None)
    table = Shown("table <i>", 3, "text/html", b"<script>alert(1)</script>")
    large = Shown("drawing", 4, "image/svg+xml", b"x" * 199_000)
    html = html_of(run_with(table, large))
    assert "<script" not in html
    assert "<i>" not in html
    text = unescape(re.sub("<[^>]*>", "", html)).replace("\xa0", "")
    assert "table <i> step 3: left out here (HTML); run.figures['table <i>'][-1] shows it" in text
    assert "drawing step 4: left out here (199 kB); run.figures['drawing'][-1] shows it" in text


def test_a_small_image_is_drawn_in_whole_pixels() -> None:
    data = images.encoded(np.eye(28, dtype=np.uint8) * 255, 10_000)
    assert data is not None
    assert 'style="width:168px;height:168px;image-rendering:pixelated"' in html_of(run_with(Shown("x", 0, *data)))


def test_more_than_20_names_are_counted_in_the_picture() -> None:
    html = html_of(run_with(*(Shown(f"{i}", 0, "image/png", b"x") for i in range(23))))
    assert "Figures of 3 more names were left out: 20 are kept." in html


# ---------------------------------------------------------------------------- picture mode and text


def test_a_live_picture_is_renewed_for_a_figure_and_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], **_: object) -> None:
            sent.append(data["text/html"])

    def display(data: dict[str, str], **_: object) -> Handle:
        sent.append(data["text/html"])
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = run_with(photo(1))
    view = PictureView(run, with_output=False)
    for step in range(200):
        now[0] += 0.2
        if step % 10 == 0:
            run.history.figures.add(photo(step + 2))
        view.update(run.now)
    assert sum(map(len, sent)) <= 8_000 * 40 + 50_000
    assert max(map(len, sent)) <= 45_000
    assert len(sent) >= 6
    assert all(len(sources(html)) == 1 for html in sent)


def test_text_has_a_line_for_a_new_figure_at_most_every_two_seconds() -> None:
    now, stream = [0.0], io.StringIO()
    run = run_with()
    view = TextView(run, stream, lambda: now[0])
    for step in range(11):
        run.history.figures.add(Shown("samples", step, "image/png", b"x"))
        view.update(run.now)
        now[0] += 0.5
    run.now = status("finished")
    view.update(run.now)
    lines = [line for line in stream.getvalue().splitlines() if "figure" in line]
    assert lines == [f"train: figure samples, step {step}" for step in (0, 4, 8, 10)]
    assert figures.line(Shown("figure 2", 1000, "image/png", b"")) == "figure 2, step 1,000"
