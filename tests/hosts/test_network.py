"""Which ports are open on the network, who can reach them, and what else is written into the pipe between hosts."""

from __future__ import annotations

import ast
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import nbddp
from tests.hosts.rig import Rig
from tests.hosts.test_bad_input import preloading
from tests.hosts.test_lost import Login, begin
from tests.support import Cells, listening_ports, run

pytestmark = pytest.mark.slow

WAITING = """
    import nbddp, os, time
    def train(*data):
        nbddp.barrier()
        open(f"there-{nbddp.rank()}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.05)
        nbddp.barrier()
        return {name: os.environ.get(name) for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
"""


def finish(going: nbddp.Run) -> nbddp.Run:
    open("go", "w").close()
    return going.wait(60)


def test_ports_are_open_only_on_the_rendezvous_address_and_only_during_a_run(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    here = listening_ports()
    idle = {name: rig.hosts[name].listening() for name in warm.hosts}
    going = begin(cell(WAITING).train, warm, 4)
    found = {name: rig.hosts[name].listening() - idle[name] for name in warm.hosts}
    udp = {name: rig.hosts[name].run("ss", "-Hluanp").split() for name in warm.hosts}
    children = [(p.pid, listening_ports(p.pid)) for p in psutil.Process().children() if p.name() == "ssh"]
    finish(going)
    assert all(address == rig.hosts[name].address for name in found for address, _ in found[name]), found
    assert any(found.values())
    assert udp == {"gpu1": [], "gpu2": []}
    assert listening_ports() == here
    assert len(children) == 2
    assert not any(ports for _, ports in children)
    # Between runs there is nothing but what was there before nbddp was.
    assert {name: rig.hosts[name].listening() for name in warm.hosts} == idle
    assert all(program.startswith("sshd") for name in idle for _, program in idle[name]), idle


def test_the_rendezvous_address_is_reachable_from_every_host(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    """The hosts' own names stand for 127.0.1.1, and all have the same docker0."""
    found = finish(begin(cell(WAITING).train, warm, 4)).values
    address = rig.hosts["gpu1"].address
    expected = {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert found == [expected] * 4


def test_the_interface_that_the_user_set_is_kept(cell: Cells, warm: nbddp.Cluster, in_folder: Path) -> None:
    going = begin(cell(WAITING).train, warm, 4, env={"NCCL_SOCKET_IFNAME": "ib0"})
    assert {found["NCCL_SOCKET_IFNAME"] for found in finish(going).values} == {"ib0"}


def test_a_stranger_on_the_network_does_not_end_the_run(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    going = begin(cell(WAITING).train, warm, 4)
    spoken_to = json.loads(rig.hosts["gpu3"].run(sys.executable, "-c", _STRANGER, rig.hosts["gpu1"].address))
    assert finish(going).state == "finished"
    assert 22 in spoken_to
    assert len(spoken_to) > 1


_STRANGER = """
import json, os, socket, sys
open_ports = []
for port in [22, *range(1024, 65536)]:
    with socket.socket() as s:
        s.settimeout(2)
        if s.connect_ex((sys.argv[1], port)) == 0:
            open_ports.append(port)
            if port != 22:
                try:
                    s.sendall(os.urandom(200_000))
                except OSError:
                    pass
print(json.dumps(open_ports))
"""


def test_environment_and_arguments_appear_on_no_command_line_and_in_no_file(
    cell: Cells, warm: nbddp.Cluster, rig: Rig, in_folder: Path
) -> None:
    secret, data = "opensesame-environment", "opensesame-argument"
    going = begin(cell(WAITING).train, warm, 4, data, env={"TOKEN": secret})
    lines = [" ".join(p.cmdline()) for host in rig.hosts.values() for p in host.processes()]
    lines += [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    left = {name: rig.hosts[name].files() for name in warm.hosts}
    finish(going)
    assert lines
    assert not [line for line in lines if "opensesame" in line]
    for name, files in left.items():
        root = Path(f"/proc/{rig.hosts[name].pid}/root")
        texts = [(root / file).read_bytes() for file in files if (root / file).is_file()]
        assert not [text for text in texts if b"opensesame" in text]


def test_floods_of_output_leave_metrics_and_frames_intact(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp, os, struct
        def flood():
            mark = b"\\0nbddp frames 1\\n" + struct.pack(">II", 16, 0) + b'{"kind": "lost"}'
            line = b"x" * 1000 + mark * 3 + b"\\n"
            for step in range(10_000):
                os.write(1 + step % 2, line)
                if step % 10 == 0:
                    nbddp.log(line=step, reduce="sum")
            print("the end of", nbddp.rank(), flush=True)
    """)
    found = run(names.flood, hosts=warm)
    assert found.history["line"].values.tolist() == [4.0 * step for step in range(0, 10_000, 10)]
    for rank in range(4):
        assert found.logs(rank).endswith(f"the end of {rank}\n")
    assert run(cell("def fine(): return 1").fine, hosts=warm).values == [1] * 4


def test_output_of_a_hosts_shell_is_not_mistaken_for_an_answer(
    cell: Cells, cluster: Callable[..., nbddp.Cluster], rig: Rig
) -> None:
    """A greeting with half a mark in it; one that goes on in the background while frames come."""
    home = Path(f"/proc/{rig.hosts['gpu2'].pid}/root{rig.hosts['gpu2'].home}/.bashrc")
    before = home.read_text()
    home.write_text("printf '\\0nbddp frames 1'; printf '\\0nbddp'; seq 20000\n" + before)
    try:
        found = run(cell("import nbddp\ndef where(): return nbddp.world_size()").where, hosts=cluster())
    finally:
        home.write_text(before)
    assert found.values == [4] * 4


def test_no_rank_connects_back_to_the_notebook(cell: Cells, warm: nbddp.Cluster, in_folder: Path) -> None:
    """Nothing connects back to the notebook: it may be behind a firewall."""
    going = begin(cell(WAITING).train, warm, 4)
    connections = psutil.Process().net_connections(kind="inet")
    finish(going)
    remote = [c for c in connections if c.raddr and c.raddr.ip.startswith("198.18.")]
    assert remote == []  # ssh alone has some


def test_hosts_with_one_address_networks_and_a_router_between_meet(
    cell: Cells, cluster: Callable[..., nbddp.Cluster], rig: Rig, in_folder: Path
) -> None:
    """Cloud machines have addresses of one, and a router between."""
    net = rig.hosts["gpu1"].address.rpartition(".")[0] + ".0/24"
    hosts = [rig.hosts[name] for name in ("gpu1", "gpu2")]
    for host in hosts:
        host.run("sh", "-c", f"ip addr flush dev eth0 && ip addr add {host.address}/32 dev eth0")
        host.run("ip", "route", "add", net, "dev", "eth0", "src", host.address)
    try:
        found = finish(begin(cell(WAITING).train, cluster(), 4)).values
    finally:
        for host in hosts:
            host.run("sh", "-c", f"ip addr flush dev eth0 && ip addr add {host.address}/24 dev eth0")
    assert {value["MASTER_ADDR"] for value in found} == {rig.hosts["gpu1"].address}
    assert {value["GLOO_SOCKET_IFNAME"] for value in found} == {"eth0"}


def test_hosts_that_cannot_reach_each_other_fail_within_60_s(
    cell: Cells, cluster: Callable[..., nbddp.Cluster], rig: Rig
) -> None:
    """A firewall between them, while the notebook reaches both."""
    names = cell("import nbddp\ndef train(): return nbddp.world_size()")
    hosts = cluster()
    rig.isolate("gpu1", "gpu2")
    try:
        began = time.monotonic()
        with pytest.raises(nbddp.LaunchError, match="gpu2") as raised:
            run(names.train, hosts=hosts)
        assert time.monotonic() - began < 60  # torch's own patience is one of minutes
        assert any(rig.hosts[name].address in str(raised.value) for name in hosts.hosts)  # what could not be reached
        assert "firewall" in str(raised.value)
        going = run(names.train, hosts=hosts, wait=False)
        time.sleep(1)
        began = time.monotonic()
        going.stop(0.5)
        assert time.monotonic() - began < 10  # the agents try for 15 s
    finally:
        rig.isolate("gpu1", "gpu2", state="off")
    assert run(names.train, hosts=hosts).values == [4] * 4


# ---------------------------------------------------------------------------- pickles

UNPICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "Unpickler", "unpickle", "unpack", "recv"}


def words(path: Path) -> Iterator[str]:
    """Every name in that file, and every part of what it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) != "json.loads":
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")


def test_the_agents_source_has_no_call_that_unpickles() -> None:
    """Neither what the kernel sends, nor what the other hosts write into the store that they meet at."""
    for path in [
        Path(nbddp.__file__).parent / "hosts" / "frames.py",
        *(Path(nbddp.__file__).parent / "agent").glob("*.py"),
    ]:
        assert not set(words(path)) & {*UNPICKLES, "load", "loads"}, path


@pytest.mark.parametrize("host", ["gpu1", "gpu2"])
def test_the_agent_unpickles_nothing_but_the_words_of_its_own_ranks(
    cell: Cells, cluster: Callable[..., nbddp.Cluster], tmp_path: Path, host: str
) -> None:
    """The first one has the store. Arguments, results, errors and news of the ranks pass by, and a restart."""
    python = preloading(
        host,
        tmp_path,
        f"""
        import os, pickle, sys
        def watch(event, args):
            if event == "pickle.find_class":
                with open({str(tmp_path / "unpickled")!r}, "a") as file:
                    print(*args, file=file)
        if "nbddp.agent" in sys.orig_argv:
            sys.addaudithook(watch)
            pickle.loads(pickle.dumps(os.getpid))
        """,
    )
    names = cell("""
        import nbddp
        class Thing: pass
        def train(thing):
            nbddp.barrier()
            nbddp.log(loss=1.0)
            print("here")
            if nbddp.restart_count() == 0: raise ValueError(thing)
            return thing
    """)
    found = run(names.train, names.Thing(), hosts=cluster(python=python), max_restarts=1)
    assert [type(value) for value in found.values] == [names.Thing] * 4
    first, *more = (tmp_path / "unpickled").read_text().splitlines()
    assert first == "posix getpid", "the watch itself"
    assert {line.split()[0] for line in more} == {"nbddp.wire"}, "the words of its own ranks"


def test_a_dns_server_that_does_not_answer_keeps_no_run_from_starting(
    cell: Cells, cluster: Login, warm: nbddp.Cluster, rig: Rig
) -> None:
    names = cell("import nbddp, os\ndef train(): return nbddp.world_size(), os.environ.get('RES_OPTIONS')")
    with rig.dead_dns():
        assert run(names.train, hosts=cluster()).values == [(4, "timeout:1 attempts:1")] * 4
    assert run(names.train, hosts=warm).values == [(4, None)] * 4
