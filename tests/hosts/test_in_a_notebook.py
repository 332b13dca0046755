"""Several hosts from a real notebook: its interrupt, its death and its magic, with the user's own ~/.ssh/config."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts.rig import Rig
from tests.support import Notebook, wait_until
from tests.test_docs import HOSTS, ROOT, execute
from tests.test_notebooks import executed

pytestmark = pytest.mark.slow

START_S = 120.0
TRAIN = """
import nbddp, os, time
def train(seconds=1000):
    nbddp.barrier()
    open(f"there-{nbddp.rank()}", "w").close()
    time.sleep(seconds)
    return nbddp.rank(), nbddp.world_size()
def options():
    return {"device": "cpu", "nprocs": 2}
"""


def _open(rig: Rig, folder: Path) -> Notebook:
    """A notebook whose user has the hosts in ~/.ssh/config."""
    return Notebook({"PATH": rig.plain_ssh() + os.pathsep + os.environ["PATH"]}, cwd=str(folder))


@pytest.fixture
def own(rig: Rig, in_folder: Path) -> Iterator[Notebook]:
    """The notebook of a test that ends it."""
    with _open(rig, in_folder) as notebook:
        notebook.ok(TRAIN)
        yield notebook


@pytest.fixture(scope="module")
def _kernel(rig: Rig) -> Iterator[Notebook]:
    with _open(rig, rig.shared) as notebook:
        yield notebook


@pytest.fixture
def there(_kernel: Notebook, in_folder: Path) -> Notebook:
    """The notebook of all tests that leave it as it is."""
    _kernel.ok(f"import os\nos.chdir({str(in_folder)!r})\n{TRAIN}")
    return _kernel


@pytest.fixture(scope="module")
def _cluster(_kernel: Notebook) -> Iterator[None]:
    _kernel.ok("import nbddp\nc = nbddp.cluster(['gpu1', 'gpu2'])", START_S)
    _kernel.ok("c.run(int, nprocs=1, device='cpu', show=False)", START_S)  # there is then what a cluster keeps
    yield
    _kernel.ok("c.close()")


@pytest.fixture
def logged_in(_cluster: None, there: Notebook) -> Notebook:
    """It has the hosts as ``c``, for the tests at the end of this module."""
    return there


def wait_for_ranks(folder: Path, number: int = 4) -> None:
    wait_until(lambda: len(list(folder.glob("there-*"))) == number, START_S)


def test_run_accepts_a_plain_list_of_hosts(there: Notebook, rig: Rig) -> None:
    shown = there.ok("nbddp.run(train, (0,), hosts=['gpu1', 'gpu2'], **options()).values", START_S).shown
    assert "[(0, 4), (1, 4), (2, 4), (3, 4)]" in shown
    rig.wait_until_clean()


def test_every_block_of_the_guide_runs(there: Notebook, rig: Rig) -> None:
    execute(ROOT / "docs" / HOSTS, there)
    rig.wait_until_clean()


def test_the_magic_accepts_hosts_and_names_an_unknown_one(there: Notebook, rig: Rig) -> None:
    there.ok("%load_ext nbddp")
    line = "%%ddp --hosts gpu1,gpu2 --min-hosts 1 -n 1 --device cpu -o found"
    there.ok(f"{line}\nimport socket\nfound = socket.gethostname(), world_size", START_S)
    assert "('gpu1', 2)" in there.ok("found").shown
    said = there.cell("%%ddp --hosts gpu1,gpu9 -n 1\n1", START_S)
    assert (said.status, said.ename) == ("error", "LaunchError")
    assert "gpu9" in said.evalue


def sleeping(rig: Rig) -> list[psutil.Process]:
    """What a login shell on gpu2 waits for."""
    found = []
    for process in rig.hosts["gpu2"].processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.name() == "sleep" else []
    return found


def test_an_interrupt_during_the_login_ends_the_login(there: Notebook, rig: Rig) -> None:
    home = Path(f"/proc/{rig.hosts['gpu2'].pid}/root{rig.hosts['gpu2'].home}/.bashrc")
    greeting = home.read_text()
    home.write_text("sleep 1000\n")
    try:
        going = there.begin("nbddp.run(train, hosts=['gpu1', 'gpu2'], **options())")
        wait_until(lambda: sleeping(rig), 30)
        began = time.monotonic()
        there.interrupt()
        assert there.end_of(going).ename == "KeyboardInterrupt"
        assert time.monotonic() - began < 10
        rig.wait_until_clean("gpu1")
    finally:
        home.write_text(greeting)
        for process in sleeping(rig):
            process.kill()  # sshd leaves it to itself


def test_a_killed_notebook_leaves_nothing_on_its_hosts(own: Notebook, rig: Rig, in_folder: Path) -> None:
    own.begin("nbddp.run(train, hosts=['gpu1', 'gpu2'], **options())")
    wait_for_ranks(in_folder)
    own.kill()
    rig.wait_until_clean()


def test_a_notebook_killed_while_it_sends_leaves_nothing_on_its_hosts(own: Notebook, rig: Rig, in_folder: Path) -> None:
    own.ok("import numpy\nbig = numpy.ones(100_000_000)")
    own.ok("c = nbddp.cluster(['gpu1', 'gpu2'])", START_S)
    agent = rig.hosts["gpu2"].agent()
    agent.suspend()  # so that it has no end
    before = rig.passed("gpu2")[0]
    own.begin("nbddp.run(lambda big: 1, (big,), hosts=c, **options())")
    try:
        wait_until(lambda: rig.passed("gpu2")[0] - before > 1_000_000, 30)
        own.kill()
    finally:
        agent.resume()
    rig.wait_until_clean()


def test_a_restarted_or_closed_notebook_leaves_nothing_on_its_hosts(own: Notebook, rig: Rig, in_folder: Path) -> None:
    for end in (own.restart, own.close):
        own.begin(f"{TRAIN}\nc = nbddp.cluster(['gpu1', 'gpu2'])\nnbddp.run(train, hosts=c, **options())")
        wait_for_ranks(in_folder)
        end()
        rig.wait_until_clean()
        for path in in_folder.glob("there-*"):
            path.unlink()


def test_a_forked_child_of_a_killed_notebook_does_not_keep_its_hosts_busy(
    own: Notebook, rig: Rig, in_folder: Path
) -> None:
    own.ok("c = nbddp.cluster(['gpu1', 'gpu2'])", START_S)
    going = own.begin("run = nbddp.run(train, hosts=c, wait=False, **options())")
    wait_for_ranks(in_folder)
    own.end_of(going)
    own.ok("""
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        with open("child", "w") as file: print(pid, file=file)
    """)
    own.kill()
    try:
        rig.wait_until_clean()
    finally:
        os.kill(int((in_folder / "child").read_text()), 9)


def test_the_several_machines_notebook_shows_what_its_text_says(
    rig: Rig, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", rig.plain_ssh() + os.pathsep + os.environ["PATH"])
    found = executed(
        "several_machines",
        """{
            "lost": [[v["host"], v["rank"], v["weights"]] for v in run.values],
            "accuracy": run.value["accuracy"],
            "here": [v["weights"] for v in here.values],
            "restarts": [[r.step, r.reason] for r in run.history.restarts],
            "steps": run.history["loss"].steps.tolist(),
            "everyone": sorted(load),
        }""",
        in_folder,
    )
    assert [(host, rank) for host, rank, _ in found["lost"]] == [("gpu1", "0 of 2"), ("gpu1", "1 of 2")]
    assert len({weights for *_, weights in found["lost"]}) == len(set(found["here"])) == 1
    assert found["accuracy"] > 0.9
    (restart,) = found["restarts"]
    assert "gpu2" in restart[1]
    assert found["steps"] == sorted(set(found["steps"]))
    assert found["everyone"] == ["gpu1", "gpu2"]


def test_breakpoints_stop_ranks_on_other_hosts(logged_in: Notebook) -> None:
    source = """
    def fit():
        x = 10 * nbddp.rank()
        if nbddp.rank() in (1, 2):
            breakpoint()
            x += 1
        return float(nbddp.all_reduce(float(x), op="sum"))
    run = nbddp.run(fit, hosts=c, **options())
    print("value", run.value)
    """
    talk = logged_in.talk(source, ["p x", "rank 2", "p x", "!x = 100", "rank all", "n", "c"], START_S)
    assert talk.prompts[:4] == ["ranks 1 and 2 (Pdb) "] * 2 + ["rank 2 on gpu2 (Pdb) "] * 2
    assert "rank 1 on gpu1: 10\nrank 2 on gpu2: 20" in talk.shown
    assert "value 142.0" in talk.shown  # 0 + 11 + 101 + 30


@pytest.mark.parametrize("how", ["kill", "killpg"])
def test_an_interrupt_ends_the_run_within_10_s_and_the_cluster_stays_usable(
    logged_in: Notebook, rig: Rig, in_folder: Path, how: str
) -> None:
    logged_in.ok("from nbddp.kernel import state\ngrace_s, state.STOP_GRACE_S = state.STOP_GRACE_S, 60.0")
    going = logged_in.begin("nbddp.run(train, hosts=c, **options())")
    wait_for_ranks(in_folder)
    began = time.monotonic()
    logged_in.interrupt(how)
    said = logged_in.end_of(going)
    assert time.monotonic() - began < 10
    assert (said.status, said.ename) == ("error", "KeyboardInterrupt")
    assert not rig.hosts["gpu1"].ranks() + rig.hosts["gpu2"].ranks()
    shown = logged_in.ok("nbddp.run(train, (0,), hosts=c, **options()).values", START_S).shown
    assert "[(0, 4), (1, 4), (2, 4), (3, 4)]" in shown
    logged_in.ok("state.STOP_GRACE_S = grace_s")


def test_the_traceback_of_a_remote_rank_shows_only_the_users_lines(logged_in: Notebook) -> None:
    said = logged_in.cell("""
        def broken():
            nbddp.barrier()
            if nbddp.rank() == 3:
                raise ValueError("bad batch")
            nbddp.barrier()
        nbddp.run(broken, hosts=c, **options())
    """)
    assert said.ename == "RankError"
    assert 'raise ValueError("bad batch")' in said.traceback
    assert said.traceback.splitlines()[0].startswith("rank 3 of 4")
    assert "gpu2" in said.traceback.splitlines()[0]
    assert "site-packages" not in said.traceback
    assert "nbddp/host" not in said.traceback
