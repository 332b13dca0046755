"""Several machines on a real Ray of three nodes, from a real notebook. Ray's own processes are not the tests'."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import MARK, OUR_FILES, START_TIMEOUT_S, Notebook, wait_until
from tests.test_notebooks import executed

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

_BEGIN = """
import os, time, torch, nbddp
def on_two(fn, *args, nprocs=4, **options):
    return nbddp.run(fn, args, nprocs=nprocs, nnodes=2, **{"device": "cpu", "show": False, **options})
nbddp.run(lambda: 1, nprocs=4, nnodes=2, device="cpu").values
"""


class Ray:
    """The nodes, in a process that hangs below none of the tests'."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="nbr-", dir="/tmp")
        name = MARK.partition("=")[0]
        self.environ = {"RAY_TMPDIR": self._folder, "TMPDIR": self._folder}
        self.environ |= {"RAY_raylet_start_wait_time_s": "240", "RAY_worker_niceness": "0"}
        environ = {key: each for key, each in os.environ.items() if key != name}
        command = ["setsid", "--fork", sys.executable, str(Path(__file__).with_name("ray_cluster.py")), "3"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env={**environ, **self.environ}, **pipes)  # type: ignore[call-overload]
        self.environ["RAY_ADDRESS"] = self._process.stdout.readline().strip()

    def processes(self) -> list[psutil.Process]:
        """Actors, with their fork servers and ranks."""
        found: list[psutil.Process] = []
        for each in psutil.process_iter(["cmdline"]):
            if "ray::_Actor" in str(each.info["cmdline"]):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
                    found += [each, *each.children(recursive=True)]
        return found

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.read()  # it has ended
        self._process.stdout.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    ray = Ray()
    try:
        yield ray
    finally:
        ray.close()


@pytest.fixture(scope="module")
def _notebook(ray: Ray) -> Iterator[Notebook]:
    with Notebook(ray.environ) as notebook:
        notebook.ok(_BEGIN, timeout_s=4 * START_TIMEOUT_S)
        yield notebook


@pytest.fixture
def notebook(_notebook: Notebook) -> Notebook:
    return _notebook


def test_weights_are_those_of_one_machine_to_the_bit(notebook: Notebook) -> None:
    notebook.ok("""
        def train():
            model = nbddp.wrap(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.utils.data.TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(1)))
            for epoch in range(3):
                for (x,) in nbddp.loader(data, 8, shuffle=True):
                    optimizer.zero_grad(); loss = (model(x) - x.sum(1, keepdim=True)).square().mean(); loss.backward()
                    optimizer.step()
                    nbddp.log(loss=loss)
            return {name: value.clone() for name, value in model.module.state_dict().items()}
        there = on_two(train, seed=3)
        here = nbddp.run(train, nprocs=4, device="cpu", show=False, seed=3)
        for a, b in zip(there.values, here.values): assert all(torch.equal(a[name], b[name]) for name in b)
        assert (there.history["loss"].values == here.history["loss"].values).all()
    """)


def test_the_notebook_for_several_machines_trains_to_the_weights_of_one(
    ray: Ray, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ray.environ.items():
        monkeypatch.setenv(name, value)
    found = executed("several_machines", "[same, [place for place, _ in run.values]]", in_folder)
    assert found == [True, [f"rank {rank}: rank {rank % 2} of its node" for rank in range(4)]]


def test_an_exception_has_the_cells_lines_and_the_nodes_name(notebook: Notebook) -> None:
    reply = notebook.cell("""
        def wrong():
            if nbddp.rank() == 3: raise KeyError("missing")  # this line
            nbddp.barrier()
        on_two(wrong)
    """)
    assert "rank 3 of 4 on " in reply.traceback
    assert "KeyError: 'missing'" in reply.traceback
    assert "# this line" in reply.traceback
    assert not OUR_FILES.search(reply.traceback)


def test_places_and_environment_are_those_of_torchrun_on_two_nodes(notebook: Notebook) -> None:
    notebook.ok("""
        def look():
            names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MINE"
            return [os.environ.get(name) for name in names], os.environ.get("PYTHONBREAKPOINT")
        values = on_two(look, env={"MINE": "x"}).values
        assert [value[0] for value in values] == [[str(r), str(r % 2), "2", str(r // 2), "2", "x"] for r in range(4)]
        assert {value[1] for value in values} == {None} == {os.environ.get("PYTHONBREAKPOINT")}
    """)


def test_output_metrics_and_tens_of_megabytes_arrive_whole(notebook: Notebook) -> None:
    notebook.ok("""
        data = torch.arange(8 << 20, dtype=torch.float32)
        def train(data):
            for step in range(5000):
                nbddp.log(loss=step)
                print(step)
            return data + nbddp.rank()
        run = on_two(train, data, nprocs=2)
        assert all((value == data + rank).all() for rank, value in enumerate(run.values))
        assert run.history["loss"].steps.tolist() == list(range(5000))
        assert all(run.logs(rank).split() == [*map(str, range(5000))] for rank in range(2))
    """)


def test_a_module_next_to_the_notebook_is_there_also_after_an_edit(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True")
    for number in (1, 2):
        (tmp_path / "beside_it.py").write_text(f"number = {number}")
        notebook.ok(f"""
            import importlib, beside_it; importlib.reload(beside_it)
            def imported():
                import beside_it
                return beside_it.number, beside_it.__file__
            assert on_two(imported).values == [({number}, beside_it.__file__)] * 4
        """)
        time.sleep(1.1)  # for reload()


def test_stacks_are_shown_and_stop_ends_it(notebook: Notebook) -> None:
    notebook.ok("""
        def sleep():
            while True: time.sleep(0.01)
        run = on_two(sleep, wait=False)
        while run.state == "starting": time.sleep(0.05)
        time.sleep(0.3)
        assert "all 4 ranks are in sleep" in run.stacks()
        run.stop()
        assert run.state == "stopped"
    """)


def test_breakpoint_asks_under_the_cell(notebook: Notebook) -> None:
    source = """
        def paused():
            x = nbddp.rank() + 40
            breakpoint()
            return x
        print(on_two(paused, nprocs=2).values)
    """
    talk = notebook.talk(source, ["p x", "c"])
    assert (talk.ename, "[40, 41]" in talk.shown) == ("", True)


def test_a_session_goes_on_after_a_failure(notebook: Notebook) -> None:
    notebook.ok("""
        with nbddp.Session(nprocs=4, nnodes=2, device="cpu") as session:
            session.push(data=data)
            session.cell("import nbddp; r = nbddp.rank(); x = nbddp.all_reduce(r) + len(data) * 0")
            assert session.pull("x") == 6
            try: session.cell("if r == 2: raise ValueError('boom')\\nnbddp.barrier()")
            except nbddp.NbddpError as error: assert "boom" in str(error)
            session.cell("y = nbddp.all_reduce(1)")
            assert session.pull("y", "r") == (4, 0)
    """)


def test_ray_assigns_the_gpus(notebook: Notebook) -> None:
    """Pretended ones, so the ranks are on the CPU."""
    source = """
        import dataclasses
        from nbddp.kernel import start
        from nbddp.kernel.run import Run
        from nbddp.kernel.settings import Options, decide
        from nbddp.ray import nodes
        assert nodes.gpus_per_node(2) == 2
        options = Options(nnodes=2, show=False, backend="gloo")
        settings = decide("seen", options)
        assert (settings.world_size, settings.device) == (4, "cuda")
        packed = start.pack_call("seen", lambda: os.environ["CUDA_VISIBLE_DEVICES"], (), {})
        machines = start.machines_for(settings, options, print)
        run = Run(dataclasses.replace(settings, device="cpu"), options)
        start.carry_out(run, packed, machines)
        assert [sorted(value.split(",")) for value in run.values] == [["0", "1"]] * 4
    """
    notebook.ok(source, timeout_s=4 * START_TIMEOUT_S)  # on other actors


def test_after_the_users_shutdown_of_ray_the_next_run_connects_again(notebook: Notebook) -> None:
    notebook.ok("import ray; ray.shutdown(); on_two(nbddp.rank).values", timeout_s=4 * START_TIMEOUT_S)


def test_nodes_are_given_back_by_shutdown(ray: Ray, notebook: Notebook) -> None:
    assert ray.processes()
    notebook.ok("nbddp.shutdown()")
    wait_until(lambda: not ray.processes())
    assert not [*Path(ray.environ["TMPDIR"]).glob("nb-*")]


def test_when_a_node_dies_the_ranks_go_on_from_the_snapshot_on_another_one(notebook: Notebook, tmp_path: Path) -> None:
    source = """
        def train(path):
            first = (nbddp.load_snapshot(path) or {"step": 0})["step"]
            for step in range(first, first + 50 if first else 10_000):  # the first time, until the node is gone
                nbddp.all_reduce(1)
                nbddp.log(at=step)
                time.sleep(0.02)
                if step % 10 == 9: nbddp.save_snapshot(path, step=step + 1)
            return first
        run = on_two(train, FILE, max_restarts=1, wait=False)
        while run.history.latest().get("at", 0) < 30: time.sleep(0.1)
        print(run.pids[3])
    """
    file = repr(str(tmp_path / "snapshot.pt"))
    pid = notebook.ok(source.replace("FILE", file), timeout_s=4 * START_TIMEOUT_S).json()
    raylet = next(each for each in psutil.Process(pid).parents() if each.name() == "raylet")
    raylet.kill()
    notebook.ok("run.wait()", timeout_s=400)
    reply = notebook.ok("print(run.restarts, run.value, run.history.restarts[0].reason)")
    restarts, first, reason = reply.shown.split(maxsplit=2)
    assert (restarts, int(first) >= 30, reason.startswith("NodeLost: node ")) == ("1", True, True)
    notebook.ok("nbddp.shutdown()")


def test_when_the_kernel_is_killed_its_ranks_are_gone(ray: Ray) -> None:
    with Notebook(ray.environ) as notebook:
        notebook.ok(_BEGIN, timeout_s=4 * START_TIMEOUT_S)
        notebook.ok("run = on_two(time.sleep, 1000, wait=False)\nwhile run.state == 'starting': time.sleep(0.05)")
        assert len(ray.processes()) >= 8
        before = time.monotonic()
        notebook.kill()
        wait_until(lambda: not ray.processes(), what=lambda: str(ray.processes()))
        print(f"gone after {time.monotonic() - before:.2f} s")
