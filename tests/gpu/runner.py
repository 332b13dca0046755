"""Runs parts one after the other, each in a process of its own with a time limit, and keeps what they find."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.parts import Part

ROOT = Path(__file__).parents[2]
_LAST_LINES = 15
_WITHIN = "not begun: its {limit:.0f} s do not fit into what is left of --within"


class Results:
    """The file with all results, written again after each finding: what is cut off is not lost."""

    def __init__(self, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "gpu.log"
        self._file = folder / "gpu.json"
        found = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._parts: dict[str, dict[str, Any]] = found.get("parts", {}) if found.get("device") == device else {}
        self._device = device

    def has(self, name: str) -> bool:
        """Return whether this part has ended."""
        return self._parts.get(name, {}).get("state", "not begun") not in ("not begun", "cut off")

    def begin(self, name: str, state: str = "cut off", why: str = "") -> dict[str, Any]:
        part = self._parts[name] = {"state": state, "why": why, "seconds": 0.0, "results": []}
        self.write()
        return part

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"device": self._device, "parts": self._parts}, indent=1))
        new.replace(self._file)

    def states(self) -> dict[str, str]:
        return {name: part["state"] for name, part in self._parts.items()}


def run_all(parts: Sequence[Part], results: Results, device: str, within_s: float) -> int:
    """Run the parts that have no result yet. Returns how many of all have failed.

    Args:
        within_s: a part whose limit does not fit into the rest of this time is left for the next call.
    """
    deadline = time.monotonic() + within_s
    for part in parts:
        if results.has(part.name):
            print(f"=== {part.name}: has a result already", flush=True)
        elif time.monotonic() + part.limit_s > deadline:
            results.begin(part.name, "not begun", _WITHIN.format(limit=part.limit_s))
            print(f"=== {part.name}: {_WITHIN.format(limit=part.limit_s)}", flush=True)
        else:
            _run(part, results, device)
    states = results.states()
    print("=== " + ", ".join(f"{name}: {state}" for name, state in states.items()), flush=True)
    return sum(states.get(part.name) in ("failed", "timed out") for part in parts)


def _run(part: Part, results: Results, device: str) -> None:
    print(f"=== {part.name}: {part.what}, at most {part.limit_s:.0f} s", flush=True)
    began, record = time.monotonic(), results.begin(part.name)
    with open(results.log, "ab") as log:
        log.write(f"=== {part.name}\n".encode())
        log.flush()
        at = log.tell()
        reader, writer = os.pipe()
        command = [sys.executable, "-u", "-m", "tests.gpu", "--child", part.where, "--device", device]
        child = subprocess.Popen(
            [*command, "--fd", str(writer)], cwd=ROOT, stdout=log, stderr=log, pass_fds=[writer], start_new_session=True
        )
        os.close(writer)
        end = _follow(child, reader, record, results, began + part.limit_s)
    record["seconds"] = round(time.monotonic() - began, 1)
    record["state"], record["why"] = _state(end, record["results"], part)
    results.write()
    print(f"    {record['state']} after {record['seconds']} s. {record['why']}".rstrip(), flush=True)
    if record["state"] in ("failed", "timed out"):
        lines = results.log.read_bytes()[at:].decode(errors="replace").rstrip().splitlines()[-_LAST_LINES:]
        print("\n".join(f"    | {line}" for line in lines), flush=True)


def _follow(
    child: subprocess.Popen[bytes], reader: int, record: dict[str, Any], results: Results, deadline: float
) -> dict[str, Any]:
    """Take what the part finds until it ends or its time is over; then everything that it started is killed."""
    end: dict[str, Any] = {}
    rest = b""
    with open(reader, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not end:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                end = {"end": "timed out", "why": ""}
            elif not (data := pipe.read(1 << 16)):
                end = {"end": "failed", "why": f"its process ended with exit code {child.wait()}"}
            else:
                *lines, rest = (rest + data).split(b"\n")
                for finding in map(json.loads, lines):
                    if "end" in finding:
                        end = finding
                    else:
                        _keep(finding, record, results)
    _end(child, grace_s=0.0 if end["end"] == "timed out" else 10.0)
    return end


def _keep(finding: dict[str, Any], record: dict[str, Any], results: Results) -> None:
    record["results"].append(finding)
    results.write()
    if "ok" in finding:
        mark = "ok  " if finding["ok"] else "FAIL"
        print(f"    {mark} {finding['name']}" + (f": {finding['found']}" if finding["found"] != "" else ""), flush=True)
    else:
        print(f"    {finding['name']}: {finding['value']} {finding['unit']}".rstrip(), flush=True)


def _state(end: dict[str, Any], results: list[dict[str, Any]], part: Part) -> tuple[str, str]:
    if end["end"] == "timed out":
        return "timed out", f"its limit is {part.limit_s:.0f} s"
    if end["end"] == "failed":
        return "failed", end["why"]
    if wrong := [finding["name"] for finding in results if finding.get("ok") is False]:
        return "failed", ", ".join(wrong)
    return ("skipped", end["why"]) if end["end"] == "skipped" else ("passed", "")


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Let the part's process end, or kill it with all that it has started, by their ids."""
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        for pid in [child.pid, *_below(child.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        child.wait()


def _below(pid: int) -> list[int]:
    """The pids of all that was started from a process."""
    import psutil

    try:
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
