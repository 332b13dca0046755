"""``show`` on real ranks: what is taken, which ranks and steps count, what is kept, and where it is seen."""

from __future__ import annotations

import io
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nbddp
from nbddp import images, shown, wire
from nbddp.history import album
from nbddp.history.album import Album
from nbddp.history.history import History
from nbddp.shown import Shown
from nbddp.worker.metrics_pipe import MetricsPipe
from tests.support import Cells, Notebook, out, run

image_module = pytest.importorskip("PIL.Image", reason="Pillow, which decodes the images, is not installed")


def pixels(image: Shown) -> Any:
    """Of a PNG or JPEG."""
    return np.asarray(image_module.open(io.BytesIO(image.data)))


# ---------------------------------------------------------------------------- what is taken

KINDS = """
    import nbddp
    def train():
        import numpy as np, torch
        from PIL import Image
        import matplotlib
        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        nbddp.log(loss=1.0, step=30)
        grey = np.arange(15, dtype=np.uint8).reshape(3, 5)
        nbddp.show(grey, "array")
        nbddp.show(torch.tensor(grey) / 255, "tensor")
        nbddp.show(torch.stack([torch.tensor(grey)] * 3), "channels first", step=7)
        nbddp.show(Image.fromarray(grey), "PIL")
        figure, axes = plt.subplots(num="label of the figure")
        axes.plot([1, 2])
        nbddp.show(figure)
        nbddp.show(axes, "of axes")

        class Table:
            def _repr_html_(self):
                return "<table><tr><td>ä</td></tr></table>"

        class Drawing:
            def _repr_svg_(self):
                return "<svg xmlns='http://www.w3.org/2000/svg'/>"
            def _repr_html_(self):
                raise AssertionError("SVG goes before HTML")

        nbddp.show(Table(), "table")
        nbddp.show(Drawing(), "drawing")
"""


def test_figures_images_arrays_and_tables_arrive(cell: Cells) -> None:
    figures = run(cell(KINDS).train).figures
    grey = np.arange(15).reshape(3, 5)
    for name in ("array", "tensor", "PIL"):
        assert [image.step for image in figures[name]] == [30], "the step of the last log()"
        assert (pixels(figures[name][-1]) == grey).all()
    assert (pixels(figures["channels first"][-1]) == grey[..., None]).all()
    assert figures["channels first"][-1].step == 7
    assert pixels(figures["label of the figure"][-1]).shape[0] > 300
    assert pixels(figures["of axes"][-1]).shape == pixels(figures["label of the figure"][-1]).shape
    assert figures["table"][-1].data.decode() == "<table><tr><td>ä</td></tr></table>"
    assert figures["drawing"][-1].kind == "image/svg+xml"
    assert repr(figures["array"][-1]).startswith("<array, step 30: image/png, 0.1 kB")
    assert figures["array"][-1]._repr_mimebundle_()["image/png"]


def test_an_image_can_be_saved(cell: Cells, in_folder: Path) -> None:
    image = run(cell(KINDS).train, nprocs=1).figures["array"][-1]
    image.save("array.png")
    with image_module.open("array.png") as saved:
        assert saved.size == (5, 3)


@pytest.mark.parametrize("with_pillow", [True, False])
def test_every_kind_of_pixels_is_drawn_exactly(with_pillow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_pillow:
        monkeypatch.setattr(images, "_pillow", lambda: None)
    noise = np.random.default_rng(0)
    for shape in ((5, 7), (5, 7, 3), (5, 7, 4), (3, 5, 7), (1, 5, 7), (5, 7, 1)):
        drawn = noise.integers(0, 256, shape)
        expected = drawn if drawn.ndim == 2 or shape[-1] != 7 else np.moveaxis(drawn, 0, -1)
        expected = expected[..., 0] if expected.shape[-1] == 1 else expected
        for array in (drawn, drawn.astype(np.uint8), drawn / 255, (drawn / 255).astype(np.float16)):
            kind, data = images.encoded(images.pixels_of(array), shown.MAX_BYTES)  # type: ignore[misc]
            assert kind == "image/png"
            assert np.abs(pixels(Shown("", 0, kind, data)).astype(int) - expected).max() <= (array.dtype == np.float16)
    odd = images.pixels_of(np.array([[np.nan, -1.0, 2.0, np.inf, 0.5]]))
    assert odd.tolist() == [[0, 0, 255, 255, 128]]
    assert images.pixels_of(np.array([[-5, 300, 7]])).tolist() == [[0, 255, 7]]
    assert images.pixels_of(np.array([[True, False]])).tolist() == [[255, 0]]


def test_a_batch_becomes_a_grid_of_its_first_64_images() -> None:
    batch = np.zeros((100, 3, 4, 6), np.uint8) + np.arange(100, dtype=np.uint8)[:, None, None, None]
    grid = images.pixels_of(batch)
    assert grid.shape == (8 * 6 - 2, 8 * 8 - 2, 3)
    assert [int(grid[6 * (i // 8), 8 * (i % 8), 0]) for i in range(64)] == list(range(64))
    assert (grid[4:6] == 128).all(), "the line between two rows"
    assert images.pixels_of(batch[:5, :1]).shape == (2 * 6 - 2, 3 * 8 - 2)
    assert (images.pixels_of(np.moveaxis(batch, 1, -1)) == grid).all()


@pytest.mark.parametrize("with_pillow", [True, False])
def test_a_large_image_is_scaled_down_to_the_limits(with_pillow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_pillow:
        monkeypatch.setattr(images, "_pillow", lambda: None)
    noise = np.random.default_rng(0).integers(0, 256, (1300, 900, 3), np.uint8)
    kind, data = images.encoded(noise, shown.MAX_BYTES)  # type: ignore[misc]
    assert shown.MAX_BYTES / 8 < len(data) <= shown.MAX_BYTES
    assert max(pixels(Shown("", 0, kind, data)).shape[:2]) <= images.MAX_SIDE
    _, data = images.encoded(np.zeros((10, 3000), np.uint8), shown.MAX_BYTES)  # type: ignore[misc]
    assert pixels(Shown("", 0, kind, data)).shape[1] <= images.MAX_SIDE


@pytest.mark.parametrize(
    ("fig", "options", "error", "text"),
    [
        (3, {}, TypeError, "show() takes a matplotlib figure, a PIL image, an array or tensor, .* not int"),
        (torch.zeros(8, 5, 32, 32), {}, ValueError, "and a batch one dimension more, not (8, 5, 32, 32)"),
        (torch.zeros(3), {}, ValueError, "not (3,)"),
        (np.zeros((0, 4)), {}, ValueError, "not (0, 4)"),
        (np.zeros((4, 4), complex), {}, TypeError, "floats 0 to 1 or integers 0 to 255, not complex128"),
        (np.zeros((4, 4)), {"name": 3}, TypeError, "show(name=3): a name must be a string"),
        (np.zeros((4, 4)), {"step": 0.5}, TypeError, "show(step=0.5): a step must be an integer"),
        (np.zeros((4, 4)), {"step": 2**63}, ValueError, "a step must fit into 64 bits"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(fig: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=re.escape(text).replace(r"\.\*", ".*")):
        nbddp.show(fig, **options)


def test_html_that_is_too_large_is_left_out_with_one_line(cell: Cells) -> None:
    names = cell("""
        import nbddp
        class Large:
            def _repr_html_(self):
                return "x" * 300_000
        def train():
            nbddp.show(Large(), "large")
            nbddp.show(Large(), "large")
    """)
    finished = run(names.train)
    assert dict(finished.figures) == {}
    assert finished.logs(0) == "show() left out large: it has more than 256 kB\n"
    assert finished.logs(1) == ""


# ---------------------------------------------------------------------------- which ranks and steps


def test_rank_0_is_shown_and_with_a_rank_in_the_name_every_rank(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            mine = torch.full((4, 4), nbddp.rank(), dtype=torch.uint8)
            nbddp.show(mine, "all")
            nbddp.show(mine, "of rank {rank}")
    """)
    figures = run(names.train, nprocs=3).figures
    assert set(figures) == {"all", "of rank 0", "of rank 1", "of rank 2"}
    for rank in range(3):
        assert (pixels(figures[f"of rank {rank}"][-1]) == rank).all()
    assert (pixels(figures["all"][-1]) == 0).all()


def test_images_have_the_last_logged_step_and_are_counted_before_the_first(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            for _ in range(3):
                nbddp.show(torch.zeros(4, 4), "before")
            for step in range(10, 13):
                nbddp.log(loss=1.0, step=step)
                nbddp.show(torch.full((4, 4), step / 20), "after")
                nbddp.show(torch.full((4, 4), 1.0), "again", step=5)
    """)
    figures = run(names.train).figures
    assert [image.step for image in figures["before"]] == [0, 1, 2]
    assert [image.step for image in figures["after"]] == [10, 11, 12]
    assert [image.step for image in figures["again"]] == [5]
    assert repr(figures) == "<figures: before: 3 steps, 0 to 2; after: 3 steps, 10 to 12; again: step 5>"
    with pytest.raises(KeyError, match="nothing was shown as 'sample'; the names are: before, after, again"):
        figures["sample"]


def test_a_sessions_next_call_begins_without_figures() -> None:
    def train(value: float) -> None:
        nbddp.show(torch.full((4, 4), value), "x")
        nbddp.show(torch.full((4, 4), value), "x")

    with nbddp.session(nprocs=2, device="cpu") as session:
        session.run(train, (0.0,), show=False)
        second = session.run(train, (1.0,), show=False)
    assert [image.step for image in second.figures["x"]] == [0, 1]
    assert (pixels(second.figures["x"][0]) == 255).all()


def test_after_a_restart_no_image_of_a_later_step_is_left(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            state = nbddp.load_snapshot("s.pt")
            for step in range(state["step"] + 1 if state else 0, 9):
                nbddp.log(loss=1.0, step=step)
                if not state or step % 2:
                    nbddp.show(torch.full((4, 4), nbddp.restart_count(), dtype=torch.uint8), "x")
                if step == 4:
                    nbddp.save_snapshot("s.pt", step=4)
                if step == 7 and not state:
                    raise ValueError("once")
    """)
    figures = run(names.train, nprocs=1, max_restarts=1).figures
    kept = {image.step: int(pixels(image)[0, 0]) for image in figures["x"]}
    assert kept == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 7: 1}


PLOTS = """
    def train():
        import matplotlib.pyplot as plt
        for _ in range(2):
            plt.figure(), plt.plot([1, 2])
        plt.figure("named"), plt.plot([2, 1])
        plt.show()
        return plt.get_fignums(), plt.get_backend()
"""


def test_plt_show_shows_rank_0s_figures_and_closes_them(cell: Cells) -> None:
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # as every notebook kernel has it
    finished = run(cell(PLOTS).train, env=inline)
    assert list(finished.figures) == ["figure", "figure 2", "named"]
    assert finished.values == [([], "module://nbddp.worker.pyplot_backend")] * 2
    assert finished.logs() == ""


# ---------------------------------------------------------------------------- what is kept


def image(step: int, name: str = "x", nbytes: int = 1) -> Shown:
    return Shown(name, step, "image/png", bytes(nbytes))


def test_the_first_and_the_newest_are_kept_and_those_between_evenly() -> None:
    figures = Album()
    for step in range(1000):
        figures.add(image(step))
        steps = [each.step for each in figures["x"]]
        assert (steps[0], steps[-1]) == (0, step)
        assert len(steps) == min(step + 1, album.MAX_STEPS)
    gaps = np.diff(steps)
    assert gaps.max() <= 4 * np.median(gaps)


def test_an_album_is_limited_in_bytes_and_names() -> None:
    figures = Album()
    for step in range(album.MAX_STEPS):
        for name in range(album.MAX_NAMES + 2):
            figures.add(image(step, f"name {name}", 200 << 10))
    assert len(figures) == album.MAX_NAMES
    assert figures.names_left_out == 2
    assert sum(len(each.data) for kept in figures.values() for each in kept) <= album.MAX_BYTES
    for kept in figures.values():
        assert (kept[0].step, kept[-1].step) == (0, album.MAX_STEPS - 1)
        assert len(kept) >= 3


def test_an_image_of_any_size_and_name_survives_pieces_of_any_size() -> None:
    random.seed(0)
    history, sent = History(), []
    for step in range(60):
        name = "".join(random.choices("aé\N{SNOWMAN}", k=random.choice((1, 30, shown.NAME_CHARS // 4))))
        sent.append(
            Shown(
                f"{name}{step % 7}", step, random.choice(shown.KINDS), random.randbytes(random.choice((0, 1, 99, 7000)))
            )
        )
    data = b"".join(map(shown.records_of, sent))
    while data:
        size = random.choice((1, 39, 40, 41, 5000))
        history.feed(0, data[:size])
        data = data[size:]
    kept = {each.name for each in sent[: album.MAX_NAMES]}
    arrived = [each for images_of in history.figures.values() for each in images_of]
    assert sorted(arrived, key=lambda each: each.step) == [each for each in sent if each.name in history.figures]
    assert len(history.figures) == min(album.MAX_NAMES, len({each.name for each in sent})) >= len(kept) - 1


def test_bytes_that_no_rank_sends_show_nothing() -> None:
    random.seed(1)
    history = History()
    for _ in range(200):
        more = random.choice((0, 1))
        history.feed(0, bytes([wire.KIND_SHOWN, more]) + random.randbytes(wire.SHOWN_PIECE_BYTES))
    assert all(each.kind in shown.KINDS for kept in history.figures.values() for each in kept)
    assert len(history.figures) <= 1


def test_a_rank_does_not_wait_for_a_notebook_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    pipe = MetricsPipe(write)
    monkeypatch.setattr(pipe, "_help", lambda: None)
    began = time.monotonic()
    for step in range(100):
        pipe.show(image(step, nbytes=200 << 10))
    assert time.monotonic() - began < 5.0
    assert 8 << 20 < sum(map(len, pipe._unsent)) < 9 << 20
    os.close(read)
    os.close(write)


# ---------------------------------------------------------------------------- where it is seen

TRAIN = """
import nbddp, torch
def train():
    for step in range(3):
        nbddp.log(loss=1.0, step=step)
        nbddp.show(torch.rand(3, 16, 16), "samples")
"""


def test_the_saved_picture_has_the_newest_image_and_lines_of_text_name_it(notebook: Notebook) -> None:
    notebook.ok(TRAIN)
    text = notebook.ok("run = nbddp.run(train, nprocs=2, device='cpu', show='text')")
    assert text.shown.startswith("train: 2 processes · gloo\ntrain: figure samples, step 2\n")
    html = out(notebook.ok("print(run._repr_html_())"))
    assert html.count("data:image/png;base64,") == 1
    assert "<b>samples</b> &nbsp;step 2</div>" in html


def test_in_the_notebook_itself_it_is_displayed_at_once(notebook: Notebook) -> None:
    reply = notebook.ok("import nbddp, numpy as np; nbddp.show(np.zeros((4, 4)), 'of rank {rank}')")
    assert "<of rank 0, step 0: image/png, 0.1 kB>" in out(reply)
