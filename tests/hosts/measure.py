"""How long runs on several hosts take to start, to notice, to begin again, to end: ``python -m tests.hosts.measure``.

By root, on namespaces of one machine, so the network costs nothing and all share its cores. Prints a table.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import nbddp
from nbddp import wire
from nbddp.hosts import suppliers
from tests.hosts.rig import Rig
from tests.support import fresh_main, wait_until

ROUNDS = 3
HOSTS = ["gpu1", "gpu2"]
MANY = [f"gpu{i + 1}" for i in range(8)]
SLOW = "100mbit"  # of every cable, for the rows that say so
Timing = Callable[["Bench"], float]


class Bench:
    """A rig and functions for it; ``folder`` is what all hosts see."""

    def __init__(self, rig: Rig, folder: Path, cell: Callable[[str], Any]) -> None:
        self.rig = rig
        self.folder = folder
        self.names = cell(f"""
            import nbddp, os, signal, time, torch
            FOLDER = {str(folder)!r}
            def nothing(): nbddp.barrier()
            def say(name):
                open(os.path.join(FOLDER, f"{{name}}-{{nbddp.rank()}}-{{nbddp.restart_count()}}"), "w").close()
            def wait(then=""):
                nbddp.barrier()
                say("there")
                if nbddp.restart_count() == 0:
                    if nbddp.rank() == 3 and then:
                        time.sleep(0.5)
                        with open(os.path.join(FOLDER, "at"), "w") as file: file.write(str(time.time()))
                        if then == "raise": raise ValueError
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(1000)
            def give(big): return None
            def take(n): return torch.zeros(n // 4) if nbddp.rank() == 2 else None
            def chat(n):
                for step in range(n): nbddp.log(loss=1.0)
        """)

    def cluster(self, *hosts: str, **options: Any) -> nbddp.Cluster:
        return nbddp.cluster(list(hosts) or HOSTS, **{"launcher": self.rig.ssh, **options})

    def clean(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    def until_clean(self, *names: str) -> float:
        """Until no process of ours is left on these hosts."""
        hosts = [self.rig.hosts[name] for name in names or HOSTS]
        return max(host.wait_until_clean(10, files=host.files()) for host in hosts)

    def begin(self, hosts: nbddp.Cluster, *args: Any, **options: Any) -> nbddp.Run:
        self.clean()
        going = run(self.names.wait, *args, hosts=hosts, wait=False, **options)
        wait_until(lambda: len(list(self.folder.glob("there-*-0"))) == 4, 60)
        return going


def run(fn: Callable[..., Any], *args: Any, **options: Any) -> nbddp.Run:
    return nbddp.run(fn, args, **{"nprocs": 2, "device": "cpu", "show": False, **options})


def seconds(body: Callable[[], Any]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def log_in(bench: Bench) -> float:
    box: list[nbddp.Cluster] = []
    took = seconds(lambda: box.append(bench.cluster()))
    box[0].close()
    return took


def first_run(bench: Bench) -> float:
    with bench.cluster() as hosts:
        return seconds(lambda: run(bench.names.nothing, hosts=hosts))


def further_run(bench: Bench) -> float:
    with bench.cluster() as hosts:
        run(bench.names.nothing, hosts=hosts)
        return statistics.median(seconds(lambda: run(bench.names.nothing, hosts=hosts)) for _ in range(5))


def here(bench: Bench) -> float:
    run(bench.names.nothing, nprocs=4)
    return statistics.median(seconds(lambda: run(bench.names.nothing, nprocs=4)) for _ in range(5))


def call(bench: Bench) -> float:
    with bench.cluster() as hosts, nbddp.session(hosts=hosts, nprocs=2, device="cpu") as session:
        return _call(session, bench)


def call_here(bench: Bench) -> float:
    with nbddp.session(nprocs=4, device="cpu") as session:
        return _call(session, bench)


def _call(session: nbddp.Session, bench: Bench) -> float:
    session.run(bench.names.nothing, show=False)
    return statistics.median(seconds(lambda: session.run(bench.names.nothing, show=False)) for _ in range(50))


def _failure(bench: Bench, then: str) -> float:
    with bench.cluster() as hosts:
        bench.clean()
        with contextlib.suppress(nbddp.NbddpError):
            run(bench.names.wait, then, hosts=hosts)
        return time.time() - float((bench.folder / "at").read_text())


def raised(bench: Bench) -> float:
    return _failure(bench, "raise")


def killed(bench: Bench) -> float:
    return _failure(bench, "kill")


def restarted(bench: Bench) -> float:
    with bench.cluster() as hosts:
        bench.clean()
        going = run(bench.names.wait, "kill", hosts=hosts, wait=False, max_restarts=1)
        wait_until(lambda: len(list(bench.folder.glob("there-*-1"))) == 4, 60)
        took = time.time() - float((bench.folder / "at").read_text())
        going.wait()
        return took


def agent_killed(bench: Bench) -> float:
    with bench.cluster() as hosts:
        going = bench.begin(hosts)
        bench.rig.hosts["gpu2"].agent().kill()
        return seconds(lambda: _until_lost(going))


def cable_pulled(bench: Bench) -> float:
    with bench.cluster(heartbeat=3.0) as hosts:
        going = bench.begin(hosts)
        bench.rig.cable("gpu2", "down")
        try:
            took = seconds(lambda: _until_lost(going))
            bench.until_clean("gpu2")
        finally:
            bench.rig.cable("gpu2", "up")
        return took


def far_ranks_gone(bench: Bench) -> float:
    with bench.cluster(heartbeat=3.0) as hosts:
        going = bench.begin(hosts)
        bench.rig.cable("gpu2", "down")
        try:
            took = bench.until_clean("gpu2")
            _until_lost(going)
        finally:
            bench.rig.cable("gpu2", "up")
        return took


def _until_lost(going: nbddp.Run) -> None:
    with contextlib.suppress(nbddp.HostLost):
        going.wait()


def stopped(bench: Bench) -> float:
    with bench.cluster() as hosts:
        return seconds(bench.begin(hosts).stop)


def logged_out(bench: Bench) -> float:
    hosts = bench.cluster()
    run(bench.names.nothing, hosts=hosts)
    took = seconds(hosts.close)
    return took + bench.until_clean()


def kernel_killed(bench: Bench) -> float:
    bench.clean()
    source = f"""
        import nbddp, time
        def wait():
            nbddp.barrier()
            open({str(bench.folder)!r} + f"/there-{{nbddp.rank()}}-0", "w").close()
            time.sleep(1000)
        nbddp.run(wait, nprocs=2, device="cpu", show=False, hosts=nbddp.cluster({HOSTS}, launcher={bench.rig.ssh}))
    """
    kernel = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)])
    wait_until(lambda: len(list(bench.folder.glob("there-*-0"))) == 4, 60)
    kernel.send_signal(signal.SIGKILL)
    took = bench.until_clean()
    kernel.wait()
    return took


def to_the_hosts(bench: Bench) -> float:
    big = np.ones(62_500_000)
    with bench.cluster() as hosts:
        run(bench.names.nothing, hosts=hosts)
        return seconds(lambda: run(bench.names.give, big, hosts=hosts))


def to_one(bench: Bench) -> float:
    return _slowly(bench, MANY[:1])


def to_many(bench: Bench) -> float:
    return _slowly(bench, MANY)


def to_each(bench: Bench) -> float:
    suppliers.Named.chain_from = len(MANY) + 1
    try:
        return _slowly(bench, MANY)
    finally:
        suppliers.Named.chain_from = suppliers.CHAIN_FROM


def _slowly(bench: Bench, names: list[str]) -> float:
    big = np.ones(37_500_000)
    with bench.cluster(*names, heartbeat=60.0) as hosts:
        run(bench.names.nothing, hosts=hosts, nprocs=1)
        for name in (*names, "notebook"):
            bench.rig.limit(name, SLOW)
        try:
            return seconds(lambda: run(bench.names.give, big, hosts=hosts, nprocs=1))
        finally:
            for name in (*names, "notebook"):
                bench.rig.limit(name)


def from_a_host(bench: Bench) -> float:
    with bench.cluster() as hosts:
        run(bench.names.nothing, hosts=hosts)
        return seconds(lambda: run(bench.names.take, 500_000_000, hosts=hosts))


def to_ranks_here(bench: Bench) -> float:
    big = np.ones(62_500_000)
    run(bench.names.nothing)
    return seconds(lambda: run(bench.names.give, big))


WHAT: dict[str, tuple[str, Timing]] = {
    "login": ("log in to both (imports torch there)", log_in),
    "first": ("first run, logged in", first_run),
    "further": ("further run, hosts warm", further_run),
    "here": ("the same 4 ranks on one machine, warm", here),
    "call": ("a call of a session, with a barrier", call),
    "call-here": ("the same in a session on one machine", call_here),
    "raised": ("exception on a far rank → raised in the cell", raised),
    "killed": ("far rank killed → `RankDied`, all ranks gone", killed),
    "restart": ("far rank killed → all ranks in the function again", restarted),
    "agent": ("agent killed → `HostLost`, all ranks gone", agent_killed),
    "cable": ("cable pulled → `HostLost`, heartbeat 3 s", cable_pulled),
    "cable-far": ("cable pulled → far ranks gone, heartbeat 3 s", far_ranks_gone),
    "stop": ("stop() → every rank gone", stopped),
    "logout": ("close() → every host clean", logged_out),
    "kernel": ("kernel killed → every host clean", kernel_killed),
    "to": ("500 MB to two hosts, 4 ranks", to_the_hosts),
    "to-one": (f"300 MB to one host, {SLOW} on every cable", to_one),
    "to-many": (f"300 MB to {len(MANY)} hosts, from host to host, {SLOW}", to_many),
    "to-each": (f"300 MB to {len(MANY)} hosts, from the notebook to each, {SLOW}", to_each),
    "to-here": ("500 MB to 2 ranks on this machine", to_ranks_here),
    "from": ("500 MB from a far rank", from_a_host),
}


def records(bench: Bench, number: int = 300_000) -> str:
    """Metric records over the pipe: bytes and time each."""
    with bench.cluster() as hosts:
        run(bench.names.nothing, hosts=hosts)
        before = bench.rig.passed("gpu2")[1]
        took = seconds(lambda: run(bench.names.chat, number, hosts=hosts))
        crossed = bench.rig.passed("gpu2")[1] - before
    return (
        f"{4 * number:,} records of 4 ranks in {took:.1f} s: {4 * number / took:,.0f} a second, of {wire.RECORD.size} "
        f"bytes each, {crossed / 2 / number:.1f} on the wire"
    )


def idle(bench: Bench, for_s: float = 20.0) -> str:
    """What a logged-in host costs when nothing happens."""
    with bench.cluster() as hosts:
        run(bench.names.nothing, hosts=hosts)
        ours = [time.process_time(), *bench.rig.passed("gpu2")]
        agent = bench.rig.hosts["gpu2"].agent()
        cpu = sum(agent.cpu_times()[:2])
        time.sleep(for_s)
        kernel, inward, outward = (b - a for a, b in zip(ours, [time.process_time(), *bench.rig.passed("gpu2")]))
        busy = sum(agent.cpu_times()[:2]) - cpu
        memory = sum(p.memory_full_info().uss for p in bench.rig.hosts["gpu2"].processes())
    return (
        f"idle, per host: {inward / for_s:.0f} bytes/s in, {outward / for_s:.0f} out; kernel {kernel / for_s / 2:.2%} "
        f"of a core, agent {busy / for_s:.2%}; {memory / 1e6:.0f} MB of its own"
    )


def main(parts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, Rig(Path(folder), MANY) as rig, fresh_main() as cell:
        bench = Bench(rig, Path(folder), cell)
        print(f"{os.cpu_count()} cores, {ROUNDS} rounds\n\n| what | median | least | most |\n| --- | --- | --- | --- |")
        for part, (words, timing) in WHAT.items():
            if not parts or part in parts:
                took = sorted(timing(bench) for _ in range(ROUNDS))
                print(f"| {words} | {took[ROUNDS // 2]:.3g} s | {took[0]:.3g} | {took[-1]:.3g} |", flush=True)
        for part, tell in {"records": records, "idle": idle}.items():
            if not parts or part in parts:
                print(f"\n{tell(bench)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
