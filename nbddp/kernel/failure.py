"""Which rank failed first, and the error that the cell raises for it."""

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any

from nbddp.errors import CRASHES, LaunchError, NbddpError, NodeLost, PayloadError, RankDied, RankError, signal_name
from nbddp.kernel.advice import advice
from nbddp.kernel.crew import Crew
from nbddp.kernel.rank_state import RankState
from nbddp.process import dumps
from nbddp.tracebacks import hide_libraries

_TIMED_OUT = re.compile(r"tim(ed|e) ?-?out", re.IGNORECASE)
_NCCL_TIMEOUT = "collective operation timeout"  # in the text with which NCCL's watchdog aborts
_NOT_IMPORTED = re.compile(r"^(ModuleNotFound|Import|Attribute)Error|No module named")
_NUMBER = re.compile(r"\d+")
_LAST_LINES = 10
_OUT_OF_MEMORY = (
    "was killed by the system's OOM killer: the machine or container ran out of memory. "
    "Try a smaller batch, fewer ranks, or fewer DataLoader workers"
)


def first(ranks: Iterable[RankState]) -> RankState:
    """Return the rank that failed first in time: broken connections follow from another rank's end.

    A rank that ended after it had reported success is the cause if all failures are broken connections.
    """
    ended = [rank for rank in ranks if rank.failed or not rank.alive]
    return min(ended, key=lambda rank: (rank.is_consequence, not rank.failed, rank.failed_at))


def is_timeout(rank: RankState) -> bool:
    """Return whether it timed out waiting for the others, perhaps; NCCL's watchdog then aborts the process."""
    if failure := rank.failure:
        return failure.phase == "call" and _TIMED_OUT.search(failure.text) is not None
    return rank.exitcode == -signal.SIGABRT and _NCCL_TIMEOUT in rank.output.text(rank.printed_before)


def all_alike(ranks: Sequence[RankState]) -> bool:
    """Return whether every rank raised the same error, up to the numbers in its text: a rank, a device, a size."""
    texts = [rank.failure.text for rank in ranks if rank.failure is not None]
    return len(texts) == len(ranks) and len({_NUMBER.sub("0", text) for text in texts}) == 1


def error_of(rank: RankState, name: str, crew: Crew, where: str = "") -> NbddpError:
    """Return the error that the cell raises for this rank's failure.

    Args:
        name: of the function.
        where: where all ranks were, in one line, if a collective timed out; else "".
    """
    failure, size, host = rank.failure, len(crew.ranks), rank.host or None
    if rank.lost:
        return NodeLost(rank.host, rank.lost)
    if failure is None:  # a session's rank may die after its report
        assert rank.exitcode is not None
        printed, stack = rank.output.text(rank.printed_before), ""
        if signal_name(rank.exitcode) in CRASHES:  # otherwise a crash in the output is that of a child
            printed, stack = dumps.split_crash(printed)
        last = "\n".join(printed.rstrip("\n").split("\n")[-_LAST_LINES:])
        why = _OUT_OF_MEMORY if rank.out_of_memory else ""
        if rank.exitcode >= 0 and not rank.interruptible:  # before the function
            unpacking = f" while unpacking {name} and its data" if rank.ready else ""
            why = f"ended with exit code {rank.exitcode}{unpacking}"
        died = RankDied(rank.number, size, rank.exitcode, why=why, stack=stack, last_lines=last, where=where, host=host)
        return died if rank.ready else LaunchError(f"before it was ready, {died}")
    if failure.code is not None:
        text = f" ({failure.text})" if failure.text else ""
        return RankDied(rank.number, size, failure.code, why=f"called sys.exit({failure.code}){text}", host=host)
    if failure.phase == "setup":
        text = ". ".join(filter(None, [failure.text, advice(failure.text, crew.device)]))
        return LaunchError(f"rank {rank.number} failed during setup: {text}")
    if failure.phase == "unpack":
        why = ""
        if _NOT_IMPORTED.search(failure.text):
            why = ". The modules that they use must be importable in a new process, from the notebook's sys.path"
        elif failure.kind in ("TypeError", "KeyError", "RecursionError"):
            why = ". One of the objects can't be unpickled: send plain data instead, such as dict(config)"
        return PayloadError(f"rank {rank.number} couldn't unpickle {name} and its data: {failure.text}{why}")
    alike, names = all_alike(crew.ranks), dict(failure.names)
    cause = _cause(rank, crew.definitions, failure.text)
    known = advice(failure.text, crew.device, rank.number, alike=alike)
    return RankError(rank.number, size, cause, where=where, host=host, alike=alike, advice=known, locals=names)


def _cause(rank: RankState, definitions: Sequence[Any], text: str) -> BaseException:
    """Return the exception that a rank raised, or a stand-in if it can't be unpickled here."""
    try:
        cause: BaseException = rank.value(definitions)
        hide_libraries(cause)
        return cause
    except Exception:  # its class cannot be imported here
        return RuntimeError(text)
