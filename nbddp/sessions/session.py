"""``Session``: the handle of ranks that stay."""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.errors import LaunchError
from nbddp.kernel.options import RunOptions, complete, takes_options
from nbddp.kernel.plan import Call, Plan, check_numbers, checked_call, has_post_mortem, is_attended
from nbddp.kernel.run import R, Run
from nbddp.kernel.runner import launch
from nbddp.latch import uninterrupted
from nbddp.launch.interface import Home
from nbddp.payload.known import Known
from nbddp.sessions.names import Names
from nbddp.sessions.ranks import Ranks, SessionSite
from nbddp.text import ranks_text, short
from nbddp.worker import namespace

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

# The others are the session's.
OF_A_CALL = {"timeout", "stall_after", "stop_on_nan", "wait", "show", "name", "to", "pdb"}
_LEAVE_S = 5.0

_open: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """Ranks that stay, made by :func:`nbddp.session`: what a call leaves in ``__main__`` is there for the next one.

    A failure ends the call and not the session: the other ranks are released from their collectives, all meet in a new
    process group, and every DDP model goes on in it. A rank that dies is lost, with its names; :meth:`restart` starts
    another one.

    ``s["x"] = value`` sets a name on all ranks, ``s["x"]`` is rank 0's value, with tensors on the CPU.
    """

    def __init__(self, plan: Plan, home: Home) -> None:
        self._plan = plan
        self._ranks = Ranks(self._plan, home)
        self._cells = 0
        self._closed = False
        self._latest: Run[Any] | None = None
        self._end = weakref.finalize(self, self._ranks.leave)  # at the kernel's exit, or when no variable holds it
        _open.add(self)

    # ------------------------------------------------------------------ calls

    @takes_options
    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        **options: Unpack[RunOptions],
    ) -> Run[R]:
        """Call ``fn(*args, **kwargs)`` on every rank, as :func:`nbddp.run` does, but on the ranks of the session.

        The notebook's variables that the function reads go along if the ranks do not have them yet, or if the notebook
        has bound the name to another object since. The options ``timeout``, ``stall_after``, ``stop_on_nan``, ``wait``,
        ``show``, ``name``, ``to`` and ``pdb`` are those of :func:`nbddp.run`; all others are the session's.

        Args:
            fn: called with the same arguments on every rank.
            ranks: call it on these ranks alone. The others get the variables that it reads, but wait for the next call,
                so a collective of all ranks cannot work in it. ``value`` is then the first one's.

        Returns:
            The run, finished unless ``wait=False``.

        Raises:
            LaunchError: an option is the session's, there is no such rank, another call goes on, a rank has been lost,
                or the session is closed. Otherwise as :func:`nbddp.run`.
        """
        call = checked_call(fn, args, kwargs, options["name"])
        if ranks is not None:
            call = dataclasses.replace(call, fn=namespace.OnRanks(self.checked(ranks), call.fn))
        return self.launch(call, options, ranks=ranks)

    def checked(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        """Return these ranks in order; None: all. Raises LaunchError if the session does not have one of them."""
        if ranks is None:
            return tuple(range(self.nprocs))
        if not isinstance(ranks, (list, tuple, range)) or not all(type(rank) is int for rank in ranks) or not ranks:
            raise LaunchError(f"ranks is a list of rank numbers, e.g. ranks=[0], not {short(ranks)}")
        for rank in ranks:
            if not 0 <= rank < self.nprocs:
                raise LaunchError(f"there is no rank {rank}: the session has ranks 0 to {self.nprocs - 1}")
        return tuple(sorted(set(ranks)))

    def launch(
        self, call: Call, options: RunOptions, *, ranks: Sequence[int] | None = None, **planned: Any
    ) -> Run[Any]:
        """Start a checked call; ``planned`` are fields of its ``Plan``. Raises the errors of :meth:`run`."""
        _refuse_options_of_the_session(options)
        check_numbers(timeout=options["timeout"], stall_after=options["stall_after"])
        self._check_that_it_can_run()
        self._cells += 1
        plan = self._plan_for(
            call.name,
            timeout_s=options["timeout"],
            stall_after_s=options["stall_after"],
            stop_on_nan=bool(options["stop_on_nan"]),
            summary=f"session · {self._summary_of(ranks)} · call {self._cells}",
            ranks=None if ranks is None else self.checked(ranks),
            attended=is_attended(options),
            post_mortem=has_post_mortem(options),
            **planned,
        )
        self._latest = launch(plan, self._site(plan), call, options)
        return self._latest

    def _plan_for(self, name: str, **planned: Any) -> Plan:
        return dataclasses.replace(self._plan, name=name, sent=self._ranks.sent, **planned)

    def _ask(self, fn: Callable[..., Any], *args: Any, only: Sequence[int] | None = None) -> list[Any]:
        """Call one of our functions on every rank, or on some, out of sight. Returns what these returned."""
        plan = self._plan_for("session")
        options = complete({"show": False})
        return launch(plan, self._site(plan, only), Call("session", fn, args, {}), options, remember=False).values

    def _site(self, plan: Plan, only: Sequence[int] | None = None) -> SessionSite:
        return SessionSite(plan, self._ranks, only, owner=self)

    def _left(self) -> list[int]:
        return [rank for rank in range(self.nprocs) if rank not in self._ranks.lost]

    def _check_that_it_lives(self) -> None:
        if self._closed:
            raise LaunchError("this session is closed; nbddp.session() or %ddp open starts another one")
        if self._ranks.in_call:
            raise LaunchError(f"{self._ranks.in_call} is still running in this session; wait() for it or stop() it")
        self._ranks.find_lost()
        if self._ranks.crew is None or not self._left():
            raise LaunchError("the ranks of this session have ended; restart() starts new ones")

    def _check_that_it_can_run(self) -> None:
        self._check_that_it_lives()
        for rank, why in self._ranks.lost.items():
            advice = "restart() starts it again, restart(names=[...]) with names of another rank"
            raise LaunchError(f"rank {rank} is lost: {why}. {advice}")

    # ------------------------------------------------------------------ names

    @property
    def nprocs(self) -> int:
        """Number of ranks."""
        return self._plan.nprocs

    @property
    def closed(self) -> bool:
        """Whether the session has been closed."""
        return self._closed

    @property
    def summary(self) -> str:
        """``4 ranks · gloo``, ``4 ranks on 2 hosts · gloo``."""
        hosts = f" on {len(self._plan.shares)} hosts" if self._plan.shares else ""
        return f"{self.nprocs} ranks{hosts} · {self._plan.backend or self._plan.device}"

    def _summary_of(self, ranks: Sequence[int] | None) -> str:
        if ranks is None:
            return self.summary
        return f"{ranks_text(self.checked(ranks))} of {self.summary}"

    @property
    def sent(self) -> Known:
        """The notebook's variables that the ranks have."""
        return self._ranks.sent

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        return [worker.pid for worker in self._ranks.workers]

    def __setitem__(self, name: str, value: Any) -> None:
        self._check_that_it_can_run()
        self._ask(namespace.assign, {name: value})
        self._ranks.sent.add({name: value})

    def __getitem__(self, name: str) -> Any:
        """Return the value of this name on rank 0, or if that is lost on the lowest rank left; tensors on the CPU.

        Raises:
            RankError: the rank does not have it.
        """
        self._check_that_it_lives()
        return self._ask(namespace.fetch, name, only=self._left()[:1])[0]

    def values(self, name: str) -> list[Any]:
        """Return each rank's value of this name, by rank, with tensors on the CPU."""
        self._check_that_it_can_run()
        return self._ask(namespace.fetch, name)

    def names(self) -> Names:
        """Return what the ranks' names are: type, shape, device, size, and whether the ranks' values differ."""
        self._check_that_it_can_run()
        return Names(self._ask(namespace.names))

    def completions(self, text: str) -> list[str]:
        """Return the names on the ranks that begin like this, or after a dot the attributes; [] during a call."""
        if self._closed or self._ranks.in_call or not self._left() or self._ranks.crew is None:
            return []
        [found] = self._ask(namespace.complete, text, only=self._left()[:1])
        return list(found)

    def check(self, name: str) -> list[int]:
        """Return the ranks whose value of this name differs from rank 0's, by its bits; [] if all are equal.

        Raises:
            LaunchError: the value cannot be compared, because it does not pickle.
        """
        self._check_that_it_can_run()
        digests = self._ask(namespace.digest, name)
        if None in digests:
            raise LaunchError(f"{name} cannot be compared between ranks: it does not pickle")
        return [rank for rank, digest in enumerate(digests) if digest != digests[0]]

    def sync(self, name: str, src: int = 0) -> None:
        """Give all ranks the value of rank ``src``: a model's parameters and buffers, a tensor or another object."""
        self._check_that_it_can_run()
        if not 0 <= src < self.nprocs:
            raise LaunchError(f"src={src}: the session has ranks 0 to {self.nprocs - 1}")
        self._ask(namespace.sync, name, src)

    def free(self, *names: str) -> None:
        """Delete these names on all ranks, and give their memory back."""
        self._check_that_it_can_run()
        self._ask(namespace.free, names)
        self._ranks.sent.forget(names)

    def reset(self) -> None:
        """Delete all names on all ranks."""
        self._check_that_it_can_run()
        self._ask(namespace.reset)
        self._ranks.sent = Known()

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Start the ranks. Raises the errors of :func:`nbddp.run`."""
        self._ask(namespace.nothing)

    def restart(self, names: Sequence[str] = ()) -> None:
        """Start the lost ranks again; all of them if none is lost, or if their host was: then every other name is gone.

        Args:
            names: that the new ranks get from the lowest rank that is left.

        Raises:
            LaunchError: a host was lost and is not back.
        """
        if self._closed:
            raise LaunchError("this session is closed; nbddp.session() or %ddp open starts another one")
        if self._ranks.in_call:
            raise LaunchError(f"{self._ranks.in_call} is still running in this session; stop() it first")
        self._ranks.find_lost()
        left = self._left() if self._ranks.crew is not None else []
        if names and not left:
            raise LaunchError(f"no rank is left that has {', '.join(names)}; restart() starts new ones without names")
        lost_host = next((worker.lost for worker in self._ranks.workers if worker.lost), "")
        if lost_host and not self._ranks.home.can_restart():
            raise LaunchError(
                f"{lost_host}. Until it is back its ranks cannot be started again, and s[name] still works"
            )
        kept = {name: self._ask(namespace.fetch, name, only=left[:1])[0] for name in names}
        if lost_host or not self._ranks.lost or not left:
            self._ranks.end()
        self.open()
        for name, value in kept.items():
            self._ask(namespace.assign_where_missing, {name: value})

    def close(self) -> None:
        """End the session; a call that goes on is stopped. A second call has no effect."""
        if not self._closed:
            if self._latest is not None:
                self._latest.stop(0)
            self._closed = True
            uninterrupted(functools.partial(self._ranks.dismiss, _LEAVE_S), "nbddp-close")
            self._end.detach()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<Session: closed>"
        lost = f", lost: {', '.join(map(str, sorted(self._ranks.lost)))}" if self._ranks.lost else ""
        return f"<Session: {self.nprocs} ranks on {self._plan.device}, {self._cells} calls{lost}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Session stays in the notebook")


def _refuse_options_of_the_session(options: RunOptions) -> None:
    defaults: Mapping[str, Any] = complete({})
    for name, value in options.items():
        if name not in OF_A_CALL and value != defaults[name]:
            raise LaunchError(f"{name} belongs to the session: pass it to nbddp.session() or %ddp open")


def close_all() -> None:
    """Close every session of this notebook kernel."""
    for session in list(_open):
        session.close()


def _disown_all() -> None:
    for session in list(_open):
        session._end.detach()
        session._ranks.disown()
    _open.clear()


os.register_at_fork(after_in_child=_disown_all)
