"""Cell after cell on ranks that stay: a cell's time, and that of a failure; beside others that keep processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.measure import Table, version_of
from tests.benchmarks.peers import IPYPARALLEL, NBDISTRIBUTED, free_port
from tests.benchmarks.settings import Settings

RANKS = 4
FAILS_WITHIN_S = 20.0  # a candidate whose other ranks wait for the failed one is not waited for any longer

ASSIGN = "x = 1"
REDUCE = "dist.all_reduce(t)"
FAIL = "if rank == 1:\n    raise ValueError('on purpose')\ndist.all_reduce(t)"


@dataclass(frozen=True)
class Keeper:
    """One way to keep ranks from cell to cell.

    Attributes:
        opens: the cells that start the ranks, with ``t`` and ``rank`` on each: ``{n}``, ``{port}``.
        magic: the first line of a cell on all ranks.
        needs: the distribution that has to be installed.
    """

    name: str
    opens: tuple[str, ...]
    magic: str
    needs: str = ""

    @property
    def installed(self) -> bool:
        return not self.needs or bool(version_of(self.needs))

    def cell(self, body: str) -> str:
        return f"{self.magic}\n{body}"


_PREPARE = "import torch, torch.distributed as dist\nt = torch.ones(1)"
KEEPERS = [
    Keeper(
        "nbddp, %ddp open",
        ("%load_ext nbddp\nimport nbddp", "%ddp open -n {n} --device cpu", f"%%ddp\n{_PREPARE}"),
        "%%ddp",
    ),
    Keeper(
        "ipyparallel, %%px",
        (IPYPARALLEL.imports, IPYPARALLEL.once + "\nengines.activate()\n", f"%%px\n{_PREPARE}"),
        "%%px --block",
        "ipyparallel",
    ),
    Keeper(
        "nbdistributed, %%distributed",
        # Its workers lose a first cell that comes before they are there.
        (NBDISTRIBUTED.imports, NBDISTRIBUTED.once, "%%distributed\npass", f"%%distributed\n{_PREPARE}"),
        "%%distributed",
        "nbdistributed",
    ),
]


@contextlib.contextmanager
def _opened(keeper: Keeper, ranks: int) -> Iterator[Kernel]:
    with Kernel() as kernel:
        for source in keeper.opens:
            kernel.cell(source.replace("{n}", str(ranks)).replace("{port}", str(free_port())))
        for _ in range(3):
            kernel.cell(keeper.cell(REDUCE))
        yield kernel


def measure(settings: Settings) -> list[Table]:
    """Cells on ranks that stay, turn by turn; then a failure inside a collective, and the next all-reduce."""
    ranks = (settings.ranks or [RANKS])[0]
    cells = Table(f"A cell on {ranks} ranks that stay, from Shift-Enter to idle", (ASSIGN, "an all-reduce"))
    failure = Table(f"One of {ranks} ranks raises, the others wait in an all-reduce", ("the error", "next all-reduce"))
    tables = [cells, failure]
    for table in tables:
        settings.keep(table)
    with contextlib.ExitStack() as stack:
        opened: dict[Keeper, Kernel] = {}
        for keeper in filter(lambda keeper: keeper.installed, KEEPERS):
            try:
                opened[keeper] = stack.enter_context(_opened(keeper, ranks))
            except Exception as error:  # a peer's
                cells.fail(keeper.name, error, ASSIGN)
        for _ in range(settings.rounds):
            for keeper, kernel in opened.items():
                cells.add(keeper.name, kernel.cell(keeper.cell(ASSIGN)).seconds, ASSIGN)
                cells.add(keeper.name, kernel.cell(keeper.cell(REDUCE)).seconds, "an all-reduce")
        for _ in range(settings.rounds):
            for keeper, kernel in opened.items():
                _fail(failure, keeper, kernel)
    for table in tables:
        settings.show(table)
    return tables


def _fail(table: Table, keeper: Keeper, kernel: Kernel) -> None:
    if table.failed(keeper.name, "the error") or table.failed(keeper.name, "next all-reduce"):
        return None
    try:
        failed = kernel.end_of(kernel.begin(keeper.cell(FAIL)), FAILS_WITHIN_S)
        table.add(keeper.name, failed.seconds, "the error")
    except Exception as error:  # a peer's
        return table.fail(keeper.name, error, "the error")
    try:
        table.add(keeper.name, kernel.cell(keeper.cell(REDUCE), FAILS_WITHIN_S).seconds, "next all-reduce")
    except Exception as error:  # a peer's
        table.fail(keeper.name, error, "next all-reduce")
