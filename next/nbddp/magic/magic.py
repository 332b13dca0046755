"""The magics: ``%%ddp`` runs a cell on fresh ranks, ``%ddp open`` has every cell run on ranks that stay."""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from nbddp.kernel.run import Run, runs
from nbddp.kernel.script import run_script
from nbddp.kernel.session import Session
from nbddp.magic import options, reads, routing
from nbddp.payload import pack
from nbddp.text import did_you_mean

_RANKS = ("--ranks", {"type": options.numbers, "default": None})
_OUT = ("-o", {"default": "", "metavar": "NAMES"})
_TORCHRUN = (
    ("--standalone", {"action": "store_true"}),  # it always is
    ("--nproc-per-node --nproc_per_node", {"type": options.processes, "dest": "nprocs"}),
    ("-m --module", {"action": "store_true", "default": False}),
)
_ARGV = ("argv", {"nargs": argparse.REMAINDER})


@magics_class
class DdpMagics(Magics):
    """``%ddp`` and ``%%ddp``.

    Attributes:
        session: the one that is open.
    """

    session: Session | None = None
    shell: Any
    _opened_with: dict[str, Any]

    @line_magic
    def ddp(self, line: str) -> Run[None] | None:
        """%ddp open -n 4, close, push NAMES, pull NAMES, logs [RANK], stacks, status; run train.py ARGS."""
        command, *words = shlex.split(line) or ["status"]
        act = getattr(self, f"_{command}", None) if command in _COMMANDS else None
        if act is None:
            raise UsageError(
                f"%ddp {command} is unknown{did_you_mean(command, _COMMANDS)}. There are: {', '.join(_COMMANDS)}"
            )
        result: Run[None] | None = act(words)
        return result

    @cell_magic("ddp")  # type: ignore[arg-type]
    def on_ranks(self, line: str, cell: str) -> None:
        """Run a cell on the ranks: %%ddp [-n N] [-o NAMES] [--ranks 0,1] and the options of run()."""
        given = options.parse("%%ddp", line, _RANKS, _OUT)
        names = [name for name in given.o.replace(",", " ").split() if name]
        if names and (missing := set(names) - reads.names_bound(ast.parse(self.shell.transform_cell(cell)))):
            raise UsageError(f"-o {', '.join(sorted(missing))}: the cell binds no such name")
        if self.session is not None:
            if given.options:
                raise UsageError(f"a session is open, with its own options: leave out {', '.join(given.options)}")
            self._run_cell(self.session, cell, given.ranks, names)
            return
        with Session(**given.options) as session:
            with contextlib.suppress(SyntaxError):  # the ranks show it
                session.push(**self._read_by(cell))
            self._run_cell(session, cell, given.ranks, names)

    def _run_cell(self, session: Session, cell: str, ranks: list[int] | None, names: list[str]) -> None:
        session.cell(cell, ranks)
        for name in names:
            self.shell.user_ns[name] = session.pull(name, rank=min(ranks or [0]))
        if session.lost and session is self.session:
            DdpMagics.session = None

    def _read_by(self, cell: str) -> dict[str, Any]:
        """Return the notebook's names that a fresh cell reads. What it may bind is left out if it can't be sent."""
        shell, source = self.shell, self.shell.transform_cell(cell)
        found = {
            name: shell.user_ns[name]
            for name in reads.names_read(source) - vars(builtins).keys()
            if name in shell.user_ns and shell.user_ns_hidden.get(name) is not shell.user_ns[name]
        }
        for name in found.keys() & reads.names_bound(ast.parse(source)):
            if not _can_be_sent(found[name]):
                del found[name]
        return found

    # ------------------------------------------------------------------ %ddp ...

    def _open(self, words: list[str]) -> None:
        given = options.parse("%ddp open", shlex.join(words))
        if self.session is not None and not self.session.lost:
            if given.options == self._opened_with:  # Run All again: as a kernel keeps its names
                print(f"the session of {self.session.nprocs} ranks is open; %ddp close ends it")
                return
            raise UsageError("a session is open: %ddp close ends it")
        if self.session is not None:
            self.session.close()  # it's lost, but its other ranks are there
        DdpMagics.session, DdpMagics._opened_with = Session(**given.options), given.options
        print(f"cells run on {self._the_session().nprocs} ranks from here on, until %ddp close; %%local runs one here")

    def _close(self, _: list[str]) -> None:
        self._the_session().close()
        DdpMagics.session = None

    def _push(self, words: list[str]) -> None:
        if missing := [word for word in words if word not in self.shell.user_ns]:
            raise UsageError(f"the notebook has no {missing[0]}{did_you_mean(missing[0], self.shell.user_ns)}")
        self._the_session().push(**{word: self.shell.user_ns[word] for word in words})

    def _pull(self, words: list[str]) -> None:
        session = self._the_session()
        found = session.pull(*words)
        self.shell.user_ns.update(zip(words, found if len(words) > 1 else [found]))

    def _run(self, words: list[str]) -> Run[None]:
        """Run what follows ``torchrun`` on a command line, or options of run() and a script."""
        line = shlex.join(words[words[:1] == ["torchrun"] :])
        given = options.parse("%ddp run", line, *_TORCHRUN, ("script", {}), _ARGV)
        return run_script(given.script, given.argv, module=given.module, **given.options)

    def _logs(self, words: list[str]) -> None:
        print(self._the_session().logs(int(words[0]) if words else 0), end="")

    def _stacks(self, _: list[str]) -> None:
        print(self._the_session().stacks())

    def _status(self, _: list[str]) -> None:
        if self.session is None:
            print("no session is open: %ddp open -n 2")
        shown: list[Session | Run[Any]] = [*filter(None, [self.session]), *runs()]
        for each in shown:
            crew = each._crew  # another thread may end the run
            print(each, *(crew.overview() if crew is not None else ()), sep="\n  ")

    def _the_session(self) -> Session:
        if self.session is None:
            raise UsageError("no session is open: %ddp open -n 2")
        return self.session


_COMMANDS = ("open", "close", "push", "pull", "run", "logs", "stacks", "status")


def _can_be_sent(value: object) -> bool:
    try:
        pack(value).block.close()
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nbddp``: the magics; from now on, cells go to the ranks while a session is open."""
    shell.register_magics(DdpMagics)

    def current() -> Session | None:
        return DdpMagics.session

    routing.route_cells(shell, current)
    if kernel := getattr(shell, "kernel", None):
        routing.route_questions(kernel, current)
