"""A failed login reports its cause, whatever the launcher was waiting for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbddp
from nbddp.hosts import cluster, host
from tests.hosts.test_endings import files_left
from tests.support import is_fork_server, wait_until

BUSY = "srun: Job step creation temporarily disabled, retrying (Requested nodes are busy)"


def refused(program: str, *hosts: str, **options: Any) -> str:
    """What ``nbddp.cluster`` says to a launcher that does this."""
    with pytest.raises(nbddp.LaunchError) as raised:
        nbddp.cluster(hosts or ["box1"], launcher=["sh", "-c", program, "{host}"], **options)
    return str(raised.value)


@pytest.mark.slow
def test_a_login_timeout_quotes_the_launchers_last_line() -> None:
    said = refused(f"echo '{BUSY}' >&2; exec sleep 60", login_timeout=1)
    assert said == f"box1: no answer within 1 s; its last output: {BUSY}"
    said = refused("read line; exec sleep 60", login_timeout=1)
    assert said == (
        "box1: does a start-up file of the shell there, such as ~/.bashrc, wait for input? Try `ssh -T box1 true` (no "
        "answer within 1 s)"
    )
    said = refused("echo 'ssh: connect to host box1: No route to host' >&2; exec sleep 60", login_timeout=1)
    assert said.startswith("box1: it does not answer; is it up, and reachable from here? (no answer within 1 s; ")


def test_a_launcher_that_closes_its_output_is_reported_as_that() -> None:
    said = refused("exec >&-; echo 'that was all' >&2; exec sleep 60")
    assert said == "box1: its login closed its output; its last output: that was all"


def test_a_failed_login_reports_its_exit_code_and_last_line() -> None:
    said = refused("echo 'Use is monitored' >&2; echo 'Welcome to box1' >&2; exit 3")
    assert said == "box1: its login ended with exit code 3; its last output: Welcome to box1"
    assert "an exit or exec in ~/.bashrc there" in refused("exit 0")


def test_all_hosts_that_cannot_be_used_are_named() -> None:
    said = refused('echo "$0 is down" >&2; exit 3', *(f"box{i}" for i in range(1, 8)))
    each = [f"box{i}: its login ended with exit code 3; its last output: box{i} is down" for i in range(1, 6)]
    assert said == "; ".join([*each, "and 2 more hosts"])


def test_a_missing_python_is_told_from_output_that_quotes_the_command() -> None:
    words = 'echo "csh: cannot run: $3" >&2; exit 1'
    assert "pass its path" not in refused(words)
    assert "pass its path" in refused('exec "$@"', python="/none/python")
    assert "/one/python" in refused('echo "$3" >&2; exit 1', python={"box1": "/one/python"})
    with pytest.raises(nbddp.LaunchError, match="python names 'box2', which is not in hosts"):
        nbddp.cluster(["box1"], python={"box2": "/other"})


@pytest.mark.slow
def test_setup_comes_before_the_interpreter_and_disturbs_no_frame() -> None:
    names = {"launcher": ["env", "NBDDP_TESTS_BOX={host}"], "python": sys.executable}
    setup = "export NBDDP_TESTS_SETUP=done; echo noise; read line"
    with nbddp.cluster(["box1"], setup=f"{setup} || true", **names) as hosts:
        found = hosts.run(_setup_of, nprocs=1, device="cpu", show=False).value
    assert found == ("box1", "done")
    with pytest.raises(nbddp.LaunchError, match="box1: its login ended with exit code 5; its last output: no module"):
        nbddp.cluster(["box1"], setup="echo no module; (exit 5)", **names)


def _setup_of() -> tuple[str, str]:
    return os.environ["NBDDP_TESTS_BOX"], os.environ["NBDDP_TESTS_SETUP"]


@pytest.mark.slow
def test_a_login_without_file_descriptors_is_a_launch_error_that_names_ulimit() -> None:
    for spare in range(20):
        try:
            with files_left(spare), nbddp.cluster(["localhost"]):
                break
        except nbddp.LaunchError as error:
            said = str(error)
        assert said.startswith("localhost: ")
        assert said.endswith("(ulimit -n)")
    assert 4 < spare < 19


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest keeps for itself."""


@pytest.mark.slow
def test_an_interrupt_just_after_a_login_began_kills_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def begin(*args: Any) -> host.Host:
        made = host.Host(*args)
        begun.append(made._process)
        signal.raise_signal(signal.SIGUSR2)
        time.sleep(0.5)  # where the interrupt ends this, nobody else knows of it
        return made

    def interrupt(*_: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(cluster, "Host", begin)
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(Interrupted):
            nbddp.cluster(["box1", "box2"], launcher=["sh", "-c", "exec sleep 60", "{host}"])
        assert [process.returncode for process in begun] == [-signal.SIGKILL]  # the second was not begun
    finally:
        signal.signal(signal.SIGUSR2, before)
        for process in begun:
            process.kill()
            process.wait()


def test_a_null_byte_in_the_launcher_is_a_launch_error() -> None:
    with pytest.raises(nbddp.LaunchError, match="embedded null byte"):
        nbddp.cluster(["box"], launcher=["a\0b", "{host}"])


@pytest.mark.parametrize("bad", [*" \t\n\r\0\x1b\x7f\u2028\"'`$&|;<>(){}*?!#~\\^,=", "-o", "@", "@-"])
def test_an_invalid_host_name_is_refused_before_a_process_starts(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    leading = [] if bad in ("@", "@-") else [f"box{bad}"] * (bad != "-o") + [f"user{bad}@box"] * (bad != "-o")
    for name in [bad, f"{bad}box", f"user@{bad}box", *leading]:
        with pytest.raises(nbddp.LaunchError, match=r"^hosts\[1\] is not the name of a host") as raised:
            nbddp.cluster(["good", name])
        assert "box" not in str(raised.value)


@pytest.mark.parametrize(
    "name",
    ["gpu1", "GPU-1.example.org", "user@gpu1", "first.last-x@10.0.0.1", "::1", "fe80::1%eth0", "me@2001:db8::7"]
    + ["ssh://me@box:2222", "ssh://[::1]:22", "pod_name-0", "namespace/pod-0", "bücher.example", "_x", "a.b."],
)
def test_host_names_and_addresses_that_ssh_accepts_are_accepted(name: str) -> None:
    with pytest.raises(nbddp.LaunchError) as raised:
        nbddp.cluster([name], launcher=["sh", "-c", 'echo "got $0" >&2; exit 3', "{host}"])
    assert str(raised.value) == f"{name}: its login ended with exit code 3; its last output: got {name}"


def test_control_characters_in_a_hosts_output_do_not_reach_the_notebook() -> None:
    said = refused(r"printf '\033[31mred\033[0m \033]0;title\007\tend\033[2K\233\n\033[0m\n' >&2; exit 3")
    assert said == "box1: its login ended with exit code 3; its last output: red \N{REPLACEMENT CHARACTER}]0;title" + (
        "\N{REPLACEMENT CHARACTER} end\N{REPLACEMENT CHARACTER}"
    )


def test_the_agents_fork_server_starts_at_once_and_ends_with_the_login(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time\ntime.sleep(1000)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-m", "nbddp.agent"], stdin=subprocess.PIPE, env=env) as login:
        server = wait_until(lambda: _fork_servers(login.pid), what="its fork server, while it imports torch")[0]
        assert login.stdin is not None
        login.stdin.close()
    server.wait(5)


def _fork_servers(pid: int) -> list[psutil.Process]:
    return list(filter(is_fork_server, psutil.Process(pid).children()))
