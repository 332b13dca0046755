"""Worker side. The stores that torch makes for a group of the user's own.

One hosted at a loopback address listens there and nowhere else. A second group at the same address finds none of
the first one's keys: it would connect to the first one's addresses, and wait for ever.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections import Counter
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]


def keep_stores_at_home() -> None:
    """Change what torch's handlers of ``env://`` and ``tcp://`` make on rank 0: torch listens on all interfaces."""
    # By its full name: torch.distributed.rendezvous is also a function (torch 2.6 to 2.13).
    handlers: Any = sys.modules["torch.distributed.rendezvous"]
    handlers.TCPStore = _store


def let_other_hosts_in() -> None:
    """From now on, do as torch does: ranks on other hosts use the store, whatever its host calls itself.

    A PyTorchJob's master is told ``localhost``, the workers are told its name.
    """
    global _at_home
    _at_home = False


_at_home = True
_made: Counter[tuple[str, int]] = Counter()  # groups so far, by their store's address


def _store(host_name: str, port: int, **options: Any) -> Store:
    store = _tcp_store(host_name, port, **options)
    earlier = _made[host_name, port]
    _made[host_name, port] += 1
    return PrefixStore(f"group {earlier}", store) if earlier else store


def _tcp_store(host_name: str, port: int, *, is_master: bool = False, **options: Any) -> TCPStore:
    listener = _listener(host_name, port) if is_master and _at_home else None
    if listener is None:
        return TCPStore(host_name, port, is_master=is_master, **options)
    with listener:
        store = TCPStore(host_name, port, is_master=True, **{**options, "master_listen_fd": listener.fileno()})
        listener.detach()  # the store closes it
    return store


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens there; None where torch is to do as it always does.

    That is for an address of a network, which other machines are to reach, and for a port in use: by an
    earlier store of this process, which torch then shares, or by somebody else's, which torch words best.
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
        if not all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found):
            return None
        family, _, _, _, address = min(found, key=lambda entry: entry[0])  # 127.0.0.1 before ::1
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)  # as torch does
        except OSError:
            listener.close()
            raise
        return listener
    return None
