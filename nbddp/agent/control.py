"""Carries out the notebook kernel's orders on this host, run after run, until the kernel says goodbye."""

from __future__ import annotations

from nbddp.agent.agent import run_agent
from nbddp.agent.facts import facts
from nbddp.agent.pipe import ControlPipe


def serve(orders: int, answers: int) -> None:
    """Send the facts of this host, then carry out one run after the other until the order ``bye``."""
    pipe = ControlPipe(orders, answers)
    pipe.send(facts())
    while True:
        order = pipe.orders.get()
        if order["kind"] == "run":
            run_agent(order, pipe)
        elif order["kind"] == "bye":
            pipe.close()
            return
