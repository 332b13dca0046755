"""Several machines, as far as that can be seen without Ray; long/test_ray.py has the real one."""

import dataclasses
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

import nbddp
from nbddp.kernel import settings as kernel_settings
from nbddp.kernel import start
from nbddp.kernel.run import Run
from nbddp.kernel.settings import Options, decide
from nbddp.payload import carried
from nbddp.process.machine import Event
from nbddp.ray.actor import NodeMachine
from tests.machines import FakeMachine, exited, failed, finished, run_on
from tests.support import Cells, script


@pytest.fixture
def _two_nodes_with_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = SimpleNamespace(gpus_per_node=lambda nnodes: 4 if nnodes <= 2 else 0)
    monkeypatch.setattr(kernel_settings, "on_ray", lambda: nodes)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nbddp.ray.nodes", raising=False)
    with pytest.raises(nbddp.LaunchError, match=r"run pip install ray on every.*export\(\) and torchrun"):
        nbddp.run(print, nnodes=2)


@pytest.mark.usefixtures("_two_nodes_with_four_gpus")
def test_nprocs_is_the_total_and_without_it_there_is_one_rank_per_gpu_of_the_nodes() -> None:
    decided = decide("train", Options(nnodes=2))
    assert (decided.world_size, decided.device, decided.indices) == (8, "cuda", (0, 1, 2, 3))
    assert decide("train", Options(nprocs=4, nnodes=2)).indices == (0, 1)
    assert decide("train", Options(nnodes=2, device="cpu")).world_size == 4
    for options, why in (
        ({"nprocs": 5, "nnodes": 2}, "nprocs=5 counts all ranks, so it must be divisible by nnodes=2"),
        ({"gpus": [0], "nnodes": 2}, "Ray assigns the GPUs"),
        ({"device": "cuda", "nnodes": 3}, "doesn't have 3 nodes with GPUs"),
        ({"nnodes": 0}, "nnodes=0 is too small"),
    ):
        with pytest.raises(nbddp.LaunchError, match=why):
            decide("train", Options(**options))


def test_a_node_that_hears_nothing_of_the_notebook_ends() -> None:
    began = time.monotonic()
    source = """
        import os, time
        from nbddp.ray import actor
        actor.SILENCE_S = 3.0
        node = actor.Node("127.0.0.1", os.getppid())
        for _ in range(3): time.sleep(1); node.beat(); print("heard", flush=True)
        time.sleep(60)
    """
    said = script(source)
    assert (said.returncode, said.stdout) == (1, "heard\n" * 3)
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("_two_nodes_with_four_gpus")
def test_a_node_gets_the_users_variables_and_not_those_of_the_notebook() -> None:
    environ = decide("train", Options(nnodes=2, env={"MINE": "1"})).environ
    assert environ["MINE"] == "1"
    assert not {"PATH", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"} & environ.keys()


def _on(*attempts: tuple[FakeMachine, FakeMachine], **options: object) -> Run[None]:
    machines = iter(attempts)
    return run_on(lambda: next(machines), print, nprocs=2, **options)


def _lost(rank: int) -> list[Event]:
    return [Event("lost", rank, "the node has died"), exited(rank, -9)]


def test_a_lost_node_is_the_cause_of_what_its_peers_raise_before_anybody_notices() -> None:
    closed = FakeMachine(failed(0, time.monotonic(), "Connection closed by peer"), node="gpu1")
    run = _on((closed, FakeMachine(*_lost(1), node="gpu2")))
    assert isinstance(run.error, nbddp.NodeLost)
    assert (run.error.node, str(run.error)) == ("gpu2", "node gpu2 was lost: the node has died")


def test_after_a_loss_the_ranks_start_again_on_other_nodes() -> None:
    first = FakeMachine(node="gpu1"), FakeMachine(*_lost(1), node="gpu2")
    second = FakeMachine(finished(0), node="gpu1"), FakeMachine(finished(1), node="gpu3")
    run = _on(first, second, max_restarts=1)
    assert (run.state, run.restarts) == ("finished", 1)
    assert all(machine.closed for machine in (*first, *second))


def test_an_error_and_the_panel_name_the_node() -> None:
    run = _on((FakeMachine(node="gpu1"), FakeMachine(failed(1, 1.0, "1"), node="gpu2")))
    assert (isinstance(run.error, nbddp.RankError), run.error.host) == (True, "gpu2")
    assert str(run.error).splitlines()[0] == "rank 1 of 2 on gpu2 failed: RuntimeError: RuntimeError: 1"
    assert [rank.host for rank in run._status().ranks] == ["gpu1", "gpu2"]


def test_own_modules_are_imported_under_their_own_names(cell: Cells, tmp_path: Path) -> None:
    files = {
        "alone.py": "def fail(): raise ValueError('boom')",
        "pack/__init__.py": "from .part import two",
        "pack/part.py": "two = 2",
        "bare/inner.py": "three = 3",
        "later/alone.py": "another",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        names = cell("""
            import alone, bare.inner, pack
            def train(): return pack.two, bare.inner.three, alone.__file__
            def wrong(): alone.fail()
        """)
        modules = carried.sources([str(tmp_path), str(tmp_path / "later")])  # the first, as import takes it
        packed = [start.pack_call("train", fn, (), {}, elsewhere=True) for fn in (names.train, names.wrong)]
    assert set(modules) == {"alone", "bare.inner", "pack", "pack.part"}
    for name in ("alone", "bare", "bare.inner", "pack", "pack.part"):
        del sys.modules[name]
    given, runs = Options(nprocs=2, show=False, device="cpu"), []
    settings = dataclasses.replace(decide("train", given), modules=modules)
    for each in packed:
        runs.append(Run(settings, given))
        start.carry_out(runs[-1], each, lambda: [NodeMachine("127.0.0.1")])
    assert runs[0].value == (2, 3, str(tmp_path / "alone.py"))
    assert isinstance(runs[1].error, nbddp.RankError)
    assert f'File "{tmp_path}/alone.py", line 1, in fail' in "".join(traceback.format_exception(runs[1].error.cause))
