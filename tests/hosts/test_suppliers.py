"""Hosts that a scheduler gives: nodes that Slurm allocates for the notebook, and pods."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from nbddp.hosts import returns, suppliers
from tests.hosts.rig import Rig
from tests.support import Cells, run, script, wait_until

pytestmark = pytest.mark.slow

SIZE = "import nbddp\ndef train(): return nbddp.rank(), nbddp.world_size()"


@pytest.fixture
def login_node(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of ``salloc``; ``asked`` there says what it was asked for, and whether the nodes were given back."""
    monkeypatch.setenv("PATH", rig.slurm() + os.pathsep + os.environ["PATH"])
    folder = Path(rig.slurm())
    yield folder
    for name in ("asked", "granted"):
        (folder / name).unlink(missing_ok=True)


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_slurm_gives_nodes_to_a_notebook_on_a_login_node_and_gets_them_back(
    cell: Cells, login_node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suppliers, "_SHOWN_AFTER_S", 0.1)
    threading.Timer(1.0, (login_node / "granted").touch).start()
    options = {"gpus_per_node": 8, "time": "2:00:00", "salloc": ["--partition=gpu"]}
    with nbddp.cluster("slurm", nodes=3, **options) as hosts:
        assert hosts.hosts == ["gpu1", "gpu2", "gpu3"]
        found = run(cell(SIZE).train, hosts=hosts, nprocs=1)
        assert found.values == [(0, 3), (1, 3), (2, 3)]
        assert len(asked(login_node)) == 1
    assert asked(login_node)[0].startswith("--nodes=3 --gpus-per-node=8 --time=2:00:00 --partition=gpu sh -c ")
    assert asked(login_node)[1:] == ["released"]
    assert re.search(r"waiting for 3 nodes of Slurm, \d\.\d s: Pending job allocation 4711\n", capsys.readouterr().out)


def test_a_refusal_of_slurm_is_quoted(login_node: Path) -> None:
    (login_node / "granted").write_text("salloc: error: Job submit/allocate failed: Invalid partition\n")
    with pytest.raises(nbddp.LaunchError, match=r"no hosts were granted: .*Invalid partition"):
        nbddp.cluster("slurm", nodes=3)


def test_an_interrupt_takes_the_request_out_of_the_queue(login_node: Path) -> None:
    done = script(
        """
        import _thread, os, sys, threading, time, nbddp
        def interrupt():
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.05)
            _thread.interrupt_main()
        threading.Thread(target=interrupt).start()
        try:
            nbddp.cluster("slurm", nodes=3)
        except KeyboardInterrupt:
            print("interrupted")
    """,
        str(login_node / "asked"),
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert asked(login_node)[1:] == ["cancelled"]


def test_a_killed_notebook_gives_the_nodes_back(login_node: Path, rig: Rig) -> None:
    (login_node / "granted").touch()
    script("""
        import os, signal, nbddp
        hosts = nbddp.cluster("slurm", nodes=3)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    wait_until(lambda: asked(login_node)[1:] == ["released"], 10)
    rig.wait_until_clean()


def test_arguments_for_slurm_without_slurm_are_refused() -> None:
    with pytest.raises(nbddp.LaunchError, match="need nodes="):
        nbddp.cluster("slurm", gpus_per_node=8)
    with pytest.raises(nbddp.LaunchError, match=r"nbddp.cluster\('slurm', nodes=2\)"):
        nbddp.cluster(["gpu1"], nodes=2)


def test_kubectl_exec_runs_ranks_in_pods_and_again_after_a_loss(
    cell: Cells, login_node: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returns, "FIRST_PAUSE_S", 0.2)
    launcher = ["kubectl", "exec", "-i", "{host}", "--"]
    with pytest.raises(nbddp.LaunchError, match=r"gpu7.*not found"):
        nbddp.cluster(["gpu7"], launcher=launcher)
    with nbddp.cluster(["gpu1", "gpu2"], launcher=launcher) as pods:
        assert run(cell(SIZE).train, hosts=pods, nprocs=1).values == [(0, 2), (1, 2)]
        rig.hosts["gpu2"].agent().kill()
        wait_until(lambda: pods.present() == ["gpu1"])
        wait_until(lambda: pods.present() == ["gpu1", "gpu2"], 60)
        assert run(cell(SIZE).train, hosts=pods, nprocs=1).values == [(0, 2), (1, 2)]
