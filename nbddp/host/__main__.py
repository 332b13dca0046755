"""Host side. ``python -m nbddp.host``: takes orders as frames on stdin, answers on stdout, until stdin ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def _take_over() -> tuple[int, int]:
    """The two ends of the control pipe. Whatever prints here from now on prints to stderr."""
    orders, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, answers


def _end_with_the_login(orders: int) -> None:
    """Whatever is imported or done meanwhile, and whatever orders nobody has read yet."""
    poll = select.poll()
    poll.register(orders, getattr(select, "POLLRDHUP", 0))  # with what is always told: that the writer is gone
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    ends = _take_over()
    threading.Thread(target=_end_with_the_login, args=ends[:1], name="nbddp-login", daemon=True).start()
    # The kernel alone decides when ranks end; SIGTERM, as a scheduler sends it, ends this process and so them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # Read when torch is imported, here and in the fork server. It would warn at the head of each rank's output that
    # an address has no name, as on most private networks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from nbddp import hugefiles
    from nbddp.kernel import forkserver

    hugefiles.begin()
    forkserver.warm()  # before torch is imported here: both import it at the same time
    from nbddp.host.service import serve

    serve(*ends)
    sys.stderr.flush()
    os._exit(0)  # no thread holds anything that matters
