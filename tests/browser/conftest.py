"""Fixtures of a file's tests: one server and one browser, as a rule one page and one kernel, tidied by each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support import marked_pids

if TYPE_CHECKING:  # the tests skip where playwright is not installed
    from lab import Lab
    from notebook_page import NotebookPage
    from playwright.sync_api import Browser, Page
    from shared import SharedPage

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of the one that looks at this process: ``settle`` and ``Lab.end_kernels`` see to all processes."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    from lab import browser

    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def app() -> str:
    return "lab"


@pytest.fixture(scope="module")
def shared_lab(app: str) -> Iterator[Lab]:
    from lab import OTHER_KERNELS, Lab

    with Lab(app, OTHER_KERNELS) as started:
        yield started


@pytest.fixture(scope="module")
def shared_page(shared_browser: Browser) -> Iterator[SharedPage]:
    from shared import SharedPage

    made = SharedPage(shared_browser)
    yield made
    made.drop()


@pytest.fixture
def own_page(shared_browser: Browser) -> Iterator[Page]:
    """For a test that needs the loading of the page, or leaves something in it that no other test should meet."""
    from shared import SIZE

    made = shared_browser.new_page(viewport=SIZE)
    yield made
    made.close()


@pytest.fixture
def page(request: pytest.FixtureRequest, shared_page: SharedPage) -> Page:
    """The one of all tests, or the test's own if it uses ``own_page``."""
    return request.getfixturevalue("own_page") if "own_page" in request.fixturenames else shared_page.get()


@pytest.fixture
def kernel() -> str:
    """The name of the notebook's kernel."""
    from lab import KERNEL

    return KERNEL


@pytest.fixture
def notebook(
    request: pytest.FixtureRequest, shared_lab: Lab, shared_page: SharedPage, page: Page, kernel: str
) -> Iterator[NotebookPage]:
    from notebook_page import NotebookPage
    from shared import settle

    shared_memory, others = set(os.listdir("/dev/shm")), marked_pids()
    made = NotebookPage(shared_lab, page, kernel)
    yield made
    made.forget_page()
    try:
        page.close() if "own_page" in request.fixturenames else shared_page.tidy()
        settle(shared_lab, shared_memory, others)
    except Exception:
        _start_again(shared_page, shared_lab)
        raise
    if request.node.stash[_FAILED]:
        _start_again(shared_page, shared_lab)
    shared_lab.reset_settings()
    ours = [problem for problem in made.problems if "nbddp" in problem]
    assert not ours


def _start_again(shared_page: SharedPage, shared_lab: Lab) -> None:
    """The next test shall not suffer from what has gone wrong in this one."""
    shared_page.drop()
    shared_lab.end_kernels()
