"""The nodes of a Ray cluster as machines for ranks. They are kept from one run to the next.

notebook ── Ray ── an actor per node, in a bundle of one placement group ── fork server ── ranks
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nbddp.errors import LaunchError, NodeLost
from nbddp.messages import Report, Settings
from nbddp.payload import Block
from nbddp.process.gauges import Memory
from nbddp.process.machine import Event
from nbddp.ray.actor import versions
from nbddp.text import first_line, in_a_line

KEPT_S = 600.0  # without a run; then the nodes are given back
_BEAT_S = 5.0
_REPLACED_S = 120.0  # until Ray has noticed a loss, and has another node
_POLL_S = 0.2
_ANSWER_S = 10.0  # for a node that's there
_MEMORY_S = 0.3
_INLINE_BYTES = 64 << 10  # a larger payload goes into Ray's store, once
# For the nodes; not as a runtime_env, for which Ray would start a new process, although it has one that's ready.
# torch asks DNS for the name of each address, only to log it; there may be no name, or a server that never answers.
_ENVIRON = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}

Waiting = Callable[[str], None]


@ray.remote(concurrency_groups={"aside": 16})  # all other calls of an actor are carried out in their order
class _Actor:
    """A ``Node`` in a process of Ray's; imports ours only after Ray's environment is undone."""

    def begin(self, address: str, environ: dict[str, str]) -> set[str]:
        raylet = os.getppid()
        for rays in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):  # for one core, and its own debugger
            os.environ.pop(rays, None)
        os.environ.update(environ)
        from nbddp.process import server

        server.use_own_folder()
        server.running()  # imports torch while this process does
        from nbddp.ray import actor

        self._node = actor.Node(address, raylet)
        return actor.versions()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._node, method)(*args)

    def leave(self) -> None:
        from nbddp.process import server

        server.remove_own_folder()


class _Node:
    """One node of a group: its actor, and what is known about it.

    Attributes:
        lost: why it can't be reached any more; "" as long as it can.
        ahead_s: subtract this from its monotonic times to get ours.
        beat: the last one's answer.
    """

    def __init__(self, group: Any, index: int, gpus: int) -> None:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        self.actor = _Actor.options(  # type: ignore[attr-defined]
            scheduling_strategy=where, num_gpus=gpus, num_cpus=0 if gpus else 1
        ).remote()
        self.index, self.name, self.address, self.lost = index, "", "", ""
        self.ahead_s, self.beat = float("-inf"), Future[None]()

    def lose(self, why: object) -> str:
        """Give it up. Returns the reason in a line."""
        if not self.lost:
            lines = [line.strip() for line in str(why).splitlines() if line.strip() and not line.startswith("\t")]
            self.lost = first_line(lines[-1].partition(". ")[0]) if lines else type(why).__name__
            ray.kill(self.actor)  # if it can be reached after all
        return self.lost


class _Group:
    """Nodes that Ray has given, all of one kind."""

    def __init__(self, nnodes: int, gpus: int, waiting: Waiting) -> None:
        self._connection, self._over = _connected(), threading.Event()
        self.runs: set[int] = set()  # that go on
        self._used_at = time.monotonic()
        self._sent: weakref.WeakKeyDictionary[Block, Any] = weakref.WeakKeyDictionary()
        self._group = placement_group([{"GPU": gpus} if gpus else {"CPU": 1}] * nnodes, strategy="STRICT_SPREAD")
        self._nodes: list[_Node] = []  # in the order of their ranks
        each = f" with {gpus} GPU{'s' * (gpus > 1)}{' each' * (nnodes > 1)}" if gpus else ""
        try:
            while not self._group.wait(_POLL_S):
                waiting(f"waiting for Ray to provide {nnodes} node{'s' * (nnodes > 1)}{each}")
            self._begin(nnodes, gpus, waiting)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._keep, name="nbddp-ray", daemon=True).start()

    def _begin(self, nnodes: int, gpus: int, waiting: Waiting) -> None:
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        known, here = {node["NodeID"]: node for node in ray.nodes()}, ray.get_runtime_context().get_node_id()
        nodes = [_Node(self._group, index, gpus) for index in range(nnodes)]
        self._nodes = sorted(nodes, key=lambda node: (placed[node.index] != here, node.index))  # rank 0 is here
        names = [known[placed[node.index]]["NodeManagerHostname"] for node in self._nodes]
        for node, name in zip(self._nodes, names):
            node.address = known[placed[node.index]]["NodeManagerAddress"]
            node.name = name if names.count(name) == 1 else f"{name}-{node.index}"  # two on one machine, as in tests
        ours, beginning = versions(), [node.actor.begin.remote(node.address, _ENVIRON).future() for node in self._nodes]
        while wait(beginning, _POLL_S).not_done:
            waiting(f"starting on {', '.join(names)}")
        for node, begun in zip(self._nodes, beginning):
            try:
                theirs = begun.result()
            except RayTaskError as error:
                raise LaunchError(f"node {node.name} can't start ranks: {in_a_line(error.cause)}") from error
            if theirs != ours:
                there, here = (", ".join(sorted(differ)) for differ in (theirs - ours, ours - theirs))
                raise LaunchError(
                    f"node {node.name} has {there}, but this notebook has {here}: install the same versions there"
                )

    @property
    def is_connected(self) -> bool:
        return not self._over.is_set() and ray.is_initialized() and _connected() == self._connection

    @property
    def is_whole(self) -> bool:
        """Whether all of its nodes are there, as far as that's known."""
        failed = (node.lost or (node.beat.done() and node.beat.exception()) for node in self._nodes)
        return self.is_connected and not any(failed)

    def machines(self) -> list[_RayMachine]:
        """Return these nodes for one run."""
        self.runs.add(number := next(_numbers))
        self._used_at = time.monotonic()
        for node in self._nodes:
            node.actor.call.remote("open", number)
        return [_RayMachine(self, node, number) for node in self._nodes]

    def put(self, block: Block) -> Any:
        """Put a payload into Ray's store, once for all nodes and restarts; it's there as long as the block lives."""
        if block not in self._sent:
            self._sent[block] = ray.put(np.frombuffer(block.view(), np.uint8))
        return self._sent[block]

    def close(self) -> None:
        """Give the nodes back."""
        if self.is_connected:
            wait([node.actor.leave.remote().future() for node in self._nodes if not node.lost], _POLL_S)
            remove_placement_group(self._group)  # and its actors end
        self._over.set()

    def _keep(self) -> None:
        """On a thread: let the nodes know that this notebook reaches them, until nobody has used them for a while."""
        while not self._over.wait(_BEAT_S) and self.is_connected:
            if self.runs:
                self._used_at = time.monotonic()
            elif time.monotonic() > self._used_at + KEPT_S:
                return self.close()
            for node in self._nodes:
                node.beat = node.actor.call.options(concurrency_group="aside").remote("beat").future()


class _RayMachine:
    """A node's share of one run: what a ``LocalMachine`` does, by calls of its actor."""

    def __init__(self, group: _Group, on: _Node, number: int) -> None:
        self.node, self._group, self._on, self._number = on.name, group, on, number
        self._alive: set[int] = set()
        self._started = Future[None]()
        self._asked: Future[Any] | None = None  # for events

    def store(self, size: int) -> tuple[str, int, int]:
        try:
            return self._tell("store", size).result(_ANSWER_S)[1]  # type: ignore[no-any-return]
        except (RayError, TimeoutError) as error:
            raise NodeLost(self.node, self._on.lose(error)) from error

    def start(self, settings: Settings, ranks: Sequence[int]) -> None:
        self._alive = set(ranks)
        self._started = self._tell("start", settings, ranks)

    def events(self, wait_s: float) -> list[Event]:
        """Return what has happened. Not by waiting inside Ray: the notebook may leave it, which would crash (2.60)."""
        try:
            self._started.result(wait_s)
            self._asked = self._asked or self._tell("events", wait_s, aside=True)
            clock, events = self._asked.result(2 * wait_s)
        except TimeoutError:
            return [] if self._group.is_connected else self._lost("the notebook disconnected from Ray")
        except RayTaskError as error:
            raise LaunchError(f"node {self.node} couldn't start its ranks: {in_a_line(error.cause)}") from error
        except RayError as error:
            return self._lost(self._on.lose(error) if self._group.is_connected else in_a_line(error))
        self._asked = None
        self._on.ahead_s = max(self._on.ahead_s, clock - time.monotonic())
        self._alive -= {event.rank for event in events if event.kind == "exit"}
        return [*map(self._by_our_clock, events)]

    def _by_our_clock(self, event: Event) -> Event:
        if not isinstance(report := event.data, Report):
            return event
        return event._replace(data=dataclasses.replace(report, at=report.at - self._on.ahead_s))

    def _lost(self, reason: str) -> list[Event]:
        return [each for rank in self._alive for each in (Event("lost", rank, reason), Event("exit", rank, -9))]

    def send(self, ranks: Sequence[int], message: Any) -> None:
        block = getattr(message, "block", None)
        if block is not None and block.nbytes > _INLINE_BYTES:
            message = dataclasses.replace(message, block=[self._group.put(block)])
        self._tell("send", ranks, message)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        self._tell("signal", ranks, number)

    def stacks(self, ranks: Sequence[int], wait_s: float) -> dict[int, str]:
        with contextlib.suppress(RayError, TimeoutError):
            return self._tell("stacks", ranks, wait_s).result(_ANSWER_S)[1]  # type: ignore[no-any-return]
        return {}

    def memory(self, ranks: Sequence[int]) -> dict[int, Memory]:
        with contextlib.suppress(RayError, TimeoutError):
            return self._tell("memory", ranks, aside=True).result(_MEMORY_S)[1]  # type: ignore[no-any-return]
        return {}

    def close(self) -> None:
        if self._asked is not None:  # nobody hears what it returns
            wait([self._asked], _ANSWER_S)
        if self._group.is_connected:
            self._on.actor.call.remote("close", self._number)
        self._group.runs.discard(self._number)

    def _tell(self, method: str, *args: Any, aside: bool = False) -> Future[Any]:
        """Call a method there. Calls that aren't aside are carried out in their order; ``events`` tells of a loss."""
        if not self._group.is_connected:  # a call would connect to Ray again
            return Future()
        call = self._on.actor.call
        call = call.options(concurrency_group="aside") if aside else call
        return call.remote("call", self._number, method, *args).future()  # type: ignore[no-any-return]


_numbers = itertools.count(1)  # of runs
_kept: dict[tuple[int, int], _Group] = {}  # by number of nodes, and of GPUs on each
_lock = threading.Lock()


def machines(nnodes: int, gpus: int, waiting: Waiting) -> list[_RayMachine]:
    """Return that many nodes of Ray's, with that many GPUs each, for one run.

    Args:
        waiting: is called again and again with what is waited for; what it raises ends the wait.

    Raises:
        LaunchError: there is no Ray, or a node can't start ranks. NodeLost: one can't be replaced.
    """
    _connected()
    while not _lock.acquire(timeout=_POLL_S):
        waiting("waiting for another run to get its nodes")
    try:
        for asked, group in list(_kept.items()):
            if not group.is_whole or (not group.runs and asked != (nnodes, gpus)):
                _kept.pop(asked).close()
        deadline = time.monotonic() + _REPLACED_S
        while (nnodes, gpus) not in _kept:
            try:
                _kept[nnodes, gpus] = _Group(nnodes, gpus, waiting)
            except RayError as error:  # Ray hasn't noticed yet that a node is lost
                if time.monotonic() > deadline:
                    raise LaunchError(f"Ray couldn't provide {nnodes} working nodes: {in_a_line(error)}") from error
        return _kept[nnodes, gpus].machines()
    finally:
        _lock.release()


def gpus_per_node(nnodes: int) -> int:
    """Return how many GPUs that many nodes have each. Raises LaunchError."""
    _connected()
    counts = sorted((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
    return counts[nnodes - 1] if nnodes <= len(counts) else 0


@atexit.register  # before Ray's own, which is older
def give_back() -> None:
    """Give all nodes back to Ray."""
    for asked in list(_kept):
        _kept.pop(asked).close()


def _connected() -> str:
    """Use the Ray that the notebook is connected to, else the one that runs here. Returns which, and our job in it."""
    if not ray.is_initialized():
        before = os.environ.get("PYTHONBREAKPOINT")
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR", namespace="nbddp")
        except ConnectionError:
            raise LaunchError(
                "nnodes= needs a Ray cluster, and none is running here: run `ray start --head` on this machine, then, "
                "on each of the others, the command that it prints"
            ) from None
        finally:  # Ray has put in its own debugger
            os.environ.pop("PYTHONBREAKPOINT", None) if before is None else os.environ.update(PYTHONBREAKPOINT=before)
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"
