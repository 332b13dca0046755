"""Hosts that cannot be used: one error names the host and the remedy, and nothing is left running on any machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from tests.hosts.rig import ROOT, Rig
from tests.support import Cells, run

pytestmark = pytest.mark.slow

SOON_S = 90.0  # hosts import torch at the same time on a machine with other work; the login's own limit is 120 s


def refused(rig: Rig, *hosts: str, **options: Any) -> str:
    """What ``nbddp.cluster`` says; it must be a LaunchError of a line, and soon."""
    began = time.monotonic()
    with pytest.raises(nbddp.LaunchError) as raised:
        with nbddp.cluster(list(hosts), **{"launcher": rig.ssh, **options}):
            pass
    assert time.monotonic() - began < SOON_S
    said = str(raised.value)
    assert "\n" not in said, said
    assert "Welcome" not in said, "the login shell's greeting is no cause"
    assert "new mail" not in said, "the login shell's greeting is no cause"
    return said


def only_on(host: str, folder: Path, body: str) -> str:
    """A Python that is another one on that host."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" != {host} ] || {{ {body}; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def preloading(host: str, folder: Path, source: str) -> str:
    """A Python that executes this first, on that host."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(textwrap.dedent(source))
    return only_on(host, folder, f"export PYTHONPATH={shlex.quote(str(site))}:$PYTHONPATH")


# ---------------------------------------------------------------------------- who cannot be logged in to


@contextlib.contextmanager
def holding(path: Path, text: str) -> Iterator[None]:
    """That file holds this for a while."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def no_key(rig: Rig) -> contextlib.AbstractContextManager[None]:
    return holding(rig.folder / "gpu2.authorized", "")


def other_keys(rig: Rig) -> contextlib.AbstractContextManager[None]:
    known = rig.folder / "known_hosts"
    lines = known.read_text().splitlines()
    swapped = [f"{a.split()[0]} {' '.join(b.split()[1:])}" for a, b in zip(lines, lines[1:] + lines[:1])]
    return holding(known, "\n".join(swapped) + "\n")


def as_it_is(_rig: Rig) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("spoilt", "hosts", "bad", "says"),
    [
        pytest.param(as_it_is, ["gpu1", "gpu9"], "gpu9", ["~/.ssh/config"], id="nobody knows it"),
        pytest.param(as_it_is, ["gpu1", "nobody-there"], "nobody-there", ["is it up"], id="off"),
        pytest.param(as_it_is, ["no-server", "gpu1"], "no-server", ["no ssh server"], id="no ssh server"),
        # And no prompt for a password, which nobody sees.
        pytest.param(no_key, ["gpu1", "gpu2"], "gpu2", ["ssh-copy-id gpu2"], id="it refuses the key"),
        pytest.param(other_keys, ["gpu1"], "gpu1", ["host key", "ssh gpu1"], id="it may be another"),
    ],
)
def test_a_failed_login_is_an_error_that_names_the_host_and_the_remedy(
    rig: Rig,
    spoilt: Callable[[Rig], contextlib.AbstractContextManager[None]],
    hosts: list[str],
    bad: str,
    says: list[str],
) -> None:
    with spoilt(rig):
        said = refused(rig, *hosts)
    assert said.startswith(f"{bad}: ")
    assert not [words for words in says if words not in said], said


# ---------------------------------------------------------------------------- what is missing there


def test_a_missing_python_is_named_with_its_host(rig: Rig) -> None:
    said = refused(rig, "gpu1", "gpu2", python="/no/such/python")
    assert said.startswith("gpu1: ")
    assert "/no/such/python" in said
    assert "python=" in said


def test_a_host_without_nbddp_is_told_what_to_install(rig: Rig, tmp_path: Path) -> None:
    base = os.path.realpath(sys.executable)
    said = refused(rig, "gpu1", "gpu2", python=only_on("gpu2", tmp_path, f'unset PYTHONPATH; exec {base} -S "$@"'))
    assert said.startswith("gpu2: ")
    assert f"pip install nbddp=={nbddp.__version__}" in said


def test_a_host_that_lacks_a_dependency_is_named_with_the_package(rig: Rig, tmp_path: Path) -> None:
    base = os.path.realpath(sys.executable)
    body = f'export PYTHONPATH={ROOT}; exec {base} -S "$@"'
    said = refused(rig, "gpu1", "gpu2", python=only_on("gpu2", tmp_path, body))
    assert said.startswith("gpu2: ")
    assert "lacks a package" in said
    assert "No module named" in said


@pytest.mark.parametrize(("what", "there"), [("torch", "2.1.0"), ("cloudpickle", "1.0")])
def test_a_different_package_version_is_refused_with_both_versions(
    rig: Rig, tmp_path: Path, what: str, there: str
) -> None:
    source = f"""
        import importlib.metadata as metadata
        found = metadata.version
        metadata.version = lambda name: {there!r} if name == {what!r} else found(name)
    """
    said = refused(rig, "gpu1", "gpu2", python=preloading("gpu2", tmp_path, source))
    assert said.startswith(f"gpu2 has {what} {there}, this notebook {what} ")
    assert "install the same version" in said


def test_a_different_python_version_is_refused_with_both_versions(rig: Rig, tmp_path: Path) -> None:
    source = "import platform; platform.python_version_tuple = lambda: ('3', '8', '10')"
    said = refused(rig, "gpu2", python=preloading("gpu2", tmp_path, source))
    assert said.startswith("gpu2 has Python 3.8, this notebook Python 3.")


def test_a_different_nbddp_version_is_refused_with_both_versions(rig: Rig, tmp_path: Path) -> None:
    source = "from nbddp import versions; versions.__version__ = '0.0'"
    said = refused(rig, "gpu2", python=preloading("gpu2", tmp_path, source))
    assert said.startswith(f"gpu2 has nbddp 0.0, this notebook nbddp {nbddp.__version__}")


def test_a_python_that_crashes_at_once_is_reported_with_its_exit_code(rig: Rig, tmp_path: Path) -> None:
    python = only_on("gpu2", tmp_path, "kill -SEGV $$")
    with pytest.raises(nbddp.LaunchError, match=r"gpu2: .*exit code"):
        nbddp.cluster(["gpu1", "gpu2"], launcher=rig.ssh, python=python)


# ---------------------------------------------------------------------------- what is no list of hosts


def test_a_host_named_twice_is_refused(rig: Rig) -> None:
    assert refused(rig, "gpu1", "gpu2", "gpu1").startswith("gpu1 is named twice: name it once")


def test_two_names_of_one_host_are_refused(rig: Rig) -> None:
    said = refused(rig, "gpu1", "gpu1.by-another-name")
    assert said.startswith("gpu1 and gpu1.by-another-name are the same machine")


def test_two_names_of_this_machine_are_refused(rig: Rig) -> None:
    here = ["sh", "-c", 'exec "$@"', "{host}"]
    assert "same machine" in refused(rig, "localhost", "me", launcher=here)


@pytest.mark.parametrize(
    ("hosts", "options", "says"),
    [
        ([], {}, "hosts is a list of names"),
        ("gpu1", {}, "hosts is a list of names"),
        (["gpu1", ""], {}, "hosts is a list of names"),
        (["gpu1", 2], {}, "hosts is a list of names"),
        (["-oProxyCommand=touch /tmp/owned"], {}, "hosts[0] is not the name of a host"),
        (["gpu1"], {"launcher": ["ssh", "gpu1"]}, "{host}"),
        (["gpu1"], {"launcher": []}, "{host}"),
        (["gpu1"], {"launcher": ["/no/such/launcher", "{host}"]}, "gpu1: /no/such/launcher cannot be started"),
        (["gpu1"], {"heartbeat": 0}, "heartbeat"),
        (["gpu1"], {"heartbeat": float("nan")}, "heartbeat"),
        (["gpu1"], {"heartbeat": "soon"}, "heartbeat"),
        ("slurm", {}, "salloc"),
    ],
)
def test_invalid_hosts_or_launchers_are_refused(hosts: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(nbddp.LaunchError) as raised:
        nbddp.cluster(hosts, **options)
    assert says in str(raised.value)


def test_run_refuses_the_same_hosts_with_the_same_messages(cell: Cells) -> None:
    names = cell("def train(): return 1")
    with pytest.raises(nbddp.LaunchError, match="hosts is a list of names"):
        run(names.train, hosts="gpu1")
    with pytest.raises(nbddp.LaunchError, match="named twice"):
        run(names.train, hosts=["localhost", "localhost"])


# ---------------------------------------------------------------------------- what cannot be run there


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nprocs": {"gpu1": 2}}, "does not name gpu2"),
        ({"nprocs": {"gpu1": 2, "gpu2": 2, "gpu3": 1}}, "names 'gpu3', which is not in hosts="),
        ({"nprocs": {"gpu1": 2, "gpu2": 0}}, "too small"),
        ({"nprocs": 0}, "too small"),
        ({"nprocs": "2"}, "whole number"),
        ({"min_hosts": 0}, "min_hosts"),
        ({"min_hosts": 3}, "min_hosts"),
        ({"device": "cuda"}, "gpu1"),
        ({"gpus": [0]}, "gpu"),
        ({"env": {"RANK": "0"}}, "RANK"),
    ],
)
def test_invalid_nprocs_or_min_hosts_are_refused_and_the_cluster_stays_usable(
    cell: Cells, warm: nbddp.Cluster, options: dict[str, Any], says: str
) -> None:
    names = cell("def train(): return 1")
    with pytest.raises(nbddp.LaunchError) as raised:
        nbddp.run(names.train, hosts=warm, show=False, **options)
    assert says in str(raised.value)
    assert run(names.train, hosts=warm).values == [1] * 4


def test_hosts_with_different_gpu_counts_need_nprocs_by_host(rig: Rig, cell: Cells, tmp_path: Path) -> None:
    source = """
        import os, socket
        if os.environ.get("FAKE_GPUS") != "no":
            import nbddp.launch.devices as devices
            devices.accelerator = lambda: ("cuda", 4 if socket.gethostname() == "gpu2" else 8)
    """
    python = preloading("gpu2", tmp_path, source)
    with open(python) as file:
        everywhere = file.read().replace('[ "$(hostname)" != gpu2 ] ||', "")
    with open(python, "w") as file:
        file.write(everywhere)
    names = cell("def train(): return 1")
    with nbddp.cluster(["gpu1", "gpu2"], launcher=rig.ssh, python=python) as hosts:
        with pytest.raises(nbddp.LaunchError) as raised:
            nbddp.run(names.train, hosts=hosts, show=False)
        assert "gpu1 has 8, gpu2 has 4" in str(raised.value)
        assert "nprocs={'gpu1': 8, 'gpu2': 4}" in str(raised.value)
        with pytest.raises(nbddp.LaunchError, match=r"gpu2: nprocs=8, but .* 4 cuda devices"):
            nbddp.run(names.train, hosts=hosts, nprocs=8, show=False)


def test_min_hosts_or_a_dict_of_nprocs_without_hosts_is_refused(cell: Cells) -> None:
    names = cell("def train(): return 1")
    with pytest.raises(nbddp.LaunchError, match="min_hosts"):
        run(names.train, min_hosts=1)
    with pytest.raises(nbddp.LaunchError, match="nprocs"):
        run(names.train, nprocs={"gpu1": 2})


def test_a_host_whose_limits_refuse_the_payload_is_named_before_the_heartbeat(
    rig: Rig, cell: Cells, tmp_path: Path
) -> None:
    names = cell("def train(big): return len(big)")
    python = only_on("gpu2", tmp_path, "ulimit -f 4000")
    with nbddp.cluster(["gpu1", "gpu2"], launcher=rig.ssh, python=python, heartbeat=60.0) as hosts:
        began = time.monotonic()
        with pytest.raises((nbddp.LaunchError, nbddp.HostLost), match="gpu2"):
            run(names.train, b"x" * 20_000_000, hosts=hosts)
        assert time.monotonic() - began < 40  # the heartbeat comes later


# ---------------------------------------------------------------------------- who is no nbddp


LIARS = {
    "silence at once": "sys.exit(0)",
    "no end of noise": "while True: print('y' * 1000)",
    "a mark and no frames": "lie(b'x' * 4096)",
    "a hello without facts": "lie(frame({'kind': 'hello'}))",
    "facts of other kinds": "lie(frame({**HELLO, 'networks': 7, 'devices': 'many'}))",
    "a clock that is none": "lie(frame({**HELLO, 'now': 'late'}))",
    "a frame of 4 GB": "lie(b'\\xff' * 8)",
}


@pytest.mark.parametrize("liar", LIARS)
def test_a_host_that_answers_with_something_else_is_refused_within_30_s(liar: str, tmp_path: Path) -> None:
    program = tmp_path / "liar.py"
    program.write_text(
        textwrap.dedent("""
            import json, os, struct, sys, time
            def lie(data):
                os.write(1, b"\\0nbddp frames 1\\n" + data)
                time.sleep(60)
            def frame(head):
                text = json.dumps(head).encode()
                return struct.pack(">II", len(text), 0) + text
            HELLO = {"kind": "hello", "versions": {}, "devices": {}, "networks": [], "asked_at": "", "identity": "me",
                     "machine": "me", "now": 1.0}
        """)
        + LIARS[liar]
    )
    began = time.monotonic()
    with pytest.raises(nbddp.LaunchError, match="box1"):
        nbddp.cluster(["box1"], launcher=[sys.executable, str(program), "{host}"], heartbeat=5.0)
    assert time.monotonic() - began < 30  # the liar itself ends after 60 s


def test_a_tilde_in_python_is_the_home_on_the_host(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python="~/..."`` is that on the host."""
    monkeypatch.setenv("HOME", str(tmp_path))
    program = "'#!/bin/sh\necho it is the one of the host >&2; exit 3\n'"
    there = rig.hosts["gpu1"]
    there.run("sh", "-c", f"mkdir '{there.home}/my env' && printf {program} > '{there.home}/my env/python'")
    there.run("chmod", "+x", f"{there.home}/my env/python")
    assert "it is the one of the host" in refused(rig, "gpu1", python="~/my env/python")
