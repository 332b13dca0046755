"""What a rank does for each order: a function, a cell, push, pull, Tab; and what puts things right after a failure."""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import comm
import torch
import torch.distributed as dist
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.utils.tokenutil import token_at_cursor

from nbddp import messages
from nbddp.helpers import context, log
from nbddp.messages import Failure, Ran, Report
from nbddp.payload import Block
from nbddp.worker import debugger, main_module, mending, redirect, reports, steps
from nbddp.worker.group import Groups, collectives_begun
from nbddp.worker.line import Line
from nbddp.worker.shell import Shell


class Orders:
    """Takes one order after the other, and reports each."""

    def __init__(self, line: Line, shell: Shell, groups: Groups, *, metrics: int, post_mortem: bool) -> None:
        self._line, self._groups = line, groups
        self._shell: Any = shell  # IPython's own types are partial
        self._metrics, self._post_mortem = metrics, post_mortem
        self._sigchld: Any = signal.SIG_DFL
        self._phase = "call"
        self._last_value: Any = None  # of the last cell
        self._shell.given = {
            "nbddp": sys.modules["nbddp"],
            "torch": torch,
            "dist": dist,
            "rank": context.rank(),
            "world_size": context.world_size(),
            "device": context.device(),
        }
        self._before: Any = None  # the default group before the last failure
        self._handlers: dict[type, Callable[[Any, Block | None], Report]] = {
            messages.Function: self._function,
            messages.Cell: self._cell,
            messages.Push: self._push,
            messages.Pull: self._pull,
            messages.Complete: lambda order, _: self._answer(self._complete(order)),
            messages.Inspect: lambda order, _: self._answer(self._inspect(order)),
            messages.Hear: self._hear,
            messages.Render: lambda *_: self._answer(self._shell.render()),
            messages.CountCollectives: lambda *_: self._answer(collectives_begun()),
            messages.Mend: lambda order, _: self._answer(self._mend(order)),
        }

    def serve(self) -> None:
        """Serve until the rank should leave. The rank's one broad ``except``."""
        while (given := self._line.orders.get()) is not None:
            order, block = given
            self._phase = "unpack" if block is not None else "call"
            redirect.printed.clear()
            redirect.answer_stacks()
            try:
                report = self._handlers[type(order)](order, block)
            except SystemExit as error:
                report = reports.exited(error, time.monotonic())
            except BaseException as error:
                at = time.monotonic()  # before anything slow: the run reports its earliest failure
                mending.end_loaders_of(error := self._handled(error))
                report = reports.failed(error, self._phase, at)
            log.flush()
            self._line.tell(report)

    def _handled(self, error: BaseException) -> BaseException:
        if (
            self._post_mortem
            and self._phase == "call"
            and isinstance(error, Exception)
            and not isinstance(error, bdb.BdbQuit)
        ):
            with contextlib.suppress(bdb.BdbQuit, KeyboardInterrupt), self._interruptible():
                debugger.post_mortem(error)
        return error

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The user's code: an interrupt raises here, and nowhere else."""
        steps.begin()
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, self._sigchld)  # torch's raises when a DataLoader's worker dies
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.settrace(None)  # a debugger that has stepped so far
            self._sigchld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _function(self, order: messages.Function, block: Block | None) -> Report:
        assert block is not None
        log.enter(self._metrics)
        with self._interruptible():
            function, args, kwargs = main_module.unpack(block, order.before)
            self._phase = "call"
            self._line.tell(messages.Called())
            with main_module.completed_by(self._line.definition):
                value = function(*args, **kwargs)
        self._phase = "pack"
        report = reports.finished(
            value, f"the value that {order.name} returned on rank {context.rank()} cannot be sent to the notebook"
        )
        return dataclasses.replace(report, met=self._groups.used())

    def _cell(self, order: messages.Cell, _: Block | None) -> Report:
        shell, raised = self._shell, None
        log.enter(self._metrics)
        shell.speaks = context.rank() == order.speaker
        shell.begin(order.count)
        if lends := order.pdb and not shell.call_pdb:
            shell.call_pdb = True
        try:
            with self._interruptible():
                shell.history_manager.store_inputs(order.count, order.source, order.source)
                result = shell.run_cell(order.source)  # with store_history it would render each error, to store it
                self._last_value = result.result
                raised = result.error_before_exec or result.error_in_exec
        except KeyboardInterrupt as late:
            raised = late
        if raised is not None:
            mending.end_loaders_of(raised)
        if lends:
            shell.call_pdb = False
        at = time.monotonic()
        if raised is None and shell.has_shown_an_error:  # %tb
            print("\n".join(shell.render()))
        payload = tuple(shell.payload_manager.read_payload())
        shell.payload_manager.clear_payload()
        answer = Ran("".join(redirect.printed)[: redirect.KEPT_CHARS], shell.value, steps.taken, payload, shell.leaving)
        failure = Failure("call", type(raised).__name__, str(raised)) if raised is not None else None
        return Report(at, answer, failure)

    def _push(self, order: messages.Push, block: Block | None) -> Report:
        assert block is not None
        with self._interruptible():
            self._shell.user_ns.update(main_module.unpack(block, order.before))
        return self._answer(None)

    def _pull(self, order: messages.Pull, _: Block | None) -> Report:
        names = {**self._shell.user_ns, "": self._last_value}
        if missing := [name for name in order.names if name not in names]:
            return dataclasses.replace(self._answer(None), lost=f"the ranks have no {missing[0]}", path=(missing[0],))
        found = {name: names[name] for name in order.names}
        return reports.finished(found, "this cannot be sent to the notebook", found)

    def _complete(self, order: messages.Complete) -> dict[str, Any]:
        with provisionalcompleter():
            found = list(rectify_completions(order.code, self._shell.Completer.completions(order.code, order.cursor)))
        start, end = (found[0].start, found[0].end) if found else (order.cursor, order.cursor)
        matches = [each.text for each in found]
        return {"status": "ok", "matches": matches, "cursor_start": start, "cursor_end": end, "metadata": {}}

    def _inspect(self, order: messages.Inspect) -> dict[str, Any]:
        data: dict[str, Any] = {}
        with contextlib.suppress(KeyError):
            name = token_at_cursor(order.code, order.cursor)
            data = self._shell.object_inspect_mime(name, detail_level=order.level)
        return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}

    def _hear(self, order: messages.Hear, _: Block | None) -> Report:
        self._shell.speaks = True
        with self._interruptible():
            said = {"content": order.content, "buffers": list(order.buffers)}
            comm.get_comm_manager().comm_msg(None, None, said)  # type: ignore[arg-type]
        return self._answer(None)

    def _mend(self, order: messages.Mend) -> list[str]:
        if order.group is not None and (dist.is_initialized() or self._groups.failed):
            self._before = dist.group.WORLD if dist.is_initialized() else self._before
            self._groups.open(order.group)
        return mending.mend(self._shell.user_ns, self._before)

    def _answer(self, answer: Any) -> Report:
        return Report(time.monotonic(), answer)
