"""Fixtures: hosts for the tests, and a check of what a run has left on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nbddp
from nbddp.hosts import returns
from tests import support
from tests.hosts.rig import GONE_S, NAMES, Machine, NotHere, Rig
from tests.support import wait_until

HEARTBEAT_S = 3.0
LONG_HEARTBEAT_S = 60.0  # what is noticed sooner has not waited for it
_NEVER_S = 3600.0
Limit = Callable[[str], None]
BACK_S = 60.0  # a login imports torch, on a machine with other work


@pytest.fixture(scope="package")  # the other tests look for processes that are left
def rig(_warm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Four hosts, ``gpu1`` to ``gpu4``."""
    try:
        made = Rig(tmp_path_factory.getbasetemp())
    except NotHere as reason:
        pytest.skip(f"no hosts on this machine: {reason}")
    with made:
        yield made


@pytest.fixture(autouse=True)
def _hosts_stay_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process or a file on a host; cables that it has pulled are in again."""
    if "rig" not in request.fixturenames:
        yield
        return
    rig: Rig = request.getfixturevalue("rig")
    if "warm" in request.fixturenames:
        request.getfixturevalue("warm")
    else:  # the test takes every process on a host for its own
        for opened in request.getfixturevalue("_logged_in"):
            opened.close()
    before = {name: ({p.pid for p in host.processes()}, host.files()) for name, host in rig.hosts.items()}
    yield
    problems = []
    for name, host in rig.hosts.items():
        rig.cable(name, "up")
        try:
            host.wait_until_clean(GONE_S, *before[name])
        except AssertionError as problem:
            problems.append(str(problem))
            host.clean_up(*before[name])
    assert not problems, "\n".join(problems)


@pytest.fixture
def cluster(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., nbddp.Cluster]]:
    """Logs in to hosts of the rig; logs out at the end. Hosts that are lost stay lost, unless ``returning``."""
    opened: list[nbddp.Cluster] = []

    def log_in(*hosts: str, returning: bool = False, **options: Any) -> nbddp.Cluster:
        monkeypatch.setattr(returns, "FIRST_PAUSE_S", 0.2 if returning else _NEVER_S)
        options = {"launcher": rig.ssh, "heartbeat": HEARTBEAT_S, **options}
        opened.append(nbddp.cluster(list(hosts) or ["gpu1", "gpu2"], **options))
        return opened[-1]

    yield log_in
    for one in opened:
        one.close()


@pytest.fixture(scope="package")  # the other tests look for processes that are left
def _logged_in(rig: Rig) -> Iterator[list[nbddp.Cluster]]:
    box: list[nbddp.Cluster] = []
    yield box
    for opened in box:
        opened.close()


@pytest.fixture
def warm(rig: Rig, _logged_in: list[nbddp.Cluster]) -> nbddp.Cluster:
    """``gpu1`` and ``gpu2``, logged in to for many tests. A host that a test loses is there again for the next one."""
    if is_new := not _logged_in or repr(_logged_in[0]) == "<Cluster, closed>":
        _logged_in[:] = [nbddp.cluster(["gpu1", "gpu2"], launcher=rig.ssh, heartbeat=LONG_HEARTBEAT_S)]
    if is_new or _logged_in[0].present() != _logged_in[0].hosts:
        bring_back(_logged_in[0])
    return _logged_in[0]


def bring_back(hosts: nbddp.Cluster) -> None:
    """Log in again to hosts that were lost. Those that are lost later stay so until this is called again."""
    if hosts.present() != hosts.hosts:
        hosts._returns.begin()
        wait_until(lambda: hosts.present() == hosts.hosts and hosts._returns._thread_over is None, BACK_S)
    for host in hosts._returns.hosts:
        host.when_lost = lambda: None
    hosts.run(_nothing, nprocs=1, device="cpu", show=False)  # there is then what a cluster keeps


def _nothing() -> None:
    pass


@pytest.fixture
def limit(rig: Rig) -> Iterator[Limit]:
    """Limits the rate of all cables, and of the notebook's."""

    def set_rate(rate: str) -> None:
        for name in (*NAMES, "notebook"):
            rig.limit(name, rate)

    yield set_rate
    set_rate("")


@pytest.fixture
def gpu2(rig: Rig) -> Iterator[Machine]:
    """The host that the tests lose; it is there again for the next test."""
    yield rig.hosts["gpu2"]
    power_on(rig.hosts["gpu2"])


def power_on(host: Machine) -> None:
    """Start its ssh server, which is not left behind by the test."""
    support.at_start.update(host.power_on())
