"""What is compared: the ways to run a function on several ranks, and to keep ranks, as the cells that a user writes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import work
from benchmarks.kernel import Kernel
from benchmarks.measure import version_of

WORK = Path(work.__file__).read_text()


@dataclass(frozen=True)
class Way:
    """One way to run a function of work.py on N ranks, or a cell on ranks that stay.

    Attributes:
        imports: the cell before the first run.
        call: runs ``{fn}`` with ``{args}`` on ``{n}`` ranks; ``{port}`` is free. In a session, ``{fn}`` is a cell.
        once: the cell that starts what is kept.
        needs: the distribution that has to be installed.
    """

    name: str
    imports: str
    call: str
    once: str = ""
    needs: str = ""

    def cell(self, function: str, ranks: int, *args: str) -> str:
        """Return the cell that runs that function; ``args`` are source text."""
        return _filled(self.call, ranks, function, "".join(f"{arg}, " for arg in args))

    def prepared(self, ranks: int, first: str = "together") -> Kernel:
        """Open a kernel that has one run behind it."""
        with contextlib.ExitStack() as stack:
            kernel = stack.enter_context(Kernel())
            for source in (WORK, self.imports, _filled(self.once, ranks), self.cell(first, ranks)):
                kernel.cell(source)
            stack.pop_all()
        return kernel


def installed(candidates: Iterable[Way]) -> list[Way]:
    return [each for each in candidates if not each.needs or version_of(each.needs)]


def _filled(source: str, ranks: int, function: str = "", args: str = "") -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return source.format(fn=function, args=args, n=ranks, port=port)


NBDDP = Way("nbddp", "%load_ext nbddp\nimport nbddp", "nbddp.run({fn}, ({args}), nprocs={n}, device='cpu')")
SILENT = replace(NBDDP, name="nbddp, show=False", call=NBDDP.call.replace("'cpu'", "'cpu', show=False"))
ON_RAY = replace(SILENT, call=SILENT.call.replace("'cpu'", "'cpu', nnodes=2"))
FORK = Way(
    "a fork of the kernel, by torch",
    "import torch.multiprocessing as mp",
    "mp.start_processes(by_hand, ({n}, {port}, {fn}, {args}), nprocs={n}, start_method='fork')",
)
SPAWN = Way(
    "mp.spawn",
    "import torch.multiprocessing as mp\nfrom benchmarks import work",  # it can't be given a cell's function
    "mp.spawn(work.by_hand, ({n}, {port}, work.{fn}, {args}), nprocs={n})",
)
TORCHRUN = Way("torchrun", "", "torchrun({n}, '{fn}')")
ACCELERATE = Way(
    "accelerate debug_launcher",
    "from accelerate import debug_launcher",
    "debug_launcher(under_accelerate, ({fn}, {args}), num_processes={n})",
    needs="accelerate",
)
_ENGINES = """
cluster = ipp.Cluster(n={n}, log_level=logging.ERROR)
engines = cluster.start_and_connect_sync(activate=False)[:]
engines.scatter("rank", range({n}), flatten=True, block=True)
engines.apply_sync(lambda rank: __import__("benchmarks.work").work.join_group(rank, {n}, {port}), ipp.Reference("rank"))
"""
IPYPARALLEL = Way(
    "ipyparallel, engines kept",
    "import ipyparallel as ipp, logging\nfrom benchmarks import work",
    "done = engines.apply_sync(work.{fn}, {args})",
    once=_ENGINES,
    needs="ipyparallel",
)
WAYS = installed([NBDDP, SILENT, FORK, SPAWN, TORCHRUN, ACCELERATE, IPYPARALLEL])
SESSION = Way("nbddp", "%load_ext nbddp", "{fn}", "%ddp open -n {n} --device cpu")
ENGINES = replace(IPYPARALLEL, name="ipyparallel", call="%%px --block\n{fn}", once=_ENGINES + "engines.activate()")
SESSIONS = installed([SESSION, ENGINES])
