"""Output is shown as a terminal would show it, wherever its bytes are cut."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from nbddp.launch.output import RankOutput, open_output
from nbddp.text import fold
from tests.properties.budget import examples

TEXT = st.text(st.sampled_from("ab\r\n é€😀\0\x1b"), max_size=60)
RAW = st.one_of(
    TEXT.map(str.encode), st.binary(max_size=40), st.lists(TEXT.map(str.encode), max_size=3).map(b"\xff".join)
)
CUTS = st.lists(st.integers(1, 7), max_size=60)


def terminal(text: str) -> str:
    """A screen whose cursor goes to the line's start by a carriage return, and clears the line with what comes next."""
    lines = [""]
    returned = False
    for char in text:
        if char == "\n":
            lines.append("")
            returned = False
        elif char == "\r":
            returned = True
        else:
            lines[-1] = char if returned else lines[-1] + char
            returned = False
    return "\n".join(lines)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    position = 0
    for cut in cuts:
        yield data[position : position + cut]
        position += cut
    yield data[position:]


@examples(400)
@given(TEXT)
def test_folded_text_is_what_a_terminal_shows(text: str) -> None:
    assert fold(text) == terminal(text)
    assert fold(fold(text)) == fold(text)


@examples(150)
@given(RAW, CUTS, st.integers(1, 9))
def test_parallel_readers_see_all_output_wherever_it_is_cut(data: bytes, cuts: list[int], limit: int) -> None:
    output = RankOutput(open_output())
    whole = data.decode("utf-8", "replace")
    taken, followed, position = "", "", 0
    try:
        for piece in pieces(data, cuts):
            os.write(output.fileno(), piece)
            taken += output.take()
            text, position, follows = output.since(position, max(4, limit))
            assert follows
            followed += text
        assert output.text() == terminal(whole)
    finally:
        output.close()
    taken += output.take()
    while (seen := output.since(position, max(4, limit)))[1] > position:
        followed, position = followed + seen[0], seen[1]
    assert taken == whole
    assert output.text() == terminal(whole)
    # A character that was never finished waits for its other half for ever.
    assert whole.startswith(followed)
    assert len(data) - position <= 3
