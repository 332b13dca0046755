"""Kernel side. A run as its views see it: they may look, and ask it to stop."""

from __future__ import annotations

from nbddp.errors import first_line
from nbddp.kernel.crew import Site
from nbddp.kernel.history import History
from nbddp.kernel.plan import Plan
from nbddp.kernel.supervisor import Supervisor
from nbddp.panel.view import RankStatus, Status

STOP_GRACE_S = 5.0  # between KeyboardInterrupt in the ranks and SIGKILL


class Source:
    """``panel.view.Source`` of one run."""

    def __init__(self, plan: Plan, supervisor: Supervisor, history: History, site: Site, *, blocking: bool) -> None:
        self.history = history
        self._blocking = blocking
        self._plan = plan
        self._site = site
        self._supervisor = supervisor

    def output(self, rank: int, position: int, limit: int) -> tuple[str, int, bool]:
        """What that rank wrote from there on; where that ends; is there no more?"""
        outputs = self._supervisor.outputs
        return outputs[rank].since(position, limit) if rank < len(outputs) else ("", position, True)

    def stop(self) -> None:
        """Ask for the end, and return at once."""
        self._supervisor.request_stop(STOP_GRACE_S)

    def summary(self) -> str:
        """``4 processes · nccl · 2 hosts``."""
        processes = f"{self._plan.nprocs} process{'es' * (self._plan.nprocs != 1)}"
        hosts = f" · {len(self._plan.shares)} hosts" if len(self._plan.shares) > 1 else ""
        return f"{processes} · {self._plan.backend or self._plan.device}{hosts}"

    def status(self) -> Status:
        """The run at this moment."""
        error = self._supervisor.error
        failed_rank = getattr(error, "rank", None)
        return Status(
            name=self._plan.name,
            state=self._supervisor.state,
            summary=self.summary(),
            notice=self._plan.notice,
            seconds=self._supervisor.seconds,
            error=first_line(str(error)) if error is not None else "",
            failed_rank=failed_rank,
            blocking=self._blocking,
            ranks=self._rank_statuses(failed_rank),
            restarts=self._supervisor.restarts,
            max_restarts=self._plan.max_restarts,
            restart_reason=self._supervisor.restart_reason,
            hang=self._supervisor.hang,
            remark=self._supervisor.remark,
        )

    def _rank_statuses(self, failed_rank: int | None) -> tuple[RankStatus, ...]:
        if not self._supervisor.done.is_open:  # a pid may be a stranger's afterwards
            self._site.gauges.read(self._supervisor.pids())
        states = self._supervisor.rank_states()
        return tuple(self._rank_status(rank, states, failed_rank) for rank in range(self._plan.nprocs))

    def _rank_status(self, rank: int, states: list[str], failed_rank: int | None) -> RankStatus:
        state = states[rank] if rank < len(states) else "starting"
        if 0 < len(self._site.layout) <= rank:
            state = "ended"  # its host is lost, and the others go on
        if rank == failed_rank:
            state = "failed"
        elif state == "ended" or (state != "finished" and self._supervisor.state not in ("starting", "running")):
            state = "stopped"
        gauges, layout = self._site.gauges, self._site.layout
        used, total = gauges.gpus.get(rank, (None, None))
        host, local_rank = layout[rank] if rank < len(layout) else ("", rank)
        device = self._plan.device if self._plan.device == "cpu" else f"{self._plan.device}:{local_rank}"
        return RankStatus(rank, device, state, gauges.processes.get(rank), used, total, host)
