"""What stays of a panel: in the saved file, after a reload of the page, and in other front ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support import START_TIMEOUT_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.lab import Sheet

pytestmark = pytest.mark.timeout(240)


def test_the_saved_notebook_shows_the_picture_without_a_kernel(sheet: Sheet, started_browser: Browser) -> None:
    from playwright.sync_api import expect

    cell = sheet.run("run = nbddp.run(train, (2, 100), nprocs=2, device='cpu')")
    expect(cell.panel.locator("canvas")).to_have_count(2)
    saved = sheet.save()
    saved["cells"] = [each for each in saved["cells"] if each["outputs"]][-1:]
    (output,) = [each for each in saved["cells"][0]["outputs"] if each["output_type"] == "display_data"]
    assert set(output["data"]) == {"text/html", "text/plain"}
    assert len("".join(output["data"]["text/html"])) < 100_000
    assert "widgets" not in saved["metadata"], "no widget state"
    theirs = sheet.lab.notebooks / "theirs.ipynb"  # unsigned, as somebody else's notebook: not trusted
    theirs.write_text(json.dumps(saved))
    page = started_browser.new_page(viewport={"width": 1100, "height": 900})
    page.goto(sheet.lab.address(theirs.name))
    images = page.locator(".nbddp-picture img")
    expect(images).to_have_count(2, timeout=START_TIMEOUT_S * 1000)
    for image in images.all():
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    assert str(images.first.get_attribute("alt")).startswith("Loss: train 0.")
    expect(page.locator(".nbddp-picture")).to_contain_text("Finished")
    expect(page.locator(".nbddp-picture tr")).to_have_count(3)
    expect(page.locator("section.nbddp")).to_have_count(0)
    page.close()


# ---------------------------------------------------------------------------- marimo
