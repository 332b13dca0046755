"""What a rank does for each order: a function, a cell, push, pull, Tab; and what puts things right after a failure."""

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
from nbddp.helpers.model import accumulated
from nbddp.worker import debugger, main_module, mending, redirect, reports, steps
from nbddp.worker.group import Groups, collectives_begun
from nbddp.worker.line import Line
from nbddp.worker.shell import Shell

_STOPS = KeyboardInterrupt, bdb.BdbQuit  # by the user


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
        self._handlers: dict[type, Callable[[Any], Any]] = {  # their answers, or whole reports
            messages.Function: self._function,
            messages.Cell: self._cell,
            messages.Push: self._push,
            messages.Pull: self._pull,
            messages.Complete: self._complete,
            messages.Inspect: self._inspect,
            messages.Hear: self._hear,
            messages.Render: lambda _: self._shell.render(),
            messages.CountCollectives: lambda _: {**collectives_begun(), **mending.state()},
            messages.Mend: self._mend,
        }

    def serve(self) -> None:
        """Serve until the rank should leave. The rank's one broad ``except``."""
        while (order := self._line.orders.get()) is not None:
            self._phase, before = "call", mending.state()
            redirect.forget_printed()
            redirect.answer_stacks()
            try:
                answer = self._handlers[type(order)](order)
                report = answer if isinstance(answer, messages.Report) else messages.Report(time.monotonic(), answer)
            except SystemExit as error:
                report = reports.exited(error, time.monotonic())
            except BaseException as error:
                at = time.monotonic()  # before anything slow: the run reports its earliest failure
                if self._post_mortem and self._phase == "call" and not isinstance(error, _STOPS):
                    with contextlib.suppress(*_STOPS), self._interruptible():
                        debugger.post_mortem(error)
                mending.end_loaders_of(error)
                report = reports.failed(error, self._phase, at)
            if report.failure is not None and mending.state() != before:  # its gradients are nobody's
                accumulated.clear()
            log.flush()
            self._line.tell(report)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The user's code: an interrupt raises here, and nowhere else."""
        steps.begin()
        try:
            signal.signal(signal.SIGINT, steps.interrupt)
            signal.signal(signal.SIGCHLD, self._sigchld)  # torch's raises when a DataLoader's worker dies
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            steps.end()
            sys.settrace(None)  # a debugger that has stepped so far
            self._sigchld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _unpacked(self, order: messages.Function | messages.Push) -> Any:
        self._phase = "unpack"
        value = main_module.unpack(order.block, order.before)
        self._phase = "call"
        return value

    def _function(self, order: messages.Function) -> messages.Report:
        log.enter(self._metrics)
        with self._interruptible():
            function, args, kwargs = self._unpacked(order)
            before = main_module.sizes()
            self._line.tell(messages.Called())
            with main_module.completed_by(self._line.definition), main_module.exiting_at_once():
                value = function(*args, **kwargs)
        self._phase = "pack"
        what = f"the value that {order.name} returned on rank {context.rank()} can't be sent to the notebook"
        return dataclasses.replace(
            reports.finished(value, what),
            met=self._groups.used() or not steps.taken,
            left_after=steps.left_after,
            read_whole=steps.read_whole,
            filled="" if value is not None else main_module.grown_since(before),
            trained_copy=steps.trained_copy and not reports.has_tensors(value),
        )

    def _cell(self, order: messages.Cell) -> messages.Report:
        shell, raised = self._shell, None
        log.enter(self._metrics)
        shell.speaks = context.rank() == order.speaker
        shell.begin(order.count)
        if lends := order.pdb and not shell.call_pdb:
            shell.call_pdb = True
        try:
            with self._interruptible():
                result = shell.run_cell(order.source, store_history=True)
                self._last_value = result.result
                raised = result.error_before_exec or result.error_in_exec
        except KeyboardInterrupt as late:
            raised = late
        at, failure = time.monotonic(), None
        if lends:
            shell.call_pdb = False
        if raised is not None:
            mending.end_loaders_of(raised)
            failure = messages.Failure("call", type(raised).__name__, _text_of(raised))
        payload = tuple(shell.payload_manager.read_payload())
        shell.payload_manager.clear_payload()
        answer = messages.Ran(redirect.printed(), shell.value, steps.taken, payload, shell.leaving)
        return messages.Report(at, answer, failure)

    def _push(self, order: messages.Push) -> None:
        self._shell.give()
        with self._interruptible():
            self._shell.user_ns.update(self._unpacked(order))

    def _pull(self, order: messages.Pull) -> messages.Report:
        names = {**self._shell.user_ns, "": self._last_value}
        if missing := [name for name in order.names if name not in names]:
            lost = f"rank {context.rank()} has no variable {missing[0]}"
            return messages.Report(time.monotonic(), lost=lost, path=(missing[0],))
        found = {name: names[name] for name in order.names}
        return reports.finished(found, "a variable can't be sent to the notebook", found)

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
            if not self._shell.enable_html_pager:  # as in a kernel
                data.pop("text/html", None)
        return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}

    def _hear(self, order: messages.Hear) -> None:
        self._shell.speaks = self._shell.hears = True
        with self._interruptible():
            said = {"content": order.content, "buffers": list(order.buffers)}
            comm.get_comm_manager().comm_msg(None, None, said)  # type: ignore[arg-type]

    def _mend(self, order: messages.Mend) -> list[str]:
        if order.group is not None and (dist.is_initialized() or self._groups.failed):
            self._before = dist.group.WORLD if dist.is_initialized() else self._before
            self._groups.open(order.group)
        return mending.mend(self._shell.user_ns, self._before, replaced=order.group is not None)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # whatever a user's __str__ raises
        return "<exception str() failed>"
