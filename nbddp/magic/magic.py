"""The magics: ``%%ddp`` runs a cell on fresh ranks, ``%ddp open`` has every cell run on ranks that stay."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from nbddp.kernel.cells import launch_cell
from nbddp.kernel.run import Run, last_run, runs
from nbddp.kernel.script import run_script
from nbddp.kernel.session import ONLY_OF_RUNS, Session
from nbddp.kernel.settings import CPU_NPROCS, Options, device_and_count
from nbddp.magic import options, reads, routing
from nbddp.magic.options import Parser
from nbddp.messages import OF_A_RANK
from nbddp.payload.pickler import can_be_sent
from nbddp.process import gauges
from nbddp.text import did_you_mean, words

_AS = ("--as", {"dest": "keep", "default": "", "metavar": "NAME"})
_BACKGROUND = ("--background", {"action": "store_true", "default": False})
_TORCHRUN = (
    ("--standalone", {"action": "store_true"}),  # it always is
    ("--nproc-per-node --nproc_per_node", {"type": options.processes, "dest": "nprocs"}),
    ("-m --module", {"action": "store_true", "default": False}),
)
_DEFAULTS, _OPEN = Parser("%ddp"), Parser("%ddp open")
_SCRIPT = Parser("%ddp run", _AS, _BACKGROUND, *_TORCHRUN, ("script", {}), ("argv", {"nargs": argparse.REMAINDER}))
_CELL = Parser(
    "%%ddp",
    ("-o --out", {"type": options.names, "action": "extend", "default": [], "metavar": "NAMES"}),
    ("--ranks", {"type": options.numbers, "action": "extend", "default": None, "metavar": "0,1"}),
    _AS,
    _BACKGROUND,
)


@magics_class
class DdpMagics(Magics):
    """``%ddp`` and ``%%ddp``.

    Attributes:
        session: the one that is open.
    """

    session: ClassVar[Session | None] = None
    shell: Any
    _opened_with: ClassVar[dict[str, Any]]
    _defaults: ClassVar[dict[str, Any]] = {}

    @line_magic
    def ddp(self, line: str) -> Any:
        """Open a session, run scripts, manage runs, and set defaults.

        ::

          %ddp open -n 4           from now on, every cell runs on four ranks; %%local runs one in the notebook
          %ddp push NAMES          send them to the ranks
          %ddp pull NAMES          bring them back, from rank 0
          %ddp close               end the ranks
          %ddp run [options] train.py --lr 0.1     run a script on every rank, as torchrun does
          %ddp status              the session and the runs
          %ddp stop                stop all runs
          %ddp logs [RANK]         what the ranks have printed, in the open session or in the latest run
          %ddp stacks              where each rank of the latest run is now
          %ddp show                the latest run
          %ddp devices             the devices that runs can use
          %ddp -n 4 --device cpu   defaults for %%ddp, %ddp open, and %ddp run; --reset removes them
        """
        command, *words = options.split(line) or ["status"]
        if command.startswith("-"):
            return self._set_defaults([command, *words])
        if command not in _COMMANDS:
            hint = did_you_mean(command, _COMMANDS)
            raise UsageError(f"unknown command %ddp {command}{hint} (commands: {', '.join(_COMMANDS)})")
        return getattr(self, f"_{command}")(words)

    @cell_magic("ddp")  # type: ignore[arg-type]
    def on_ranks(self, line: str, cell: str) -> Run[Any] | None:
        """Run the cell on every rank: one fresh process per GPU, or the ranks of the open session.

        Fresh ranks get copies of the notebook's variables that the cell reads; what it sets is lost, except for the
        names in -o, which come back from the lowest rank. nbddp, torch, dist, rank, world_size, and device are
        predefined. --as keeps the cell's run, --background doesn't wait for it, and --ranks runs the cell on only some
        ranks; the other options are those of nbddp.run().
        ::

          %%ddp -n 2 -o model
          model = nbddp.wrap(Net())
          for x, y in nbddp.loader(train_set, 64, shuffle=True):
              ...
        """
        given = _CELL.parse(options.split(line))
        if missing := set(given.out) - (found := words(cell)):
            name = min(missing)
            raise UsageError(f"-o {name}: the cell doesn't define it{did_you_mean(name, found)}")
        source = routing.below(f"%%ddp {line}", cell)
        with self._kept_as(given.keep):
            if self.session is not None:
                pdb = given.options.pop("pdb", False)
                if given.options or given.background:
                    refused = options.text(given.options) or "--background"
                    raise UsageError(f"a session is open, with its own options: leave out {refused}")
                self.in_session(source, given.ranks, given.out, pdb=pdb, keep=bool(given.keep))
                return None
            chosen = Options(**{**self._defaults, **given.options, "wait": not given.background})
            values = {}
            with contextlib.suppress(SyntaxError):  # the ranks show it
                values = self._read_by(cell, given.out)
            into, keep = self.shell.user_ns, bool(given.keep) or given.background
            run = launch_cell(source, values, given.out, into, given.ranks, keep=keep, options=chosen)
            return run if given.background else None

    def in_session(self, source: str, ranks: Sequence[int] | None = None, out: Sequence[str] = (), **how: bool) -> None:
        """Run a cell on the ranks of the session that's open, as every cell then."""
        session = self._the_session()
        try:
            session._cell(source, ranks, out, self.shell.user_ns, **how)
        finally:
            if session._closed:  # by exit()
                DdpMagics.session = None

    @contextlib.contextmanager
    def _kept_as(self, name: str) -> Iterator[None]:
        """Bind the run that begins meanwhile to a name of the notebook, also if it fails."""
        before = last_run()
        try:
            yield
        finally:
            if name and (run := last_run()) is not before:
                self.shell.user_ns[name] = run

    def _read_by(self, cell: str, out: Sequence[str]) -> dict[str, Any]:
        """Return the notebook's names that a fresh cell reads, or brings back unless it binds them itself.

        What it may bind is left out if it can't be sent.
        """
        shell, source = self.shell, self.shell.transform_cell(cell)
        found = {
            name: shell.user_ns[name]
            for name in reads.names_read(source, out) - {*OF_A_RANK}
            if name in shell.user_ns and shell.user_ns_hidden.get(name) is not shell.user_ns[name]
        }
        for name in found.keys() & reads.names_bound(source):
            if not can_be_sent(found[name]):
                del found[name]
        return found

    # ------------------------------------------------------------------ %ddp ...

    def _set_defaults(self, words: list[str]) -> None:
        if words == ["--reset"]:
            self._defaults.clear()
        else:
            self._defaults.update(_DEFAULTS.parse(words).options)
        print(f"defaults: {options.text(self._defaults) or 'none'}")

    def _open(self, words: list[str]) -> Session:
        defaults = {name: value for name, value in self._defaults.items() if name not in ONLY_OF_RUNS}
        chosen = {**defaults, **_OPEN.parse(words).options}
        if self.session is not None and not self.session.lost:
            if chosen == self._opened_with:  # Run All again: as a kernel keeps its names
                print(f"already open: {self.session}; %ddp close ends it")
                return self.session
            raise UsageError("a session with different options is open: run %ddp close first")
        if self.session is not None:
            self.session.close()  # it's lost, but its other ranks are there
        session = DdpMagics.session = Session(**chosen)
        DdpMagics._opened_with = chosen
        ranks = f"{session.nprocs} rank{'s' * (session.nprocs != 1)}"
        print(f"cells now run on {ranks} until %ddp close; %%local runs one in the notebook")
        return session

    def _close(self, _: list[str]) -> None:
        self._the_session().close()
        DdpMagics.session = None
        print("the session is closed")

    def _push(self, words: list[str]) -> None:
        if missing := [word for word in words if word not in self.shell.user_ns]:
            known = self.shell.user_ns.keys() - self.shell.user_ns_hidden.keys()
            raise UsageError(f"the notebook has no variable {missing[0]}{did_you_mean(missing[0], known)}")
        self._the_session().push(**{word: self.shell.user_ns[word] for word in words})

    def _pull(self, words: list[str]) -> None:
        session = self._the_session()
        session._bring(words, self.shell.user_ns, session._living())

    def _run(self, words: list[str]) -> Run[None]:
        """Run what follows ``torchrun`` on a command line, or options of run() and a script."""
        given = _SCRIPT.parse(words[words[:1] == ["torchrun"] :])
        chosen = {**self._defaults, **given.options, "wait": not given.background}
        if words[:1] == ["torchrun"]:  # its --nproc-per-node isn't the total, and one node is this machine
            nnodes = chosen.get("nnodes") or 1
            chosen |= {"nprocs": nprocs * nnodes} if (nprocs := given.options.get("nprocs")) else {}
            chosen["nnodes"] = nnodes if nnodes > 1 else None
        with self._kept_as(given.keep):
            return run_script(given.script, given.argv, module=given.module, **chosen)

    def _stop(self, _: list[str]) -> None:
        going = [run for run in runs() if not run.done()]
        for run in going:
            run.stop()
            print(run)
        if not going:
            print("nothing is running")

    def _logs(self, words: list[str]) -> None:
        if not all(word.isdigit() for word in words) or len(words) > 1:
            raise UsageError("%ddp logs takes one rank, or nothing")
        if words and int(words[0]) >= (nprocs := (self.session or _newest()).nprocs):
            raise UsageError(f"there is no rank {words[0]} (nprocs={nprocs})")
        print((self.session or _newest()).logs(*map(int, words)), end="")

    def _stacks(self, _: list[str]) -> None:
        print(_newest().stacks())

    def _show(self, _: list[str]) -> None:
        _newest().show()

    def _devices(self, _: list[str]) -> None:
        kind, count = device_and_count(Options())
        lines = gauges.describe_gpus(count) if kind == "cuda" else [f"{count} {kind} device{'s' * (count != 1)}"]
        if kind == "cpu":
            cores = len(os.sched_getaffinity(0))
            lines = [f"no GPU: runs use {CPU_NPROCS} ranks with gloo on the CPU (cores: {cores})"]
        print("\n".join(lines))

    def _status(self, _: list[str]) -> None:
        if self.session is None:
            print("no session is open: run %ddp open -n 2")
        shown: list[Session | Run[Any]] = [*filter(None, [self.session]), *runs()]
        for each in shown:
            crew = each._crew  # another thread may end the run
            print(each, *(crew.overview() if crew is not None else ()), sep="\n  ")
        if self._defaults:
            print(f"defaults: {options.text(self._defaults)}")

    def _the_session(self) -> Session:
        if self.session is None:
            raise UsageError("no session is open: run %ddp open -n 2")
        return self.session


_COMMANDS = ("open", "close", "push", "pull", "run", "status", "stop", "logs", "stacks", "show", "devices")
# ``%%ddp?`` shows the options.
vars(DdpMagics)["on_ranks"].__doc__ += f"\n{_CELL.format_usage()}"


def _newest() -> Run[Any]:
    if (newest := last_run()) is None:
        raise UsageError("there is no run yet")
    return newest


def load_ipython_extension(shell: Any) -> None:
    """Add the magics (``%load_ext nbddp``). While a session is open, cells run on its ranks."""
    shell.register_magics(DdpMagics)
    routing.route_cells(shell, lambda: DdpMagics.session)
    if kernel := getattr(shell, "kernel", None):
        routing.route_questions(kernel, lambda: DdpMagics.session)
