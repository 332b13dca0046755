"""The options of ``%%ddp`` and ``%ddp`` lines, and their parsers."""

# IPython's decorators and parsers are untyped.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Only the magics import this module, so IPython is installed.
from IPython.core.magic_arguments import MagicArgumentParser, argument  # noqa: TID253

COMMANDS = ("status", "stop", "logs", "stacks", "debug", "show", "devices", "open", "close", "run")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1") from None


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names or not all(name.isidentifier() for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as model,losses")
    return names


def _hosts(text: str) -> list[str] | str:
    return text if "," not in text else [name for name in text.split(",") if name]


def _places(text: str) -> list[str]:
    return [place for place in text.split(",") if place]


RUN_OPTIONS = [
    argument("-n", "--nprocs", type=int, help="Number of ranks. Default: one per visible GPU, or 2 on the CPU."),
    argument("--device", help="cuda, cpu or another device type of torch."),
    argument("--gpus", type=_numbers, help="GPU numbers, e.g. 0,1; one rank each."),
    argument("--backend", help="Backend of the process group, e.g. nccl or gloo."),
    argument("--seed", type=int, help="Seed python, numpy and torch on each rank with seed + rank."),
    argument("--deterministic", action="store_const", const=True, help="Use torch's deterministic algorithms."),
    argument("--max-restarts", type=int, help="How often all ranks may be restarted after a failure."),
    argument("--stall-after", type=float, help="Show stacks after this many silent seconds. Default: 60."),
    argument("--stop-on-nan", action="store_const", const=True, help="End the run as soon as a rank logs NaN."),
    argument("--timeout", type=float, help="Limit of the run's wall time in seconds. Default: none."),
    argument("--hosts", type=_hosts, help="Hosts, e.g. gpu1,gpu2; or slurm; or a variable with a Cluster."),
    argument("--keep-children", action="store_const", const=True, help="Processes that a rank detaches outlive it."),
    argument("--min-hosts", type=int, help="A restart needs at least this many hosts. Default: all."),
    argument("--to", type=_places, help="Metrics go there: variables, csv:PATH, jsonl:PATH, tensorboard:FOLDER."),
    argument("--no-listen", dest="listen", action="store_const", const=False, help="No curves from other loggers."),
    argument("--pdb", action="store_const", const=True, help="After an exception, open the debugger where it was."),
    argument("--oversubscribe", action="store_const", const=True, help="Allow more than 16 ranks per CPU core."),
]
OUTPUT_OPTIONS = [
    argument("--background", action="store_const", const=True, help="Return at once; %%ddp status shows the run."),
    argument("--as", dest="keep", metavar="NAME", type=_names, help="Assign the Run to this variable."),
]
CELL_OPTIONS = [
    argument("--ranks", type=_numbers, help="In a session: on these ranks alone, e.g. 0,2."),
    argument("--fresh", action="store_const", const=True, help="On fresh ranks, although a session is open."),
    argument("-o", "--out", metavar="NAMES", type=_names, help="Return these variables of rank 0, e.g. model,acc."),
]


def with_options(options: Sequence[Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):  # the help lists them in this order
            function = option(function)
        return function

    return decorate


def with_plain_help(magic: Any) -> Any:
    """Decorate a magic so that its help has no colours, which Python 3.14 gives it in Jupyter."""
    magic.parser.color = False
    magic.__doc__ = magic.parser.format_help()
    return magic


def _parser(command: str, options: Iterable[Any]) -> MagicArgumentParser:
    parser = MagicArgumentParser(command, argument_default=argparse.SUPPRESS)
    for option in options:
        option.add_to_parser(parser, None)
    return parser


DEFAULTS_PARSER = _parser("%ddp", RUN_OPTIONS)
_NOT_OF_A_SESSION = ("--max-restarts", "--stall-after", "--stop-on-nan", "--timeout", "--min-hosts", "--to")
SESSION_OPTIONS = [option for option in RUN_OPTIONS if option.args[-1] not in _NOT_OF_A_SESSION]
OPEN_PARSER = _parser("%ddp open", SESSION_OPTIONS)
SCRIPT_PARSER = _parser("%ddp run", [*RUN_OPTIONS, *OUTPUT_OPTIONS])
SCRIPT_PARSER.add_argument("script")
SCRIPT_PARSER.add_argument("argv", nargs=argparse.REMAINDER)
