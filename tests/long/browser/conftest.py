"""The server, the browser, and the notebook of ``tests/browser``."""

from tests.browser.conftest import _nothing_left_behind, _opened, expect, lab, sheet, started_browser  # noqa: F401
