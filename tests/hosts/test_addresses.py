"""The choice of rendezvous address and interface when hosts have several networks, some with the same address."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp.agent.facts import asked_at
from nbddp.hosts.addresses import choose_addresses

DOCKER = ("docker0", "172.17.0.1", "172.17.0.0/16")
Network = tuple[str, str, str]


numbers = itertools.count()


def told(*networks: Network, asked_at: str = "", machine: str | None = None) -> dict[str, Any]:
    keys = ("name", "address", "network")
    machine = f"{next(numbers)}" if machine is None else machine
    return {
        "networks": [dict(zip(keys, network)) for network in networks],
        "asked_at": asked_at,
        "machine": machine,
    }


def chosen(**facts: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    addresses = choose_addresses(facts)
    assert addresses.address.keys() == addresses.interface.keys() == facts.keys()
    return {host: (addresses.address[host], addresses.interface[host]) for host in facts}


def lan(i: int, name: str = "eth0") -> Network:
    return name, f"10.0.0.{i}", "10.0.0.0/24"


def fast(i: int, name: str = "ib0") -> Network:
    return name, f"10.9.0.{i}", "10.9.0.0/16"


def test_dockers_address_which_all_hosts_share_is_not_chosen() -> None:
    assert chosen(a=told(DOCKER, lan(1)), b=told(DOCKER, lan(2))) == {
        "a": ("10.0.0.1", "eth0"),
        "b": ("10.0.0.2", "eth0"),
    }


def test_without_a_common_network_or_ssh_dockers_address_is_still_not_chosen() -> None:
    """srun tells no address; cloud machines have networks of one address."""
    a = told(DOCKER, ("ens4", "10.0.0.1", "10.0.0.1/32"))
    b = told(DOCKER, ("ens4", "10.0.0.2", "10.0.0.2/32"))
    assert chosen(a=a, b=b) == {"a": ("10.0.0.1", "ens4"), "b": ("10.0.0.2", "ens4")}


def test_interfaces_with_different_names_can_be_on_the_same_network() -> None:
    found = chosen(a=told(lan(1, "eno1")), b=told(lan(2, "enp3s0")))
    assert found == {"a": ("10.0.0.1", "eno1"), "b": ("10.0.0.2", "enp3s0")}


def test_the_address_that_ssh_connected_to_is_preferred() -> None:
    a, b = told(fast(1), lan(1), asked_at="10.0.0.1"), told(fast(2), lan(2), asked_at="10.0.0.2")
    assert chosen(a=a, b=b) == {"a": ("10.0.0.1", "eth0"), "b": ("10.0.0.2", "eth0")}


def test_ssh_addresses_on_different_networks_give_way_to_a_shared_network() -> None:
    a = told(("wan0", "203.0.113.5", "203.0.113.0/24"), lan(1), asked_at="203.0.113.5")
    b = told(("wan0", "198.51.100.7", "198.51.100.0/24"), lan(2), asked_at="198.51.100.7")
    assert chosen(a=a, b=b) == {"a": ("10.0.0.1", "eth0"), "b": ("10.0.0.2", "eth0")}


def test_cloud_hosts_with_one_address_networks_use_the_address_of_ssh() -> None:
    a = told(DOCKER, ("ens4", "10.0.0.1", "10.0.0.1/32"), asked_at="10.0.0.1")
    b = told(DOCKER, ("ens4", "10.0.0.2", "10.0.0.2/32"), asked_at="10.0.0.2")
    assert chosen(a=a, b=b) == {"a": ("10.0.0.1", "ens4"), "b": ("10.0.0.2", "ens4")}


def test_an_ssh_address_that_is_not_on_the_host_is_ignored() -> None:
    """ssh goes through a jump host or a forwarded port: what it reached is none of the host's interfaces."""
    a = told(lan(1), asked_at="127.0.0.1")
    b = told(lan(2), asked_at="2001:db8::7")
    assert chosen(a=a, b=b) == {"a": ("10.0.0.1", "eth0"), "b": ("10.0.0.2", "eth0")}


def test_one_host_alone_uses_the_loopback_address() -> None:
    assert chosen(a=told(lan(1))) == {"a": ("127.0.0.1", None)}


def test_a_host_without_a_network_is_refused_by_name() -> None:
    with pytest.raises(nbddp.LaunchError, match="b has no network"):
        choose_addresses({"a": told(lan(1)), "b": told()})


@given(st.integers(2, 5), st.data())
def test_each_host_gets_a_different_address_of_its_own_interfaces(count: int, data: st.DataObject) -> None:
    pool = st.sampled_from([lambda i: DOCKER, lan, fast, lambda i: ("virbr0", "192.168.122.1", "192.168.122.0/24")])
    facts = {}
    for i in range(count):
        extra = [make(i + 1) for make in data.draw(st.lists(pool, max_size=4, unique=True))]
        networks = data.draw(st.permutations([lan(i + 1), *(one for one in extra if one[0] != "eth0")]))
        asked = data.draw(st.sampled_from(["", *(network[1] for network in networks)]))
        facts[f"host{i}"] = told(*networks, asked_at=asked)
    found = chosen(**facts)
    assert len({address for address, _ in found.values()}) == count
    for name, (address, interface) in found.items():
        assert (interface, address) in [(n["name"], n["address"]) for n in facts[name]["networks"]]


@pytest.mark.parametrize(
    ("connection", "address"),
    [("192.0.2.1 50000 10.0.0.7 22", "10.0.0.7"), ("UNKNOWN 65535 UNKNOWN 65535", ""), ("", "")],
)
def test_the_ssh_address_is_read_from_ssh_connection_or_is_empty(
    monkeypatch: pytest.MonkeyPatch, connection: str, address: str
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert asked_at() == address


def test_hosts_that_are_all_one_machine_meet_on_loopback() -> None:
    """Two nodes of Ray may be."""
    found = chosen(a=told(DOCKER, lan(1), machine="m"), b=told(DOCKER, lan(1), machine="m"))
    assert found == {"a": ("127.0.0.1", None), "b": ("127.0.0.1", None)}


def test_two_hosts_on_one_machine_and_one_elsewhere_meet_on_the_network() -> None:
    found = chosen(a=told(DOCKER, lan(1), machine="m"), b=told(DOCKER, lan(1), machine="m"), c=told(DOCKER, lan(2)))
    assert {host: address for host, (address, _) in found.items()} == {
        "a": "10.0.0.1",
        "b": "10.0.0.1",
        "c": "10.0.0.2",
    }
