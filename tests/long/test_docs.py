"""Every code block of the guides runs as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_docs import PAGES, ROOT, blocks, run_blocks


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page != ROOT / "README.md"
        and any(block.language in ("python", "bash") and not block.reason for block in blocks(page))
    ],
    ids=lambda page: page.name,
)
def test_every_block_of_the_guide_runs(page: Path, in_folder: Path) -> None:
    run_blocks(in_folder, page)
