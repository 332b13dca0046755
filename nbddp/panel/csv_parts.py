"""Gives a page the metrics as CSV, in parts that a Jupyter server lets pass."""

from __future__ import annotations

import io
from typing import Any

from nbddp.history.history import History

_PART_BYTES = 512 << 10  # a Jupyter server drops messages beyond 3 MB in 3 s
_KEPT = 2  # files that pages are in the middle of


class CsvParts:
    """The file ``History.to_csv`` writes, as it was when a page asked for the first part."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._files: dict[str, bytes] = {}  # by the page's request

    def part(self, request: str, start: int) -> tuple[dict[str, Any], bytes]:
        """The message with the bytes from ``start`` on; its size is 0 if this request's file is no longer kept."""
        if start == 0:
            self._files[request] = self._written()
            while len(self._files) > _KEPT:
                del self._files[next(iter(self._files))]
        file = self._files.get(request, b"")
        data = file[start : start + _PART_BYTES]
        if start + len(data) >= len(file):
            self._files.pop(request, None)
        return {"kind": "csv", "request": request, "size": len(file)}, data

    def _written(self) -> bytes:
        text = io.StringIO(newline="")
        self._history.write_csv(text)
        return text.getvalue().encode()
