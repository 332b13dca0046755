"""What the ranks say → the cell: output, displays, the value of a cell, widgets, and where ranks differ."""

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbddp import messages
from nbddp.kernel.rank_state import RankState
from nbddp.panel.frontend import ipython, request_id
from nbddp.process.machine import Event
from nbddp.text import write

_MAX_LINES = 10  # of ranks that differ
_MOST_LINES, _LAST_LINES = 1000, 10  # of the speaker
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Page:
    """Shows what one rank, the speaker, prints and displays.

    Attributes:
        hear: takes what the page says to a widget: rank, content, buffers.
    """

    def __init__(self, ranks: Sequence[RankState], speaker: int = 0, *, quiet: bool = False) -> None:
        self._ranks, self._speaker, self._quiet = ranks, speaker, quiet
        self.hear: Callable[[int, Any], None] = lambda rank, said: None
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a piece may end within a character
        self._lines = 0  # of the speaker
        self._since_prompt: dict[int, int] = {}  # size of each rank's output at the last prompt

    def take(self, event: Event) -> None:
        """Show an event, if it's the speaker's."""
        if event.rank != self._speaker or self._quiet:
            return
        if event.kind == "output":
            self._output(self._decode(event.data))
        elif show := _SHOWN.get(type(event.data)):
            show(self, event.data)

    def _output(self, text: str) -> None:
        """Show as many lines as a front end can take."""
        room, self._lines = _MOST_LINES - self._lines, self._lines + text.count("\n")
        if self._lines <= _MOST_LINES:
            self.write(text)
        elif room >= 0:
            shown = text.split("\n", room)[:room]
            self.write_lines([*shown, f"[further lines are in the logs: %ddp logs {self._speaker}]"])

    def finish(self) -> None:
        """Before a prompt, and at an order's end: say how many lines are only in the logs, and show the last ones."""
        if (more := self._lines - _MOST_LINES) > 0:
            last = self._ranks[self._speaker].output.text().splitlines()[-min(more, _LAST_LINES) :]
            left_out = [f"[{more - len(last):,} more lines in the logs]"] if more > len(last) else []
            self.write_lines([*left_out, *last])
        self._lines = 0

    def write(self, text: str) -> None:
        """Write text into the cell."""
        write(text)

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write lines into the cell, if there are any."""
        if text := "".join(f"{line}\n" for line in lines):
            self.write(text)

    def tell(self, text: str) -> None:
        """Write text that isn't an answer to the user, unless they want no output."""
        if not self._quiet:
            write(text)

    def show_differences(self, ranks: Sequence[RankState]) -> None:
        """Before a prompt: show what ranks that ask have printed, if the speaker hasn't shown the same."""
        self.finish()
        before = self._since_prompt
        texts = {rank.number: rank.output.text(before.get(rank.number, rank.printed_before)) for rank in self._ranks}
        for rank in ranks:
            if rank.number == self._speaker and self._quiet:
                self.write(texts[rank.number])
            elif texts[rank.number] != texts[self._speaker]:
                self.write_lines([f"[rank {rank.number}] {line}" for line in texts[rank.number].splitlines()])
        self._since_prompt = {rank.number: rank.output.size for rank in self._ranks}

    def show_where_ranks_differ(self, answers: dict[int, messages.Ran]) -> None:
        """After a cell: show what other ranks have printed or returned, if it differs from the speaker's."""
        lines = []
        for name in ("printed", "value"):
            plain = {number: _ADDRESS.sub("", getattr(ran, name)) for number, ran in sorted(answers.items())}
            for number, text in plain.items():
                if text != plain.get(self._speaker, ""):
                    lines += [f"[rank {number}] {line}" for line in text.splitlines()]
        left_out = [f"[{len(lines) - _MAX_LINES} more; see %ddp logs]"] if len(lines) > _MAX_LINES else []
        if lines:
            self.tell("\n".join([*lines[:_MAX_LINES], *left_out, ""]))

    def _display(self, said: messages.Display) -> None:
        if shell := ipython():
            shell.display_pub.publish(**vars(said))
        else:
            self.write_lines([said.data.get("text/plain", "")])

    def _clear(self, said: messages.Clear) -> None:
        self._lines = 0
        if shell := ipython():
            shell.display_pub.clear_output(said.wait)

    def _result(self, said: messages.Result) -> None:
        hook: Any = getattr(ipython(), "displayhook", None)
        if not hasattr(hook, "pub_socket"):  # no kernel
            return self.write_lines([said.data.get("text/plain", "")])
        shown = {"execution_count": hook.prompt_count, "data": said.data, "metadata": said.metadata}
        hook.session.send(hook.pub_socket, "execute_result", shown, parent=hook.parent_header, ident=hook.topic)

    def _error(self, said: messages.ShownError) -> None:
        if shell := ipython():
            shell._showtraceback(type(said.kind, (Exception,), {}), said.text, list(said.lines))
        else:
            self.write_lines(said.lines)

    def _widget_says(self, said: messages.WidgetSays) -> None:
        """A widget has a twin here, which speaks for it and hears the page."""
        import comm

        known: Any = comm.get_comm_manager().comms
        if said.kind == "comm_open":
            target = said.keys["target_name"]
            twin = known[said.comm_id] = comm.create_comm(comm_id=said.comm_id, primary=False, target_name=target)
            twin.on_msg(functools.partial(self.hear, self._speaker))
        state = said.data.get("state") if isinstance(said.data, dict) else None
        if isinstance(state, dict) and state.get("msg_id") == messages.THIS_REQUEST:
            state["msg_id"] = request_id()
        if twin := known.get(said.comm_id):
            blobs = list(said.buffers)
            twin.publish_msg(said.kind, data=said.data, metadata=said.metadata, buffers=blobs, **said.keys)


_SHOWN: dict[type, Callable[[Page, Any], None]] = {
    messages.Display: Page._display,
    messages.Clear: Page._clear,
    messages.Result: Page._result,
    messages.ShownError: Page._error,
    messages.WidgetSays: Page._widget_says,
}


def keep_ipythons_debugger_closed() -> None:
    """With ``%pdb on``, it would open in the notebook for the error that this cell is about to raise."""
    shell = ipython()
    if shell is None or not shell.call_pdb:
        return

    def restore(*_: object) -> None:
        shell.events.unregister("post_run_cell", restore)
        shell.call_pdb = True

    shell.call_pdb = False
    shell.events.register("post_run_cell", restore)
