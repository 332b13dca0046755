"""A case drawn from its seed: its runs, its fault and when; and which outcomes are legal, within which time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.programs import ENDLESS_S

# What is promised (README, DESIGN 4), and what a busy machine may add to it.
ERROR_S = 0.5  # a rank fails or dies -> the error is in the cell
INTERRUPT_S = 1.0  # of code that can be interrupted; otherwise the grace and 1 s
WORKER_SEEN_S = 6.0  # torch looks for dead DataLoader workers every 5 s
KERNEL_GONE_S = 2.0
RESTART_S = 8.0  # Jupyter gives a busy kernel 2.5 s before SIGTERM, and 2.5 s more
BUSY_S = 1.5
HANGS_S = 40.0

# Programs that a KeyboardInterrupt does not end at once: in C, in a collective, or deaf.
_STUBBORN = {"gil", "swallow", "collective", "plain", "restarts", "snapshots", "failing", "uneven"}
_ENDLESS = ["plain", "workers", "gil", "swallow", "collective", "uneven", "restarts"]
_ALL = [*_ENDLESS, "payload", "result", "flood", "failing", "spawned", "several"]
_OFTEN = {"payload": 0.5, "result": 0.5, "flood": 0.5}  # the expensive ones less


@dataclass(frozen=True)
class Fault:
    """A kind of harm.

    Attributes:
        weight: how often it is drawn.
        programs: that it can be done to.
        ends: does it end every run that is under way, so that the run need not end by itself?
        kernel: ``shared`` (one for many cases), ``small`` (tiny disks), ``limited`` (a memory cgroup),
            ``notebook`` (a real Jupyter kernel).
        limit_s: from the fault to the error, beside what a busy machine adds.
    """

    weight: float
    programs: list[str]
    ends: bool = False
    kernel: str = "shared"
    limit_s: Callable[[Case], float] = lambda case: ERROR_S


def _interrupted_within(case: Case) -> float:
    # An interrupt in torch's code can leave a DataLoader worker that is asked to end without the request; torch then
    # joins it for 5 s. Three processes of torch alone did so in 5 of 200 interrupts.
    slow = any(run["program"] in {*_STUBBORN, "workers"} for run in case.runs)
    return INTERRUPT_S + (case.grace_s if slow else 0.0)


def _stopped_within(case: Case) -> float:
    return case.grace_s + 1.0


def _notebook(weight: float, limit_s: float = ERROR_S) -> Fault:
    return Fault(
        weight, ["cell", "run", "background", "stubborn", "session"], kernel="notebook", limit_s=lambda case: limit_s
    )


_BLOCKING = [p for p in _ALL if p != "several"]

FAULTS: dict[str, Fault] = {
    "none": Fault(1, _ALL),
    "rank SIGKILL": Fault(10, _ALL, ends=True),
    "rank SIGTERM": Fault(6, _ALL, ends=True),
    "rank SIGSTOP": Fault(4, _ALL, ends=True, limit_s=_stopped_within),
    "rank SIGSTOP, SIGCONT": Fault(4, _ALL),
    # Without memory for a thread torch's parent polls for a batch that no worker was asked for.
    "rank RLIMIT_AS": Fault(
        4,
        [p for p in _ALL if p != "failing"],
        limit_s=lambda case: WORKER_SEEN_S if case.label == "workers" else ERROR_S,
    ),
    "fork server SIGKILL": Fault(6, _ALL),  # one that dies before its first fork is replaced
    "DataLoader worker SIGKILL": Fault(5, ["workers"], ends=True, limit_s=lambda case: WORKER_SEEN_S),
    "kernel SIGKILL": Fault(4, _ALL, ends=True, limit_s=lambda case: KERNEL_GONE_S),
    "interrupt, kill": Fault(5, _ALL, ends=True, limit_s=_interrupted_within),
    "interrupt, killpg": Fault(5, _ALL, ends=True, limit_s=_interrupted_within),
    "5 interrupts, kill": Fault(5, _ALL, ends=True, limit_s=lambda case: INTERRUPT_S),
    "5 interrupts, killpg": Fault(5, _ALL, ends=True, limit_s=lambda case: INTERRUPT_S),
    "interrupt at a line": Fault(6, _BLOCKING, limit_s=_interrupted_within),
    "run.stop()": Fault(6, _ALL, ends=True, limit_s=_stopped_within),
    "panel's Stop": Fault(4, _ALL, ends=True, limit_s=_stopped_within),
    "few fds, from the start": Fault(4, _ALL, limit_s=lambda case: 5.0),
    "few fds, from some moment": Fault(3, _ALL, limit_s=lambda case: 5.0),
    "disk full for snapshots": Fault(4, ["snapshots", "restarts"], kernel="small"),
    "disk full for output": Fault(4, ["flood", "plain", "restarts", "failing"], kernel="small"),
    "/dev/shm of 64 kB": Fault(4, _ALL, kernel="small", limit_s=lambda case: WORKER_SEEN_S),
    "memory.max of a cgroup": Fault(3, ["hog"], kernel="limited", limit_s=lambda case: 10.0),
    # The program fills that memory first; three lanes share the cores.
    "memory, RLIMIT_AS in the function": Fault(3, ["hog"], limit_s=lambda case: 10.0 + case.runs[0]["limit"] / 1e8),
    "notebook: interrupt, kill": _notebook(1, INTERRUPT_S + 0.5),  # the grace that it has there
    "notebook: interrupt, killpg": _notebook(1, INTERRUPT_S + 0.5),
    "notebook: 5 interrupts, killpg": _notebook(1, INTERRUPT_S),
    "notebook: rank SIGKILL": _notebook(1, ERROR_S),
    "notebook: panel's Stop": _notebook(1.5, 1.5),
    "notebook: page closed": _notebook(1.5),
    "notebook: client gone": _notebook(1),
    "notebook: restart": _notebook(1.5, RESTART_S),
    "notebook: shutdown_request": _notebook(1, RESTART_S),
    "notebook: SIGKILL": _notebook(1, KERNEL_GONE_S),
}


@dataclass
class Case:
    """One fault and what it is done to.

    Attributes:
        label: the kind of run, for the table.
        runs: for the driver; all ``nprocs`` ranks of each start at once.
        target: which run is hurt.
        rank: which rank of it.
        fraction: of the run's life at which the fault comes; -1: before its first process.
        extra_s: beside that, near one of the ends.
        pauses_s: between interrupts, or from SIGSTOP to SIGCONT.
        slowness: of the machine meanwhile; limits are stretched by it.
        options: of the command that draws it again.
    """

    seed: str
    fault: str
    label: str
    runs: list[dict[str, Any]]
    target: int
    rank: int
    fraction: float
    extra_s: float
    pauses_s: list[float]
    grace_s: float
    number: int
    at_line: int = 0
    slowness: float = 1.0
    options: str = ""
    applied: dict[str, Any] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        return FAULTS[self.fault].kernel

    @property
    def limit_s(self) -> float:
        return FAULTS[self.fault].limit_s(self)


def draw(seed: str, only: str = "", kernels: set[str] | None = None) -> Case:
    """The case of that seed: always the same."""
    rng = random.Random(seed)
    possible = {fault.kernel for fault in FAULTS.values()} if kernels is None else kernels
    names = [n for n, f in FAULTS.items() if only.lower() in n.lower() and f.kernel in possible]
    if not names:
        raise SystemExit(f"no fault is called {only!r}; there are: {', '.join(FAULTS)}")
    fault = rng.choices(names, [FAULTS[name].weight for name in names])[0]
    kind = FAULTS[fault]
    label = rng.choices(kind.programs, [_OFTEN.get(p, 1.0) for p in kind.programs])[0]
    endless = kind.ends and label in _ENDLESS and rng.random() < 0.4
    if label == "restarts" and "rank" in fault:
        endless = False  # it starts again, and goes on to its end
    seconds = ENDLESS_S if endless else rng.choice([0.0, 0.05, 0.1, 0.2, 0.3])
    parts = rng.choices([p for p in _ALL if p not in ("several", "spawned")], k=rng.choice([2, 3]))
    runs = [_run(rng, part, seconds) for part in (parts if label == "several" else [label])]
    fraction, extra_s = _moment(rng)
    case = Case(
        seed=seed,
        fault=fault,
        label=label,
        runs=runs,
        target=rng.randrange(len(runs)),
        rank=rng.randrange(4),
        fraction=fraction,
        extra_s=extra_s,
        pauses_s=[rng.choice([0.0, 0.005, 0.03, 0.1]) * rng.random() for _ in range(4)],
        grace_s=rng.choice([0.0, 0.2, 0.4, 0.4, 5.0 if rng.random() < 0.2 else 0.3]),
        number=rng.randrange(45),
        at_line=int(10 ** rng.uniform(0, 3.1)) if fault == "interrupt at a line" else 0,
        options=(f" --only '{only}'" if only else "") + (" --no-notebooks" if "notebook" not in possible else ""),
    )
    if any(run["seconds"] == ENDLESS_S for run in runs):  # and all of them end by the fault
        for run in runs:
            run["seconds"] = ENDLESS_S if run is runs[case.target] or "interrupt" in fault else 0.2
    if "RLIMIT_AS in the function" in fault:
        runs[0]["limit"] = rng.choice([1, 50, 300, 1000]) * 1_000_000
    if label == "uneven" and endless:  # not the one that has reported: it may die
        case.rank = (runs[0]["token"] + 1) % runs[0]["nprocs"]
    if kind.ends and "interrupt" in fault and case.grace_s == 0.0:
        case.grace_s = 0.2  # an interrupt's grace; a stop may have none
    return case


def at_line(number: int) -> Case:
    """An interrupt at that line of the kernel's main thread, of a short run: for going through them all."""
    case = draw(f"line:{number}", "interrupt at a line", {"shared"})
    case.label, case.at_line, case.grace_s, case.target = "plain", number, 0.4, 0
    case.runs = [{"program": "plain", "nprocs": 2, "token": 1000 + number, "seconds": 0.02}]
    return case


def _run(rng: random.Random, program: str, seconds: float) -> dict[str, Any]:
    token = rng.randrange(1000, 100_000)
    endless = seconds == ENDLESS_S and program in _ENDLESS
    run = {"program": program, "nprocs": rng.choice([2, 2, 2, 3]), "token": token}
    run["seconds"] = seconds if endless or seconds < ENDLESS_S else 0.2
    if program == "hog":
        run |= {"how": rng.choice(["torch", "bytes", "floats"]), "limit": 0}
    return run


def _moment(rng: random.Random) -> tuple[float, float]:
    """Uniform over the life, or near one of its ends: that is where races live."""
    where = rng.random()
    if where < 0.05:
        return -1.0, 0.0
    if where < 0.3:
        return 0.0, rng.uniform(0.0, 0.05)
    if where < 0.5:
        return 1.0, rng.uniform(-0.05, 0.03)
    return rng.random(), 0.0


# ---------------------------------------------------------------------------- what may come of it


def judge(case: Case, reply: dict[str, Any]) -> list[str]:
    """What is wrong with how the runs of this case ended; nothing, if nothing is."""
    wrong = []
    for index, (run, outcome) in enumerate(zip(case.runs, reply["outcomes"])):
        if _is_natural(run, outcome):
            continue
        hit = index == case.target or case.fault in _HIT_ALL or "interrupt" in case.fault
        verdict = _verdict(case, run, outcome) if hit and case.applied else "nothing was done to this run"
        if verdict:
            wrong.append(f"run {index} ({run['program']}): {verdict}")
        elif late := _late(case, outcome):
            wrong.append(f"run {index} ({run['program']}): {late}")
    return wrong


_HIT_ALL = {
    "fork server SIGKILL",
    "few fds, from the start",
    "few fds, from some moment",
    "disk full for output",
    "/dev/shm of 64 kB",
}


def _is_natural(run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    """Its end without any fault: the value is checked, so nobody can have made it up."""
    if run["program"] == "failing":
        return (
            outcome.get("error") == "RankError"
            and outcome["cause_text"] == f"by itself {run['token']}"
            and outcome["rank"] == run["token"] % run["nprocs"]
        )
    return bool(outcome.get("good"))


def _late(case: Case, outcome: dict[str, Any]) -> str:
    took = max(0.0, outcome["ended"] - case.applied["at"])
    outcome["took"] = took
    limit = (case.limit_s + BUSY_S) * case.slowness
    stretched = f"({case.limit_s} + {BUSY_S}) * {case.slowness:.1f} s"
    return f"the error came after {took:.2f} s; the limit is {stretched}" if took > limit else ""


def _verdict(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> str:
    if "error" not in outcome:
        return "wrong value"
    check = _LEGAL.get(case.fault)
    if check is None or not check(case, run, outcome):
        return "this end is not legal"
    return ""


def _names(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    """Does the error name the rank that was hurt?"""
    rank = case.applied.get("rank")
    return rank is None or outcome["rank"] == rank or f"rank {rank} " in outcome["text"].split("\n")[0]


def _died(signal_name: str) -> Callable[[Case, dict[str, Any], dict[str, Any]], bool]:
    def check(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
        if run["program"] == "restarts" or not _names(case, run, outcome):
            return False
        if outcome["error"] == "LaunchError":
            return "before it was ready" in outcome["text"]
        return "RankDied" in outcome["is"] and outcome["signal"] == signal_name

    return check


def _stopped(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    return outcome["state"] == "stopped" and outcome["error"] in ("KeyboardInterrupt", "stopped")


def _interrupted(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    own_failure_first = run["program"] == "failing" and outcome["state"] == "failed"
    ended = outcome["state"] in ("stopped", "finished", "never started") or own_failure_first
    if case.at_line and outcome["state"] == "starting":  # made, and not yet begun: the next look says if it goes on
        ended = True
    return outcome["error"] == "KeyboardInterrupt" and ended


def _with_the_server(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    if run["program"] == "restarts":
        return False
    if outcome["error"] == "SpawnExited":  # worded as torch words it
        return "exit code 255" in outcome["text"]
    return outcome["error"] in ("LaunchError", "RankDied") and "fork server" in outcome["text"]


def _worker_died(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    # It dies before a batch's shared memory was fetched from it: then that says so.
    unfetched = outcome["cause"] in ("ConnectionResetError", "ConnectionRefusedError", "EOFError", "FileNotFoundError")
    # torch's signal handler raises between any two instructions, in threading's Thread.start too, which then fails of
    # a KeyError of its own.
    about = "DataLoader worker" in outcome["text"] + outcome.get("raised_during", "") or unfetched
    return _names(case, run, outcome) and outcome["error"] == "RankError" and about


def _no_memory(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    ours = {"RankError", "RankDied", "LaunchError", "PayloadError"} & set(outcome["is"])
    return bool(ours) and _names(case, run, outcome)


def _no_fds(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    about = any(words in outcome["text"] for words in ("Too many open files", "limit of open files"))
    return outcome["error"] in ("LaunchError", "PayloadError") and about


def _no_space(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    return outcome["error"] == "RankError" and outcome["rank"] == 0


def _no_shm(case: Case, run: dict[str, Any], outcome: dict[str, Any]) -> bool:
    return run["program"] == "workers" and outcome["error"] == "RankError"


_LEGAL: dict[str, Callable[[Case, dict[str, Any], dict[str, Any]], bool]] = {
    "rank SIGKILL": _died("SIGKILL"),
    "rank SIGTERM": _died("SIGTERM"),
    "rank SIGSTOP": _stopped,
    "rank RLIMIT_AS": _no_memory,
    "fork server SIGKILL": _with_the_server,
    "DataLoader worker SIGKILL": _worker_died,
    "interrupt, kill": _interrupted,
    "interrupt, killpg": _interrupted,
    "5 interrupts, kill": _interrupted,
    "5 interrupts, killpg": _interrupted,
    "interrupt at a line": _interrupted,
    "run.stop()": _stopped,
    "panel's Stop": _stopped,
    "few fds, from the start": _no_fds,
    "few fds, from some moment": _no_fds,
    "disk full for snapshots": _no_space,
    "/dev/shm of 64 kB": _no_shm,
    "memory.max of a cgroup": _no_memory,
    "memory, RLIMIT_AS in the function": _no_memory,
}
