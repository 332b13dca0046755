"""Kernel side. A ``%%ddp`` cell in its notebook: its lines and number, the variables it gives back."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

# IPython is there: the magics alone import this module.
from IPython.core.error import UsageError  # noqa: TID253

from nbddp.errors import LaunchError, NbddpError, PayloadError
from nbddp.kernel import cell as cells
from nbddp.kernel import runner
from nbddp.remains import Remains
from nbddp.worker import script

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class CellSyntaxError(LaunchError):
    """A ``%%ddp`` cell is no Python; shown as any cell's SyntaxError is, with the cell's own line."""

    def __init__(self, shell: InteractiveShell, error: SyntaxError) -> None:
        super().__init__(str(error))
        self.__cause__ = error
        self._shown: list[str] = shell.SyntaxTB.structured_traceback(type(error), error, None)

    def _render_traceback_(self) -> list[str]:
        return self._shown


class CellSource:
    """A cell's body under the name that the notebook's tracebacks know the cell by, line for line."""

    def __init__(self, shell: InteractiveShell, body: str) -> None:
        self._shell = shell
        raw, number = _typed_cell(shell, body)
        before = _before(raw, body).splitlines()
        # Comments stand for the lines before the body, so that the whole is Python.
        self.text = "".join(f"# {line}\n" if line.strip() else "\n" for line in before) + body
        self.name = f"In[{number}]"
        self.filename: str = shell.compile.cache(self.text, number, raw_code=raw)

    def parse(self) -> ast.Module:
        try:
            return cells.parse(self.text, self.filename)
        except SyntaxError as error:
            raise CellSyntaxError(self._shell, error) from error


def _typed_cell(shell: InteractiveShell, body: str) -> tuple[str, int]:
    """The cell as it was typed and its number, if it ends with this body; else as a plain ``%%ddp`` cell."""
    history = shell.history_manager
    if history is not None and history.input_hist_raw and _before(history.input_hist_raw[-1], body):
        return history.input_hist_raw[-1], len(history.input_hist_raw) - 1
    return f"%%ddp\n{body}", shell.execution_count


def _before(raw: str, body: str) -> str:
    """What stands before the body; "" if that is not how the cell ends."""
    raw, body = raw.rstrip(), body.rstrip()
    return raw[: -len(body)] if body and raw.endswith(body) else ""


class Return:
    """Takes a cell's results apart on their way to the Run, and gives the notebook its variables."""

    def __init__(self, shell: InteractiveShell, names: list[str]) -> None:
        self.names = names
        self._shell = shell

    def receive(self, results: list[script.CellResult | Remains | None]) -> list[Any]:
        """On the run's thread, when every rank has finished; None: the rank left by ``sys.exit(0)``."""
        outputs = results[0].outputs if isinstance(results[0], script.CellResult) else {}
        arrived = {name: value for name, value in outputs.items() if not isinstance(value, Remains)}
        self._shell.user_ns.update(arrived)
        for name in self.names:
            if name not in outputs:
                raise NbddpError(f"-o {name}: rank 0 has no {name} at the end of the cell")
            if name not in arrived:
                raise PayloadError(f"-o {name}: it cannot come back to the notebook: {outputs[name].why}", (name,))
        return [result.value if isinstance(result, script.CellResult) else result for result in results]


class Keeping:
    """Within it, a new Run gets the user's name, also one that fails."""

    def __init__(self, shell: InteractiveShell, names: list[str]) -> None:
        if len(names) > 1:
            raise UsageError("--as takes one name")
        self._shell = shell
        self._names = names
        self._before = runner.last_run()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        run = runner.last_run()
        if run is not self._before:
            self._shell.user_ns.update(dict.fromkeys(self._names, run))
