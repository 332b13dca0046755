"""What a part finds: values and checks, each told at once to the process that started the part."""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.measure import Table


class Skip(Exception):
    """A part, or the rest of it, means nothing on this machine; says why."""


@dataclass
class Report:
    """The findings of one part.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        send: is called with each finding, as a dict for JSON.
    """

    device: str
    send: Callable[[dict[str, Any]], None]
    on_cuda: bool = False

    def __post_init__(self) -> None:
        self.on_cuda = self.device == "cuda"

    def needs_cuda(self, why: str) -> None:
        """Skip the rest on a CPU."""
        if not self.on_cuda:
            raise Skip(why)

    def value(self, name: str, value: object, unit: str = "") -> None:
        """Report a figure or a text."""
        self.send({"name": name, "value": _for_json(value), "unit": unit})

    def check(self, name: str, ok: object, found: object = "") -> None:
        """Report whether something holds. The part goes on, and has failed in the end."""
        self.send({"name": name, "ok": bool(ok), "found": _for_json(found)})

    def table(self, table: Table) -> None:
        """Report the medians of a table, and its notes."""
        for name, row in table.values.items():
            for column in row:
                label = ", ".join(filter(None, [table.title, name, column]))
                middle = table.median(name, column)
                self.value(label, middle * table.scale if middle is not None else None, table.unit)
        for (name, column), why in table.failures.items():
            self.check(", ".join(filter(None, [table.title, name, column])), False, why)
        for note in table.notes:
            self.value(table.title, note.strip())

    def options(self, ranks: int = 1) -> str:
        """The options of a run with this number of ranks, as source text: several share the first GPU, with gloo."""
        if not self.on_cuda:
            return f"nprocs={ranks}, device='cpu'"
        return "nprocs=1, device='cuda'" if ranks == 1 else f"gpus={[0] * ranks}, backend='gloo'"

    def magic_options(self, ranks: int = 1) -> str:
        """The same for ``%ddp open``."""
        if not self.on_cuda:
            return f"-n {ranks} --device cpu"
        return "-n 1 --device cuda" if ranks == 1 else f"--gpus {','.join('0' * ranks)} --backend gloo"

    @property
    def first_device(self) -> str:
        """The device of rank 0, as torch writes it."""
        return "cuda:0" if self.on_cuda else "cpu"


def _for_json(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_for_json(each) for each in value]
    return value if isinstance(value, (int, str, bool, type(None))) else str(value)


def run_part(function: Callable[[Report], None], device: str, fd: int) -> None:
    """Run a part in this process; its findings and its end go to the pipe ``fd``."""
    os.set_inheritable(fd, False)

    def send(finding: dict[str, Any]) -> None:
        os.write(fd, (json.dumps(finding) + "\n").encode())

    try:
        function(Report(device, send))
        send({"end": "done"})
    except Skip as skip:
        send({"end": "skipped", "why": str(skip)})
    except BaseException as error:
        traceback.print_exc()
        text = (str(error).strip().splitlines() or [""])[0]
        send({"end": "failed", "why": f"{type(error).__name__}: {text}"[:500]})
