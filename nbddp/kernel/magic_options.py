"""Kernel side. What may stand on a ``%%ddp`` or ``%ddp`` line."""

# IPython's decorators and parsers are untyped.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# IPython is there: the magics alone import this module.
from IPython.core.magic_arguments import MagicArgumentParser, argument  # noqa: TID253


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of GPU numbers such as 0,1") from None


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names or not all(name.isidentifier() for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names such as model,losses")
    return names


def _hosts(text: str) -> list[str] | str:
    return text if "," not in text else [name for name in text.split(",") if name]


RUN_OPTIONS = [
    argument("-n", "--nprocs", type=int, help="How many ranks. Default: all visible GPUs, else 2 on the CPU."),
    argument("--device", help="cuda, cpu or another accelerator of torch."),
    argument("--gpus", type=_numbers, help="Which GPUs, e.g. 0,1; one rank each."),
    argument("--backend", help="Of the process group, e.g. nccl or gloo."),
    argument("--seed", type=int, help="Seeds python, numpy and torch on each rank with seed + rank."),
    argument("--deterministic", action="store_const", const=True, help="Torch's deterministic algorithms."),
    argument("--max-restarts", type=int, help="After a failure all ranks start again, at most so often."),
    argument("--stall-after", type=float, help="Tell where the ranks are after so many silent seconds (60)."),
    argument("--timeout", type=float, help="Wall time of the run in seconds. Default: no limit."),
    argument("--hosts", type=_hosts, help="Run on these, e.g. gpu1,gpu2; slurm; or a variable with a Cluster."),
    argument("--keep-children", action="store_const", const=True, help="What a rank has detached outlives it."),
    argument("--min-hosts", type=int, help="When a host is lost, a restart goes on with so many. Default: all."),
    argument("--oversubscribe", action="store_const", const=True, help="Also more than 16 ranks per core of the CPU."),
]
OUTPUT_OPTIONS = [
    argument("--background", action="store_const", const=True, help="Return at once; %%ddp status tells how it goes."),
    argument("--as", dest="keep", metavar="NAME", type=_names, help="Keep the Run under this name."),
]
CELL_OPTIONS = [
    argument("-o", "--out", metavar="NAMES", type=_names, help="Bring these variables of rank 0 back, e.g. model,acc."),
]


def with_options(options: Sequence[Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):  # the help lists them in this order
            function = option(function)
        return function

    return decorate


def _parser(command: str, options: Iterable[Any]) -> MagicArgumentParser:
    parser = MagicArgumentParser(command, argument_default=argparse.SUPPRESS)
    for option in options:
        option.add_to_parser(parser, None)
    return parser


DEFAULTS_PARSER = _parser("%ddp", RUN_OPTIONS)
SCRIPT_PARSER = _parser("%ddp run", [*RUN_OPTIONS, *OUTPUT_OPTIONS])
SCRIPT_PARSER.add_argument("script")
SCRIPT_PARSER.add_argument("argv", nargs=argparse.REMAINDER)
