"""Runs one case after the other: the fault, how the runs ended, what is left; and prints the table at the end."""

from __future__ import annotations

import contextlib
import json
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.faults import apply, cases
from tests.faults.cases import FAULTS, HANGS_S, KERNEL_GONE_S, Case
from tests.faults.kernels import DriverKernel, Hangs, may_limit_memory, may_mount
from tests.faults.pace import Pace, Patience

_NEXT_RUN_S = 12.0  # torch asks the name server about 127.0.0.1: a lost answer costs 5 s
_NEW_SERVER_S = 20.0  # which imports torch
_GONE_S = 3.0
_LIFE_S = {"payload": 0.25, "result": 0.5, "flood": 0.4, "workers": 0.2, "several": 0.4}  # beside what it sleeps
_ENDLESS_FRACTION_S = 0.4  # of a run without an end, this much is its life
_TORCHS_PROBE = re.compile(r"(tmp)?[a-z0-9_]{8}")  # tempfile itself looks first where it can write, without "tmp"


@dataclass
class Verdict:
    """What came of a case. ``wrong`` is empty when all was as it has to be."""

    case: Case
    wrong: list[str]
    evidence: dict[str, Any] = field(default_factory=dict)
    took_s: float | None = None  # from the fault to the last error that it caused
    seconds: float = 0.0


def able() -> dict[str, str]:
    """Which kernels this machine can have; by name, and why not."""
    able = {"shared": "", "notebook": ""}
    able["small"] = "" if may_mount() else "no mounts of its own (not root)"
    able["limited"] = "" if may_limit_memory() else "no memory cgroup of its own may be made"
    return able


class Suite:
    """Keeps one kernel of each sort for as long as it lives."""

    def __init__(self) -> None:
        self._kernels: dict[str, Any] = {}
        self._spares: dict[str, DriverKernel] = {}  # starting, while others work
        self._pace = Pace()

    def __enter__(self) -> Suite:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for kernel in [*self._kernels.values(), *self._spares.values()]:
            kernel.close()
        self._pace.close()

    def kernel(self, sort: str) -> Any:
        if sort not in self._kernels:
            if sort == "notebook":
                from tests.faults.notebooks import NotebookKernel

                self._kernels[sort] = NotebookKernel()
            else:
                self._kernels[sort] = self._spares.pop(sort, None) or DriverKernel(sort)
                self._kernels[sort].wait_until_ready()
        return self._kernels[sort]

    def run(self, case: Case) -> Verdict:
        began = time.monotonic()
        if case.kernel == "notebook":
            from tests.faults.notebooks import run_case

            verdict = run_case(self.kernel("notebook"), case)
        else:
            verdict = self._run_in_driver(case)
        verdict.seconds = time.monotonic() - began
        if verdict.wrong or verdict.evidence.get("kernel") == "gone":
            self._drop(case.kernel)  # the next case shall not suffer from this one
        return verdict

    def prepare_for(self, coming: list[Case]) -> None:
        """Have the kernel's successor start while there is still time."""
        if "shared" not in self._spares and any(case.fault == "kernel SIGKILL" for case in coming):
            self._spares["shared"] = DriverKernel("shared")

    def _drop(self, sort: str) -> None:
        if sort in self._kernels:
            self._kernels.pop(sort).close()

    # ------------------------------------------------------------------ in a driver

    def _run_in_driver(self, case: Case) -> Verdict:
        kernel: DriverKernel = self.kernel(case.kernel)
        verdict = Verdict(case, [])
        began = time.monotonic()
        try:
            reply = _with_fault(kernel, case)
            if case.fault == "kernel SIGKILL":
                self._look_at_the_dead(kernel, verdict)
                return verdict
            verdict.evidence = reply
            case.slowness = self._pace.since(began)
            if reply.get("where"):
                case.applied = {"at": reply["at"], "line": reply["where"]}
            verdict.wrong += cases.judge(case, reply)
            times = [outcome["took"] for outcome in reply["outcomes"] if "took" in outcome]
            verdict.took_s = max(times, default=None)
            self._look_around(kernel, verdict)
        except Hangs as error:
            verdict.wrong.append(f"hangs: {error}")
        except Exception:  # of the suite itself: the other cases shall be done
            verdict.wrong.append(f"the suite failed: {traceback.format_exc()}")
        finally:
            if case.fault != "kernel SIGKILL":
                with contextlib.suppress(OSError, ProcessLookupError):
                    apply.heal(kernel, case)
        return verdict

    def _look_at_the_dead(self, kernel: DriverKernel, verdict: Verdict) -> None:
        at = verdict.case.applied["at"]
        patience = Patience(KERNEL_GONE_S)
        while (left := kernel.left()) and not patience.is_over():
            time.sleep(0.005)
        verdict.took_s = time.monotonic() - at
        if left:
            verdict.wrong.append(f"left {KERNEL_GONE_S} s after the kernel was killed: {left}")
        self._drop(kernel.sort)  # what its fork server has to say of the broken pipe is for nobody

    def _look_around(self, kernel: DriverKernel, verdict: Verdict) -> None:
        """Is all as it was, and does the next run work?"""
        apply.heal(kernel, verdict.case)
        kernel.tell(do="after")
        began = time.monotonic()
        after = kernel.read(HANGS_S)
        verdict.evidence["after"] = after
        limit_s = _NEW_SERVER_S if "fork server" in verdict.case.fault else _NEXT_RUN_S
        if after["next_run"] or after["next_seconds"] > limit_s * self._pace.since(began):
            verdict.wrong.append(f"the next run: {after['next_run']} after {after['next_seconds']:.2f} s")
        if changed := _but_torchs_probes(after["changed"]):
            verdict.wrong.append(f"the kernel is not as it was: {changed}")
        for path in kernel.seen("tmp").iterdir():  # a later case would find them
            if _TORCHS_PROBE.fullmatch(path.name):
                path.unlink()
        if after["going"]:
            verdict.wrong.append("a run that is over counts as going")
        if left := _wait_until_none(lambda: kernel.strangers() + kernel.zombies()):
            verdict.wrong.append(f"processes are left: {left}")
        if (said := _without_torchs(kernel.said())) and not _lost_by_python(verdict.case, said):
            verdict.wrong.append(f"the kernel printed: {said[-2000:]}")
        if len(sockets := kernel.sockets()) > 1:  # the fork server's
            verdict.wrong.append(f"sockets are left in the kernel's temporary folder: {sockets}")
        self._look_at_snapshots(kernel, verdict)

    def _look_at_snapshots(self, kernel: DriverKernel, verdict: Verdict) -> None:
        """Whole files under their own names; a rank killed in the middle of one leaves its part of it."""
        tokens = {f"{run['token']}.pt" for run in verdict.case.runs}
        files = list(kernel.seen("snapshots").iterdir())
        parts = [path for path in files if path.suffix == ".partial"]
        for path in files:
            if path.name not in tokens and (path not in parts or len(parts) > 1):
                verdict.wrong.append(f"a file is left: {path.name} of {path.stat().st_size} bytes")
            path.unlink()


def _but_torchs_probes(changed: dict[str, str]) -> dict[str, str]:
    """A DataLoader whose worker died opens ten files, to see if it can; a rank that is killed just then leaves one."""
    files = set(re.findall(r"'([^']*)'", changed.get("files", "")))
    if files and all(_TORCHS_PROBE.fullmatch(name) for name in files):
        return {what: how for what, how in changed.items() if what != "files"}
    return changed


def _without_torchs(said: str) -> str:
    """torch's store warns of clients that went away, from C++, and only an environment variable could stop it."""
    theirs = r"\[[WE].*\] \[c10d\].*|Exception raised from .*|frame #.*|<omitting python frames>|"
    return re.sub(rf"^({theirs})\n", "", said, flags=re.M)


def _lost_by_python(case: Case, said: str) -> bool:
    """Python itself swallows an interrupt that lands in a finalizer or a weak reference's callback, and says so."""
    return "interrupt" in case.fault and said.startswith("Exception ignored in") and "KeyboardInterrupt" in said


def _with_fault(kernel: DriverKernel, case: Case) -> dict[str, Any]:
    """Start the runs, do the harm at its moment; the driver's reply."""
    fraction = case.fraction
    apply.harm_before(kernel, case)
    if fraction < 0 and case.fault in ("fork server SIGKILL", "disk full for output", "disk full for snapshots"):
        apply.harm(kernel, case)
    told = {"runs": case.runs, "grace_s": case.grace_s, "at_line": case.at_line}
    kernel.tell(do="case", case=told)
    began = kernel.read(HANGS_S)["began"]
    if "at" not in case.applied or case.fault == "few fds, from some moment":
        moment = began + max(0.0, fraction) * _life_s(case) + case.extra_s
        if not kernel.has_answered(moment - time.monotonic()):
            apply.harm(kernel, case)
    if case.fault == "kernel SIGKILL":
        if "at" not in case.applied:
            apply.harm(kernel, case)
        return {}
    return _reply(kernel, case)


def _reply(kernel: DriverKernel, case: Case) -> dict[str, Any]:
    """The driver's; where the fault found nothing to harm, an endless run is stopped by hand."""
    endless = any(run["seconds"] == cases.ENDLESS_S for run in case.runs)
    if endless and "at" not in case.applied:
        while not kernel.has_answered(0.01):
            for index in range(len(case.runs)):
                kernel.ask("stop", index=index, grace_s=0.0)
        kernel.read(HANGS_S)
        return {"outcomes": [{"good": True} for _ in case.runs]}
    return kernel.read(HANGS_S)


def _life_s(case: Case) -> float:
    seconds = max(run["seconds"] for run in case.runs)
    if seconds == cases.ENDLESS_S:
        return _ENDLESS_FRACTION_S
    return seconds + 0.06 + max(_LIFE_S.get(name, 0.0) for name in (case.label, *(r["program"] for r in case.runs)))


def _wait_until_none(what: Callable[[], list[str]]) -> list[str]:
    patience = Patience(_GONE_S)
    while (left := what()) and not patience.is_over():
        time.sleep(0.01)
    return left


# ---------------------------------------------------------------------------- many


_COSTS = {"notebook": 3.0, "kernel SIGKILL": 2.0, "DataLoader": 3.0, "fork server": 3.0, "mem": 2.0}  # rough seconds


def run_all(drawn: list[Case], lanes: int = 2, minutes: float | None = None, verbose: bool = False) -> list[Verdict]:
    """All cases, in lanes side by side: each has kernels of its own. Failures are printed as they come."""
    share: list[list[Case]] = [[] for _ in range(max(1, lanes))]
    loads = [0.0] * len(share)
    for case in drawn:
        lane = 0 if case.kernel == "notebook" else loads.index(min(loads))
        share[lane].append(case)
        loads[lane] += next((cost for name, cost in _COSTS.items() if case.fault.startswith(name)), 0.4)
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(len(share)) as pool:
        others = [pool.submit(_run_lane, lane, deadline, verbose, verdicts) for lane in share[1:]]
        _run_lane(share[0], deadline, verbose, verdicts)  # here: a Jupyter client keeps its thread's event loop
        for lane in others:
            lane.result()
    return verdicts


def _run_lane(lane: list[Case], deadline: float, verbose: bool, verdicts: list[Verdict]) -> None:
    with Suite() as suite:
        for number, case in enumerate(lane):
            if time.monotonic() > deadline:
                return
            suite.prepare_for(lane[number : number + 10])
            verdict = suite.run(case)
            verdicts.append(verdict)
            if verdict.wrong:
                print(explain(verdict), flush=True)
            if verbose:
                took = f"{verdict.took_s:.2f} s" if verdict.took_s is not None else "-"
                print(
                    f"{case.seed} {case.fault} / {case.label}: {verdict.seconds:.2f} s, error after {took}", flush=True
                )
            if len(verdicts) % 50 == 0:
                print(f"{len(verdicts)} faults", flush=True)


# ---------------------------------------------------------------------------- telling


def explain(verdict: Verdict) -> str:
    """A failed case with all that is known of it."""
    case = asdict(verdict.case)
    lines = [f"FAILED: seed {case.pop('seed')}: {case.pop('fault')} during {case.pop('label')}"]
    lines += [f"  {line}" for wrong in verdict.wrong for line in wrong.splitlines()]
    lines.append(f"  case: {json.dumps(case, default=str)}")
    lines.append(f"  evidence: {json.dumps(verdict.evidence, default=str)[:4000]}")
    lines.append(f"  alone: python -m tests.faults --case {verdict.case.seed}{verdict.case.options}")
    return "\n".join(lines)


def table(verdicts: list[Verdict]) -> str:
    """Faults by kinds of run: how many, how many failed; how many hit, the slowest error and its limit."""
    labels = sorted({v.case.label for v in verdicts})
    rows = defaultdict(list)
    for verdict in verdicts:
        rows[verdict.case.fault].append(verdict)
    head = ["fault", *labels, "all", "hit", "failed", "slowest s", "limit s"]
    body = [_row(fault, rows[fault], labels) for fault in FAULTS if fault in rows]
    total = ["all", *(_count([v for v in verdicts if v.case.label == label]) for label in labels)]
    hit = sum(bool(v.case.applied) for v in verdicts)
    total += [str(len(verdicts)), str(hit), str(sum(bool(v.wrong) for v in verdicts)), "", ""]
    widths = [max(len(row[i]) for row in [head, total, *body]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
             for row in [head, *body, total]]  # fmt: skip
    return "\n".join(lines)


def _row(fault: str, verdicts: list[Verdict], labels: list[str]) -> list[str]:
    times = [v.took_s for v in verdicts if v.took_s is not None]
    limits = [v.case.limit_s for v in verdicts]
    limit = f"{min(limits):.1f}" if min(limits) == max(limits) else f"{min(limits):.1f}-{max(limits):.1f}"
    counts = [_count([v for v in verdicts if v.case.label == label]) for label in labels]
    hit = sum("at" in v.case.applied for v in verdicts)
    failed = sum(bool(v.wrong) for v in verdicts)
    return [fault, *counts, str(len(verdicts)), str(hit), str(failed), f"{max(times):.2f}" if times else "", limit]


def _count(verdicts: list[Verdict]) -> str:
    failed = sum(bool(v.wrong) for v in verdicts)
    return "" if not verdicts else str(len(verdicts)) + (f" ({failed}!)" if failed else "")
