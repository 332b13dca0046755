"""IPython in a rank. The fork server makes the shell, once; what it shows goes to the notebook."""

import functools
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

import comm
from comm.base_comm import BaseComm
from IPython.core import page, payloadpage
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.formatters import DisplayFormatter
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from nbddp.messages import THIS_REQUEST, Clear, Display, Result, ShownError, WidgetSays
from nbddp.tracebacks import cut_recursion, drop_our_frames, is_of_several

Tell = Callable[[Any], None]


class _Publisher(DisplayPublisher):
    def publish(  # type: ignore[override]
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        if self.shell.speaks:
            self.shell.tell(Display(data, metadata or {}, transient or {}, update))
        else:
            print(data.get("text/plain", ""), file=sys.stderr)  # in this rank's output

    def clear_output(self, wait: bool = False) -> None:
        if self.shell.speaks:
            self.shell.tell(Clear(wait))


class _Formatter(DisplayFormatter):
    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        """Make text only, where nothing else is shown: a figure isn't drawn on every rank."""
        return super().format(obj, include if self.parent.speaks else {"text/plain"}, exclude)  # type: ignore[no-untyped-call, union-attr]


class _Hook(DisplayHook):
    shell: Any  # IPython's own types are partial

    def write_output_prompt(self) -> None: ...

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shell.value = format_dict.get("text/plain", "")
        if self.shell.speaks:
            self.shell.tell(Result(format_dict, md_dict or {}))


class _Comm(BaseComm):
    """A widget of the rank that speaks talks to the page, through its twin in the notebook kernel."""

    kernel = property(lambda _: InteractiveShell.instance())  # whose parent an Output widget asks for

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        shell: Any = InteractiveShell.instance()
        if shell.speaks:
            blobs = tuple(bytes(each) for each in buffers or ())
            shell.tell(WidgetSays(msg_type, self.comm_id, data or {}, metadata or {}, blobs, keys))


class _History(HistoryManager):
    """Of this session only, since no database is open."""

    def get_tail(self, n: int | None = 10, raw: bool = True, output: bool = False, include_latest: bool = False) -> Any:
        last = len(self.input_hist_raw) - (not include_latest)
        return self.get_range(0, max(last - (n or 10), 1), last, raw, output)


class Shell(InteractiveShell):
    """The shell of a rank.

    Attributes:
        speaks: its displays are shown in the notebook.
        given: the names that every cell has.
        value: the text of the last line's value.
        error: how IPython shows the last error, once :meth:`render` has been called.
        leaving: the user has called ``exit()``.
        hears: it runs a widget's callbacks, and no cell.
    """

    displayhook_class, display_pub_class = Type(_Hook), Type(_Publisher)
    system = InteractiveShell.system_raw  # its output goes where the rank's goes
    tell: Tell
    speaks = False
    given: Mapping[str, Any] = types.MappingProxyType({})
    leaving = hears = False
    value = ""
    error: list[str] | None = None
    _render: Callable[[], None] | None = None

    def enter(self, tell: Tell, look: dict[str, Any], speaks: bool) -> None:
        """Belong to a rank from now on, and show things as the notebook's shell does."""
        self.tell, self.speaks = tell, speaks
        if look:
            comm.create_comm = _Comm
            self.set_hook("show_in_pager", page.as_hook(payloadpage.page), 99)  # type: ignore[no-untyped-call]
        if (look := dict(look)).pop("is_kernel", False):
            self.config["IPKernelApp"] = Config()  # by this transformers and older tqdm know a notebook,
            type(self).__name__, self.kernel = "ZMQInteractiveShell", None  # ... by these rich and pandas,
            # ... and by this tqdm, or by ipykernel.zmqshell, which takes 30 ms to import.
            sys.modules.setdefault("IPython.utils._process_emscripten", types.ModuleType("none"))
        for name, value in look.items():
            if getattr(self, name) != value:
                setattr(self, name, value)

    def render(self) -> list[str]:
        """Render the last error: up to a second of work."""
        while (render := self._render) is not None:  # that of a SyntaxError may leave another one
            self._render = None
            render()
        return self.error or []

    def begin(self, count: int) -> None:
        """Begin a cell."""
        history: Any = self.history_manager
        for inputs in (history.input_hist_parsed, history.input_hist_raw):
            inputs += [""] * (count - len(inputs))  # the notebook has run them
        self.execution_count, self.value, self.error, self._render = count, "", None, None
        self.leaving = self.hears = False
        self.give()

    def give(self) -> None:
        """Define the names that every cell has, unless the user has bound them."""
        for name in self.given.keys() - self.user_ns.keys():
            self.user_ns[name] = self.user_ns_hidden[name] = self.given[name]

    def init_user_ns(self) -> None:
        """Begin with the names of a kernel, also after ``%reset``."""
        super().init_user_ns()  # type: ignore[no-untyped-call]
        self.give()

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        sys.last_type, sys.last_value, sys.last_traceback = found = self._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        drop_our_frames(found[1])
        cut_recursion(found[1])
        if is_of_several(found[1]):  # IPython prints what is being handled, which may be nothing any more
            lines = "".join(traceback.format_exception(found[1])).splitlines()
            self._show(lambda: self._showtraceback(found[0], found[1], lines))
            return
        shown = (*found[:2], found[1].__traceback__)
        render = functools.partial(super().showtraceback, shown, *args, **kwargs)
        if self.call_pdb and isinstance(found[1], Exception):
            print("".join(traceback.format_exception_only(*found[:2])), end="")
            self._render = render
            self.render()  # and opens the debugger
        else:
            self._show(render)

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        sys.last_type, sys.last_value, sys.last_traceback = self._get_exc_info()  # type: ignore[no-untyped-call]
        self._show(functools.partial(super().showsyntaxerror, *args, **kwargs))

    def _show(self, render: Callable[[], None]) -> None:
        """Show an error at once if the cell goes on, as after ``%tb`` or ``%run``; else it's the cell's error."""
        self._render = render
        if self.hears or any(frame.f_globals is self.user_ns for frame, _ in traceback.walk_stack(None)):
            lines, self.error = self.render(), None
            if lines and self.speaks:
                self.tell(ShownError(type(sys.last_value).__name__, str(sys.last_value), tuple(lines)))
            elif lines:
                print("\n".join(lines), file=sys.stderr)  # in this rank's output
        elif threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the cell has failed already

    def _format_exception_for_storage(self, *_: Any, **__: Any) -> str:
        return ""  # it would render each error, up to a second

    def get_parent(self) -> dict[str, Any]:
        """Return the page's request, as far as a rank knows it."""
        return {"header": {"msg_id": THIS_REQUEST}}

    def set_next_input(self, text: str, replace: bool = False) -> None:
        """Offer a cell to the page, as ``%load`` does."""
        payload = {"source": "set_next_input", "text": text, "replace": replace}
        self.payload_manager.write_payload(payload)  # type: ignore[union-attr]

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.error = stb

    def init_history(self) -> None:
        self.history_manager = _History(shell=self, parent=self)
        self.configurables.append(self.history_manager)  # type: ignore[arg-type]

    def init_prompts(self) -> None:
        """Set no ``sys.ps1``, by which Lightning takes a rank for a notebook, and refuses ``strategy="ddp"``."""

    def init_display_formatter(self) -> None:
        self.display_formatter = _Formatter(parent=self)
        self.configurables.append(self.display_formatter)  # type: ignore[arg-type]

    def ask_exit(self) -> None:
        self.leaving = True

    def enable_gui(self, gui: Any = None) -> None: ...


def _ddp(line: str) -> None:
    raise UsageError(f"%ddp {line} must be in its own cell, which runs in the notebook")


def make() -> Shell:
    """Make the shell, run a cell, and render an error: what each rank would otherwise do for its first one."""
    config = Config({"HistoryManager": {"enabled": False}})  # nor a thread that would not survive the fork
    module = types.ModuleType("__main__")
    shell = Shell.instance(config=config, user_module=module, user_ns=vars(module))
    shell.tell = lambda _: None
    shell.register_magic_function(_ddp, "line", "ddp")  # type: ignore[arg-type]
    shell.run_cell("None")  # type: ignore[no-untyped-call]
    shell.run_cell("1 / 0")  # type: ignore[no-untyped-call]
    shell.render()
    sys.last_type = sys.last_value = sys.last_traceback = None
    shell.user_ns.pop("_i", None)
    return shell
