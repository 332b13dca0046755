"""A table of the names on the ranks of a session."""

from __future__ import annotations

import html
from collections.abc import Sequence

from nbddp.worker.namespace import Name, size_text

_HEADS = ("name", "type", "shape", "dtype", "device", "size", "ranks")


class Names(list[Name]):
    """The names on the ranks, as rank 0 describes them; shown as a table.

    Attributes:
        differing: names whose value, or presence, differs between ranks.
    """

    def __init__(self, by_rank: Sequence[Sequence[Name]]) -> None:
        found: dict[str, Name] = {}
        for names in by_rank:
            for each in names:
                found.setdefault(each.name, each)
        super().__init__(found[name] for name in sorted(found))
        self.differing = {name for name in found if _differs(name, by_rank)}

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                each.name,
                each.kind,
                " × ".join(map(str, each.shape)),
                each.dtype,
                each.device,
                size_text(each.nbytes),
                "differ" if each.name in self.differing else "",
            )
            for each in self
        ]

    def __repr__(self) -> str:
        rows = [_HEADS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        def cells(row: Sequence[str], tag: str) -> str:
            return "".join(f'<{tag} style="text-align: left">{html.escape(text)}</{tag}>' for text in row)

        head, body = cells(_HEADS, "th"), "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self._rows())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _differs(name: str, by_rank: Sequence[Sequence[Name]]) -> bool:
    digests = [next((each.digest for each in names if each.name == name), "missing") for names in by_rank]
    return len(set(digests)) > 1
