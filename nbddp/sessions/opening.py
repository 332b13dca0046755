"""``nbddp.session``: opens ranks that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbddp.errors import LaunchError
from nbddp.kernel.options import RunOptions, complete, takes_options
from nbddp.kernel.runner import plan_run
from nbddp.sessions.session import OF_A_CALL, Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFUSED = {
    "min_hosts": "a session needs all of its hosts",
    "grow": "a session needs all of its hosts",
    "max_restarts": "restart() starts lost ranks again, when you say so",
}


@takes_options
def session(**options: Unpack[RunOptions]) -> Session:
    """Open a session: ranks that stay, so that one cell goes on where the last one ended.

    As for :func:`nbddp.run` are ``nprocs``, ``device``, ``gpus``, ``backend``, ``init``, ``seed``, ``deterministic``,
    ``env``, ``pg_timeout``, ``start_method``, ``keep_children``, ``oversubscribe`` and ``hosts``. All others are
    options of the calls: :meth:`Session.run`.

    Returns:
        The session, open: a context manager that closes it, or ``close()`` it.

    Raises:
        LaunchError: an option cannot work, a host cannot be used, or a rank ended before it was ready.
    """
    defaults = complete({})
    for name, value in options.items():
        if value != defaults.get(name) and (name in _REFUSED or name in OF_A_CALL):
            advice = _REFUSED.get(name, f"pass {name} to the session.run() of each call")
            raise LaunchError(f"session({name}=...): {advice}")
    opened = Session(*plan_run("session", options, stays=True, attended=False))
    try:
        opened.open()
    except BaseException:
        opened.close()
        raise
    return opened
