"""The notebook's side of a ``%%ddp`` cell: its source and number, and the variables that it returns."""

# IPython's printer is untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ast
import contextlib
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

# Only the magics import this module, so IPython is installed.
from IPython.core.error import UsageError  # noqa: TID253
from IPython.lib.pretty import pretty  # noqa: TID253

from nbddp.errors import LaunchError, NbddpError, PayloadError
from nbddp.kernel.run import last_run
from nbddp.magic import analysis
from nbddp.payload.partial import Remains
from nbddp.text import bounded, ranks_text
from nbddp.worker import script

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_VALUE_CHARS = 1000


class CellSyntaxError(LaunchError):
    """A ``%%ddp`` cell has a syntax error; shown like the SyntaxError of any cell, with its line."""

    def __init__(self, shell: InteractiveShell, error: SyntaxError) -> None:
        super().__init__(str(error))
        self.__cause__ = error
        self._shown: list[str] = shell.SyntaxTB.structured_traceback(type(error), error, None)

    def _render_traceback_(self) -> list[str]:
        return self._shown


class CellSource:
    """The source of a cell, with the file name and line numbers that the notebook's tracebacks use for it."""

    def __init__(self, shell: InteractiveShell, body: str) -> None:
        self._shell = shell
        history, raw, number = shell.history_manager, f"%%ddp\n{body}", shell.execution_count
        if history is not None and history.input_hist_raw and _before(history.input_hist_raw[-1], body):
            raw, number = history.input_hist_raw[-1], len(history.input_hist_raw) - 1  # the cell as it was typed
        before = _before(raw, body).splitlines()
        # The lines before the body become comments, so that line numbers stay and all of it is Python.
        self.text = "".join(f"# {line}\n" if line.strip() else "\n" for line in before) + body
        self.name = f"In[{number}]"
        self.filename: str = shell.compile.cache(self.text, number, raw_code=raw)

    def parse(self) -> ast.Module:
        try:
            return analysis.parse(self.text, self.filename)
        except SyntaxError as error:
            raise CellSyntaxError(self._shell, error) from error


def _before(raw: str, body: str) -> str:
    """Return the text before the body; "" if the cell does not end with the body."""
    raw, body = raw.rstrip(), body.rstrip()
    return raw[: -len(body)] if body and raw.endswith(body) else ""


def ends_with_semicolon(body: str) -> bool:
    """Return whether the last word of a cell is a ``;``, which hides its value."""
    tokens = tokenize.generate_tokens(io.StringIO(body).readline)
    empty = (tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.DEDENT)
    return [token.string for token in tokens if token.type not in empty][-1:] == [";"]


class ResultReceiver:
    """Receives a cell's results: assigns the variables of ``-o`` in the notebook, and passes the values to the Run."""

    def __init__(self, shell: InteractiveShell, names: list[str], ranks: Sequence[int] = (0,)) -> None:
        """
        Args:
            ranks: that run the cell, in order.
        """
        self.names = names
        self._shell = shell
        self._first = ranks[0]

    def receive(self, results: list[script.CellResult | Remains | None]) -> list[Any]:
        """Called on the run's thread when every rank has finished; None: the cell has no value there and no outputs."""
        first = results[self._first]
        outputs = first.outputs if isinstance(first, script.CellResult) else {}
        arrived = {name: value for name, value in outputs.items() if not isinstance(value, Remains)}
        self._shell.user_ns.update(arrived)
        for name in self.names:
            if name not in outputs:
                raise NbddpError(f"-o {name}: rank {self._first} has no {name} at the end of the cell")
            if name not in arrived:
                raise PayloadError(f"-o {name}: {name} cannot return to the notebook: {outputs[name].why}", (name,))
        return [result.value if isinstance(result, script.CellResult) else result for result in results]


def print_values(values: Mapping[int, Any]) -> None:
    """Print the value of each rank, by rank, unless all are alike; equal ones together.

    ::

      ranks 0 to 2: True
      rank 3: False
    """
    if len(set(map(id, values.values()))) == 1:
        return
    by_text: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_text.setdefault(_ADDRESS.sub(" at 0x…", bounded(pretty(value), _VALUE_CHARS)), []).append(rank)
    if len(by_text) > 1:
        for text, ranks in by_text.items():
            print(f"{ranks_text(ranks)}:{chr(10) if chr(10) in text else ' '}{text}")


@contextlib.contextmanager
def keep_run_as(shell: InteractiveShell, names: list[str]) -> Iterator[None]:
    """Assign a run that begins in this context to the name of ``--as``, also if the run fails."""
    if len(names) > 1:
        raise UsageError("--as takes one name")
    before = last_run()
    try:
        yield
    finally:
        run = last_run()
        if run is not before:
            shell.user_ns.update(dict.fromkeys(names, run))
