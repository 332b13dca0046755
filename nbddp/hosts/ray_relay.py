"""Runs agents on the nodes of a Ray cluster: the one connection to Ray, in a process of its own beside the notebook.

    notebook ── pipe ── ray_login.py ── Unix socket ── this process ── Ray ── an actor on each node ── pipe ── agent

``python -m nbddp.hosts.ray_relay FOLDER NODES GPUS ADDRESS`` reserves the nodes by a placement group, and writes their
names in JSON. It ends with its stdin, and gives the nodes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from typing import Any

from nbddp.hosts.ray_login import EXITED, SOCKET, STDERR, STDOUT, encoded

_READY_POLL_S = 1.0
_CONNECT_S = 5.0
_MOST_PENDING = 8  # writes of 1 MiB at most
_READ_BYTES = 1 << 20
_FAILED = 255


class Relay:
    """A placement group of Ray, one bundle per node, and an actor per login."""

    def __init__(self, nodes: int, gpus: int, address: str) -> None:
        import ray

        self._ray = ray
        try:
            _check(address)
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR", namespace="nbddp")
        except (OSError, ValueError) as error:  # ConnectionError: of Ray, too
            advice = "start it with `ray start --head`, or name one with address="
            sys.exit(f"no Ray answers at {address or 'its default address'}: {advice} ({_last_line(error)})")
        self._resources: dict[str, float] = {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}
        self._group = ray.util.placement_group([self._resources] * nodes, strategy="STRICT_SPREAD")
        self._names: list[str] = []
        # Writes keep their order only in a group of one.
        self._actor = ray.remote(concurrency_groups={"read": 4, "write": 1})(_Actor)

    def wait(self) -> list[str]:
        """Wait until Ray has reserved the nodes. Returns their names."""
        print("Ray looks for the nodes", file=sys.stderr, flush=True)
        while not self._group.wait(_READY_POLL_S):
            pass
        found = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        host = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        names = [host[found[index]] for index in range(len(found))]
        self._names = [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names)]
        return self._names

    def serve(self, connection: socket.socket) -> None:
        """Run the command of one login on its node, until one end closes."""
        with connection, connection.makefile("rb") as stream:
            name, *command = json.loads(stream.readline())
            actor = None
            try:
                actor = self._actor_on(self._names.index(name))
                self._ray.get(actor.start.remote(command))
                threading.Thread(target=self._feed, args=(stream, actor), daemon=True).start()
                errors = threading.Thread(target=self._forward, args=(actor, STDERR, connection), daemon=True)
                errors.start()
                self._forward(actor, STDOUT, connection)
                errors.join(1.0)
                connection.sendall(encoded(EXITED, str(self._ray.get(actor.wait.remote())).encode()))
            except OSError:  # the login has ended
                pass
            except Exception as error:  # whatever Ray raises when a node is lost
                with contextlib.suppress(OSError):
                    connection.sendall(encoded(STDERR, f"Ray: {_last_line(error)}\n".encode()))
                    connection.sendall(encoded(EXITED, str(_FAILED).encode()))
            finally:
                if actor is not None:
                    self._ray.kill(actor)

    def _actor_on(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        cpus, gpus = self._resources["CPU"], self._resources.get("GPU", 0.0)
        return self._actor.options(scheduling_strategy=where, num_cpus=cpus, num_gpus=gpus).remote()

    def _feed(self, stream: Any, actor: Any) -> None:
        pending: list[Any] = []
        with contextlib.suppress(Exception):  # the actor is gone, which the other threads report
            while data := stream.read1(_READ_BYTES):
                pending.append(actor.write.options(concurrency_group="write").remote(data))
                if len(pending) > _MOST_PENDING:
                    self._ray.get(pending.pop(0))
            actor.write.options(concurrency_group="write").remote(b"")

    def _forward(self, actor: Any, which: int, connection: socket.socket) -> None:
        options = {"concurrency_group": "read", "num_returns": "streaming"}
        for piece in actor.read.options(**options).remote(which):
            connection.sendall(encoded(which, self._ray.get(piece)))

    def close(self) -> None:
        """Give the nodes back."""
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


class _Actor:
    """On a node: one process, and its pipes."""

    def start(self, command: list[str]) -> None:
        import os
        import subprocess

        import ray

        environ = {**os.environ, "NBDDP_NODE": ray.get_runtime_context().get_node_id()}
        environ.pop("OMP_NUM_THREADS", None)  # Ray's, for one core
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=environ)

    def write(self, data: bytes) -> None:
        pipe: Any = self.process.stdin
        if not data:
            pipe.close()
        view = memoryview(data)
        while view:
            view = view[pipe.write(view) :]

    def read(self, which: int) -> Any:
        pipe: Any = self.process.stdout if which == 1 else self.process.stderr
        while data := pipe.read(1 << 20):
            yield data

    def wait(self) -> int:
        return self.process.wait()


def _check(address: str) -> None:
    """Connect once: Ray itself tries again for ever. Raises OSError, or ValueError for another kind of address."""
    if not address or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("address= is HOST:PORT, as `ray start --head` prints it")
    socket.create_connection((host, int(port)), _CONNECT_S).close()


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _main(folder: str, nodes: str, gpus: str, address: str) -> None:
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def read_stdin() -> None:
        while os.read(0, _READ_BYTES):
            pass
        ended.put(None)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=relay.serve, args=(connection,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(folder, SOCKET))
        listener.listen(128)
        threading.Thread(target=read_stdin, daemon=True).start()
        relay = Relay(int(nodes), int(gpus), address)
        print(json.dumps(relay.wait()), flush=True)
        threading.Thread(target=accept, daemon=True).start()
        ended.get()
        relay.close()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
