"""Kernel side. ``%load_ext nbddp``: the ``%%ddp`` cell and the ``%ddp`` line. Parse, call, return."""

# IPython's decorators and parsers are untyped.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

import argparse
import dataclasses
import glob
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# IPython is there: it alone imports this module, for %load_ext.
from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher  # noqa: TID253
from IPython.core.error import UsageError  # noqa: TID253
from IPython.core.magic import (  # noqa: TID253
    Magics,
    cell_magic,
    line_magic,
    magics_class,
    output_can_be_silenced,
)
from IPython.core.magic_arguments import magic_arguments  # noqa: TID253

from nbddp.errors import LaunchError, did_you_mean
from nbddp.kernel import cell as cells
from nbddp.kernel import forkserver, runner
from nbddp.kernel.devices import CPU_NPROCS, accelerator
from nbddp.kernel.hosts import SLURM, Cluster
from nbddp.kernel.magic_options import (
    CELL_OPTIONS,
    DEFAULTS_PARSER,
    OUTPUT_OPTIONS,
    RUN_OPTIONS,
    SCRIPT_PARSER,
    with_options,
)
from nbddp.kernel.notebook_cell import CellSource, Keeping, Return
from nbddp.kernel.script import run_script
from nbddp.worker import script

if TYPE_CHECKING:
    import ast

    from IPython.core.interactiveshell import InteractiveShell

_SMI = ("--query-gpu=index,name,memory.used,memory.total", "--format=csv,noheader")
_SMI_S = 10.0


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, and warm the fork server so that the first run starts as fast as every later one."""
    shell.register_magics(DdpMagics)
    if _complete not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_complete)
    forkserver.warm()


@magics_class
class DdpMagics(Magics):
    """The magics of one notebook, and the defaults it has set."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self._defaults: dict[str, Any] = {}

    # ------------------------------------------------------------------ %%ddp

    @output_can_be_silenced
    @cell_magic("ddp")
    @magic_arguments("%ddp")  # the help puts one more % before it
    @with_options([*CELL_OPTIONS, *OUTPUT_OPTIONS, *RUN_OPTIONS])
    def cell(self, line: str, cell: str) -> Any:
        """Run the cell on every rank: one fresh process per GPU, or on the CPU.

        ::

          %%ddp -n 2 -o model
          model = nbddp.wrap(Net())
          for x, y in nbddp.loader(train_set, 64, shuffle=True):
              ...
          evaluate(model)

        The notebook's variables that the cell names come along; what it sets stays on the ranks, unless
        -o asks for it. The last line's value on rank 0 is the cell's output. A process group is ready,
        and nbddp, torch, dist, rank, world_size and device are there without imports.
        """
        # Not IPython's parse_argstring, which leaves the quotes in: both magics read a line as a shell does.
        options = _given(DdpMagics.cell.parser.parse_args(_words(line)))
        source = CellSource(self._shell, cell)
        out = options.pop("out", [])
        tree = source.parse()
        names = cells.names_of(tree, out)
        for name in out:
            if name not in names.bound | names.needed and not names.open_ended:
                raise LaunchError(f"-o {name}: the cell never sets {name}{did_you_mean(name, names.bound)}")
        values = self._values_of(names, tree)
        return self._launch(source, values, names.perhaps & values.keys(), Return(self._shell, out), options)

    def _values_of(self, names: cells.Names, tree: ast.Module) -> dict[str, Any]:
        """The notebook's variables that the cell may read."""
        user_ns = self._shell.user_ns
        theirs = {name for name in names.needed if self._is_ipythons(name)}
        cells.refuse_notebook_names(tree, (theirs | ({"display"} & names.needed - set(user_ns))) - names.perhaps)
        return {name: user_ns[name] for name in names.needed - theirs if name in user_ns}

    def _is_ipythons(self, name: str) -> bool:
        """Is it a name that IPython put into the notebook (``exit``, ``open``, ``get_ipython``)?"""
        value = self._shell.user_ns.get(name)
        return value is not None and value is self._shell.user_ns_hidden.get(name) and callable(value)

    def _launch(
        self,
        source: CellSource,
        names: dict[str, Any],
        optional: frozenset[str],
        back: Return,
        options: dict[str, Any],
    ) -> Any:
        keep, background = options.pop("keep", []), options.pop("background", False)
        body = script.Cell(source.text, source.filename, tuple(back.names))
        plan, site = runner.planned(script.run_cell, (body,), names, name=source.name, **self._whole(options))
        plan = dataclasses.replace(plan, receive=back.receive, optional=optional)
        with Keeping(self._shell, keep):
            run = runner.launch(plan, site, script.run_cell, (body,), names, wait=not background, show=None)
        return run if background else run.value

    def _whole(self, options: dict[str, Any]) -> dict[str, Any]:
        """With the defaults, and with the Cluster or the list that ``--hosts`` names."""
        whole = {**self._defaults, **options}
        hosts = whole.get("hosts")
        if isinstance(hosts, str) and hosts != SLURM:
            known = self._shell.user_ns.get(hosts)
            whole["hosts"] = known if isinstance(known, Cluster) else [hosts]
        return whole

    # ------------------------------------------------------------------ %ddp

    @line_magic("ddp")  # type: ignore[arg-type]
    def line(self, line: str) -> Any:
        """Look after runs, set defaults, run scripts.

        ::

          %ddp status              the defaults and the newest run
          %ddp stop                end every run that is going on
          %ddp logs [RANK]         what the newest run printed
          %ddp stacks              where each rank is now
          %ddp show                the newest run, shown here
          %ddp devices             what there is to run on
          %ddp run [options] train.py --lr 0.1     a script on every rank, as torchrun does

          %ddp --nprocs 4 --device cpu     defaults for every %%ddp and %ddp run from now on
          %ddp --reset                     no defaults any more
        """
        words = _words(line)
        command = words[0] if words else "status"
        if command.startswith("-"):
            return self._set_defaults(words)
        if command not in _COMMANDS:
            meant = did_you_mean(command, _COMMANDS)
            raise UsageError(f"%ddp {command}: there is no such command, only {', '.join(_COMMANDS)}{meant}")
        if len(words) > 1 and command not in ("run", "logs"):
            raise UsageError(f"%ddp {command} takes no arguments")
        return getattr(self, f"_{command}")(words[1:])

    def _set_defaults(self, words: list[str]) -> None:
        if words == ["--reset"]:
            self._defaults.clear()
        else:
            self._defaults.update(_given(DEFAULTS_PARSER.parse_args(words)))
        self._say_defaults()

    def _say_defaults(self) -> None:
        text = " ".join(_option_text(name, value) for name, value in self._defaults.items())
        print(f"defaults: {text or 'none'}")

    def _status(self, _: list[str]) -> None:
        self._say_defaults()
        newest = runner.last_run()
        print(newest if newest is not None else "no run yet")
        for run in runner.going():
            if run is not newest:
                print(run)

    def _stop(self, _: list[str]) -> None:
        going = runner.going()
        for run in going:
            run.stop()
            print(run)
        if not going:
            print("nothing is running")

    def _logs(self, words: list[str]) -> None:
        if len(words) > 1 or not all(word.isdigit() for word in words):
            raise UsageError("%ddp logs takes one rank, or nothing for all of them")
        rank = int(words[0]) if words else None
        run = _newest()
        if rank is not None and rank >= run.nprocs:
            raise UsageError(f"there is no rank {rank}: {run.name} has ranks 0 to {run.nprocs - 1}")
        print(run.logs(rank), end="")

    def _stacks(self, _: list[str]) -> None:
        print(_newest().stacks())

    def _show(self, _: list[str]) -> None:
        _newest().show()

    def _devices(self, _: list[str]) -> None:
        print(_devices_text())

    def _run(self, words: list[str]) -> Any:
        options = _given(SCRIPT_PARSER.parse_args(words))
        path, argv = options.pop("script"), options.pop("argv")
        keep, background = options.pop("keep", []), options.pop("background", False)
        with Keeping(self._shell, keep):
            return run_script(path, argv, wait=not background, **self._whole(options))


_COMMANDS = ("status", "stop", "logs", "stacks", "show", "devices", "run")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r} cannot be read: {str(error)[:1].lower()}{str(error)[1:]}") from None


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if value is not None}


def _option_text(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    if value is True:
        return option
    return f"{option} {','.join(map(str, value)) if isinstance(value, list) else value}"


def _newest() -> runner.Run:
    newest = runner.last_run()
    if newest is None:
        raise UsageError("there is no run yet")
    return newest


def _devices_text() -> str:
    found = accelerator()
    if found is None:
        return f"no GPU: runs use {CPU_NPROCS} processes on the CPU with gloo, of {os.cpu_count()} cores"
    kind, count = found
    smi = shutil.which("nvidia-smi") if kind == "cuda" else None
    if smi is None:
        return f"{count} × {kind}"
    # Asked of the driver's own tool: torch would make a CUDA context in the notebook.
    asked = subprocess.run([smi, *_SMI], capture_output=True, text=True, timeout=_SMI_S, check=False)
    return asked.stdout.strip() or f"{count} × {kind}"


# ---------------------------------------------------------------------------- Tab

_VALUES: dict[str, Callable[[], list[str]]] = {
    "--device": lambda: ["cpu", *([found[0]] if (found := accelerator()) else [])],
    "--backend": lambda: ["gloo", "nccl"],
    "logs": lambda: [str(rank) for rank in range(_newest().nprocs)] if runner.last_run() else [],
}


@context_matcher(identifier="nbddp", priority=200)
def _complete(context: CompletionContext) -> dict[str, Any]:
    """IPython's hook for Tab. What we know of a line of ours is all there is to know."""
    command, space, rest = context.text_until_cursor.lstrip().partition(" ")
    found = _candidates(command, rest) if space and command in ("%ddp", "%%ddp") else []
    return {"completions": [SimpleCompletion(text) for text in found], "suppress": bool(found), "ordered": True}


def _candidates(command: str, rest: str) -> list[str]:
    """What may follow: an option, an option's value, a command, a script."""
    words = rest.split()
    word = words.pop() if words and not rest[-1:].isspace() else ""
    before = words[-1] if words else ""
    if before in _VALUES:
        fitting = _VALUES[before]()
    elif word.startswith("-"):
        fitting = _options_of(command, words)
    elif command == "%ddp" and words[:1] == ["run"]:
        fitting = _scripts(word)
    else:
        fitting = list(_COMMANDS) if command == "%ddp" and not words else []
    return [text for text in fitting if text.startswith(word)]


def _options_of(command: str, words: list[str]) -> list[str]:
    parsers = {"%%ddp": DdpMagics.cell.parser, "run": SCRIPT_PARSER}
    parser = parsers.get(command) or parsers.get("".join(words[:1]), DEFAULTS_PARSER)
    extra = ["--reset"] if parser is DEFAULTS_PARSER else []
    return [option for action in parser._actions for option in action.option_strings] + extra


def _scripts(start: str) -> list[str]:
    folders = [path + "/" for path in glob.glob(start + "*") if os.path.isdir(path)]
    return sorted(glob.glob(start + "*.py") + folders)
