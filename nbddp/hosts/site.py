"""Runs whose ranks are on the hosts of a cluster; the counterpart of ``kernel.site``, which is for this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbddp import payload
from nbddp.errors import HostLost, LaunchError
from nbddp.hosts.cluster import Cluster, log_in
from nbddp.hosts.crew import RemoteCrew, RemoteGauges
from nbddp.hosts.staying import RemoteStayingCrew
from nbddp.kernel.plan import Plan
from nbddp.latch import StayingThread
from nbddp.launch.output import open_output
from nbddp.payload import Pickled


class RemoteSite:
    """The hosts of a cluster; see ``launch.interface.Site``."""

    thread: StayingThread | None = None
    open_output = staticmethod(open_output)

    def __init__(self, plan: Plan, cluster: Cluster, login: contextlib.ExitStack) -> None:
        self.gauges = RemoteGauges()
        self.layout: list[tuple[str, int]] = []
        self._plan = plan
        self._cluster = cluster
        self._login = login  # closes a cluster that was made for this run
        self._block = -1
        self._saved: dict[str, tuple[str, int]] = {}
        self._closed = False
        cluster.reserve(plan.name)

    def copy_data(self, pickled: Pickled, keep_going: Callable[[], bool]) -> None:
        """Write the data into a block on this machine, from which it is sent."""
        self._block = payload.open_block(self._plan.name, pickled.packed.nbytes)
        self._login.callback(os.close, self._block)
        pickled.write(self._block, keep_going)

    def new_crew(self, start_method: str) -> RemoteCrew:
        """Return a crew for one attempt, on the hosts that are not lost."""
        return RemoteCrew(
            self._plan, self._cluster, start_method, self._block, self.layout, self.gauges, dict(self._saved)
        )

    def remember_snapshots(self, saved: Mapping[str, int]) -> None:
        """Remember the snapshots of rank 0 of the last attempt, with its host."""
        if self.layout:
            host, _ = self.layout[0]
            self._saved |= {path: (host, step) for path, step in saved.items()}

    def waits_for(self, *, started: bool) -> str:
        """Return what takes long on its way to or from a host, in words; "" for nothing."""
        return self._cluster.transfers()

    def missing(self) -> str:
        """Return which hosts the run does without, in words; "" for none."""
        return self._cluster.missing({host for host, _ in self.layout}) if self.layout else ""

    def slow_links(self) -> str:
        """Return which connections are far slower than the others, in words; "" for none."""
        return self._cluster.slow_links()

    def can_restart(self) -> bool:
        """Return whether enough hosts are left for another attempt."""
        with contextlib.suppress(LaunchError, HostLost):
            return bool(self._cluster.remaining_hosts(self._plan))
        return False

    def close(self) -> None:
        """End the run on the hosts, which then wait for the next run or are logged out; a second call has no effect."""
        if not self._closed:
            self._closed = True
            self._cluster.end_run()
            self._login.close()

    def for_call(self) -> RemoteCallSite:
        """Return where the next call of a session finds its data."""
        return RemoteCallSite(self)

    def staying_crew(self, start_method: str, block: int) -> RemoteStayingCrew:
        """Return the crew of a session."""
        return RemoteStayingCrew(self._plan, self._cluster, start_method, block, self.layout, self.gauges, {})


class RemoteCallSite:
    """Where one call of a session on several hosts finds its data, and nothing else of a site."""

    def __init__(self, home: RemoteSite) -> None:
        self.gauges = home.gauges
        self.block = -1
        self.waits_for = home.waits_for

    def copy_data(self, pickled: Pickled, keep_going: Callable[[], bool]) -> None:
        """Write the data into a block on this machine, from which it is sent."""
        self.block = payload.open_block("call", pickled.packed.nbytes)
        pickled.write(self.block, keep_going)

    def close(self) -> None:
        """Close the block."""
        if self.block >= 0:
            os.close(self.block)
            self.block = -1


def open_remote(
    hosts: Sequence[str] | str | Cluster, plan_for: Callable[[Mapping[str, Any]], Plan]
) -> tuple[Plan, RemoteSite]:
    """Log in to the hosts, unless they are a cluster, and return the plan of a run there and its site.

    Raises:
        LaunchError: a host cannot be used, or the plan cannot work there.
    """
    with contextlib.ExitStack() as login:
        opened = log_in(hosts, login)
        plan = plan_for(opened.known_devices())
        return plan, RemoteSite(plan, opened, login.pop_all())
