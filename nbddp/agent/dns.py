"""Finds out, while torch is imported, whether a DNS server answers on this host; if not, lookups here end after 1 s.

torch looks up the name of each address that it connects to, only to have it for its log (2.13). Where the DNS server
does not answer, each lookup takes 10 s, after which the store's own timeout is over and no rank can start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_ANSWER_S = 1.0
_SHORT = "timeout:1 attempts:1"  # the least that glibc accepts
# Mapped to IPv6, as torch does it: so a hosts file does not have it. Nothing is sent to the address in connect().
_LOOK_UP = """
import os, socket
address = (os.environ.get("SSH_CONNECTION", "").split() + 4 * [""])[2]
if "." not in address:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(("198.51.100.1", 9))
        address = udp.getsockname()[0]
socket.getnameinfo(("::ffff:" + address, 0), 0)
"""


class DnsCheck:
    """A lookup in a process of its own: this one would remember the settings with which it made its first lookup."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        command = [sys.executable, "-S", "-c", _LOOK_UP]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)

    def finish(self) -> None:
        """Shorten the lookups of this process, and of the ranks, if there was no answer."""
        try:
            self._process.wait(max(0.0, self._began + _ANSWER_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.environ.setdefault("RES_OPTIONS", _SHORT)
            self._process.kill()
            self._process.wait()
