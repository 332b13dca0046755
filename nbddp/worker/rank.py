"""One rank's life: arm the dead man's switch, set up, say ready, take orders, leave."""

import builtins
import functools
import getpass
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbddp.messages import CountSteps, Ready, Release, StopAfter
from nbddp.worker import debugger, main_module, mending, redirect, reports, setup, shell, steps, switch
from nbddp.worker.line import Line
from nbddp.worker.orders import Orders


def main(channel: Connection, printed: int, metrics: int, stacks: int) -> None:
    """Run one rank. The only function that the notebook's side calls, and only in a new process.

    Args:
        printed, metrics, stacks: descriptors of its files, for its whole life.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    switch.arm(parent.sentinel)
    redirect.redirect(printed, stacks)
    settings, place = channel.recv()
    preloaded = InteractiveShell.initialized()
    mine: Any = InteractiveShell.instance() if preloaded else shell.make()
    main_module.install(mine.user_module)
    line = Line(channel)
    line.at_once |= {Release: mending.release, StopAfter: steps.stop_after}
    line.at_once[CountSteps] = lambda _: line.tell(steps.now())
    mine.enter(line.tell, settings.shell, speaks=place.rank == 0)
    builtins.input, getpass.getpass = line.ask, functools.partial(line.ask, hidden=True)
    debugger.install()
    try:
        groups = setup.set_up(settings, place, metrics)
    except BaseException as error:
        line.tell(reports.failed(error, "setup", time.monotonic()))
        return
    steps.count()
    line.tell(Ready(os.getpid(), preloaded))
    Orders(line, mine, groups, metrics=metrics, post_mortem=settings.post_mortem).serve()
    redirect.finish()
    groups.close()
