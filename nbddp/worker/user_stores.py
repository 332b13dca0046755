"""Changes the stores that torch creates for the user's own process groups.

A store at a loopback address listens on loopback only. A second group at the same address gets a key prefix: with the
first group's keys it would connect to its addresses, and wait forever.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections import Counter
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

# For a store that gets a socket that listens already: torch 2.6 takes it only without libuv, 2.8 also with it.
ON_SOCKET: dict[str, Any] = {} if torch.__version__ >= (2, 8) else {"use_libuv": False}  # type: ignore[operator]


def listen_on_loopback() -> None:
    """Replace the store, which listens on all interfaces, in torch's ``env://`` and ``tcp://`` handlers."""
    # From sys.modules, because torch.distributed.rendezvous is also a function (torch 2.6 to 2.15).
    handlers: Any = sys.modules["torch.distributed.rendezvous"]
    handlers.TCPStore = _store


def listen_on_all_interfaces() -> None:
    """From now on listen as torch does, because ranks on other hosts use the store.

    A PyTorchJob's MASTER_ADDR is ``localhost`` on the master, and the master's name on workers.
    """
    global _only_loopback
    _only_loopback = False


_only_loopback = True
_made: Counter[tuple[str, int]] = Counter()  # groups so far, by the address of their store


def _store(host_name: str, port: int, *, is_master: bool = False, **options: Any) -> Store:
    listener = _listener(host_name, port) if is_master and _only_loopback else None
    if listener is None:
        store = TCPStore(host_name, port, is_master=is_master, **options)
    else:
        with listener:
            options |= {"is_master": True, "master_listen_fd": listener.fileno(), **ON_SOCKET}
            store = TCPStore(host_name, port, **options)
            listener.detach()  # the store closes it
    earlier = _made[host_name, port]
    _made[host_name, port] += 1
    return PrefixStore(f"group {earlier}", store) if earlier else store


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens at a loopback address; None if torch should open the socket.

    torch opens it at any other address, which other machines have to reach, and at a port in use: torch shares a store
    of this process; if another process has the port, torch's error text is best.
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
