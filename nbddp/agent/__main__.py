"""``python -m nbddp.agent``: reads orders as frames from stdin and writes answers to stdout, until stdin ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def _take_control_pipe() -> tuple[int, int]:
    """Return file descriptors for orders and answers; from now on, stdin is empty and prints go to the login's stderr.

    No other process inherits these three: ssh would not end with this process, as long as a rank has its stderr.
    """
    orders, answers, errors = os.dup(0), os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDWR)
    for inherited in (0, 1, 2):
        os.dup2(nothing, inherited)
    os.close(nothing)
    sys.stdout = sys.stderr = os.fdopen(errors, "w", buffering=1, errors="replace")
    return orders, answers


def _exit_with_the_login(orders: int) -> None:
    """Exit as soon as the login ends, even while torch is imported or orders are unread."""
    poll = select.poll()
    poll.register(orders, getattr(select, "POLLRDHUP", 0))  # poll() always reports a closed pipe as well
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    pipe_ends = _take_control_pipe()
    threading.Thread(target=_exit_with_the_login, args=pipe_ends[:1], name="nbddp-login", daemon=True).start()
    # Only the notebook kernel decides when ranks end. SIGTERM, as a scheduler sends it, ends the agent and its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # torch reads this when it is imported, here and in the fork server. Without it, each rank's output would begin
    # with a warning that an address has no name, as on most private networks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from nbddp.forkserver import server as forkserver

    forkserver.warm()  # before torch is imported here, so that both processes import it at the same time
    from nbddp.agent.dns import DnsCheck

    dns = DnsCheck()
    from nbddp.agent.control import serve

    dns.finish()
    serve(*pipe_ends)
    sys.stderr.flush()
    os._exit(0)  # the remaining threads hold nothing that matters
