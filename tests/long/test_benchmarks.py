"""The benchmarks run to the end and fill their table; no test says how fast anything is."""

import pytest

from benchmarks.__main__ import PARTS
from benchmarks.measure import Sizes, Table, version_of

TINY = Sizes(rounds=1, ranks=2, mib=1, calls=100, steps=200)
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_a_value_for_every_way(part: str) -> None:
    if part == "nodes" and not version_of("ray"):
        pytest.skip("Ray isn't installed")
    table = Table()
    PARTS[part](table, TINY)
    assert table.figures
    for title, figure in table.figures.items():
        assert not figure.failures
        assert all(len(values) == 1 for values in figure.values.values())
        assert f"| {title} | nbddp" in table.markdown()
