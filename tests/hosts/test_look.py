"""Before ranks start, the hosts try to reach each other: a firewall is named at once, and slow connections are, too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import nbddp
from nbddp.hosts import network
from nbddp.hosts.network import Link, Links, Look, slow_links
from tests.hosts.rig import Rig
from tests.support import Cells, run

ALL = ("gpu1", "gpu2", "gpu3")
PAIRS = {(one, other) for one in ALL for other in ALL if one != other}
SIZE = "import nbddp\ndef train(): return nbddp.world_size()"


@pytest.fixture(scope="module")
def _three(rig: Rig) -> Iterator[nbddp.Cluster]:
    with nbddp.cluster(list(ALL), launcher=rig.ssh, heartbeat=60.0) as hosts:
        assert hosts.network() == {}
        hosts.run(nbddp.rank, nprocs=1, device="cpu", show=False)  # there is then what a cluster keeps
        yield hosts


@pytest.fixture
def three(_three: nbddp.Cluster) -> nbddp.Cluster:
    """Hosts that have not reached each other yet."""
    _three._seen.clear()
    _three._links.clear()
    return _three


@pytest.mark.slow
def test_a_firewall_between_two_hosts_is_named_before_ranks_start(cell: Cells, three: nbddp.Cluster, rig: Rig) -> None:
    train = cell(SIZE).train
    rig.isolate("gpu2", "gpu3")
    try:
        began = time.monotonic()
        with pytest.raises(nbddp.LaunchError) as raised:
            run(train, hosts=three, nprocs=1)
        assert time.monotonic() - began < 30  # gloo's own patience is one of minutes
        text = str(raised.value)
        one, other = ("gpu2", "gpu3") if text.startswith("gpu2") else ("gpu3", "gpu2")
        assert text.startswith(f"{one} cannot reach {other} ({rig.hosts[other].address}): ")
        assert "firewall" in text
        assert "gpu1" not in text
        assert "\n" not in text
    finally:
        rig.isolate("gpu2", "gpu3", state="off")
    assert run(train, hosts=three, nprocs=1).values == [3] * 3


@pytest.mark.slow
def test_the_first_run_measures_all_connections_and_the_next_does_not(cell: Cells, three: nbddp.Cluster) -> None:
    train = cell(SIZE).train
    run(train, hosts=three, nprocs=1)
    measured = three.network()
    assert set(measured) == PAIRS
    assert all(0 < link.latency_s < 5 and link.bytes_per_s and link.bytes_per_s > 1e6 for link in measured.values())
    run(train, hosts=three, nprocs=1)
    assert three.network() == measured


@pytest.mark.slow
def test_the_panel_names_a_host_with_a_slow_connection(cell: Cells, three: nbddp.Cluster, rig: Rig) -> None:
    rig.limit("gpu3", "10mbit")
    try:
        found = run(cell(SIZE).train, hosts=three, nprocs=1)
    finally:
        rig.limit("gpu3")
    rates = {pair: link.bytes_per_s for pair, link in three.network().items()}
    assert all((rate < 3e6) == ("gpu3" in pair) for pair, rate in rates.items() if rate is not None)
    notice = found._viewable.status().notice
    if min(rate for pair, rate in rates.items() if rate is not None and "gpu3" not in pair) >= network._GIGABIT:
        assert notice.startswith("all connections of gpu3: 1.")
    else:  # on a machine with other work, these took long enough to be called slow, too
        assert "gpu3" in notice


def links(**rates: float) -> Links:
    return {(pair[0], pair[1]): Link(1e-4, rate) for pair, rate in rates.items()}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (links(ab=1e9, ba=1e9), ""),
        (links(ab=1e9, ba=2e8), ""),
        (links(ab=1e9, ba=5e6), "b to a: 5.0 MB/s, the others up to 1,000 MB/s"),
        (links(ab=1e9, ba=1e9, ac=5e6, ca=4e6), "all connections of c: 5.0 MB/s, the others up to 1,000 MB/s"),
        (links(ab=5e6, ba=5e6), ""),
        (
            {("a", "b"): Link(1e-4, None), ("b", "a"): Link(5e-2, None)},
            "b to a: 50.0 ms there and back, others 0.1 ms",
        ),
    ],
)
def test_connections_far_slower_than_the_others_are_named(measured: Links, expected: str) -> None:
    assert slow_links(measured) == expected


@pytest.mark.parametrize(("size", "most"), [(2, 1), (8, 7), (9, 2), (100, 2)])
def test_beyond_eight_hosts_each_tries_the_next_and_the_first(size: int, most: int) -> None:
    sent: dict[str, Any] = {}

    def fake(name: str) -> Any:
        return SimpleNamespace(name=name, send=lambda order: sent.setdefault(name, order))

    hosts = [fake(f"gpu{i}") for i in range(size)]
    look = Look(hosts, {host.name: f"10.0.0.{i}" for i, host in enumerate(hosts)})
    for port, host in enumerate(hosts, 1):
        look.listens(host, port)
    assert len(sent) == size
    tried = {name: [peer[0] for peer in order["peers"]] for name, order in sent.items()}
    assert max(map(len, tried.values())) == most
    assert all(name not in peers and len(set(peers)) == len(peers) for name, peers in tried.items())
    assert all(peers[0] == f"gpu{(i + 1) % size}" for i, peers in enumerate(tried.values()))
    assert all("gpu0" in peers for name, peers in tried.items() if name != "gpu0")
    assert sent["gpu0"]["peers"][0] == ("gpu1", "10.0.0.1", 2, True)
