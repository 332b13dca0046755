"""A node's share of the ranks: this machine, in a process of Ray's. Only what's large comes through Ray's own store."""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import psutil

from nbddp.messages import Settings
from nbddp.payload import Block
from nbddp.process.machine import LocalMachine

SILENCE_S = 60.0  # without a beat; then the node is cut off from the notebook. Ray reports the notebook's death at once


class NodeMachine(LocalMachine):
    """The ranks of one run on this node."""

    def start(self, settings: Settings, ranks: Sequence[int]) -> None:
        """Start ranks. What only the node knows is filled in here: environment, interface, threads, folders."""
        found = [(name, each.address) for name, entries in psutil.net_if_addrs().items() for each in entries]
        interface = next((name for name, address in found if address == self._address), "lo")
        environ = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **os.environ, **settings.environ}
        threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // len(ranks))
        if settings.contract:
            environ.setdefault("OMP_NUM_THREADS", str(threads))
        cwd = settings.cwd if os.path.isdir(settings.cwd) else os.path.expanduser("~")
        rays = getattr(sys.modules.get("ray"), "__path__", ["-"])[0]  # it has packages of its own there
        path = [cwd, *(part for part in sys.path if part and not part.startswith(rays))]
        here: dict[str, Any] = {"environ": environ, "threads": threads, "cwd": cwd, "sys_path": tuple(path)}
        super().start(dataclasses.replace(settings, **here), ranks)

    def send(self, ranks: Sequence[int], message: Any) -> None:
        """Send a message. A block that's large is in Ray's store, and in a list, so that it's fetched here."""
        if isinstance(stored := getattr(message, "block", None), list):
            import ray

            data = memoryview(ray.get(stored[0]))
            message = dataclasses.replace(message, block=Block.of([(0, data)], data.nbytes))
        super().send(ranks, message)


class Node:
    """What the actor does: the machines of the runs that go on here, by number.

    Args:
        raylet: our parent. Ray may take its time to end us after it.
    """

    def __init__(self, address: str, raylet: int) -> None:
        self._address, self._raylet = address, raylet
        self._machines: dict[int, NodeMachine] = {}
        self._beat_at = time.monotonic()
        threading.Thread(target=self._end_if_cut_off, daemon=True).start()

    def open(self, number: int) -> None:
        """Make a machine for a run."""
        self._machines[number] = NodeMachine(self._address)

    def call(self, number: int, method: str, *args: Any) -> tuple[float, Any]:
        """Call a method of the run's machine. Returns this node's clock, and the answer."""
        answer = getattr(self._machines[number], method)(*args)
        return time.monotonic(), answer

    def close(self, number: int) -> None:
        """Close the run's machine."""
        self._machines.pop(number).close()

    def beat(self) -> None:
        """Note that the notebook can reach this node."""
        self._beat_at = time.monotonic()

    def _end_if_cut_off(self) -> None:
        while time.monotonic() - self._beat_at < SILENCE_S and os.getppid() == self._raylet:
            time.sleep(1.0)
        os._exit(1)  # which pulls the dead man's switch of each rank


def versions() -> set[str]:
    """Return the versions that must be the same on all machines, without a build's suffix (``+cu128``)."""
    return {f"{name} {metadata.version(name).partition('+')[0]}" for name in ("torch", "cloudpickle", "nbddp")}
