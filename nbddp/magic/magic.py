"""``%load_ext nbddp``: the ``%%ddp`` cell magic and the ``%ddp`` line magic."""

# IPython's decorators and parsers are untyped.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, cast

# IPython itself imports this module, for %load_ext.
from IPython.core import magic as ipythons  # noqa: TID253
from IPython.core.error import UsageError  # noqa: TID253
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class  # noqa: TID253
from IPython.core.magic_arguments import magic_arguments  # noqa: TID253

from nbddp.errors import LaunchError, RankError
from nbddp.forkserver import server as forkserver
from nbddp.hosts.cluster import SLURM, Cluster
from nbddp.kernel import run as runs
from nbddp.kernel import runner
from nbddp.kernel.options import RunOptions, complete
from nbddp.kernel.plan import Call
from nbddp.kernel.script import run_script
from nbddp.launch import gauges
from nbddp.launch.devices import CPU_NPROCS, accelerator
from nbddp.magic import analysis, completion
from nbddp.magic.notebook import CellSource, ResultReceiver, ends_with_semicolon, keep_run_as, print_values
from nbddp.magic.options import (
    CELL_OPTIONS,
    COMMANDS,
    DEFAULTS_PARSER,
    OPEN_PARSER,
    OUTPUT_OPTIONS,
    RUN_OPTIONS,
    SCRIPT_PARSER,
    with_options,
    with_plain_help,
)
from nbddp.sessions import opening
from nbddp.sessions.session import Session
from nbddp.text import did_you_mean
from nbddp.worker import script

if TYPE_CHECKING:
    import ast

    from IPython.core.interactiveshell import InteractiveShell

# A ; at the cell's end hides its value. IPython before 8.8 (Colab, Kaggle) does not know this of magics.
_IPYTHON_HIDES = hasattr(ipythons, "output_can_be_silenced")
_can_be_silenced = ipythons.output_can_be_silenced if _IPYTHON_HIDES else lambda function: function


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, and start the fork server so that the first run starts as fast as later runs."""
    magics = DdpMagics(shell)
    shell.register_magics(magics)
    completion.register(shell, DdpMagics.cell.parser, magics.completions)
    _explain_debug(shell)
    forkserver.warm()


def _explain_debug(shell: InteractiveShell) -> None:
    """Have ``%debug`` say, after an error of a rank, what to do: the frames have ended with the rank."""
    usual = shell.find_line_magic("debug")
    if getattr(usual, "of_nbddp", False):
        return

    def debug(line: str) -> Any:
        error = getattr(sys, "last_value", None)
        if not isinstance(error, RankError) or line.strip():
            return usual(line)
        return print(
            f"Rank {error.rank}'s variables are gone with the failed call, but for those of the failing line: "
            "error.locals. Run the cell with %%ddp --pdb (run(..., pdb=True), or %pdb on): then the debugger opens "
            "where it fails, before the rank ends."
        )

    debug.of_nbddp = True  # type: ignore[attr-defined]
    debug.__doc__ = usual.__doc__
    register: Any = shell.register_magic_function
    register(debug, magic_kind="line", magic_name="debug")


@magics_class
class DdpMagics(Magics):
    """The magics of one notebook, and its defaults."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self._defaults: dict[str, Any] = {}
        self._session: Session | None = None
        self._told_classes: set[str] = set()  # of which it has been said that old objects keep the old one

    # ------------------------------------------------------------------ %%ddp

    @_can_be_silenced
    @cell_magic("ddp")
    @with_plain_help
    @magic_arguments("%ddp")  # the help puts one more % before it
    @with_options([*CELL_OPTIONS, *OUTPUT_OPTIONS, *RUN_OPTIONS])
    def cell(self, line: str, cell: str) -> Any:
        """Run the cell on every rank: one fresh process per GPU, or on the CPU; or in the session of %ddp open.

        ::

          %%ddp -n 2 -o model
          model = nbddp.wrap(Net())
          for x, y in nbddp.loader(train_set, 64, shuffle=True):
              ...
          evaluate(model)

        The ranks get copies of the notebook's variables that the cell uses. Variables that it sets stay on
        the ranks, except those of -o. The last line's value on rank 0 is the cell's output. A process group
        is ready, and nbddp, torch, dist, rank, world_size and device are available without imports.

        In a session (%ddp open) the variables stay for the next cell. The notebook's are sent if the ranks do not have
        them, or if the notebook has bound the name to another object since. Where the last line's value differs between
        ranks, all are printed.
        """
        # IPython's parse_argstring would keep the quotes; both magics parse a line as a shell does.
        options = _given(DdpMagics.cell.parser.parse_args(_words(line)))
        source = CellSource(self._shell, cell)
        out = options.pop("out", [])
        tree = source.parse()
        names = analysis.names_of(tree, out)
        for name in out:
            if name not in names.bound | names.needed and not names.binds_unknown:
                raise LaunchError(f"-o {name}: the cell never sets {name}{did_you_mean(name, names.bound)}")
        values = self._values_of(names, tree)
        if not options.pop("fresh", False) and self._session is not None:
            value = self._launch_in_session(self._session, source, names, values, out, options)
        elif "ranks" in options:
            raise UsageError("--ranks needs a session: %ddp open starts one. For fewer fresh ranks, use -n")
        else:
            receiver = ResultReceiver(self._shell, out)
            value = self._launch(source, values, names.optional & values.keys(), receiver, options)
        return value if _IPYTHON_HIDES or not ends_with_semicolon(cell) else None

    def _values_of(self, names: analysis.Names, tree: ast.Module) -> dict[str, Any]:
        """Return the notebook's variables that the cell may read."""
        user_ns, hidden = self._shell.user_ns, self._shell.user_ns_hidden

        def is_ipythons(name: str) -> bool:
            """Return whether IPython put this name into the notebook (``exit``, ``open``, ``get_ipython``)."""
            value = user_ns.get(name)
            return value is not None and value is hidden.get(name) and callable(value)

        hidden_names = set(filter(is_ipythons, names.needed))
        missing_display = {"display"} & names.needed - set(user_ns)
        analysis.refuse_notebook_names(tree, (hidden_names | missing_display) - names.optional)
        return {name: user_ns[name] for name in names.needed - hidden_names if name in user_ns}

    def _launch(
        self,
        source: CellSource,
        values: dict[str, Any],
        optional: frozenset[str],
        receiver: ResultReceiver,
        options: dict[str, Any],
    ) -> Any:
        keep, background = options.pop("keep", []), options.pop("background", False)
        whole = complete(self._with_defaults({**options, "wait": not background}))
        plan, site = runner.plan_run(source.name, whole)
        body = script.Cell(source.text, source.filename, tuple(receiver.names), range(plan.nprocs))
        plan = dataclasses.replace(plan, receive=receiver.receive, optional=optional)
        call = Call(source.name, script.run_cell, (body,), values)
        with keep_run_as(self._shell, keep):
            run = runner.launch(plan, site, call, whole)
        return run if background else run.value

    def _launch_in_session(
        self,
        session: Session,
        source: CellSource,
        names: analysis.Names,
        values: dict[str, Any],
        out: list[str],
        options: dict[str, Any],
    ) -> Any:
        keep, background = options.pop("keep", []), options.pop("background", False)
        ranks = session.checked(only := options.pop("ranks", None))
        receiver = ResultReceiver(self._shell, out, ranks)
        new = {name: value for name, value in values.items() if not session.sent.has(name, value)}
        body = script.Cell(source.text, source.filename, tuple(out), ranks)
        whole = complete(cast(RunOptions, {**self._with_variables(options), "wait": not background}))
        call = Call(source.name, script.run_cell, (body,), new)
        planned = {
            "receive": receiver.receive,
            "optional": names.optional & new.keys(),
            "notice": self._sent_again(session, new),
            "ranks": only,
        }
        began = False
        try:
            with keep_run_as(self._shell, keep):
                run = session.launch(call, whole, **planned)
            began = True
            if background:
                return run
            if not source.text.rstrip().endswith(";"):
                print_values({rank: run.values[rank] for rank in ranks})
            return run.value
        except (RankError, KeyboardInterrupt):
            began = True
            raise
        finally:
            if began:  # what the cell has bound is the ranks' own from now on, until the notebook binds it anew
                bound = {*names.bound, *out, *new} & self._shell.user_ns.keys()
                session.sent.add({name: self._shell.user_ns[name] for name in bound})

    def completions(self, text: str) -> list[str]:
        """Return the names on the ranks of the session, if one is open, that begin like this."""
        return self._session.completions(text) if self._session is not None else []

    def _sent_again(self, session: Session, new: dict[str, Any]) -> str:
        """Return the line that says what the ranks had, and get again; "" for nothing."""
        again = sorted(name for name in new if session.sent.knows(name))
        classes = {name for name in again if isinstance(new[name], type)} - self._told_classes
        self._told_classes |= classes
        advice = f" (objects made before keep the old {' and '.join(sorted(classes))})" if classes else ""
        return f"sent again: {', '.join(again)}{advice}" if again else ""

    def _with_defaults(self, options: dict[str, Any]) -> RunOptions:
        """Return options and defaults, where names in ``--hosts`` and ``--to`` have become the variables' values."""
        return cast(RunOptions, self._with_hosts(self._with_variables({**self._defaults, **options})))

    def _with_hosts(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options, where the name of a variable in ``--hosts`` has become its cluster."""
        hosts = options.get("hosts")
        if not isinstance(hosts, str) or hosts == SLURM:
            return options
        known = self._shell.user_ns.get(hosts)
        return {**options, "hosts": known if isinstance(known, Cluster) else [hosts]}

    def _with_variables(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options, where the names of variables in ``--to`` have become their values."""
        to = options.get("to")
        return {**options, "to": [self._shell.user_ns.get(each, each) for each in to]} if to else options

    # ------------------------------------------------------------------ %ddp

    @line_magic("ddp")  # type: ignore[arg-type]
    def line(self, line: str) -> Any:
        """Show and stop runs, set defaults, run scripts.

        ::

          %ddp status              the defaults and the newest run
          %ddp stop                end every run that is not over
          %ddp logs [RANK]         what the newest run printed
          %ddp stacks              the stack of each rank now
          %ddp show                show the newest run here
          %ddp debug [RANK]        stop that rank of a run in the background, and look
          %ddp devices             the devices that runs can use
          %ddp open -n 4           ranks that stay: every %%ddp runs on them from now on
          %ddp close               end them
          %ddp run [options] train.py --lr 0.1     a script on every rank, as torchrun does

          %ddp --nprocs 4 --device cpu     defaults for every %%ddp and %ddp run from now on
          %ddp --reset                     remove the defaults
        """
        words = _words(line)
        command = words[0] if words else "status"
        if words == ["--reset"]:
            self._defaults.clear()
            return self._print_defaults()
        if command.startswith("-"):
            self._defaults.update(_given(DEFAULTS_PARSER.parse_args(words)))
            return self._print_defaults()
        if command not in COMMANDS:
            suggestion = did_you_mean(command, COMMANDS)
            raise UsageError(f"%ddp {command}: unknown command; the commands are {', '.join(COMMANDS)}{suggestion}")
        if len(words) > 1 and command not in ("run", "logs", "open", "debug"):
            raise UsageError(f"%ddp {command} takes no arguments")
        return getattr(self, f"_{command}")(words[1:])

    def _print_defaults(self) -> None:
        words = []
        for name, value in self._defaults.items():
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
        print(f"defaults: {' '.join(words) or 'none'}")

    def _status(self, _: list[str]) -> None:
        self._print_defaults()
        if self._session is not None:
            print(self._session)
            print(self._session.names())
        newest = runs.last_run()
        print(newest if newest is not None else "no run yet")
        for run in runs.going():
            if run is not newest:
                print(run)

    def _stop(self, _: list[str]) -> None:
        going = runs.going()
        for run in going:
            run.stop()
            print(run)
        if not going:
            print("nothing is running")

    def _logs(self, words: list[str]) -> None:
        run = _newest()
        print(run.logs(_rank_in(words, "logs", run)), end="")

    def _stacks(self, _: list[str]) -> None:
        print(_newest().stacks())

    def _debug(self, words: list[str]) -> None:
        going = runs.going()
        if not going:
            raise UsageError("nothing is running that %ddp debug could stop; breakpoint() in the code stops there")
        going[-1].debug(_rank_in(words, "debug", going[-1]) or 0)

    def _show(self, _: list[str]) -> None:
        _newest().show()

    def _devices(self, _: list[str]) -> None:
        print(_devices_text())

    def _open(self, words: list[str]) -> None:
        if self._session is not None and not self._session.closed:
            raise UsageError(f"a session is open: {self._session}. %ddp close ends it")
        names = {action.dest for action in OPEN_PARSER._actions}
        defaults = {name: value for name, value in self._defaults.items() if name in names}
        options = self._with_hosts({**defaults, **_given(OPEN_PARSER.parse_args(words))})
        self._session = opening.session(**cast(RunOptions, options))
        print(f"session · {self._session.summary}")

    def _close(self, _: list[str]) -> None:
        if self._session is None:
            print("no session is open")
        else:
            self._session.close()
            self._session = None
            print("the session is closed")

    def _run(self, words: list[str]) -> Any:
        options = _given(SCRIPT_PARSER.parse_args(words))
        path, argv = options.pop("script"), options.pop("argv")
        keep, background = options.pop("keep", []), options.pop("background", False)
        with keep_run_as(self._shell, keep):
            return run_script(path, argv, **self._with_defaults({**options, "wait": not background}))


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r} cannot be parsed: {str(error)[:1].lower()}{str(error)[1:]}") from None


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if value is not None}


def _rank_in(words: list[str], command: str, run: runs.Run[Any]) -> int | None:
    """Return the rank that a command names; None for no word."""
    if len(words) > 1 or not all(word.isdigit() for word in words):
        raise UsageError(f"%ddp {command} takes one rank, or nothing")
    rank = int(words[0]) if words else None
    if rank is not None and rank >= run.nprocs:
        raise UsageError(f"there is no rank {rank}: {run.name} has ranks 0 to {run.nprocs - 1}")
    return rank


def _newest() -> runs.Run[Any]:
    newest = runs.last_run()
    if newest is None:
        raise UsageError("there is no run yet")
    return newest


def _devices_text() -> str:
    found = accelerator()
    if found is None:
        return f"no GPU: runs use {CPU_NPROCS} processes with gloo on a CPU with {os.cpu_count()} cores"
    kind, count = found
    lines = []
    for index in range(count if kind == "cuda" else 0):
        # From the driver, since torch would make a CUDA context in the notebook.
        device = gauges.name_for_driver(index, os.environ)
        if not (name := gauges.gpu_name(device)):
            break
        memory = gauges.gpu_memory(device) or ()
        lines.append(", ".join([str(index), name, *(f"{nbytes >> 20} MiB" for nbytes in memory)]))
    return "\n".join(lines) or f"{count} × {kind}"
