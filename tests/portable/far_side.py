"""The functions that tests run in processes of nbddp's fork server."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from nbddp import wire
from nbddp.worker import dead_man_switch, output
from nbddp.worker.metrics_pipe import MetricsPipe


def answer(channel: Connection) -> None:
    """Say who we are, and leave with code 7."""
    import __main__

    channel.send((os.getpid(), os.getppid(), "marker" in vars(__main__)))
    raise SystemExit(7)


def live_for_ever(channel: Connection) -> None:
    """Arm the switch, start a child, and swallow everything."""
    dead_man_switch.arm()
    child = os.fork()
    if child == 0:
        time.sleep(600)
    channel.send((os.getpid(), child, os.getsid(0)))
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue


BURST = 20_000
LONG_NAME = "val/" + "é" * 40


def log_a_burst(channel: Connection) -> None:
    """Log more than a pipe holds, as fast as it goes."""
    os.set_blocking(channel.fileno(), False)
    pipe = MetricsPipe(channel.fileno())
    for step in range(BURST):
        pipe.log({"loss": step / 2, LONG_NAME: 1}, None, wire.REDUCE_NONE, 1.0)
    pipe.flush()


def show_stacks(channel: Connection, path: str) -> None:
    """Answer the request for stacks, from inside a sleep."""
    output.dump_stacks_on_signal(os.open(path, os.O_WRONLY))
    channel.send(os.getpid())
    wait_somewhere()


def wait_somewhere() -> None:
    time.sleep(600)
