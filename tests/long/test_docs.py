"""Every code block of the guides runs as it is written."""

from pathlib import Path

import pytest

from tests.test_docs import PAGES, blocks, run_blocks

GUIDES = [page for page in PAGES[1:] if any(each.language != "text" and not each.reason for each in blocks(page))]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_every_block_of_the_guide_runs(page: Path, in_folder: Path) -> None:
    run_blocks(in_folder, page)
