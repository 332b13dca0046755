"""Output is shown as a terminal would show it, wherever its bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st

from nbddp.kernel.output import Output
from nbddp.kernel.page import Page
from nbddp.kernel.rank_state import RankState
from nbddp.process.machine import Event
from nbddp.text import fold

TEXT = st.text(st.sampled_from("ab\r\n é€😀\0\x1b"), max_size=60)
ENCODED = TEXT.map(str.encode)
RAW = st.one_of(ENCODED, st.binary(max_size=40), st.lists(ENCODED, max_size=3).map(b"\xff".join))
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


@given(TEXT)
def test_folded_text_is_what_a_terminal_shows(text: str) -> None:
    assert fold(text) == terminal(text)
    assert fold(fold(text)) == fold(text)


@given(RAW, RAW, CUTS)
def test_the_cell_and_the_logs_have_all_output_wherever_it_is_cut(before: bytes, data: bytes, cuts: list[int]) -> None:
    output, page, shown = Output(), Page([RankState(0)]), []
    page.write = shown.append  # type: ignore[method-assign]
    output.add(before)
    begin, left = output.size, data
    for cut in [*cuts, len(data)]:
        piece, left = left[:cut], left[cut:]
        output.add(piece)
        page.take(Event("output", 0, piece))
    whole = data.decode("utf-8", "replace")
    assert output.text(begin) == terminal(whole)
    # A character that was never finished waits for its other half.
    assert whole.startswith("".join(shown))
    assert len(whole) - len("".join(shown)) <= 1
