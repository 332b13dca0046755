"""Kernel side. The hosts of a cluster as the place where a run's ranks are; as ``local.Local``, but over pipes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from nbddp import payload
from nbddp.errors import HostLost, LaunchError
from nbddp.frames import Head
from nbddp.kernel.far_crew import FarCrew
from nbddp.kernel.hosts import Cluster
from nbddp.kernel.plan import Plan
from nbddp.payload import Pickled


class FarGauges:
    """Memory of the ranks, as their hosts tell it."""

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.gpus: dict[int, tuple[int, int]] = {}

    def read(self, pids: Sequence[int]) -> None:
        """It comes by itself."""

    def take(self, head: Head) -> None:
        """What one host has told."""
        self.processes |= {int(rank): used for rank, used in head["processes"].items()}
        self.gpus |= {int(rank): (used, total) for rank, (used, total) in head["gpus"].items()}


class Far:
    """The hosts of a cluster; see ``crew.Site``."""

    def __init__(self, plan: Plan, cluster: Cluster, login: contextlib.ExitStack) -> None:
        self.gauges = FarGauges()
        self.layout: list[tuple[str, int]] = []
        self._plan = plan
        self._cluster = cluster
        self._login = login  # ends with the run, if it was made for it
        self.block = -1
        cluster.reserve(plan.name)

    def take(self, pickled: Pickled, wanted: Callable[[], bool]) -> None:
        """Into a block here, from which it is sent."""
        self.block = payload.open_block(self._plan.name)
        self._login.callback(os.close, self.block)
        pickled.write(self.block, wanted)

    def new_crew(self, start_method: str) -> FarCrew:
        """For one attempt, on the hosts that are there."""
        return FarCrew(self._plan, self._cluster, self, start_method)

    def may_go_on(self) -> bool:
        """Are there enough hosts?"""
        with contextlib.suppress(LaunchError, HostLost):
            return bool(self._cluster.present(self._plan))
        return False

    def close(self) -> None:
        """The hosts wait for another run, or are logged out."""
        self._cluster.end_run()
        self._login.close()
