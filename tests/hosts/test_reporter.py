"""The order in which an agent reports output, metrics, results and the end of its ranks."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nbddp import wire
from nbddp.agent.reporter import Reporter
from nbddp.hosts import frames

MUCH = 3_000_000  # more than is read at a look
MOST_LOOKS = 1000


class Output:
    """A rank's; ``for_ever``: somebody prints to it before each look."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.for_ever = False
        self.looks = 0

    def fileno(self) -> int:
        self.looks += 1
        assert self.looks < MOST_LOOKS, "this never ends"
        if self.for_ever:
            os.write(self.fd, b"x")
        return self.fd


@pytest.fixture
def worker() -> Iterator[Any]:
    """A rank without a process, which has printed much."""
    fd = os.memfd_create("output")
    os.write(fd, bytes(MUCH))
    yield SimpleNamespace(
        rank=0,
        pid=os.getpid(),
        ready=True,
        called=True,
        report=None,
        exitcode=None,
        exited_at=1.0,
        orphaned=False,
        out_of_memory=False,
        output=Output(fd),
        said=collections.deque(),
        regrouped=None,
        read_metrics=lambda: b"",
    )
    os.close(fd)


class Received:
    """The notebook kernel: which kinds of frames it received, and after how many bytes of output the first of each."""

    def __init__(self) -> None:
        self.backlog = 0
        self.printed = 0
        self.after: dict[str, int] = {}

    def send(self, head: Any, body: bytes = b"") -> None:
        self.printed += len(body)
        self.after.setdefault(head["kind"], self.printed)

    send_first = send


def reporter_of(worker: Any, pipe: Any, *others: Any) -> Reporter:
    gauges: Any = SimpleNamespace(processes={}, gpus={}, read=lambda pids: None)
    crew: Any = SimpleNamespace(workers=[worker, *others])
    return Reporter(crew, pipe, gauges)


@pytest.mark.parametrize("for_ever", [False, True])
def test_an_exit_is_reported_after_its_output_even_if_output_never_ends(worker: Any, for_ever: bool) -> None:
    received = Received()
    reporter = reporter_of(worker, received)
    worker.output.for_ever = for_ever
    worker.report = wire.Exited(3, "", 1.0)
    while "report" not in received.after:
        reporter.report()
    worker.exitcode = 3
    while "exit" not in received.after:
        reporter.report()
    assert MUCH <= received.after["report"] <= received.after["exit"] <= MUCH + for_ever * MOST_LOOKS


@pytest.mark.parametrize("for_ever", [False, True])
def test_the_last_report_ends_even_if_output_never_does(worker: Any, for_ever: bool) -> None:
    received = Received()
    worker.output.for_ever = for_ever
    worker.exitcode = -9
    reporter_of(worker, received).report_all()
    assert received.after["exit"] >= MUCH


def test_an_emptied_output_file_does_not_hide_the_exit(worker: Any) -> None:
    """``echo > /dev/stdout`` in a child of the rank."""
    received = Received()
    reporter = reporter_of(worker, received)
    worker.report = wire.Exited(3, "", 1.0)
    reporter.report()
    os.ftruncate(worker.output.fd, 0)
    reporter.report()
    assert "report" in received.after


def test_a_failure_overtakes_another_ranks_large_result_and_reports_precede_exits(worker: Any) -> None:
    result = os.memfd_create("result")
    os.write(result, bytes(20 * frames.CHUNK))
    other = SimpleNamespace(**{**vars(worker), "rank": 1, "output": Output(os.memfd_create("other"))})
    worker.result_fd = other.result_fd = result
    worker.read_metrics = iter([b"m", b"m"] + [b""] * MOST_LOOKS).__next__
    reader, writer = os.pipe()
    sender = frames.Sender(writer, 60.0, lambda: {"kind": "beat"}, "test-sender")
    reporter = reporter_of(worker, sender, other)
    worker.report, worker.exitcode = wire.Finished(20 * frames.CHUNK, 1.0), 0
    while reporter.report():
        pass
    other.report, other.exitcode = wire.Failed(100, 2.0, "call", "ValueError"), 1
    reporter.report_all()
    sender.send({"kind": "ended"})
    parser, found = frames.Parser(), [{"kind": "", "rank": -1}]
    while found[-1]["kind"] != "ended":
        found += [{"rank": -1, **head} for head, _ in parser.feed(os.read(reader, 1 << 20))]
    sender.close(1)
    for fd in (reader, writer, result, other.output.fd):
        os.close(fd)
    first = [head["kind"] for head in found if head["rank"] == 0]
    assert first[0] == "state"
    assert set(first[1:-22]) == {"output", "metrics"}
    assert first[-22:] == ["result"] * 20 + ["report", "exit"]
    assert [head["kind"] for head in found if head["rank"] == 1] == ["state", "result", "report", "exit"]
    exited = found.index(next(head for head in found if head["rank"] == 1 and head["kind"] == "exit"))
    assert sum(head["rank"] == 0 and head["kind"] == "result" for head in found[:exited]) <= 3
