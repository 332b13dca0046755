"""What another user on the same machine can and cannot do to a run."""

import contextlib
import io
import json
import os
import pickle
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import nbddp
from nbddp.kernel.settings import Options, decide
from nbddp.process import server as forkserver
from nbddp.process.machine import LocalMachine
from tests.support import Cells, Planted, listening_ports, marked_pids, open_fds, run, script, start, wait_until

SECRET = f"hunter2-{secrets.token_hex(8)}"  # in no file: copies of this one lie in temporary folders
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.mark.parametrize(
    ("how", "init"), [("ours", True), *((how, init) for how in ("env", "file") for init in (True, False))]
)
def test_a_run_listens_only_on_loopback(cell: Cells, tmp_path: Path, how: str, init: bool) -> None:
    """torch's own store listens on all interfaces."""
    names = cell("""
        import os, time, torch, torch.distributed as dist
        def meet(how, path):
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            where = dict(rank=rank, world_size=world_size)
            if how == "file": where["init_method"] = f"file://{path}/store"
            if how != "ours": dist.init_process_group("gloo", **where)
            dist.new_group([0, 1])
            total = torch.ones(1)
            dist.all_reduce(total)
            open(f"{path}/{rank}", "w").close()
            while not os.path.exists(f"{path}/go"): time.sleep(0.01)
            return total.item()
    """)
    started = run(names.meet, how, str(tmp_path), init_process_group=init, wait=False)
    wait_until(lambda: started.error or all((tmp_path / str(rank)).exists() for rank in range(2)))
    heard = _heard_beyond_loopback({os.getpid(), *marked_pids()})
    ports = [port for pid in started.pids for _, port in listening_ports(pid)]
    (tmp_path / "go").touch()
    assert (started.wait().values, heard) == ([2.0, 2.0], [])
    assert len(ports) >= 2  # gloo's own, or this has looked at nothing


def _heard_beyond_loopback(pids: set[int]) -> list[str]:
    """Sockets that another machine can reach, or that have a name in no folder."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for c in psutil.Process(pid).net_connections("all"):
                if c.family == socket.AF_UNIX:
                    bad = isinstance(c.laddr, str) and c.laddr.startswith("@")
                else:
                    waits = c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM
                    # A library's lookup is connected.
                    bad = waits and not c.raddr and c.laddr.ip not in ("127.0.0.1", "::1")
                if bad:
                    found.append(f"{pid}: {c}")
    return found


_STRANGER = """
    import ctypes, json, os, socket, sys
    pids, paths, address = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    done = []
    def attempt(what, function):
        try: function()
        except PermissionError: return
        done.append(what)
    def take(pid, fd):
        pidfd = os.pidfd_open(pid)
        try:
            if libc.syscall(438, pidfd, fd, 0) == -1:  # pidfd_getfd
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
        finally: os.close(pidfd)
    def trace(pid):
        if libc.ptrace(16, pid, None, None) == -1: raise OSError(ctypes.get_errno(), "ptrace")
    attempt("connect to the fork server", lambda: socket.socket(socket.AF_UNIX).connect(address))
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


@as_root
def test_another_user_cannot_reach_ranks_server_or_folder(cell: Cells) -> None:
    started = start(cell("import time\ndef wait(data): time.sleep(60)").wait, SECRET * 100_000)
    server = forkserver.running()
    pids = {pid: list(open_fds(pid)) for pid in (*started.pids, server._forkserver_pid)}
    said = script(_STRANGER, json.dumps([pids, _folders(), server._forkserver_address]))
    started.stop(0)
    assert (said.stderr, json.loads(said.stdout)) == ("", ["nothing, which always works"])


def _folders() -> list[str]:
    """The fork server's, and those of runs."""
    folder = forkserver.temporary_folder()
    return [folder, *map(str, Path(folder).glob("r-*"))]


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_folder_that_a_cleaner_of_tmp_has_removed_is_made_again_as_private_as_before() -> None:
    shutil.rmtree(forkserver.temporary_folder())
    assert (run(lambda: 1).values, {_mode(each) for each in _folders()}) == ([1, 1], {0o700})


def test_private_files_cannot_be_opened_by_others_and_secrets_are_in_no_file_message_or_command_line(
    cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has a name lies in a folder that only we can open; all else has none."""
    monkeypatch.setenv("API_TOKEN", SECRET)
    names = cell("""
        import os, time, nbddp
        def train(data):
            assert os.environ["API_TOKEN"] == data
            nbddp.log(loss=1.0)
            raise ValueError("boom")
        def wait(data): print(data); time.sleep(60)
    """)
    with pytest.raises(nbddp.RankError) as caught:
        run(names.train, SECRET, nprocs=2)
    failed = nbddp.last_run()
    with pytest.raises(nbddp.LaunchError, match="the value of 'API_TOKEN' has type bytes") as refused:
        run(names.train, SECRET, env={"API_TOKEN": SECRET.encode()})
    told = [*map(str, (caught.value, refused.value, failed.stacks())), failed.logs()]
    told += map(repr, (caught.value, failed, failed.history))
    assert not [text for text in told if SECRET in text]
    started = start(names.wait, SECRET)
    wait_until(lambda: SECRET in started.logs(0))  # it opens no more files
    folder, *of_runs = _folders()
    assert of_runs
    assert {_mode(each) for each in (folder, *of_runs)} == {0o700}
    for pid in started.pids:
        for fd, target in open_fds(pid).items():
            if target.endswith("(deleted)") and not target.startswith("/memfd:"):
                assert _mode(f"/proc/{pid}/fd/{fd}") == 0o600, target
            elif not target.startswith(("/memfd:", "pipe:", "socket:", "anon_inode:", "/dev/", "/proc/", "/usr/lib/")):
                assert target.startswith(tuple(of_runs))
                assert _mode(target) == 0o600, target
    lines = [Path(f"/proc/{pid}/cmdline") for pid in marked_pids()]
    assert len(lines) >= 3
    files = [path for path in Path(tempfile.gettempdir()).rglob("*") if path.is_file()]
    assert [path for path in (*lines, *files) if SECRET.encode() in path.read_bytes()] == []
    started.stop(0)


def test_a_job_holds_neither_the_environment_nor_source_that_it_does_not_need(
    cell: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", SECRET)
    for line in (
        "from os import environ",
        "import os; environ = os.environ",
        "from os import environb as environ",
        "from os import environ as it; environ = [it]",
        "from os import environ as it; environ = it.get",
    ):
        names = cell(f"""
            # the key of the service: {SECRET}
            key = "{SECRET}"
            {line}
            def unused(): return "{SECRET}"
            def helper(): return environ  # helper's line
            five, spare = (lambda: 5,  # the lambda's line
                "{SECRET}")
            class Model:
                def forward(self): return helper()  # the method's line
            def train(): return Model().forward(), five()
            key = "{SECRET}"
        """)
        nbddp.export(names.train, tmp_path / "job.nbddp")
        data = (tmp_path / "job.nbddp").read_bytes()
        assert SECRET.encode() not in data
        assert [text in data for text in (b"helper's line", b"method's line", b"lambda's line")] == [True] * 3


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


def test_no_signal_reaches_a_process_that_reused_a_ranks_pid() -> None:
    """Pids are used again. Who started later than the rank is not ours to end."""
    machine, settings = LocalMachine(), decide("train", Options(nprocs=1, device="cpu"))
    machine.start(settings, [0])
    rank = machine._ranks[0]
    ours, pid = rank.itself, rank.process.pid
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        try:
            rank.process._popen._number = stranger.pid  # as if Linux had given the stranger the rank's number
            rank.itself = psutil.Process(stranger.pid)
            rank.itself.create_time()
            rank.itself._ident = (stranger.pid, rank.itself._ident[1] - 1000)  # of a process that started earlier
            rank.signal(signal.SIGINT)
            rank.signal(signal.SIGKILL)
            rank._end_children()
            time.sleep(0.1)
            assert stranger.poll() is None
            rank.itself = psutil.Process(stranger.pid)  # and it would have
            rank.signal(signal.SIGKILL)
            assert stranger.wait(5) == -signal.SIGKILL
        finally:
            stranger.kill()
            rank.process._popen._number, rank.itself = pid, ours
            machine.signal([0], signal.SIGKILL)
            wait_until(lambda: any(event.kind == "exit" for event in machine.events(0.1)))
            machine.close()


def _torchs(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "write",
    [
        pickle.dumps,
        _torchs,
        lambda bomb: _torchs({"state": bomb, "steps": {}}),
        lambda bomb: _torchs({"state": {"model": {"weight": bomb}}, "steps": {}}),
        lambda bomb: _torchs({"state": {}, "steps": bomb}),
        lambda bomb: _torchs({"state": bomb, "steps": {}}, _use_new_zipfile_serialization=False),
        lambda bomb: pickle.dumps({"state": {"model": bomb}, "steps": {}}),
    ],
    ids=["pickle", "torch", "forged", "deep inside", "steps", "old format", "forged pickle"],
)
def test_a_snapshot_from_elsewhere_is_refused_and_runs_no_code(in_folder: Path, write: Callable[[Any], bytes]) -> None:
    Path("snapshot.pt").write_bytes(write(Planted("exploded")))
    with pytest.raises(nbddp.NbddpError, match="can't be read as a snapshot"):
        nbddp.load_snapshot("snapshot.pt")
    assert os.listdir() == ["snapshot.pt"]
    with contextlib.suppress(RuntimeError):  # the bomb is a real one
        torch.load("snapshot.pt", weights_only=False)
    assert os.path.exists("exploded")
