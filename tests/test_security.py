"""What another user on the same machine can and cannot do to a run."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import re
import secrets
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore

import nbddp
from nbddp import payload, wire
from nbddp.forkserver import server as forkserver
from nbddp.history import metrics_file
from nbddp.job import job_file
from nbddp.launch.rank import LocalRank
from tests.support import Cells, listening_ports, marked_pids, run, start, wait_until

PACKAGE = Path(nbddp.__file__).parent
NOBODY = 65534
SECRET = f"hunter2-{secrets.token_hex(8)}"  # in no file: copies of this one lie in temporary folders
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


# ---------------------------------------------------------------------------- who listens where

_MEETS = """
    import os, time, torch, torch.distributed as dist
    def meet(how, path):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = dict(rank=rank, world_size=world_size)
        if how == "own port":
            os.environ["MASTER_PORT"] = os.environ["PORT"]
        if how in ("tcp", "localhost"):
            where["init_method"] = f"tcp://{'localhost' if how == 'localhost' else '127.0.0.1'}:{os.environ['PORT']}"
        if how == "file":
            where["init_method"] = f"file://{path}/store"
        if how != "ours":
            dist.init_process_group("gloo", **where)
        dist.new_group([0, 1])
        total = torch.ones(1)
        dist.all_reduce(total)
        open(f"{path}/{rank}", "w").close()
        while not os.path.exists(f"{path}/go"):
            time.sleep(0.01)
        return total.item()
"""


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize("how", ["ours", "env", "own port", "tcp", "localhost", "file"])
def test_a_run_listens_only_on_loopback(cell: Cells, tmp_path: Path, how: str, init: bool) -> None:
    """torch's own store listens on all interfaces, also for tcp://127.0.0.1 and a tutorial's MASTER_PORT."""
    names = cell(_MEETS)
    if how == "ours" and not init:
        pytest.skip("there is no group")
    started = run(names.meet, how, str(tmp_path), init=init, env={"PORT": str(_free_port())}, wait=False)
    try:
        wait_until(lambda: started.error or all((tmp_path / str(rank)).exists() for rank in range(2)))
        heard = _heard_beyond_loopback({os.getpid(), *marked_pids()})
        ports = [port for pid in started.pids for _, port in listening_ports(pid)]
    finally:
        (tmp_path / "go").touch()
    assert started.wait().values == [2.0, 2.0]
    assert heard == []
    assert len(ports) >= 2  # gloo's own, or this has looked at nothing


def test_a_tutorials_spawn_listens_only_on_loopback(cell: Cells, tmp_path: Path) -> None:
    names = cell("""
        import os, torch.distributed as dist, psutil
        def train(rank, port, world_size, path):
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
            for _ in range(3):  # the later groups share the first one's store
                dist.init_process_group("gloo", rank=rank, world_size=world_size)
                dist.barrier()
                heard = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
                dist.destroy_process_group()
            with open(f"{path}/{rank}", "w") as file:
                file.write(" ".join(heard))
    """)
    nbddp.spawn(names.train, (str(_free_port()), 2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "127.0.0.1"


def _heard_beyond_loopback(pids: set[int]) -> list[str]:
    """Sockets that another machine can reach, or that have a name in no folder."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for c in psutil.Process(pid).net_connections("all"):
                if c.family == socket.AF_UNIX:
                    bad = isinstance(c.laddr, str) and c.laddr.startswith("@")
                else:
                    # A lookup of a library's own thread in the meantime hears its DNS server only.
                    waits = c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr)
                    bad = waits and c.laddr.ip not in ("127.0.0.1", "::1")
                if bad:
                    found.append(f"{pid}: {c}")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------------------- another user of the machine

_STRANGER = """
    import ctypes, json, os, socket, sys
    pids, paths = json.load(sys.stdin)
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    done = []
    def attempt(what, function):
        try:
            function()
        except PermissionError:
            return
        done.append(what)
    def trace(pid):
        if libc.ptrace(16, pid, None, None) == -1:
            raise OSError(ctypes.get_errno(), "ptrace")
    for path in paths:
        attempt(f"list {path}", lambda: os.listdir(path))
        attempt(f"write to {path}", lambda: open(path + "/x", "w").close())
    for pid, fds in pids.items():
        for name in ("environ", "maps", "mem", "stack"):
            attempt(f"read {name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
        attempt(f"list fds of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
        for fd in fds:
            attempt(f"open fd {fd} of {pid}", lambda: open(f"/proc/{pid}/fd/{fd}", "rb"))
            attempt(f"take fd {fd} of {pid}", lambda: take(int(pid), fd))
        attempt(f"trace {pid}", lambda: trace(int(pid)))
        attempt(f"signal {pid}", lambda: os.kill(int(pid), 0))
    attempt("nothing, which always works", lambda: None)
    print(json.dumps(done))
"""
_TAKE = """
    def take(pid, fd):
        pidfd = os.pidfd_open(pid)
        try:
            if libc.syscall(438, pidfd, fd, 0) == -1:  # pidfd_getfd
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
        finally:
            os.close(pidfd)
"""


@as_root
def test_another_user_cannot_reach_ranks_server_or_folder(cell: Cells) -> None:
    names = cell("import time\ndef wait(data): time.sleep(60)")
    started = start(names.wait, SECRET * 100_000)
    try:
        server = forkserver.pid()
        assert server is not None
        pids = {pid: _fds(pid) for pid in (*started.pids, server)}
        source = textwrap.dedent(_TAKE) + textwrap.dedent(_STRANGER)
        source = "import ctypes, json, os, socket, sys\n" + source
        said = subprocess.run(
            [sys.executable, "-c", source],
            input=json.dumps([pids, _folders_of_runs()]),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        started.stop(0)
    assert said.stderr == ""
    assert json.loads(said.stdout) == ["nothing, which always works"]


def _fds(pid: int) -> list[int]:
    return [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]


def test_private_files_cannot_be_opened_by_others(cell: Cells) -> None:
    """What has a name lies in a folder of ours alone; all else has none."""
    names = cell("import time\ndef wait(data): print(data); time.sleep(60)")
    started = start(names.wait, SECRET)
    try:
        wait_until(lambda: SECRET in started.logs(0))  # it opens no more files
        folders = _folders_of_runs()
        assert folders
        assert {stat.S_IMODE(os.stat(folder).st_mode) for folder in folders} == {0o700}
        named = set()
        for pid in started.pids:
            for fd in _fds(pid):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.endswith("(deleted)") and not target.startswith("/memfd:"):
                    assert stat.S_IMODE(os.stat(f"/proc/{pid}/fd/{fd}").st_mode) == 0o600, target
                elif not target.startswith(("/memfd:", "pipe:", "socket:", "anon_inode:", "/dev/", "/proc/")):
                    named.add(target)
        assert named == set()
        with_secret = [path for path in _files(tempfile.gettempdir()) if SECRET.encode() in path.read_bytes()]
        assert with_secret == []
    finally:
        started.stop(0)


def _files(folder: str) -> Iterator[Path]:
    return (path for path in Path(folder).rglob("*") if path.is_file())


def _folders_of_runs() -> list[str]:
    return [str(path) for path in Path(tempfile.gettempdir()).glob("nb-*") if path.stat().st_uid == os.getuid()]


def test_the_fork_server_listens_on_no_name(cell: Cells) -> None:
    """It is reached through a socket pair, which no other process can connect to."""
    run(cell("def train(): return 1").train)
    pid = forkserver.pid()
    assert pid is not None
    assert [c.laddr for c in psutil.Process(pid).net_connections("unix") if c.laddr] == []
    assert psutil.Process(pid).net_connections("inet") == []


# ---------------------------------------------------------------------------- secrets


@pytest.mark.slow
def test_secrets_appear_on_no_command_line_and_in_no_message(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have the notebook's environment, as they must; nobody else sees it."""
    monkeypatch.setenv("API_TOKEN", SECRET)
    names = cell("""
        import os, time, nbddp
        def train(data):
            assert os.environ["API_TOKEN"] == data
            nbddp.log(loss=1.0)
            raise ValueError("boom")
        def wait(data): time.sleep(60)
    """)
    with pytest.raises(nbddp.RankError) as caught:
        run(names.train, SECRET, nprocs=2)
    failed = nbddp.last_run()
    assert failed is not None
    told = [str(caught.value), repr(caught.value), repr(failed), failed.logs(), failed.stacks(), repr(failed.history)]
    assert not [text for text in told if SECRET in text]
    for method in ("forkserver", "spawn"):
        started = start(names.wait, SECRET, start_method=method)
        try:
            lines = [Path(f"/proc/{pid}/cmdline") for pid in marked_pids()]
            assert len(lines) >= 3
            assert not [line for line in lines if SECRET.encode() in line.read_bytes()], method
        finally:
            started.stop(0)


def test_error_texts_do_not_quote_the_environment(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", SECRET)
    names = cell("import threading\nlock = threading.Lock()\ndef bad(): return lock\ndef good(): pass")
    for attempt in (lambda: run(names.bad), lambda: run(names.good, env={"X": 1}), lambda: run(names.good, nprocs=-1)):
        with pytest.raises(nbddp.NbddpError) as caught:
            attempt()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "from os import environ",
        "import os\nenviron = os.environ",
        "from os import environb as environ",
        "from os import environ as it\nenviron = [it]",
        "from os import environ as it\nenviron = it.get",
    ],
)
def test_the_environment_is_not_exported_under_any_name(
    cell: Cells, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", SECRET)
    names = cell(f"{line}\ndef train(): return environ")
    nbddp.export(names.train, tmp_path / "job.nbddp")
    assert SECRET.encode() not in (tmp_path / "job.nbddp").read_bytes()


def test_os_environ_in_a_function_is_that_of_its_rank(cell: Cells) -> None:
    names = cell("""
        from os import environ, environb
        import os
        def train():
            environ["ONLY_HERE"] = "yes"
            return environ["RANK"], environb[b"RANK"], os.environ is environ, os.getenv("ONLY_HERE")
    """)
    assert run(names.train).values == [("0", b"0", True, "yes"), ("1", b"1", True, "yes")]
    assert "ONLY_HERE" not in os.environ


def test_a_job_holds_only_the_source_of_functions_it_needs(cell: Cells, tmp_path: Path) -> None:
    names = cell(f"""
        # the key of the service: {SECRET}
        key = "{SECRET}"
        def unused():
            return "{SECRET}"
        def helper():
            return 1  # helper's line
        class Model:
            def forward(self): return helper()  # the method's line
        def train(): return Model().forward()
        key = "{SECRET}"
    """)
    nbddp.export(names.train, tmp_path / "job.nbddp")
    data = (tmp_path / "job.nbddp").read_bytes()
    assert SECRET.encode() not in data
    assert b"helper's line" in data
    assert b"the method's line" in data


def test_inspect_finds_the_source_of_functions_sent_to_a_rank(cell: Cells) -> None:
    names = cell("""
        import functools, inspect

        def noted(function):
            @functools.wraps(function)
            def inner(*args):
                return function(*args)
            return inner

        @noted
        def helper(
            x,
        ):
            "Doubles."
            return (
                x + x
            )

        class Model:
            def forward(self): return self

        halve = lambda x: x / 2

        def train():
            inner = helper.__wrapped__, helper.__closure__[0].cell_contents
            return [inspect.getsource(thing) for thing in (helper, *inner, noted, Model.forward, halve, train)]
    """)
    inner = names.helper.__wrapped__
    there = [names.helper, inner, inner, names.noted, names.Model.forward, names.halve, names.train]
    assert run(names.train).values == [[inspect.getsource(thing) for thing in there]] * 2


def test_no_launch_error_quotes_values_that_may_be_secrets(cell: Cells) -> None:
    """An error stays in the saved notebook."""
    train = cell("def train(): pass").train
    attempts = [
        lambda: run(train, env={"TOKEN": SECRET.encode()}),
        lambda: run(train, env={SECRET.encode(): "x"}),
        lambda: run(train, env=[("TOKEN", SECRET)]),
        lambda: run(train, env="TOKEN=" + SECRET),
        lambda: run(train, hosts={"gpu1": SECRET}),
        lambda: run(train, hosts=[SECRET.encode()]),
        lambda: nbddp.cluster(["gpu1"], launcher=["sshpass", "-p", SECRET, "ssh", "gpu1"]),
        lambda: nbddp.cluster(["gpu1"], launcher="sshpass -p " + SECRET),
    ]
    for attempt in attempts:
        with pytest.raises(nbddp.LaunchError) as caught:
            attempt()
        assert SECRET not in str(caught.value)


# ---------------------------------------------------------------------------- a stranger at the store

_TALKS = """
    import datetime, time, torch, torch.distributed as dist
    def talk(seconds):
        began, rounds = time.monotonic(), 0
        again = torch.ones(1)
        while again.item():
            dist.new_group([0, 1], timeout=datetime.timedelta(seconds=5))  # asks the store each time
            again = torch.tensor([float(time.monotonic() - began < seconds)])
            dist.broadcast(again, 0)
            rounds += 1
        return rounds
"""


def _garbage(port: int, hold: list[socket.socket]) -> None:
    with socket.create_connection(("127.0.0.1", port), 5) as s:
        s.sendall(os.urandom(4096))


def _many(port: int, hold: list[socket.socket]) -> None:
    for _ in range(50):
        if len(hold) < 500:
            hold.append(socket.create_connection(("127.0.0.1", port), 5))


_VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)


def _huge_lengths(port: int, hold: list[socket.socket]) -> None:
    for query in range(1, 17):
        with socket.create_connection(("127.0.0.1", port), 5) as s:
            s.sendall(_VALIDATE + bytes([query]) + struct.pack("<Q", 1 << 60) + b"x" * 100)


def _slowly(port: int, hold: list[socket.socket]) -> None:
    if not hold:
        hold += [socket.create_connection(("127.0.0.1", port), 5) for _ in range(20)]
        for s in hold:
            s.sendall(_VALIDATE)
    for s in hold:
        s.sendall(b"\1")  # a byte at a time of a message that never ends


def _foreign_keys(port: int, hold: list[socket.socket]) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    for key in ("", "x" * 10_000, "nbddp", "init/", "0", "default_pg"):
        store.set("theirs/" + key, pickle.dumps("theirs"))
        store.add("theirs/count" + key, 1)


@pytest.mark.parametrize("attack", [_garbage, _many, _huge_lengths, _slowly, _foreign_keys])
def test_a_stranger_at_the_stores_port_does_not_stop_the_run(cell: Cells, attack: Callable[..., None]) -> None:
    """From before the first rank has connected to the last collective."""
    names = cell(_TALKS)
    before = psutil.Process().memory_info().rss
    with _at_the_port(attack) as visits:
        assert _rounds_of(run(names.talk, 1.0, timeout=60)) > 1
    assert len(visits) >= 3
    assert psutil.Process().memory_info().rss - before < 500 << 20


def _rounds_of(done: nbddp.Run) -> int:
    assert len(set(done.values)) == 1
    return int(done.value)


@contextlib.contextmanager
def _at_the_port(attack: Callable[..., None]) -> Iterator[list[int]]:
    """Attack the next run's store over and over, as soon as it listens. Yields its ports, one per visit."""
    known, visits, over = listening_ports(), list[int](), threading.Event()

    def attacker() -> None:
        hold: list[socket.socket] = []
        while not over.wait(0.005):
            for _, port in listening_ports() - known:
                with contextlib.suppress(OSError, RuntimeError):
                    attack(port, hold)
                visits.append(port)
        for s in hold:
            s.close()

    thread = threading.Thread(target=attacker)
    thread.start()
    try:
        yield visits
    finally:
        over.set()
        thread.join()


def _overwrite_keys(port: int, hold: list[socket.socket]) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    for key in store.list_keys():
        store.set(key, pickle.dumps(_Bomb(hold)))


def _delete_keys(port: int, hold: list[socket.socket]) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    for key in store.list_keys():
        store.delete_key(key)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch cannot list a store's keys")
@pytest.mark.parametrize("attack", [_overwrite_keys, _delete_keys])
def test_a_stranger_who_rewrites_keys_cannot_hang_the_run_or_run_code(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[..., None]
) -> None:
    """He can make it fail: the store knows no users. It says so in time, and the notebook goes on."""
    names = cell(_TALKS)
    monkeypatch.setattr(_Bomb, "path", str(tmp_path / "exploded"))
    began = time.monotonic()
    with _at_the_port(attack) as visits:
        with contextlib.suppress(nbddp.NbddpError):
            run(names.talk, 1.0, pg_timeout=5, timeout=120)
    assert len(visits) >= 3
    assert time.monotonic() - began < 90
    assert not (tmp_path / "exploded").exists()
    assert _rounds_of(run(names.talk, 0.1)) >= 1


# ---------------------------------------------------------------------------- files from elsewhere


class _Bomb:
    """Runs code in whoever unpickles it."""

    path = ""

    def __init__(self, *_: Any) -> None: ...

    def __reduce__(self) -> Any:
        return os.mkdir, (type(self).path,)


def _plain_pickle(bomb: Any) -> bytes:
    return pickle.dumps(bomb)


def _torchs(content: Any, **options: Any) -> bytes:
    with tempfile.TemporaryFile() as file:
        torch.save(content, file, **options)
        file.seek(0)
        return file.read()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "write",
    [
        pickle.dumps,
        _torchs,
        lambda bomb: _torchs({"nbddp snapshot": 1, "state": bomb}),
        lambda bomb: _torchs({"nbddp snapshot": 1, "state": {"model": {"weight": bomb}}}),
        lambda bomb: _torchs({"nbddp snapshot": 1, "state": bomb}, _use_new_zipfile_serialization=False),
        lambda bomb: pickle.dumps({"nbddp snapshot": 1, "state": {"model": bomb}}),
    ],
    ids=["pickle", "torch", "forged mark", "deep inside", "old format", "pickle with mark"],
)
def test_a_snapshot_from_elsewhere_is_refused_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], bytes]
) -> None:
    monkeypatch.setattr(_Bomb, "path", str(tmp_path / "exploded"))
    (tmp_path / "snapshot.pt").write_bytes(write(_Bomb()))
    with pytest.raises(nbddp.NbddpError, match=r"cannot be read as a snapshot|may be any code"):
        nbddp.load_snapshot(tmp_path / "snapshot.pt")
    assert not (tmp_path / "exploded").exists()
    with contextlib.suppress(RuntimeError):  # the bomb is a real one
        torch.load(tmp_path / "snapshot.pt", weights_only=False)
    assert (tmp_path / "exploded").exists()


# Every way to read a file whose path the user gives, or that is found beside one.
_READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "snapshot": ("s.pt", lambda folder: nbddp.load_snapshot(folder / "s.pt")),
    "result": ("r.nb", lambda folder: nbddp.load_result(folder / "r.nb")),
    "metrics": ("m", lambda folder: nbddp.History.load(folder / "m")),
    "metrics of rank 1": ("m.rank1", lambda folder: nbddp.History.load(folder / "m")),
}


def _write_all(folder: Path) -> None:
    nbddp.save_snapshot(folder / "s.pt", step=3)
    job_file.write(folder / "r.nb", job_file.RESULT, "train", lambda fd: payload.pack(5, fd, back=True).nbytes)
    for rank in range(2):
        begin = wire.BEGIN.pack(wire.KIND_BEGIN, wire.BEGIN_MARK, 2, rank, 1.7e9)
        (folder / metrics_file.path_of("m", rank)).write_bytes(begin)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", _READERS)
def test_a_file_that_is_not_regular_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A named pipe has no end that somebody must write; /dev/zero has none at all."""
    _write_all(tmp_path)
    name, read = _READERS[kind]
    read(tmp_path)
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir):
        (tmp_path / name).unlink()
        make(tmp_path / name)
        with pytest.raises(nbddp.NbddpError, match="not a regular file"):
            read(tmp_path)
        os.rename(tmp_path / name, tmp_path / f"was-{len(os.listdir(tmp_path))}")
        _write_all(tmp_path)


@as_root
@pytest.mark.parametrize("kind", _READERS)
def test_a_file_or_link_of_another_user_is_refused(tmp_path: Path, kind: str) -> None:
    _write_all(tmp_path)
    name, read = _READERS[kind]
    os.chown(tmp_path / name, 65534, 65534)
    with pytest.raises(nbddp.NbddpError, match="another user"):
        read(tmp_path)
    os.chown(tmp_path, 65534, 65534)  # in a folder of theirs, which is asked for by its name
    read(tmp_path)
    os.chown(tmp_path, 0, 0)
    (tmp_path / name).rename(tmp_path / "ours")
    os.chown(tmp_path / "ours", 0, 0)
    (tmp_path / name).symlink_to("ours")
    read(tmp_path)
    os.chown(tmp_path / name, 65534, 65534, follow_symlinks=False)
    with pytest.raises(nbddp.NbddpError, match="another user"):
        read(tmp_path)


def test_a_users_own_link_leads_to_the_newest_snapshot(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    nbddp.save_snapshot(tmp_path / "steps" / "100.pt", step=100)
    (tmp_path / "latest.pt").symlink_to("steps/100.pt")
    (tmp_path / "best.pt").symlink_to(tmp_path / "latest.pt")
    assert nbddp.load_snapshot(tmp_path / "best.pt") == {"step": 100}
    nbddp.save_snapshot(tmp_path / "best.pt", step=200)
    assert nbddp.load_snapshot(tmp_path / "steps" / "100.pt") == {"step": 200}
    assert (tmp_path / "best.pt").is_symlink()
    assert (tmp_path / "latest.pt").is_symlink()
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    with pytest.raises(OSError, match="symbolic links"):
        nbddp.save_snapshot(tmp_path / "loop.pt", step=1)


@as_root
def test_another_users_link_at_a_snapshots_name_is_replaced_not_followed(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.write_text("mine")
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    (shared / "s.pt").symlink_to(ours)
    os.chown(shared / "s.pt", 65534, 65534, follow_symlinks=False)
    nbddp.save_snapshot(shared / "s.pt", step=1)
    assert ours.read_text() == "mine"
    assert nbddp.load_snapshot(shared / "s.pt") == {"step": 1}


@pytest.mark.timeout(30)
def test_a_named_pipe_among_old_partial_files_is_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".s.pt.x.partial")
    os.symlink("/dev/zero", tmp_path / ".s.pt.y.partial")
    os.utime(tmp_path / ".s.pt.x.partial", (1, 1))
    nbddp.save_snapshot(tmp_path / "s.pt", step=1)
    assert nbddp.load_snapshot(tmp_path / "s.pt") == {"step": 1}
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.timeout(30)
def test_a_huge_file_of_metrics_is_refused_before_it_is_read(tmp_path: Path) -> None:
    _write_all(tmp_path)
    os.truncate(tmp_path / "m.rank1", 1 << 40)
    with pytest.raises(nbddp.NbddpError, match="1,099,511,627,776 bytes"):
        nbddp.History.load(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("elsewhere", path)], ids=["pipe", "link"])
def test_a_jobs_metrics_are_written_only_to_a_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    nbddp.export(print, tmp_path / "job.nb")
    make(tmp_path / "m")
    command = [sys.executable, "-m", "nbddp", "job.nb", "--metrics", "m"]
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if make is os.mkfifo:
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        assert (done.returncode, "not a regular file" in done.stderr) == (1, True), done.stderr
    else:
        subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=60)  # a link of one's own
        assert (tmp_path / "elsewhere").stat().st_size > 0


def test_pictures_in_the_example_notebooks_carry_no_scripts() -> None:
    notebooks = list((PACKAGE.parent / "notebooks").rglob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", ()):
                html = "".join(output.get("data", {}).get("text/html", ""))
                assert not re.search(r"<script|javascript:|\son\w+=|<iframe|<object", html, re.IGNORECASE), path


# ---------------------------------------------------------------------------- signals


def test_no_signal_reaches_a_process_that_reused_a_ranks_pid(cell: Cells) -> None:
    """Pids are used again. Who started later than the rank is not ours to end."""
    names = cell("import time\ndef wait(): time.sleep(60)")
    started = start(names.wait)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        try:
            theirs = psutil.Process(stranger.pid)
            process = SimpleNamespace(pid=stranger.pid, sentinel=None, exitcode=None)
            worker = LocalRank(0, process, None, None, {})  # type: ignore[arg-type]
            worker._identity = _as_of_a_rank_before(theirs)
            worker.interrupt()
            worker.kill()
            worker._signal(signal.SIGKILL)
            time.sleep(0.1)
            assert stranger.poll() is None
            worker._identity = theirs  # and it would have
            worker.kill()
            assert stranger.wait(5) == -signal.SIGKILL
        finally:
            stranger.kill()
            started.stop(0)


def _as_of_a_rank_before(process: psutil.Process) -> psutil.Process:
    """The same pid, of a process that started earlier."""
    earlier = psutil.Process(process.pid)
    earlier.create_time()
    earlier._ident = (process.pid, earlier._ident[1] - 1000)  # type: ignore[attr-defined]
    return earlier


def test_signals_are_sent_only_in_the_reviewed_places() -> None:
    """Every place that sends one, and why it may."""
    allowed = {
        "launch/rank.py": 2,  # send_signal checks the start time itself; _kill_group compares them, too
        "job/rank.py": 1,  # to itself
        "kernel/dialog.py": 1,  # to its own thread that waits for a line
        "forkserver/server_process.py": 2,  # to its own child, which it has not waited for yet
        "forkserver/inside/serve.py": 1,  # to its own group
        "forkserver/inside/reaper.py": 1,  # to its own children, which it has not waited for yet
        "hosts/suppliers.py": 1,  # to its own child, which it has not waited for yet
        "worker/dead_man_switch.py": 1,  # to its own group
        "worker/reports.py": 1,  # to its own children, by multiprocessing, which knows whether it has waited for them
    }
    sends = re.compile(
        r"os\.kill\(|killpg\(|send_signal\(|\.terminate\(\)|pidfd_send_signal|signal\.raise_signal|pthread_kill\("
    )
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if count := len(sends.findall(path.read_text())):
            found[str(path.relative_to(PACKAGE))] = count
    assert found == allowed
