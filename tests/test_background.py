"""``wait=False``: several runs at once, awaited, stopped, inspected and found again."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import nbddp
from tests.support import Cells, Notebook, listening_ports, ranks_of, run, script, start, wait_until


def test_wait_false_returns_at_once_and_wait_gives_the_value(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import os, time, nbddp
        def train():
            while not os.path.exists("go"):
                time.sleep(0.01)
            return nbddp.rank()
    """)
    going = run(names.train, wait=False)
    assert going.state in ("starting", "running")
    with pytest.raises(TimeoutError, match="still"):
        going.wait(0.05)
    (in_folder / "go").touch()
    assert going.wait(20) is going
    assert (going.state, going.values) == ("finished", [0, 1])
    assert going.wait() is going


def test_twenty_launches_at_once_do_not_collide(cell: Cells) -> None:
    """Port 29500 is taken: the second launch of every other launcher."""
    names = cell("""
        import os, torch, torch.distributed as dist
        def train(i):
            x = torch.tensor([float(i)])
            dist.all_reduce(x)
            return x.item(), dist.get_world_size(), os.environ["MASTER_PORT"]
    """)
    runs = [run(names.train, i, wait=False, timeout=150) for i in range(20)]
    values = [going.wait(150).values for going in runs]
    assert [value[0][:2] for value in values] == [(2.0 * i, 2) for i in range(20)]
    assert len({value[0][2] for value in values}) == 20


def test_several_threads_launch_at_once(cell: Cells) -> None:
    names = cell("import nbddp\ndef train(i): return i * 10 + nbddp.rank()")
    results: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: run(names.train, i).values})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: [10 * i, 10 * i + 1] for i in range(6)}


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_ranks_survive_the_thread_that_started_them(cell: Cells, in_folder: Path, start_method: str) -> None:
    """PDEATHSIG follows the thread: with it every rank would die when a launching thread ends."""
    names = cell("""
        import os, time
        def train():
            while not os.path.exists("go"):
                time.sleep(0.01)
            return "alive"
    """)
    box: list[nbddp.Run] = []
    thread = threading.Thread(target=lambda: box.append(start(names.train, start_method=start_method)))
    thread.start()
    thread.join()
    pids = box[0].pids
    time.sleep(0.2)  # a death by signal takes no longer
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    (in_folder / "go").touch()
    assert box[0].wait(20).values == ["alive", "alive"]


def test_awaiting_runs_gives_their_values_and_raises_their_errors(cell: Cells) -> None:
    names = cell("import time\ndef train(x): time.sleep(0.05); return x\ndef bad(): raise ValueError('b')")

    async def main() -> tuple[list[object], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        first, second = run(names.train, 1, wait=False), run(names.train, 2, wait=False)
        done = await asyncio.gather(first, second)  # type: ignore[call-overload]
        with pytest.raises(nbddp.RankError, match="ValueError: b"):
            await run(names.bad, wait=False)
        again = await first
        ticking.cancel()
        return [r.value for r in (*done, again)], ticks

    values, ticks = asyncio.run(main())
    assert values == [1, 2, 1]
    assert ticks > 3  # the event loop went on meanwhile


def test_a_cancelled_await_leaves_the_run_running(cell: Cells) -> None:
    names = cell("import time\ndef train(): time.sleep(1000)")

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_wait(going), 0.05)

    async def _wait(going: nbddp.Run) -> None:
        await going

    going = start(names.train)
    asyncio.run(main())
    assert going.state == "running"
    going.stop(0)


def test_last_run_is_the_newest(cell: Cells) -> None:
    names = cell("def train(x): return x\ndef bad(): raise ValueError")
    first = run(names.train, 1)
    assert nbddp.last_run() is first
    with pytest.raises(nbddp.RankError):
        run(names.bad)
    last = nbddp.last_run()
    assert last is not None
    assert (last.name, last.state) == ("bad", "failed")
    assert "<Run bad: failed (RankError), 2 processes · gloo," in repr(last)
    assert "\n" not in repr(last)


def test_stacks_show_where_each_rank_is(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import collections, itertools, nbddp, time
        def wait_here(): time.sleep(1000)  # rank 1 is here
        def in_c(): collections.deque(itertools.count(), maxlen=0)  # rank 2 holds the GIL here
        def train():
            open(f"rank-{nbddp.rank()}", "w").close()
            if nbddp.rank() == 0:
                nbddp.barrier()  # rank 0 waits for the others
            elif nbddp.rank() == 1:
                wait_here()
            else:
                in_c()
    """)
    going = start(names.train, nprocs=3)
    wait_until(lambda: len(list(in_folder.iterdir())) == 3)
    wait_until(lambda: "# rank 2 holds" in going.stacks() and "# rank 1 is here" in going.stacks())
    text = going.stacks()
    summary, *parts = text.split("\n\n")
    assert summary == (
        "rank 0 waits in barrier (train, line 8); rank 1 is in wait_here, line 3; rank 2 is in in_c, line 4"
    )
    assert len(parts) == 3
    assert parts[0].startswith("rank 0")
    assert "# rank 0 waits for the others" in parts[0]
    assert "in wait_here" in parts[1]
    assert "# rank 1 is here" in parts[1]
    assert "in in_c" in parts[2]
    assert "# rank 2 holds the GIL here" in parts[2]
    assert "multiprocessing" not in text
    assert "/nbddp/worker/" not in text
    assert going.state == "running"  # looking changes nothing
    going.stop(0)
    assert "no rank is running" in going.stacks()


def test_states_are_starting_running_finished_in_order(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import os, time
        def train():
            while not os.path.exists("go"):
                time.sleep(0.01)
    """)
    going = run(names.train, wait=False)
    seen = [going.state]
    wait_until(lambda: going.state == "running")
    seen.append(going.state)
    (in_folder / "go").touch()
    going.wait(20)
    seen.append(going.state)
    assert seen == ["starting", "running", "finished"]
    seconds = going.seconds
    assert going.seconds == seconds


def test_an_abandoned_run_goes_on_to_its_end(cell: Cells, in_folder: Path) -> None:
    """A lost variable loses nothing: the run is not stopped by the garbage collector."""
    import gc

    names = cell("""
        import os, time
        def train():
            while not os.path.exists("go"):
                time.sleep(0.01)
            open("done", "a").close()
    """)
    start(names.train)
    run(cell("def other(): return 1").other)  # last_run() is another one now
    gc.collect()
    assert len(ranks_of(os.getpid())) == 2
    (in_folder / "go").touch()
    wait_until(lambda: (in_folder / "done").exists())


def test_a_cell_can_run_while_an_earlier_cells_run_is_in_the_background(notebook: Notebook) -> None:
    reply = notebook.ok("""
        import nbddp, time
        going = nbddp.run(lambda: time.sleep(0.5) or nbddp.rank(), nprocs=2, device='cpu', wait=False, show=False)
        print(going.state in ("starting", "running"))
    """)
    assert reply.shown == "True\n"
    assert notebook.ok("print(nbddp.run(lambda: 7, nprocs=2, device='cpu', show=False).value)").shown == "7\n"
    assert notebook.ok("print((await going).values)").shown == "[0, 1]\n"


@pytest.mark.slow
def test_two_notebooks_run_at_once_without_collisions(notebook: Notebook, own_notebook: Notebook) -> None:
    source = """
        import nbddp, os
        def train():
            return [nbddp.reduce(float(i), "sum") for i in range(200)][-1], os.environ["MASTER_PORT"]
        values = [nbddp.run(train, nprocs=2, device='cpu', show=False).value for _ in range(5)]
        print([v[0] for v in values])
    """
    messages = [(book, book.begin(source)) for book in (notebook, own_notebook)]
    for book, message in messages:
        reply = book.end_of(message)
        assert (reply.status, reply.shown) == ("ok", "[398.0, 398.0, 398.0, 398.0, 398.0]\n")
    # Only the front end's own sockets listen.
    assert len(listening_ports(own_notebook.pid)) == len(listening_ports(notebook.pid))


@pytest.mark.slow
def test_load_ext_starts_the_fork_server_for_the_first_run(in_folder: Path) -> None:
    """The first run starts as fast as every later one."""
    with Notebook() as notebook:
        notebook.ok("%load_ext nbddp")
        reply = notebook.ok("""
            import time
            from nbddp.forkserver import server as forkserver
            assert forkserver.pid() is not None
        """)
        assert reply.shown == ""

        def idle() -> bool:
            path = notebook.ok("print(forkserver.pid())").shown.strip()
            with open(f"/proc/{path}/wchan") as file:
                return "poll" in file.read()

        wait_until(idle, 30)
        reply = notebook.ok("""
            import nbddp
            def seconds():
                began = time.monotonic()
                nbddp.run(lambda: 1, nprocs=2, device='cpu', show=False)
                return time.monotonic() - began
            print([seconds() for _ in range(4)])
        """)
        first, *later = reply.json()
        assert first < 5 * max(later)  # torch's import would be ten times a start


@pytest.mark.slow
def test_importing_in_a_plain_script_starts_nothing() -> None:
    ended = script("""
        import os, nbddp, psutil
        nbddp.run, nbddp.log, nbddp.loader
        print(len(psutil.Process().children()), "IPython" in __import__("sys").modules)
    """)
    assert ended.stdout == "0 False\n", ended.stderr


@pytest.mark.parametrize("refused", ["nbddp.kernel.site.LocalSite.open_output", "nbddp.payload.block.write_at"])
def test_a_run_that_the_system_refuses_releases_the_notebooks_arrays(
    cell: Cells, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    names = cell("def train(array): pass")
    array = np.ones(1000)
    kept = weakref.ref(array)
    monkeypatch.setattr(refused, refuse)
    going = run(names.train, array, wait=False)
    with pytest.raises(nbddp.LaunchError, match=r"the system refused what train needs: .*too many open files"):
        going.wait(20)
    del array
    assert kept() is None
    assert going.state == "failed"
