"""The card of a run: its size, its texts within their space, its two themes, what is in it without metrics."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import Rank, status

from nbddp.errors import NbddpError
from nbddp.history.history import History
from nbddp.panel.card import Card

SVG = "{http://www.w3.org/2000/svg}"
LONG = "a_very_long_name_of_something_" * 8


def history(*names: str, last: float = 0.25) -> History:
    made = History(1)
    rank = Rank(made)
    for name in names:
        rank.log(name, range(50), [*np.linspace(2.0, 0.5, 49).tolist(), last])
    return made


def texts(card: Card) -> list[str]:
    return [element.text or "" for element in ET.fromstring(card.svg).iter(f"{SVG}text")]


def too_wide(card: Card) -> list[str]:
    """The texts that run into the next one in their line or into the margin, in a wide font."""
    import matplotlib
    from PIL import ImageFont

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for text in ET.fromstring(card.svg).findall(f"{SVG}text"):
        bold = "-Bold" if text.get("font-weight") else ""
        font = ImageFont.truetype(str(fonts / f"DejaVuSans{bold}.ttf"), float(text.get("font-size", "11")))
        x, width = float(text.get("x", "0")), font.getlength(text.text or "")
        x -= {"end": width, "middle": width / 2}.get(text.get("text-anchor", ""), 0)
        lines.setdefault(text.get("y", ""), []).append((x, x + width, text.text or ""))
    found = []
    for line in lines.values():
        starts = [x for x, _, _ in sorted(line)[1:]] + [1141.0]
        found += [text for (_, right, text), start in zip(sorted(line), starts) if right > start]
    return found


def finished(**options: Any) -> Any:
    return status("finished", ranks=2, **options)


def test_a_card_is_an_svg_of_1200_by_630() -> None:
    root = ET.fromstring(Card(history("train/loss", "val/loss", "acc"), finished()).svg)
    assert (root.get("width"), root.get("height"), root.get("viewBox")) == ("1200", "630", "0 0 1200 630")


def test_it_says_what_the_run_was_and_what_came_of_it() -> None:
    found = texts(Card(history("train/loss", "val/loss", "acc"), finished(summary="2 processes · gloo")))
    assert found[0] == "train"
    assert "Finished · 2 processes · gloo · cpu" in found
    assert "nbddp" in found
    for label, value in (("Train loss", "0.2500"), ("Accuracy", "0.2500"), ("Val loss", "0.2500"), ("Time", "0:38")):
        assert found[found.index(label) + 1] == value
    legend = found[found.index("Loss") :][:3]
    assert legend == ["Loss", "train 0.2500", "val 0.2500"]


@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("<b>&amp;\"'", ["<b>&", "]]>"]),
        (LONG, [LONG, f"train/{LONG}", f"val/{LONG}", "日本語の損失" * 20]),
        ("train", [f"metric {i}" for i in range(30)]),
        ("\x00\u202e", ["loss"]),
    ],
)
def test_no_name_is_markup_or_leaves_the_card(name: str, logged: list[str]) -> None:
    card = Card(history(*logged), finished(name=name, summary=f"64 processes · {LONG}", seconds=1e6))
    ET.fromstring(card.svg)
    assert "<b>" not in card.svg
    assert too_wide(card) == []
    assert "277:46:40" in texts(card)


@pytest.mark.parametrize(("last", "shown"), [(float("nan"), "NaN"), (float("inf"), "∞")])
def test_a_metric_that_is_not_finite_is_red(last: float, shown: str) -> None:
    card = Card(history("loss", last=last), finished())
    values = [each for each in ET.fromstring(card.svg).iter(f"{SVG}text") if each.text == shown]
    assert len(values) == 2, "the tile and the legend"
    assert {each.get("fill") for each in values} == {"#d9453d"}
    assert any(f"{shown} from step 49" == text for text in texts(card))


def test_without_metrics_it_has_ranks_and_time() -> None:
    found = texts(Card(History(1), finished()))
    assert found[-1] == "no metric was logged"
    assert found[found.index("Ranks") + 1] == "2"
    assert found[found.index("Time") + 1] == "0:38"


def test_light_and_dark_differ_in_the_page_and_the_text() -> None:
    light, dark = (Card(history("loss"), finished(), dark=each).svg for each in (False, True))
    assert 'height="630" fill="#ffffff"' in light
    assert 'height="630" fill="#14161b"' in dark
    assert len(light) == len(dark)


def test_a_notebook_displays_it_as_an_image_and_its_repr_is_one_line() -> None:
    card = Card(history("loss"), finished(name="<b>"))
    bundle = card._repr_mimebundle_()
    assert bundle["text/html"].startswith('<img src="data:image/svg+xml;base64,')
    assert "&lt;b&gt;: finished after 0:38" in bundle["text/html"]
    assert repr(card) == "<Card <b>: finished after 0:38 · 1 process · gloo · loss 0.2500>"


def test_it_is_saved_as_svg_and_png_needs_cairosvg(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(history("loss"), finished())
    card.save("card.svg")
    assert Path("card.svg").read_text() == card.svg
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(NbddpError, match=r"with the package cairosvg.*save it as \.svg, which any browser opens"):
        card.save(Path("card.PNG"))
    with pytest.raises(ValueError, match=r"a card is saved as \.svg or \.png, not as 'card\.gif'"):
        card.save("card.gif")
    assert [path.name for path in Path().iterdir()] == ["card.svg"]


def test_with_cairosvg_it_is_saved_as_a_png_of_its_size(in_folder: Path) -> None:
    pytest.importorskip("cairosvg", reason="cairosvg is not installed")
    Card(history("loss"), finished()).save("card.png")
    data = Path("card.png").read_bytes()
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1200, 630)
