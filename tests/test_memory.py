"""Memory: what ranks and GPUs use, and the OOM killer. The driver and the cgroups are made up."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest

import nbddp
from nbddp.messages import Settings
from nbddp.process import gauges, oom
from tests.support import Cells, Notebook, gone, ranks_of, run, wait_until

GIB = 1 << 30
UUIDS = ["GPU-11111111-aaaa", "GPU-22222222-bbbb"]
USED = [3 * GIB, 5 * GIB]


class Driver:
    """The functions of ``pynvml`` that are called; a device is its number."""

    def __init__(self) -> None:
        self.missing: set[str] = set()  # functions that this driver is too old for

    def init(self) -> None:
        if "init" in self.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def by_index(self, index: int) -> int:
        if index >= len(UUIDS):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def by_uuid(self, uuid: str) -> int:
        if uuid not in UUIDS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return UUIDS.index(uuid)

    def memory(self, handle: int, version: int = 0) -> SimpleNamespace:
        if version and "v2" in self.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        reserved = GIB * (version != pynvml.nvmlMemory_v2)
        return SimpleNamespace(total=16 * GIB, used=USED[handle] + reserved)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(pynvml, "nvmlInit", driver.init)  # fails where the library has no such function
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", driver.by_index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", driver.by_uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", driver.memory)
    gauges._nvml.cache_clear()
    yield driver
    gauges._nvml.cache_clear()


def of_gpu(gpu: str) -> tuple[int, int] | None:
    return gauges.memory(psutil.Process(), gpu).gpu


def test_a_gpu_is_found_by_number_or_uuid_and_what_its_driver_reserves_is_not_in_use(driver: Driver) -> None:
    assert [of_gpu(gpu) for gpu in ["0", "1", *UUIDS]] == [(used, 16 * GIB) for used in USED * 2]
    driver.missing.add("v2")  # it doesn't tell what it reserves
    assert of_gpu("0") == (4 * GIB, 16 * GIB)


def test_of_a_gpu_or_driver_that_is_not_there_nothing_is_known_and_nothing_is_printed(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [of_gpu(gpu) for gpu in ("2", "GPU-3", "MIG-1", "-1", "")] == [None] * 5
    gauges._nvml.cache_clear()
    driver.missing.add("init")
    assert (of_gpu("0"), capfd.readouterr()) == (None, ("", ""))


def test_a_rank_shows_the_memory_of_the_gpu_that_it_sees() -> None:
    for device, indices, visible, names in (
        ("cuda", (0, 1), f"{UUIDS[1]}, 0", [UUIDS[1], "0"]),
        ("cuda", (0, 1, 1), "", ["0", "1", "1"]),
        ("cuda", (0, 1), "3", ["3", "1"]),  # env= takes a GPU away: the rank says so
        ("cpu", (0, 1), "0,1", ["", ""]),
    ):
        settings = Settings("train", len(indices), device, indices, environ={"CUDA_VISIBLE_DEVICES": visible})
        assert [gauges.gpu_of(settings, rank) for rank in range(len(indices))] == names


def test_a_ranks_memory_is_what_is_resident_of_its_process_until_it_ends() -> None:
    block = bytearray(os.urandom(1)) * (64 << 20)
    with_it = gauges.memory(psutil.Process(), "")
    del block
    assert 60 << 20 < with_it.resident - gauges.memory(psutil.Process(), "").resident < 68 << 20
    if not (pid := os.fork()):
        os._exit(0)
    ended = psutil.Process(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it's a zombie now
    assert gauges.memory(ended, "") is None
    os.waitpid(pid, 0)
    assert gauges.memory(ended, "") is None


def test_status_shows_each_ranks_memory_and_which_rank_has_ended(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp\n%ddp open -n 2 --device cpu")
    first, *lines = notebook.ok("%ddp status").shown.splitlines()
    assert first == "<Session: open, 2 ranks>"
    found = [re.fullmatch(rf"  rank {rank}: pid (\d+), (\d+) MiB", line) for rank, line in enumerate(lines[:2])]
    assert [each is not None and 50 < int(each[2]) < 2000 for each in found] == [True, True]
    pids = [int(each[1]) for each in found if each is not None]
    assert sorted(pids) == sorted(ranks_of(notebook.pid))
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: gone(pids[1]))
    first, *lines = notebook.ok("%ddp status").shown.splitlines()
    assert (lines[0][:13], lines[1]) == ("  rank 0: pid", "  rank 1: ended")
    assert notebook.cell("1").ename == "RankDied"
    first, *lines = notebook.ok("%ddp status").shown.splitlines()
    assert first.startswith("<Session: rank 1 of 2 was killed by SIGKILL")
    assert (lines[0][:13], lines[1]) == ("  rank 0: pid", "  rank 1: ended")
    assert notebook.ok("%ddp close").shown == "the session is closed\n"


def test_status_never_fails_while_runs_in_the_background_start_train_die_and_end(notebook: Notebook) -> None:
    reply = notebook.ok("""
        %load_ext nbddp
        import nbddp, os, time
        def train():
            time.sleep(0.2)
            if nbddp.rank() == die: os._exit(3)
        for die in (None, 1):
            going = [nbddp.run(train, nprocs=2, device="cpu", wait=False, max_restarts=1) for _ in range(3)]
            while not all(run.done() for run in going):
                %ddp status
                time.sleep(0.01)
        %ddp status
        del going
    """)
    assert re.search(r"<Run train: running, 2 ranks, .*>\n  rank 0: pid \d+, \d+ MiB\n  rank 1: ", reply.shown)
    assert re.findall(r"<Run train: (\w+): (\w+),", reply.shown)[-3:] == [("failed", "RankDied")] * 3


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(oom, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(oom, "_MOUNT", tmp_path)
    oom._files.cache_clear()
    yield tmp_path
    oom._files.cache_clear()


@pytest.mark.parametrize(
    ("lines", "file", "text", "kills"),
    [
        ("0::/user.slice/nb", "user.slice/nb/memory.events", "low 0\noom 9\noom_kill 2\noom_group_kill 7\n", 2),
        ("0::/", "memory.events", "oom_kill 3\n", 3),
        ("5:cpu:/a\n4:memory:/a", "memory/a/memory.oom_control", "oom_kill_disable 8\noom_kill 4\n", 4),
        ("4:cpu,memory:/docker/1f\n0::/", "memory/memory.oom_control", "oom_kill 5\n", 5),
        ("4:memory:/a", "memory/a/memory.oom_control", "oom_kill_disable 0\n", 0),  # an old kernel
        ("4:cpu:/a", "memory/a/memory.oom_control", "oom_kill 6\n", 0),
    ],
    ids=["v2", "v2 in a container", "v1", "v1 in a container", "not counted", "another group"],
)
def test_kills_are_counted_in_our_memory_cgroup(cgroups: Path, lines: str, file: str, text: str, kills: int) -> None:
    assert oom.kills() == 0  # without cgroups
    oom._files.cache_clear()
    (cgroups / "cgroup").write_text(f"{lines}\n")
    assert oom.kills() == 0
    (cgroups / file).parent.mkdir(parents=True, exist_ok=True)
    (cgroups / file).write_text(text)
    assert oom.kills() == kills


OOM_KILLER = "by the system's OOM killer: the machine or container ran out of memory. Try a smaller"


@pytest.mark.parametrize(("after", "text"), [(3, OOM_KILLER), (2, "by SIGKILL without")])
def test_it_was_the_oom_killer_if_it_killed_during_the_run(cell: Cells, cgroups: Path, after: int, text: str) -> None:
    (cgroups / "cgroup").write_text("0::/\n")
    (cgroups / "memory.events").write_text("oom_kill 2\n")
    names = cell("""
        import os, signal
        def train(file, kills):
            with open(file, "w") as events: events.write(f"oom_kill {kills}\\n")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    with pytest.raises(nbddp.RankDied, match=f"rank 0 of 1 was killed {text}"):
        run(names.train, str(cgroups / "memory.events"), after, nprocs=1)
