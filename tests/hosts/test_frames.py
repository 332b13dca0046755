"""Frames over a pipe: cut anywhere, preceded by any output, damaged, or not frames at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.hosts import frames
from nbddp.payload.block import fill, open_block, write_piece
from tests.support import open_fds, wait_until

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
heads = st.dictionaries(st.text(), values, max_size=4).flatmap(
    lambda head: st.text().map(lambda kind: {**head, "kind": kind})
)
messages = st.lists(st.tuples(heads, st.binary(max_size=300)), max_size=6)


def whole(sent: list[tuple[dict[str, Any], bytes]]) -> bytes:
    return b"".join(piece for head, body in sent for piece in frames.encode(head, body))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(messages, st.lists(st.integers(0, 10**6), max_size=12))
def test_frames_are_parsed_the_same_wherever_the_stream_is_cut(
    sent: list[tuple[dict[str, Any], bytes]], cuts: list[int]
) -> None:
    parser = frames.Parser()
    stream = whole(sent)
    assert [frame for part in cut(stream, cuts) for frame in parser.feed(part)] == sent


@given(st.binary(max_size=2000), messages, st.lists(st.integers(0, 10**6), max_size=12))
def test_output_before_the_mark_is_kept_apart_from_frames(
    noise: bytes, sent: list[tuple[dict[str, Any], bytes]], cuts: list[int]
) -> None:
    stream = noise + frames.MARK + whole(sent)
    before = (noise + frames.MARK).index(frames.MARK)
    if before != len(noise):
        return  # the noise itself ends in what begins the mark
    parser = frames.Parser(after_mark=True)
    assert [frame for part in cut(stream, cuts) for frame in parser.feed(part)] == sent
    assert parser.noise == noise


@given(st.binary(max_size=4000), st.lists(st.integers(0, 10**6), max_size=6), st.booleans())
def test_garbage_raises_only_garbled(garbage: bytes, cuts: list[int], marked: bool) -> None:
    parser = frames.Parser(after_mark=not marked)
    with contextlib.suppress(frames.ProtocolError):
        for part in cut(garbage, cuts):
            for head, body in parser.feed(part):
                assert isinstance(head["kind"], str)
                assert isinstance(body, bytes)


@given(messages, st.data())
def test_a_wrong_byte_raises_only_garbled(sent: list[tuple[dict[str, Any], bytes]], data: st.DataObject) -> None:
    stream = bytearray(whole(sent))
    if stream:
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(frames.ProtocolError):
        list(frames.Parser().feed(bytes(stream)))


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"7", b'"kind"', b"{}", b'{"kind": 1}', b"{", b"\xff\xfe", b"[" * 100_000, b'{"kind": "x"}}'],
)
def test_an_invalid_head_is_garbled(text: bytes) -> None:
    with pytest.raises(frames.ProtocolError):
        list(frames.Parser().feed(struct.pack(">II", len(text), 0) + text))


@pytest.mark.parametrize("lengths", [(2**32 - 1, 0), (2, 2**32 - 1), (2**31, 2**31)])
def test_a_length_beyond_the_limit_is_garbled(lengths: tuple[int, int]) -> None:
    with pytest.raises(frames.ProtocolError):
        list(frames.Parser().feed(struct.pack(">II", *lengths)))


def test_endless_output_before_the_mark_is_garbled_before_4_mib() -> None:
    parser = frames.Parser(after_mark=True)
    with pytest.raises(frames.ProtocolError):
        for _ in range(1000):
            assert list(parser.feed(b"y\n" * 5000)) == []
    assert len(parser.noise) < 4 << 20


def test_parsing_a_large_frame_in_small_pieces_takes_linear_time() -> None:
    def seconds(nbytes: int) -> float:
        stream, parser = whole([({"kind": "x"}, b"y" * nbytes)]), frames.Parser()
        began = time.process_time()
        found = [frame for at in range(0, len(stream), 4096) for frame in parser.feed(stream[at : at + 4096])]
        assert [len(body) for _, body in found] == [nbytes]
        return time.process_time() - began

    small = min(seconds(1 << 20) for _ in range(5))
    assert min(seconds(8 << 20) for _ in range(3)) < 8 * small * 4


def test_a_block_sent_in_pieces_arrives_unchanged(tmp_path: Path) -> None:
    data = os.urandom(3 * frames.CHUNK + 17)
    path = tmp_path / "block"
    path.write_bytes(data)
    with open(path, "rb") as block:
        pieces = frames.BlockFrames(block.fileno(), len(data), kind="payload")
    found = bytearray(len(data))  # whoever owned the block has closed it meanwhile
    parser = frames.Parser()
    for piece in itertools.chain.from_iterable(pieces):
        for head, body in parser.feed(piece):
            found[head["at"] : head["at"] + len(body)] = body
    assert bytes(found) == data
    assert not pieces.drop()


def test_holes_of_a_block_are_sent_as_zeros() -> None:
    """A few rows of a dataset of 2 GiB are a block of 2 GiB."""
    nbytes = 2 << 30
    parts = [(at, os.urandom(100)) for at in (0, 5 * frames.CHUNK - 7, nbytes // 2, nbytes - frames.CHUNK - 100)]
    there, here = open_block("there"), open_block("here")
    os.pwrite(here, b"of an earlier run", nbytes // 4)
    fill(there, nbytes, [(at, memoryview(data)) for at, data in parts], lambda: True)
    parser, sent = frames.Parser(), 0
    for piece in itertools.chain.from_iterable(frames.BlockFrames(there, nbytes, kind="payload")):
        for head, body in parser.feed(piece):
            write_piece(here, body, head["at"], head["nbytes"])
            sent += len(body)
    assert sent < 20 * frames.CHUNK
    assert os.fstat(here).st_size == nbytes
    for at, data in parts:
        assert os.pread(here, len(data), at) == os.pread(there, len(data), at) == data
    assert os.pread(here, 17, nbytes // 4) == bytes(17)
    os.close(there)
    os.close(here)


def test_a_dropped_block_stops_being_sent(tmp_path: Path) -> None:
    with open(tmp_path / "block", "w+b") as block:
        block.write(b"x" * 10 * frames.CHUNK)
        block.flush()
        pieces = frames.BlockFrames(block.fileno(), 10 * frames.CHUNK, then=[{"kind": "go"}], kind="payload")
    sending = iter(pieces)
    next(sending)
    assert pieces.drop()
    assert list(sending) == []


def test_frames_queued_after_a_block_follow_its_last_piece(tmp_path: Path) -> None:
    with open(tmp_path / "block", "w+b") as block:
        block.write(b"x" * (frames.CHUNK + 1))
        block.flush()
        pieces = frames.BlockFrames(block.fileno(), frames.CHUNK + 1, then=[{"kind": "go"}], kind="payload")
    parser = frames.Parser()
    found = [head for piece in itertools.chain.from_iterable(pieces) for head, _ in parser.feed(piece)]
    assert [(head["kind"], head.get("at")) for head in found] == [
        ("payload", 0),
        ("payload", frames.CHUNK),
        ("go", None),
    ]


@pytest.mark.parametrize(("start", "expected"), [(0, [0, 4, 8]), (1, [4, 8]), (4, [4, 8]), (5, [8]), (9, [])])
def test_a_block_is_sent_from_a_start_on_without_the_holes(start: int, expected: list[int]) -> None:
    block = open_block("block")
    fill(block, 9 * frames.CHUNK, [(at * frames.CHUNK, memoryview(b"x" * 10)) for at in (0, 4, 8)], lambda: True)
    pieces = frames.BlockFrames(block, 9 * frames.CHUNK, start=start * frames.CHUNK, kind="piece")
    parser = frames.Parser()
    found = [head["at"] for piece in itertools.chain.from_iterable(pieces) for head, _ in parser.feed(piece)]
    assert found == [at * frames.CHUNK for at in expected]
    os.close(block)


# ---------------------------------------------------------------------------- the sender


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_sending_never_waits_for_a_reader_that_does_not_read(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    sender = frames.Sender(writer, 60.0, lambda: {"kind": "beat"}, "test-sender")
    began = time.monotonic()
    for _ in range(100):
        sender.send({"kind": "x"}, b"y" * 100_000)
    assert time.monotonic() - began < 10  # nobody reads till then
    assert sender.backlog > 9_000_000
    parser, found = frames.Parser(), 0
    while found < 100:
        found += sum(1 for _ in parser.feed(os.read(reader, 1 << 20)))
    wait_until(lambda: sender.backlog == 0)
    sender.close(1)


def test_an_idle_sender_sends_heartbeats(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    sender = frames.Sender(writer, 0.05, lambda: {"kind": "beat"}, "test-sender")
    parser = frames.Parser()
    found: list[Any] = []
    deadline = time.monotonic() + 5
    while len(found) < 3 and time.monotonic() < deadline:
        found += parser.feed(os.read(reader, 1000))
    assert [head["kind"] for head, _ in found[:3]] == ["beat"] * 3
    sender.close(1)


def test_an_idle_sender_does_not_keep_the_block_that_it_has_sent(pipe: tuple[int, int], tmp_path: Path) -> None:
    """Which is a payload's memory."""
    (tmp_path / "block").write_bytes(b"x" * 100)
    sender = frames.Sender(pipe[1], 60.0, lambda: {"kind": "beat"}, "test-sender")
    with open(tmp_path / "block", "rb") as block:
        sender.send_all(frames.BlockFrames(block.fileno(), 100, kind="payload"))
    assert len(list(frames.Parser().feed(os.read(pipe[0], 1000)))) == 1
    wait_until(lambda: str(tmp_path / "block") not in open_fds().values(), 5)
    sender.close(1)


def test_the_sender_thread_ends_when_the_pipe_breaks() -> None:
    reader, writer = os.pipe()
    sender = frames.Sender(writer, 0.05, lambda: {"kind": "beat"}, "test-sender")
    os.close(reader)
    sender.send({"kind": "x"}, b"y")
    wait_until(lambda: "test-sender" not in {thread.name for thread in threading.enumerate()})
    sender.send({"kind": "x"}, b"y")  # to nobody, without an error
    sender.close(1)
    os.close(writer)


def heads_from(reader: int) -> Iterator[dict[str, Any]]:
    parser = frames.Parser()
    while True:
        for head, _ in parser.feed(os.read(reader, 1 << 20)):
            yield head


def until(last: str, coming: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """What comes, up to the one of this kind."""
    found = [next(coming)]
    while found[-1]["kind"] != last:
        found.append(next(coming))
    return found


def block_of(nbytes: int, folder: Path) -> frames.BlockFrames:
    with open(folder / "block", "w+b") as block:
        block.write(b"x" * nbytes)
        block.flush()
        return frames.BlockFrames(block.fileno(), nbytes, then=[{"kind": "report"}], kind="result")


def test_urgent_frames_overtake_a_block_in_order(pipe: tuple[int, int], tmp_path: Path) -> None:
    reader, writer = pipe
    sender = frames.Sender(writer, 60.0, lambda: {"kind": "beat"}, "test-sender")
    sender.send_all(block_of(20 * frames.CHUNK, tmp_path))
    sender.send({"kind": "exit"})
    for i in range(50):
        sender.send_first({"kind": "first", "i": i}, bytes(i * 1000))
    sender.send({"kind": "ended"})
    found = until("ended", heads_from(reader))
    assert [head["at"] for head in found if head["kind"] == "result"] == [i * frames.CHUNK for i in range(20)]
    assert [head["i"] for head in found if head["kind"] == "first"] == list(range(50))
    assert [head["kind"] for head in found[-3:]] == ["report", "exit", "ended"]
    # The first piece was on its way, or the second, too.
    assert max(i for i, head in enumerate(found) if head["kind"] == "first") <= 51
    wait_until(lambda: sender.backlog == 0)
    sender.close(1)


def test_a_block_makes_progress_while_urgent_frames_keep_coming(pipe: tuple[int, int], tmp_path: Path) -> None:
    reader, writer = pipe
    sender = frames.Sender(writer, 60.0, lambda: {"kind": "beat"}, "test-sender")
    over = threading.Event()

    def talk() -> None:
        while not over.is_set():
            if sender.backlog < 2 << 20:
                sender.send_first({"kind": "first"}, bytes(10_000))
            else:
                time.sleep(0.001)

    talking = threading.Thread(target=talk)
    talking.start()
    sender.send_all(block_of(5 * frames.CHUNK, tmp_path))
    coming = heads_from(reader)
    found = until("report", coming)
    over.set()
    talking.join()
    sender.send({"kind": "ended"})
    until("ended", coming)
    sender.close(1)
    assert sum(head["kind"] == "result" for head in found) == 5


def test_an_idle_sender_sends_an_urgent_frame_at_once(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    sender = frames.Sender(writer, 60.0, lambda: {"kind": "beat"}, "test-sender")
    sender.send_first({"kind": "first"})
    assert until("first", heads_from(reader)) == [{"kind": "first"}]
    sender.close(1)


def test_frames_of_three_threads_stay_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    sender = frames.Sender(writer, 60.0, lambda: {"kind": "beat"}, "test-sender")

    def talk(name: str) -> None:
        for i in range(500):
            sender.send({"kind": name, "i": i}, name.encode() * i)

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    parser = frames.Parser()
    found: dict[str, list[int]] = {name: [] for name in "abc"}
    while sum(map(len, found.values())) < 1500:
        for head, body in parser.feed(os.read(reader, 1 << 20)):
            assert body == head["kind"].encode() * head["i"]
            found[head["kind"]].append(head["i"])
    assert all(numbers == list(range(500)) for numbers in found.values())
    for thread in threads:
        thread.join()
    sender.close(1)
