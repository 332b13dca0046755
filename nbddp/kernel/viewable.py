"""Adapts a run to the interface of its views, which read its status and may ask it to stop."""

from __future__ import annotations

from nbddp.history.history import History
from nbddp.kernel import state
from nbddp.kernel.plan import Plan
from nbddp.launch.devices import device_index
from nbddp.launch.interface import Site
from nbddp.panel.view import Earlier, RankStatus, Status
from nbddp.text import first_line


class ViewableRun:
    """``panel.view.Viewable`` of one run."""

    def __init__(self, plan: Plan, run_state: state.RunState, history: History, site: Site, *, blocking: bool) -> None:
        self.history = history
        self.earlier: Earlier | None = None
        self._blocking = blocking
        self._plan = plan
        self._site = site
        self._state = run_state

    def output(self, rank: int, position: int, limit: int) -> tuple[str, int, bool]:
        """Return the rank's output from a position, the position after it, and whether nothing was skipped."""
        outputs = self._state.outputs
        return outputs[rank].since(position, limit) if rank < len(outputs) else ("", position, True)

    def stop(self) -> None:
        """Request the end, and return at once."""
        self._state.request_stop(state.STOP_GRACE_S)

    def summary(self) -> str:
        """``4 processes · nccl · 2 hosts``; ``2 processes · gloo · 1 of 2 hosts · gpu2 lost``."""
        ranks = len(self._site.layout) or self._plan.nprocs
        processes = f"{ranks} process{'es' * (ranks != 1)} · {self._plan.backend or self._plan.device}{self._hosts()}"
        now = [self._site.missing(), self.waits_for()] if self._goes_on() else []
        return " · ".join([self._plan.summary or processes, *filter(None, now)])

    def waits_for(self) -> str:
        """Return what the run waits for, "importing torch, 1.1 s"; "" for nothing."""
        return self._site.waits_for(started=bool(self._state.pids())) if self._goes_on() else ""

    def _goes_on(self) -> bool:
        return self._state.phase in ("starting", "running")

    def _hosts(self) -> str:
        planned, there = len(self._plan.shares), len({host for host, _ in self._site.layout})
        if planned < 2:
            return ""
        return f" · {there} of {planned} hosts" if 0 < there < planned else f" · {planned} hosts"

    def status(self) -> Status:
        """Return the run's status at this moment."""
        phase, error = self._state.phase, self._state.error  # the phase first: "failed" comes after its error
        if not self._state.done.is_open:  # afterwards a pid may belong to another process
            self._site.gauges.read(self._state.pids())
        states = self._state.rank_states()
        failed_rank = getattr(error, "rank", None)
        return Status(
            name=self._plan.name,
            state=phase,
            summary=self.summary(),
            notice="; ".join(filter(None, [self._plan.notice, self._site.slow_links()])),
            seconds=self._state.seconds,
            error=first_line(str(error)) if error is not None else "",
            failed_rank=failed_rank,
            failing_names=tuple(getattr(error, "locals", {}).items()),
            held=self._state.held,
            blocking=self._blocking,
            ranks=tuple(self._rank_status(rank, states, failed_rank) for rank in range(self._plan.nprocs)),
            restarts=self._state.restarts,
            max_restarts=self._plan.max_restarts + self._state.grown,
            restart_reason=self._state.restart_reason,
            hang=self._state.hang,
            remark=self._state.remark or first_line(getattr(error, "advice", "")),
            waits_for=self.waits_for(),
        )

    def _rank_status(self, rank: int, states: list[str], failed_rank: int | None) -> RankStatus:
        state = states[rank] if rank < len(states) else "starting"
        if 0 < len(self._site.layout) <= rank:
            state = "ended"  # its host is lost, and the others go on
        if rank == failed_rank:
            state = "failed"
        elif state == "ended" or (state != "finished" and self._state.phase not in ("starting", "running")):
            state = "stopped"
        gauges, layout = self._site.gauges, self._site.layout
        used, total = gauges.gpus.get(rank, (None, None))
        host, local_rank = layout[rank] if rank < len(layout) else ("", rank)
        device = self._plan.device
        if device != "cpu":
            gpus = self._plan.gpus
            device += f":{device_index(local_rank % len(gpus) if gpus else local_rank, gpus)}"
        stop = self._state.dialog.stops().get(rank)
        place = stop.place if stop is not None else ""
        return RankStatus(rank, device, state, gauges.processes.get(rank), used, total, host, place)
