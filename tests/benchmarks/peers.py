"""The alternatives that a user might pick, each as the cells that they would write."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from tests.benchmarks.measure import version_of


@dataclass(frozen=True)
class Peer:
    """One way to run a function on N ranks from a cell.

    Attributes:
        name: of its row.
        needs: the distribution that has to be installed.
        imports: the cell before the first run.
        once: a cell for those that keep their processes, run once for a number of ranks: ``{n}``, ``{port}``.
        call: runs ``{fn}`` of work.py with ``{args}`` (ending in a comma, or empty) on ``{n}`` ranks.
        result: the same, and rank 0's result becomes ``value``; "" where there is no such way.
        restarts: the same as ``call`` with one restart allowed; "" where there are none.
        copies: of the notebook's data, for the memory that it will need: of all ranks, or one ("per rank", "once",
            "never").
        takes_data: can a cell's data be an argument?
    """

    name: str
    imports: str
    call: str
    needs: str = ""
    once: str = ""
    result: str = ""
    restarts: str = ""
    copies: str = "once"
    takes_data: bool = True

    @property
    def installed(self) -> bool:
        return not self.needs or bool(version_of(self.needs))

    def setup(self, nprocs: int) -> str:
        """The cell that starts what is kept, or ""."""
        return self.once.format(n=nprocs, port=free_port()) if self.once else ""

    def cell(self, function: str, *args: str, nprocs: int, how: str = "call") -> str:
        """The cell that runs that function; ``args`` are source text."""
        arguments = "".join(f"{arg}, " for arg in args)
        return str(getattr(self, how)).format(fn=function, args=arguments, n=nprocs, port=free_port())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


NBDDP = Peer(
    "nbddp",
    imports="%load_ext nbddp\nimport nbddp",
    call="nbddp.run({fn}, ({args}), nprocs={n}, device='cpu')",
    result="value = nbddp.run({fn}, ({args}), nprocs={n}, device='cpu').value",
    restarts="nbddp.run({fn}, ({args}), nprocs={n}, device='cpu', max_restarts=1)",
)
NBDDP_SILENT = Peer(
    "nbddp, show=False",
    imports=NBDDP.imports,
    call="nbddp.run({fn}, ({args}), nprocs={n}, device='cpu', show=False)",
    result="value = nbddp.run({fn}, ({args}), nprocs={n}, device='cpu', show=False).value",
    restarts="nbddp.run({fn}, ({args}), nprocs={n}, device='cpu', max_restarts=1, show=False)",
)
MP_SPAWN = Peer(
    "mp.spawn",
    imports="import torch.multiprocessing as mp\nfrom tests.benchmarks import work",  # no cell's function
    call="mp.spawn(work.by_hand, ({n}, {port}, work.{fn}, {args}), nprocs={n})",
    result="""
queue = mp.get_context("spawn").SimpleQueue()
context = mp.spawn(work.by_hand_with_result, ({n}, {port}, queue, work.{fn}, {args}), nprocs={n}, join=False)
value = [queue.get() for _ in range({n})][0]
context.join()
""",
    copies="per rank",
)
TORCHRUN = Peer(
    "torchrun",
    imports="from tests.benchmarks import work",
    call="done = work.torchrun({n}, '{fn}', {args})",
    restarts="done = work.torchrun({n}, '{fn}', {args} options=['--max-restarts=1', '--monitor-interval=0.1'])",
    takes_data=False,
)
DEBUG_LAUNCHER = Peer(
    "accelerate debug_launcher",
    needs="accelerate",
    imports="from accelerate import debug_launcher",
    call="debug_launcher(under_accelerate, ({fn}, {args}), num_processes={n})",
    copies="never",
)
NOTEBOOK_LAUNCHER = Peer(
    "accelerate notebook_launcher",
    needs="accelerate",
    imports="from accelerate import notebook_launcher",
    call="notebook_launcher(under_accelerate, ({fn}, {args}), num_processes={n}, use_port='{port}')",
    restarts=(
        "notebook_launcher(under_accelerate, ({fn}, {args}), num_processes={n}, use_port='{port}', max_restarts=1)"
    ),
    copies="never",
)
FABRIC = Peer(
    "Fabric ddp_notebook",
    needs="lightning-fabric",
    imports="import logging; from lightning_fabric import Fabric; logging.disable(logging.INFO)",
    call="Fabric(accelerator='cpu', devices={n}, strategy='ddp_notebook').launch(under_fabric, {fn}, {args})",
    result=(
        "value = Fabric(accelerator='cpu', devices={n}, strategy='ddp_notebook').launch(under_fabric, {fn}, {args})"
    ),
    copies="never",
)
IPYPARALLEL = Peer(
    "ipyparallel, engines kept",
    needs="ipyparallel",
    imports="import ipyparallel as ipp, logging; from tests.benchmarks import work",
    once="""
cluster = ipp.Cluster(n={n}, log_level=logging.ERROR)
engines = cluster.start_and_connect_sync(activate=False)[:]
engines.scatter("rank", range({n}), flatten=True, block=True)
engines.apply_sync(lambda rank: __import__("tests.benchmarks.work").benchmarks.work.join_group(rank, {n}, {port}),
                   ipp.Reference("rank"))
""",
    call="done = engines.apply_sync(work.{fn}, {args})",
    result="value = engines.apply_sync(work.{fn}, {args})[0]",
    copies="per rank",
)
NBDISTRIBUTED = Peer(
    "nbdistributed, workers kept",
    needs="nbdistributed",
    # Its last resort is `pkill -f` of whatever runs workers of torch.distributed on the machine: not on ours.
    imports="""
%load_ext nbdistributed
from nbdistributed.magic import DistributedMagic
DistributedMagic._nuclear_shutdown = classmethod(lambda cls: None)
""",
    once="""
%dist_init -n {n}
%dist_mode --disable
""",
    call="""%%distributed
from tests.benchmarks import work
work.{fn}({args})
""",
    takes_data=False,
)

NBDDPS = [NBDDP, NBDDP_SILENT]
PEERS = [MP_SPAWN, TORCHRUN, DEBUG_LAUNCHER, NOTEBOOK_LAUNCHER, FABRIC, IPYPARALLEL, NBDISTRIBUTED]
CANDIDATES = [*NBDDPS, *PEERS]


def installed(candidates: Iterable[Peer]) -> list[Peer]:
    return [peer for peer in candidates if peer.installed]


def missing() -> str:
    """One line that names the peers that are not installed, or ""."""
    names = sorted({peer.needs for peer in PEERS if not peer.installed})
    return f"Not installed, and so left out: {', '.join(names)}" if names else ""
