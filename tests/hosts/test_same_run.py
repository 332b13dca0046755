"""A run on several hosts is the same as on one machine: weights, ranks, metrics, output and environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

import nbddp
from tests.hosts.rig import Rig
from tests.support import Cells, run, wait_until

pytestmark = pytest.mark.slow

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
HALF_A_GB = 500_000_000
PLACES = """
    import nbddp, os, socket, torch.distributed as dist
    NAMES = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE TORCHELASTIC_RESTART_COUNT".split()
    def places():
        everyone = [None] * nbddp.world_size()
        dist.all_gather_object(everyone, (socket.gethostname(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
        mine = (nbddp.rank(), nbddp.local_rank(), nbddp.world_size())
        return socket.gethostname(), *(int(os.environ[name]) for name in NAMES), everyone, mine
"""


def test_two_hosts_end_with_the_same_weights_as_one(cell: Cells, warm: nbddp.Cluster) -> None:
    train = _quickstart(cell).train
    there = run(train, 2, hosts=warm, seed=0, env=ONE_THREAD)
    here = run(train, 2, nprocs=4, seed=0, env=ONE_THREAD)
    assert there.value["before"] == here.value["before"] != here.value["after"]
    assert [v["after"] for v in there.values] == [here.value["after"]] * 4
    for name, weights in here.value["weights"].items():
        assert torch.equal(there.values[3]["weights"][name], weights)
    for name in here.history.names:
        assert there.history[name].steps.tolist() == here.history[name].steps.tolist()
        assert there.history[name].values.tolist() == here.history[name].values.tolist()


def test_what_the_ranks_of_two_hosts_show_is_here(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            for step in range(5):
                nbddp.log(loss=1.0, step=step)
                nbddp.show(torch.rand(3, 250, 250), "noise of rank {rank}")
                nbddp.show(torch.full((4, 4), nbddp.rank() / 255), "all")
    """)
    figures = run(names.train, hosts=warm).figures
    assert set(figures) == {"all", *(f"noise of rank {rank}" for rank in range(4))}
    assert all([image.step for image in shown] == [0, 1, 2, 3, 4] for shown in figures.values())
    assert all(len(image.data) > 100_000 for image in figures["noise of rank 3"])


def _quickstart(cell: Cells) -> object:
    """The notebook's cells up to its training function and the one that it calls."""
    path = Path(__file__).parent.parent.parent / "notebooks" / "quickstart.ipynb"
    for one in nbformat.read(path, as_version=4).cells:
        if one.cell_type == "code":
            names = cell(one.source)
            if hasattr(names, "accuracy"):
                return names
    raise AssertionError("the quickstart has no training function")


def test_every_rank_knows_its_host_local_rank_and_node_rank(cell: Cells, warm: nbddp.Cluster) -> None:
    found = run(cell(PLACES).places, hosts=warm).values
    assert [place[:8] for place in found] == [
        ("gpu1", 0, 0, 0, 4, 2, 2, 0),
        ("gpu1", 1, 1, 0, 4, 2, 2, 0),
        ("gpu2", 2, 0, 1, 4, 2, 2, 0),
        ("gpu2", 3, 1, 1, 4, 2, 2, 0),
    ]
    assert [place[9] for place in found] == [(0, 0, 4), (1, 1, 4), (2, 0, 4), (3, 1, 4)]
    assert len({place[1:] for place in found[0][8]}) == 1  # one store for all
    assert [place[0] for place in found[0][8]] == ["gpu1", "gpu1", "gpu2", "gpu2"]


def test_a_run_whose_ranks_on_several_hosts_never_met_says_so(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp
        def apart(): return nbddp.rank()
        def together(): nbddp.barrier()
    """)
    assert run(names.apart, hosts=warm).remark.startswith("no rank took part in a collective: 4 ranks worked")
    assert run(names.together, hosts=warm).remark == ""


def test_hosts_can_have_different_numbers_of_ranks(cell: Cells, warm: nbddp.Cluster) -> None:
    found = run(cell(PLACES).places, hosts=warm, nprocs={"gpu2": 3, "gpu1": 1}).values
    assert [place[:6] for place in found] == [
        ("gpu1", 0, 0, 0, 4, 1),
        ("gpu2", 1, 0, 1, 4, 3),
        ("gpu2", 2, 1, 1, 4, 3),
        ("gpu2", 3, 2, 1, 4, 3),
    ]


def test_a_cluster_can_be_one_host(cell: Cells, cluster: Callable[..., nbddp.Cluster]) -> None:
    found = run(cell(PLACES).places, hosts=cluster("gpu2")).values
    assert [place[:5] for place in found] == [("gpu2", 0, 0, 0, 2), ("gpu2", 1, 1, 0, 2)]


def test_this_machine_can_be_one_of_the_hosts(cell: Cells, cluster: Callable[..., nbddp.Cluster]) -> None:
    found = run(cell(PLACES).places, hosts=cluster("localhost", "gpu1"), nprocs=1).values
    assert [place[0] for place in found] == [os.uname().nodename, "gpu1"]


def test_a_payload_crosses_the_network_once_for_each_host(cell: Cells, warm: nbddp.Cluster, rig: Rig) -> None:
    names = cell("""
        import nbddp, numpy
        def look(big): return float(big[::4096].sum()), big.nbytes, big.flags.writeable
    """)
    big = np.arange(HALF_A_GB // 8, dtype=np.float64)
    before = {name: rig.passed(name)[0] for name in warm.hosts}
    found = run(names.look, big, hosts=warm)
    assert set(found.values) == {(float(big[::4096].sum()), HALF_A_GB, True)}
    for name in warm.hosts:
        crossed = rig.passed(name)[0] - before[name]
        assert HALF_A_GB < crossed < 1.1 * HALF_A_GB  # once, for two ranks


def test_a_large_result_of_a_remote_rank_crosses_the_network_once(cell: Cells, warm: nbddp.Cluster, rig: Rig) -> None:
    names = cell(f"""
        import nbddp, torch
        def make(): return torch.arange({HALF_A_GB // 8}) if nbddp.rank() == 3 else None
    """)
    before = rig.passed("gpu2")[1]
    found = run(names.make, hosts=warm).values[3]
    assert found.nbytes == HALF_A_GB
    assert torch.equal(found, torch.arange(HALF_A_GB // 8))
    assert HALF_A_GB < rig.passed("gpu2")[1] - before < 1.1 * HALF_A_GB


def test_metrics_and_output_of_remote_ranks_arrive_whole(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp, os, subprocess, sys
        def train():
            for step in range(2000):
                nbddp.log(loss=float(step), total=1.0, reduce="sum")
                nbddp.log({f"of {nbddp.rank()}": step}, reduce="sum")
            print("printed", nbddp.rank())
            print("to stderr", nbddp.rank(), file=sys.stderr)
            os.write(1, b"written %d\\n" % nbddp.rank())
            subprocess.run(["echo", "by a child", str(nbddp.rank())])
    """)
    found = run(names.train, hosts=warm)
    assert found.history["total"].values.tolist() == [4.0] * 2000
    assert found.history["loss"].values.tolist() == [4.0 * step for step in range(2000)]
    for rank in range(4):
        assert found.history[f"of {rank}"].values.tolist() == list(range(2000))
        lines = sorted(line for line in found.logs(rank).splitlines() if "[c10d]" not in line)
        assert lines == [f"by a child {rank}", f"printed {rank}", f"to stderr {rank}", f"written {rank}"]


def test_a_function_that_makes_its_own_group_works_on_several_hosts(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import torch, torch.distributed as dist
        def train():
            dist.init_process_group("gloo")
            x = torch.ones(1)
            dist.all_reduce(x)
            dist.destroy_process_group()
            return float(x)
    """)
    assert run(names.train, hosts=warm, timeout=60).values == [4.0] * 4
    assert run(names.train, hosts=warm, timeout=60, init=False).values == [4.0] * 4


def test_the_status_names_the_host_and_memory_of_every_rank(cell: Cells, warm: nbddp.Cluster, in_folder: Path) -> None:
    names = cell("import os, time\ndef train():\n    while not os.path.exists('go'): time.sleep(0.01)")
    going = run(names.train, hosts=warm, wait=False)
    status = going._viewable.status
    seen = wait_until(lambda: all(r.memory_bytes for r in status().ranks) and status(), 60)
    (in_folder / "go").touch()
    going.wait()
    assert [(r.rank, r.host) for r in seen.ranks] == [(0, "gpu1"), (1, "gpu1"), (2, "gpu2"), (3, "gpu2")]
    assert all(1e6 < r.memory_bytes < 1e10 for r in seen.ranks)
    assert "2 hosts" in seen.summary
    assert "4 processes" in seen.summary


def test_stacks_include_those_of_remote_ranks(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp, time
        def deep_in_rank_three():
            time.sleep(1000)
        def train():
            nbddp.barrier()
            if nbddp.rank() == 3: deep_in_rank_three()
            nbddp.barrier()
    """)
    going = run(names.train, hosts=warm, wait=False)
    wait_until(lambda: going.state == "running")
    try:
        wait_until(lambda: "deep_in_rank_three" in going.stacks())
    finally:
        going.stop(0.5)


def test_a_second_run_reuses_the_login_and_finds_no_globals_of_the_first(
    cell: Cells, warm: nbddp.Cluster, rig: Rig
) -> None:
    names = cell("""
        import nbddp
        def train(value):
            nbddp.barrier()
            return value, globals().setdefault("seen", value)
    """)
    agents = {name: rig.hosts[name].agent().pid for name in warm.hosts}
    assert run(names.train, "first", hosts=warm).values == [("first", "first")] * 4
    assert run(names.train, "second, longer", hosts=warm).values == [("second, longer", "second, longer")] * 4
    assert run(names.train, "3", hosts=warm, nprocs=1).values == [("3", "3")] * 2
    assert {name: rig.hosts[name].agent().pid for name in warm.hosts} == agents


def test_a_second_run_on_a_busy_cluster_is_refused(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("""
        import nbddp, time
        def train(value):
            nbddp.barrier()
            time.sleep(0.5)
            return value, nbddp.world_size()
    """)
    first = run(names.train, 1, hosts=warm, wait=False)
    with pytest.raises(nbddp.LaunchError, match="train"):
        run(names.train, 2, hosts=warm)
    assert first.wait().values == [(1, 4)] * 4
    assert run(names.train, 3, hosts=warm).values == [(3, 4)] * 4


def test_remote_ranks_have_the_notebooks_env_folder_and_import_path(
    cell: Cells, warm: nbddp.Cluster, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "beside_the_notebook.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(in_folder)
    names = cell("""
        import os, sys
        def train():
            import beside_the_notebook
            return os.getcwd(), os.environ["ONLY_HERE"], beside_the_notebook.VALUE, sys.argv
    """)
    found = run(names.train, hosts=warm, env={"ONLY_HERE": "x y"})
    assert found.values == [(str(in_folder), "x y", 7, ["train"])] * 4


def test_threads_are_divided_among_the_ranks_of_each_host(cell: Cells, warm: nbddp.Cluster) -> None:
    names = cell("import torch\ndef threads(): return torch.get_num_threads()")
    here = run(names.threads, nprocs=2).values
    assert run(names.threads, hosts=warm, nprocs=2).values == here * 2
