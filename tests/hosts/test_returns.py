"""A lost host is logged in to again: the next restart or run uses it, or with ``grow=True`` the next snapshot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import nbddp
from nbddp.hosts.returns import Returns
from tests.hosts.conftest import BACK_S, power_on
from tests.hosts.rig import Machine, Rig
from tests.hosts.test_lost import begin
from tests.support import Cells, run, wait_until

pytestmark = pytest.mark.slow

Login = Callable[..., nbddp.Cluster]
TRAINING = """
    import nbddp, os, shutil, signal, time, torch
    def train(folder, attempts, more=5):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = nbddp.wrap(torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        begun = 0
        if (found := nbddp.load_snapshot(f"{folder}/s.pt")) is not None:
            getattr(model, "module", model).load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            begun = found["step"] + 1
        nbddp.barrier()
        open(f"there-{nbddp.rank()}", "w").close()
        is_last = nbddp.restart_count() >= attempts - 1
        step = begun
        while not is_last or step < begun + more:
            generator = torch.Generator().manual_seed(1000 * step + nbddp.rank())
            loss = model(torch.randn(16, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            nbddp.log(loss=loss)
            nbddp.save_snapshot(f"{folder}/s.pt", model=model, optimizer=optimizer, step=step)
            if nbddp.rank() == 0:
                shutil.copy(f"{folder}/s.pt", f"{folder}/s-{step}.pt")
            if os.path.exists("kill") and not is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0 if is_last else 0.05)
            step += 1
        weights = getattr(model, "module", model).weight.detach().numpy().tobytes()
        return begun, nbddp.world_size(), nbddp.restart_count(), weights.hex()
"""
PLAIN = """
    import os, sys, torch
    from torch.nn.parallel import DistributedDataParallel
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, found = torch.distributed.get_rank(), torch.load(sys.argv[1])["state"]
    model = torch.nn.Linear(8, 4)
    model.load_state_dict(found["model"])
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(found["optimizer"])
    for step in range(found["step"] + 1, found["step"] + 6):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(16, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        open("weights", "w").write(model.module.weight.detach().numpy().tobytes().hex())
    torch.distributed.destroy_process_group()
"""


def lose_and_return(gpu2: Machine, hosts: nbddp.Cluster, going: nbddp.Run) -> None:
    """All of gpu2 dies; when the run goes on without it, its ssh server is started again."""
    gpu2.power_off()
    wait_until(lambda: going.restarts == 1 and going._viewable.status().state == "running", BACK_S)
    assert hosts.present() == list(hosts.devices()) == ["gpu1"]
    assert repr(hosts) == "<Cluster of gpu1; lost: gpu2>"
    assert going._viewable.summary() == "1 process · gloo · 1 of 2 hosts · gpu2 lost"
    assert "[1 of 2 hosts take part (gpu2 lost)]" in going.logs(0)
    power_on(gpu2)
    wait_until(lambda: hosts.present() == ["gpu1", "gpu2"], BACK_S)
    assert list(hosts.devices()) == ["gpu1", "gpu2"]


def plain_torchrun(snapshot: Path, folder: Path) -> str:
    """The weights after five steps from this snapshot, by two ranks without nbddp."""
    (folder / "plain.py").write_text(textwrap.dedent(PLAIN))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "plain.py"]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    done = subprocess.run(
        [*command, str(snapshot)], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    # Not its exit code: gloo may abort a rank that leaves after the other one.
    assert (folder / "weights").exists(), done.stderr
    return (folder / "weights").read_text()


def test_a_run_that_may_grow_ends_on_both_hosts_with_the_weights_of_torchrun(
    cell: Cells, cluster: Login, gpu2: Machine, in_folder: Path
) -> None:
    hosts, train = cluster(returning=True), cell(TRAINING).train
    options = {"nprocs": 1, "max_restarts": 2, "min_hosts": 1}
    going = begin(train, hosts, 2, str(in_folder), 3, grow=True, **options)
    lose_and_return(gpu2, hosts, going)
    going.wait(timeout=BACK_S)
    begun, *_, weights = going.value
    assert going.values == [(begun, 2, 2, weights)] * 2
    assert [place.reason.partition(":")[0] for place in going.history.restarts] == ["HostLost", "the return of gpu2"]
    assert going._viewable.status().max_restarts == 3, "the return is not one of the two"
    assert going._viewable.summary() == "2 processes · gloo · 2 hosts"
    snapshot = in_folder / f"s-{begun - 1}.pt"
    assert plain_torchrun(snapshot, in_folder) == weights
    (in_folder / "again").mkdir()
    shutil.copy(snapshot, in_folder / "again" / "s.pt")
    again = run(train, str(in_folder / "again"), 1, hosts=hosts, nprocs=1)
    assert again.values == [(begun, 2, 0, weights)] * 2


def test_the_next_restart_uses_a_host_that_is_back(cell: Cells, cluster: Login, gpu2: Machine, in_folder: Path) -> None:
    hosts = cluster(returning=True)
    options = {"nprocs": 1, "max_restarts": 2, "min_hosts": 1}
    going = begin(cell(TRAINING).train, hosts, 2, str(in_folder), 3, **options)
    lose_and_return(gpu2, hosts, going)
    assert going._viewable.summary() == "1 process · gloo · 1 of 2 hosts · gpu2 back"
    (in_folder / "kill").touch()
    going.wait(timeout=BACK_S)
    assert [value[1:3] for value in going.values] == [(2, 2)] * 2


def test_the_next_run_uses_a_host_that_is_back(cell: Cells, cluster: Login, gpu2: Machine, in_folder: Path) -> None:
    names = cell("import nbddp\ndef where(): return nbddp.rank(), nbddp.world_size()")
    hosts = cluster(returning=True)
    gpu2.power_off()
    wait_until(lambda: hosts.present() == ["gpu1"])
    with pytest.raises(nbddp.HostLost, match=r"gpu2.*logged in to again in the background.*the run needs 2"):
        run(names.where, hosts=hosts)
    assert run(names.where, hosts=hosts, min_hosts=1).values == [(0, 2), (1, 2)]
    power_on(gpu2)
    wait_until(lambda: hosts.present() == ["gpu1", "gpu2"], BACK_S)
    assert run(names.where, hosts=hosts).values == [(rank, 4) for rank in range(4)]


def test_a_host_that_refuses_the_key_is_not_asked_again(cell: Cells, cluster: Login, rig: Rig, gpu2: Machine) -> None:
    hosts = cluster(returning=True)
    key = rig.folder / "gpu2.authorized"
    kept = key.read_text()
    key.write_text("")
    try:
        gpu2.agent().kill()
        returns: Returns = hosts._returns
        wait_until(lambda: "there is no other" in returns.words("gpu2"), BACK_S)
        assert "it refused your key" in returns.words("gpu2")
    finally:
        key.write_text(kept)
    assert hosts.present() == ["gpu1"]


def test_a_cluster_that_is_closed_while_a_host_is_away_leaves_nothing(cluster: Login, rig: Rig, gpu2: Machine) -> None:
    hosts = cluster(returning=True)
    gpu2.agent().kill()
    wait_until(lambda: any(attempts.host for attempts in hosts._returns._attempts.values()))
    hosts.close()
    rig.wait_until_clean()
