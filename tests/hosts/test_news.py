"""What a host tells of its ranks comes in another order than it happened, or never."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nbddp import frames, wire
from nbddp.host.news import News

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
        read_metrics=lambda: b"",
    )
    os.close(fd)


class Told:
    """The kernel: what it has been told, in order, and how many bytes of output before that."""

    def __init__(self) -> None:
        self.backlog = 0
        self.printed = 0
        self.after: dict[str, int] = {}

    def send(self, head: Any, body: bytes = b"") -> None:
        self.printed += len(body)
        self.after.setdefault(head["kind"], self.printed)

    send_first = send


def news_of(worker: Any, told: Any, *others: Any) -> News:
    gauges: Any = SimpleNamespace(processes={}, gpus={}, read=lambda pids: None)
    crew: Any = SimpleNamespace(workers=[worker, *others])
    return News(crew, told, gauges)


@pytest.mark.parametrize("for_ever", [False, True])
def test_an_end_is_told_before_what_was_printed_or_never(worker: Any, for_ever: bool) -> None:
    told = Told()
    news = news_of(worker, told)
    worker.output.for_ever = for_ever
    worker.report = wire.Exited(3, "", 1.0)
    while "report" not in told.after:
        news.tell()
    worker.exitcode = 3
    while "exit" not in told.after:
        news.tell()
    assert MUCH <= told.after["report"] <= told.after["exit"] <= MUCH + for_ever * MOST_LOOKS


@pytest.mark.parametrize("for_ever", [False, True])
def test_the_last_words_never_end(worker: Any, for_ever: bool) -> None:
    told = Told()
    worker.output.for_ever = for_ever
    worker.exitcode = -9
    news_of(worker, told).tell_all()
    assert told.after["exit"] >= MUCH


def test_an_output_that_is_emptied_hides_the_end(worker: Any) -> None:
    """``echo > /dev/stdout`` in a child of the rank."""
    told = Told()
    news = news_of(worker, told)
    worker.report = wire.Exited(3, "", 1.0)
    news.tell()
    os.ftruncate(worker.output.fd, 0)
    news.tell()
    assert "report" in told.after


def test_a_failure_is_told_after_anothers_large_result_or_an_end_before_its_report(worker: Any) -> None:
    result = os.memfd_create("result")
    os.write(result, bytes(20 * frames.CHUNK))
    other = SimpleNamespace(**{**vars(worker), "rank": 1, "output": Output(os.memfd_create("other"))})
    worker.result_fd = other.result_fd = result
    worker.read_metrics = iter([b"m", b"m"] + [b""] * MOST_LOOKS).__next__
    reader, writer = os.pipe()
    sender = frames.Sender(writer, 60.0, lambda: {"kind": "beat"}, "test-sender")
    news = news_of(worker, sender, other)
    worker.report, worker.exitcode = wire.Finished(20 * frames.CHUNK, 1.0), 0
    while news.tell():
        pass
    other.report, other.exitcode = wire.Failed(100, 2.0, "call", "ValueError"), 1
    news.tell_all()
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
    told = found.index(next(head for head in found if head["rank"] == 1 and head["kind"] == "exit"))
    assert sum(head["rank"] == 0 and head["kind"] == "result" for head in found[:told]) <= 3
