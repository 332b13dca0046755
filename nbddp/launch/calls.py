"""Begins one more call on a rank of a session: it needs new ends, since each call has its own metrics and output."""

from __future__ import annotations

import contextlib
import os

from nbddp import fds, payload, wire
from nbddp.launch.output import RankOutput
from nbddp.launch.rank import LocalRank


def begin_call(worker: LocalRank, call: wire.NextCall, output: RankOutput, block: int) -> None:
    """Begin a call on a rank that stays and has reported.

    Args:
        block: file descriptor of the call's payload.
    """
    with contextlib.ExitStack() as workers_ends, contextlib.ExitStack() as unless_begun:
        metrics_r, metrics_w = os.pipe()
        unless_begun.callback(os.close, metrics_r)
        workers_ends.callback(os.close, metrics_w)
        fds.widen(metrics_w)
        os.set_blocking(metrics_r, False)
        result = payload.open_block(f"result-{worker.rank}")
        unless_begun.callback(os.close, result)
        fds_here = {"metrics": metrics_r, "result": result}
        worker.begin(call, output, fds_here, (metrics_w, output.fileno(), block, result))
        unless_begun.pop_all()
