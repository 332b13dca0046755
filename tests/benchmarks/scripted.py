"""A rank under torchrun: ``-m tests.benchmarks.scripted FUNCTION ARGS``."""

from __future__ import annotations

import ast
import sys

import torch.distributed as dist

from tests.benchmarks import work


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main() -> None:
    name, *args = sys.argv[1:]
    function = getattr(work, name)
    work.open_group()
    value = function(*map(_value, args))
    if value is not None:
        sys.stdout.write(f"returned {value}\n")  # in one piece: the ranks share the pipe
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
