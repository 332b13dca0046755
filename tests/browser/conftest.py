"""One server, one browser, and one notebook for all tests here; each test runs further cells of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.lab import Lab, Sheet


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the one that looks at this process: the runs are a kernel's."""


@pytest.fixture(scope="package")
def started_browser() -> Iterator[Browser]:
    """Skips where there's none; CI has one."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("playwright.sync_api")
    from playwright.sync_api import sync_playwright

    from tests.browser.lab import FLAGS, chromium

    if chromium() is None and os.environ.get("CI") != "true":
        pytest.skip("there is no Chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=FLAGS.split())
        yield started
        started.close()


@pytest.fixture
def expect(started_browser: Browser) -> Any:
    from playwright import sync_api

    return sync_api.expect


@pytest.fixture(scope="package")
def lab(started_browser: Browser) -> Iterator[Lab]:
    from tests.browser.lab import Lab

    with Lab() as started:
        yield started


@pytest.fixture(scope="package")
def _opened(lab: Lab, started_browser: Browser) -> Iterator[Sheet]:
    with started_browser.new_context(viewport={"width": 1100, "height": 900}) as context:
        yield lab.open(context.new_page())


@pytest.fixture
def sheet(_opened: Sheet) -> Iterator[Sheet]:
    yield _opened
    if _opened.is_busy():
        _opened.lab.interrupt()
        wait_until(lambda: not _opened.is_busy())
    wait_until(lambda: not _opened.ranks(), what="the ranks are gone")
    assert [problem for problem in _opened.problems if "nbddp" in problem] == []
