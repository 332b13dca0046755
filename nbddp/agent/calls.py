"""The calls of a session's ranks on this host: the kernel's orders to begin, release and end them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nbddp import wire
from nbddp.agent.reporter import Reporter
from nbddp.hosts.frames import Header
from nbddp.launch.calls import begin_call, open_ends
from nbddp.launch.crew import LocalCrew
from nbddp.launch.output import RankOutput, open_output

KINDS = ("next call", "end call", "rank")
_DO = ("free", "interrupt", "dismiss", "kill", "regroup")  # methods of LocalRank
_LEAVES = ("free", "interrupt")  # the call: nobody will read its results


class Calls:
    """The calls of the ranks of one round."""

    def __init__(self, crew: LocalCrew, reporter: Reporter, new_job: Callable[[int, int, int], wire.Job]) -> None:
        """
        Args:
            new_job: returns the job of a rank that is started again, from its local rank, the number of its process
                group and the bytes of its payload.
        """
        self._crew = crew
        self._reporter = reporter
        self._new_job = new_job

    def carry_out(self, order: Header, block: int, send: Callable[[Header], object]) -> None:
        """Carry out an order; ``block`` is the newest payload. Raises LaunchError."""
        if order["kind"] == "next call":
            self._begin(order, block)
        elif order["kind"] == "end call":
            self._reporter.report_call()
            send({"kind": "call ended", "number": order["number"]})
        elif order["do"] in _DO:
            if order["do"] in _LEAVES:
                self._reporter.drop_results()
            for worker in self._crew.workers:
                if worker.rank == order["rank"]:
                    getattr(worker, order["do"])(*order["arguments"])

    def _begin(self, order: Header, block: int) -> None:
        call = wire.NextCall(**{field.name: order[field.name] for field in dataclasses.fields(wire.NextCall)})
        call = dataclasses.replace(call, by_value=tuple(call.by_value))
        for local_rank, worker in enumerate(self._crew.workers):
            if worker.rank in order["ranks"]:
                before, output = worker.output, RankOutput(open_output())
                begin_call(worker, call, output, block, open_ends())
            elif worker.rank in order["again"]:
                worker.end()
                before, output = worker.output, RankOutput(open_output())
                self._crew.replace(self._new_job(local_rank, order["group"], call.payload_nbytes), output, block, None)
            else:
                continue
            before.close()
            self._reporter.begin_call(worker.rank)

    def close(self) -> None:
        """Close the output of the last calls."""
        for worker in self._crew.workers:
            worker.output.close()
