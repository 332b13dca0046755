"""One link of a chain, over sockets of this machine: encrypted, resumed where it broke, never waiting for ever."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nbddp.agent import chain, secured
from nbddp.agent.incoming import Incoming
from nbddp.agent.listener import Listener
from nbddp.hosts.frames import CHUNK
from tests.support import wait_until

HERE = "127.0.0.1"
SECRET = bytes(range(32))
Reports = list[dict[str, Any]]
Join = Callable[..., tuple[chain.Link, Incoming, Reports]]


@pytest.fixture
def join() -> Iterator[Join]:
    """Makes links of one chain."""
    links: list[chain.Link] = []

    def make(nbytes: int, *, serves: bool = False) -> tuple[chain.Link, Incoming, Reports]:
        reports: Reports = []
        order = {"number": 1, "secret": SECRET.hex(), "serves": serves, "address": HERE}
        incoming = Incoming(nbytes)
        links.append(chain.Link(order, incoming, reports.append))
        return links[-1], incoming, reports

    yield make
    for link in links:
        link.close()
    links.clear()  # pytest keeps this function


def fetch(link: chain.Link, port: int) -> None:
    link.carry_out({"kind": "fetch", "number": 1, "address": HERE, "port": port}, b"")


def last(reports: Reports, kind: str) -> dict[str, Any]:
    return wait_until(lambda: next((report for report in reports if report["kind"] == kind), None), 20)


def content(incoming: Incoming) -> bytes:
    return os.pread(incoming.fd, incoming.nbytes, 0)


def test_pieces_are_passed_on_as_they_arrive_and_holes_are_left_out(join: Join) -> None:
    nbytes, data = 25 * CHUNK + 7, os.urandom(CHUNK)
    first, there, reported = join(nbytes, serves=True)
    second, here, reports = join(nbytes, serves=True)
    third, behind, ends = join(nbytes)
    fetch(second, reported[0]["port"])
    fetch(third, reports[0]["port"])
    for at, piece in ((0, data), (20 * CHUNK, data), (25 * CHUNK, data[:7])):
        first.carry_out({"kind": "piece", "at": at}, piece)
        wait_until(lambda at=at: behind.next_at == at + CHUNK, 10)  # type: ignore[misc]
    assert not [report for report in reports + ends if report["kind"] == "has payload"]
    first.carry_out({"kind": "pieces end"}, b"")
    assert last(ends, "has payload") == {"kind": "has payload", "number": 1}
    expected = data + bytes(19 * CHUNK) + data + bytes(4 * CHUNK) + data[:7]
    assert content(there) == content(here) == content(behind) == expected
    assert os.fstat(behind.fd).st_blocks * 512 < 10 * CHUNK


def test_after_a_break_the_notebook_sends_the_rest_and_the_next_host_notices_nothing(join: Join) -> None:
    nbytes = 4 * CHUNK
    data = os.urandom(nbytes)
    first, _, reported = join(nbytes, serves=True)
    second, _, reports = join(nbytes, serves=True)
    third, behind, ends = join(nbytes)
    fetch(second, reported[0]["port"])
    fetch(third, reports[0]["port"])
    for at in (0, CHUNK):
        first.carry_out({"kind": "piece", "at": at}, data[at : at + CHUNK])
    wait_until(lambda: behind.next_at == 2 * CHUNK, 10)
    first.close()
    assert last(reports, "fetch failed")["at"] == 2 * CHUNK
    for at in (2 * CHUNK, 3 * CHUNK):
        second.carry_out({"kind": "piece", "at": at}, data[at : at + CHUNK])
    second.carry_out({"kind": "pieces end"}, b"")
    last(ends, "has payload")
    assert content(behind) == data
    assert not [report for report in ends if report["kind"] == "fetch failed"]


def test_a_host_that_waits_for_pieces_itself_is_not_given_up(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_BEAT_S", 0.05)
    monkeypatch.setattr(chain, "_SILENCE_S", 1.0)
    first, _, reported = join(CHUNK, serves=True)
    second, _, reports = join(CHUNK)
    fetch(second, reported[0]["port"])
    assert not threading.Event().wait(2.5)
    assert reports == []
    first.carry_out({"kind": "piece", "at": 0}, bytes(CHUNK))
    first.carry_out({"kind": "pieces end"}, b"")
    last(reports, "has payload")


def test_a_silent_host_is_given_up(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_SILENCE_S", 0.2)
    monkeypatch.setattr(chain, "_BEAT_S", 100.0)
    first, _, reported = join(CHUNK, serves=True)
    second, _, reports = join(CHUNK)
    fetch(second, reported[0]["port"])
    assert last(reports, "fetch failed") == {"kind": "fetch failed", "number": 1, "at": 0, "why": reports[0]["why"]}
    assert "timed out" in reports[0]["why"]
    first.carry_out({"kind": "pieces end"}, b"")  # its thread ends


@pytest.mark.parametrize(
    "stream",
    [
        chain._PIECE.pack(0, CHUNK + 1),
        chain._PIECE.pack(CHUNK, 1),
        chain._PIECE.pack(1 << 60, 5),
        b"",
        chain._PIECE.pack(0, 9) + b"12345",
    ],
)
def test_a_stream_that_is_not_pieces_of_this_payload_is_refused(join: Join, stream: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        with secured.secure(connection, SECRET, serves=True) as peer:
            secured.read(peer, memoryview(bytearray(8)))
            peer.sendall(stream)

    link, incoming, reports = join(CHUNK)
    with Listener(HERE, answer, 1, "answer") as listener:
        fetch(link, listener.port)
        assert last(reports, "fetch failed")["at"] == 0
    assert content(incoming) == bytes(CHUNK)


def test_a_host_on_which_nothing_answers_is_reported(join: Join) -> None:
    link, _, reports = join(CHUNK)
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    fetch(link, port)
    assert "refused" in last(reports, "fetch failed")["why"]


def test_a_host_whose_openssl_has_no_such_cipher_is_reported(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, reported = join(CHUNK, serves=True)
    link, _, reports = join(CHUNK)
    monkeypatch.setattr(secured, "_CIPHER", "NONE")
    fetch(link, reported[0]["port"])
    assert "cipher" in last(reports, "fetch failed")["why"].lower()


# ---------------------------------------------------------------------------- encryption and proof


def serve_one(secret: bytes, said: list[object]) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        try:
            with secured.secure(connection, secret, serves=True) as peer:
                word = bytearray(5)
                secured.read(peer, memoryview(word))
                said.append(bytes(word))
                peer.sendall(word[::-1])
        except OSError as error:
            said.append(error)

    return answer


def test_what_two_hosts_say_is_encrypted_and_arrives() -> None:
    said: list[object] = []
    with Listener(HERE, serve_one(SECRET, said), 1, "serve") as listener, wiretap(listener.port) as (port, seen):
        with socket.create_connection((HERE, port), 10) as connection:
            with secured.secure(connection, SECRET, serves=False) as peer:
                peer.sendall(b"hello")
                word = bytearray(5)
                secured.read(peer, memoryview(word))
                assert bytes(word) == b"olleh"
                assert peer.version() == "TLSv1.2"
                assert peer.cipher() == ("ADH-AES128-GCM-SHA256", "TLSv1.2", 128)
    assert said == [b"hello"]
    assert len(seen) > 300
    assert not [word for word in (b"hello", b"olleh", SECRET, SECRET.hex().encode()) if word in seen]


@contextlib.contextmanager
def wiretap(port: int) -> Iterator[tuple[int, bytearray]]:
    """A port that passes everything on to another one, and what it has seen."""
    seen = bytearray()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def answer(connection: socket.socket) -> None:
        with socket.create_connection((HERE, port), 10) as onward:
            back = threading.Thread(target=pump, args=(onward, connection))
            back.start()
            pump(connection, onward)
            back.join()

    with Listener(HERE, answer, 1, "wiretap") as listener:
        yield listener.port, seen


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, b"another"), (b"another", SECRET)])
def test_without_the_secret_neither_side_talks(theirs: bytes, ours: bytes) -> None:
    said: list[object] = []
    with Listener(HERE, serve_one(theirs, said), 1, "serve") as listener:
        with socket.create_connection((HERE, listener.port), 10) as connection, pytest.raises(OSError):
            secured.secure(connection, ours, serves=False)
        (error,) = wait_until(lambda: said, 10)
    assert "does not know the secret" in str(error)


def test_somebody_in_between_who_passes_the_proofs_on_is_noticed() -> None:
    said: list[object] = []

    def between(connection: socket.socket) -> None:
        with socket.create_connection((HERE, listener.port), 10) as onward:
            with (
                secured._context(True).wrap_socket(connection.dup(), server_side=True) as client,
                secured._context(False).wrap_socket(onward.dup()) as server,
            ):
                server.sendall(client.recv(1 << 10))
                client.sendall(server.recv(1 << 10))

    with Listener(HERE, serve_one(SECRET, said), 1, "serve") as listener, Listener(HERE, between, 1, "mid") as middle:
        with socket.create_connection((HERE, middle.port), 10) as connection, pytest.raises(OSError):
            secured.secure(connection, SECRET, serves=False)
        (error,) = wait_until(lambda: said, 10)
    assert "does not know the secret" in str(error)
