"""Host side. ``python -m nbddp.host``: takes orders as frames on stdin, answers on stdout, until stdin ends."""

from __future__ import annotations

import os
import signal
import sys


def _take_over() -> tuple[int, int]:
    """The two ends of the control pipe. Whatever prints here from now on prints to stderr."""
    orders, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, answers


if __name__ == "__main__":
    ends = _take_over()
    # The kernel alone decides when ranks end; SIGTERM, as a scheduler sends it, ends this process and so them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # Read when torch is imported, here and in the fork server. It would warn at the head of each rank's output that
    # an address has no name, as on most private networks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from nbddp.host.service import serve

    serve(*ends)
    sys.stderr.flush()
    os._exit(0)  # no thread holds anything that matters
