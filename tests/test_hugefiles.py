"""Files in huge pages: that blocks lie in them, and that nothing depends on it."""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nbddp import payload
from nbddp.payload import block, huge_pages
from tests.support import Cells, Notebook, open_fds, run, script, wait_until

NBYTES = huge_pages.FROM_NBYTES
HUGE = Path("/sys/kernel/mm/transparent_hugepage")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such files, and memfds")
needs_huge_pages = pytest.mark.skipif(
    not HUGE.exists() or "[deny]" in (HUGE / "shmem_enabled").read_text(), reason="this system has no huge pages"
)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has just begun."""
    monkeypatch.setattr(huge_pages, "_begun", threading.Event())
    monkeypatch.setattr(huge_pages, "_directories", directories := [])
    yield
    wait_until(lambda: not makers(), what="it is made")
    for fd in directories:
        os.close(fd)


def makers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nbddp-huge-files"]


def made() -> bool:
    """Make the file system, and wait for it."""
    huge_pages.begin()
    wait_until(lambda: not makers(), what="it is made")
    return bool(huge_pages._directories)


@pytest.fixture
def huge() -> None:
    if not made():
        pytest.skip("this system lets nobody make a tmpfs (user namespaces are forbidden, say)")


def in_huge_pages() -> int:
    """Bytes of files in memory that this process sees by huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kb) << 10 for kb in re.findall(r"^ShmemPmdMapped:\s+(\d+) kB", text, re.M))


@needs_huge_pages
def test_a_large_tensor_lies_in_huge_pages(huge: None) -> None:
    before, data = in_huge_pages(), torch.arange(NBYTES // 8)
    fd = payload.open_block("test")
    packed = payload.pack(data, fd)
    arrived = payload.unpack(fd, packed.nbytes).value
    os.close(fd)
    assert torch.equal(arrived, data)
    assert in_huge_pages() - before > NBYTES // 2  # all but its edges, while the system has huge pages to give
    arrived += 1  # the reader's own, as ever
    assert torch.equal(arrived, data + 1)
    del arrived
    assert in_huge_pages() <= before


@needs_huge_pages
def test_ranks_and_notebook_see_large_data_by_huge_pages(huge: None, cell: Cells) -> None:
    names = cell("""
        import re
        def train(data):
            total = int(data.sum())
            text = open("/proc/self/smaps_rollup").read()
            return total, int(re.search(r"ShmemPmdMapped:\\s+(\\d+)", text)[1]) << 10, data
    """)
    done = run(names.train, torch.ones(NBYTES, dtype=torch.uint8))
    for total, seen, back in done.values:
        assert total == int(back.sum()) == NBYTES
        assert seen > NBYTES // 2
    assert in_huge_pages() > NBYTES  # a result of each


@needs_huge_pages
def test_a_small_block_takes_no_huge_page(huge: None) -> None:
    for nbytes in (1, 5000, 1 << 20):
        fd = block.open_block("test")
        block.fill(fd, nbytes, [(0, memoryview(bytes(nbytes)))], lambda: True)
        assert os.fstat(fd).st_blocks * 512 < nbytes + (64 << 10)
        os.close(fd)


@needs_huge_pages
def test_a_block_that_comes_in_pieces_lies_in_huge_pages(huge: None) -> None:
    """From another host. A file that grows never has room for a huge page at its end."""
    fd = block.open_block("test")
    for nbytes in (NBYTES + 5, 3):
        whole = np.random.default_rng(nbytes).integers(0, 255, nbytes, dtype=np.uint8).tobytes()
        for at in range(0, nbytes, 1 << 20):
            block.write_piece(fd, whole[at : at + (1 << 20)], at, nbytes)
        before, mapped = in_huge_pages(), block.map_block(fd, nbytes)
        assert mapped == whole
        assert in_huge_pages() - before >= (NBYTES // 2 if nbytes > NBYTES else 0)
        assert os.fstat(fd).st_size == nbytes
        del mapped
    os.close(fd)


def test_gaps_in_a_block_take_no_memory(huge: None) -> None:
    """Some rows of a dataset: its storage is laid out whole, and a huge page would fill what lies between them."""
    dataset = torch.empty(1 << 30, dtype=torch.uint8).view(-1, 4096)
    rows = [dataset[index].fill_(index % 251) for index in range(0, len(dataset), 1000)]
    fd = payload.open_block("test")
    packed = payload.pack(rows, fd)
    assert packed.nbytes > 1 << 30
    assert os.fstat(fd).st_blocks * 512 < 64 << 20
    arrived = payload.unpack(fd, packed.nbytes).value
    os.close(fd)
    assert all(torch.equal(*pair) for pair in zip(arrived, rows, strict=True))


def test_no_other_program_gets_it(anew: None) -> None:
    """By os.system, say, or from a library that starts one."""
    if made():
        assert [os.get_inheritable(fd) for fd in huge_pages._directories] == [False]


def test_it_is_mounted_nowhere_and_has_no_name(huge: None) -> None:
    fd = block.open_block("my/run")
    link = os.readlink(f"/proc/self/fd/{fd}")
    assert re.fullmatch(r"/nbddp-my-run-\d+-\d+ \(deleted\)", link)
    assert os.fstat(fd).st_nlink == 0
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    device = os.fstat(fd).st_dev
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    assert f"{os.major(device)}:{os.minor(device)}" not in [line.split()[2] for line in mounts]
    for directory in huge_pages._directories:
        assert os.listdir(f"/proc/self/fd/{directory}") == []
    os.close(fd)


def test_many_threads_open_files_of_one_name(huge: None) -> None:
    opened: list[int] = []

    def open_some() -> None:
        for _ in range(50):
            fd = huge_pages.open_file("test", 5)
            assert fd is not None
            opened.append(fd)

    threads = [threading.Thread(target=open_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inodes = {os.fstat(fd).st_ino for fd in opened}
    for fd in opened:
        os.close(fd)
    assert len(inodes) == 400


def test_a_fork_of_the_process_has_files_of_its_own(huge: None) -> None:
    """Its numbers go on from the same one: a name that both take at the same time would be no file for one of them."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, name_of_a_new_file().encode())
        finally:
            os._exit(0)
    os.close(theirs)
    mine, others = name_of_a_new_file(), os.read(ours, 200).decode()
    os.waitpid(child, 0)
    os.close(ours)
    assert others not in ("", mine)


def name_of_a_new_file() -> str:
    fd = huge_pages.open_file("test", 5)
    assert fd is not None
    name = os.readlink(f"/proc/self/fd/{fd}")
    os.close(fd)
    return name


def never_ends(folder: Path) -> str:
    path = folder / "python"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o700)
    return str(path)


def says_nothing(folder: Path) -> str:
    return "/bin/true"


def is_not_there(folder: Path) -> str:
    return str(folder / "none")


def is_unknown(folder: Path) -> Any:
    return None


def takes_the_channel_for_words(folder: Path) -> str:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, os\nos.write(int(sys.argv[-1]), b'x')\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.slow
def test_a_large_block_does_not_wait_long_for_it(anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_TIMEOUT_S", 5.0)
    monkeypatch.setattr(huge_pages, "get_executable", lambda: never_ends(tmp_path))
    began = time.monotonic()
    fds = [block.open_block("test", NBYTES) for _ in range(10)]
    assert 0.5 <= time.monotonic() - began < 2.0  # only the first of them waits
    assert makers()
    for fd in fds:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:nbddp-test")
        os.close(fd)


def test_the_first_large_block_lies_in_it_and_small_ones_do_not_make_it(anew: None) -> None:
    fds = [block.open_block("test", nbytes) for nbytes in (0, 1, NBYTES - 1)]
    assert not makers()
    assert not huge_pages._begun.is_set()
    fds.append(block.open_block("test", NBYTES))
    kinds = [os.readlink(f"/proc/self/fd/{fd}").partition("nbddp-test")[0] for fd in fds]
    for fd in fds:
        os.close(fd)
    assert kinds[:3] == ["/memfd:"] * 3
    assert kinds[3] == ("/" if huge_pages._directories else "/memfd:")


def test_after_a_large_result_the_next_ones_lie_in_it(anew: None, cell: Cells) -> None:
    """Its own block was opened before anybody knew how large it would be."""
    names = cell(f"""
        import torch
        def large(): return torch.ones({NBYTES}, dtype=torch.uint8)
        def small(): return 1
    """)
    assert run(names.small).value == 1
    assert not huge_pages._begun.is_set()
    assert run(names.large, nprocs=1).value.sum() == NBYTES
    assert huge_pages._begun.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("forbidden", [False, True], ids=["allowed", "forbidden"])
def test_the_first_large_payload_starts_the_program_unless_the_environment_forbids_it(
    huge: None, forbidden: bool
) -> None:
    count = "print(sum('tmpfs.py' in program for program in programs))"
    with Notebook(environ={"NBDDP_HUGE_PAGES": "0"} if forbidden else {}) as notebook:
        notebook.ok("""
            import sys
            programs = []
            sys.addaudithook(lambda event, args: event == "subprocess.Popen" and programs.append(str(args[1])))
        """)
        notebook.ok("import nbddp, torch")
        total = "nbddp.run(lambda x: int(x.sum()), (torch.ones({}, dtype=torch.uint8),), nprocs=2, show=False).values"
        assert notebook.ok(f"print({total.format(NBYTES >> 1)})").shown == f"{[NBYTES >> 1] * 2}\n"
        assert notebook.ok(count).shown == "0\n"
        for _ in range(2):
            assert notebook.ok(f"print({total.format(NBYTES)})").shown == f"{[NBYTES] * 2}\n"
            assert notebook.ok(count).shown == ("0\n" if forbidden else "1\n")


@pytest.mark.parametrize(
    "program",
    [never_ends, says_nothing, is_not_there, is_unknown, takes_the_channel_for_words],
    ids=lambda f: f.__name__,
)
def test_without_it_blocks_are_memfds(
    anew: None, program: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cells
) -> None:
    fds, children = open_fds(), psutil.Process().children()
    monkeypatch.setattr(huge_pages, "_TIMEOUT_S", 0.3)
    with monkeypatch.context() as patched:
        patched.setattr(huge_pages, "get_executable", lambda: program(tmp_path))
        assert not made()
    assert open_fds() == fds
    assert psutil.Process().children() == children
    fd = block.open_block("test")
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:nbddp-test")
    os.close(fd)
    data = torch.arange(NBYTES // 8)
    assert run(cell("def total(x): return int(x.sum()), x").total, data).values[0][0] == int(data.sum())


def test_no_thread_to_make_it_with(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        os.close(block.open_block("test", NBYTES))
    assert not made()


def test_no_file_descriptor_to_make_it_with(anew: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = sorted(os.dup(0) for _ in range(20))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fds[-1] + 2, hard))
        assert not made()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fds:
            os.close(fd)


def test_a_process_that_became_another_user_takes_memfds(huge: None) -> None:
    """Files of the new user cannot be in the namespace of the old one."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    done = script("""
        import os
        from nbddp.payload import block, huge_pages
        huge_pages.begin(wait_s=20)
        os.setegid(65534)
        os.seteuid(65534)
        fd = block.open_block("test")
        block.fill(fd, 5, [(0, memoryview(b"hello"))], lambda: True)
        print(len(huge_pages._directories), huge_pages.open_file("test", 5), os.pread(fd, 5, 0))
    """)
    assert done.stdout == "1 None b'hello'\n", done.stderr


def test_a_rank_that_became_another_user_returns_much(huge: None) -> None:
    """Its own file may no longer be opened a second time, to be mapped."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    done = script("""
        import os
        from nbddp.payload import block, huge_pages
        huge_pages.begin(wait_s=20)
        fd = block.open_block("test")
        os.setuid(65534)
        data = os.urandom(50 << 20)
        block.fill(fd, len(data), [(0, memoryview(data))], lambda: True)
        print(os.pread(fd, len(data), 0) == data, os.readlink(f"/proc/self/task/{os.getpid()}/fd/{fd}"))
    """)
    assert done.stdout.startswith("True /nbddp-test"), done.stderr


@pytest.mark.slow
def test_a_killed_process_gives_its_blocks_back(huge: None) -> None:
    """A tmpfs that is mounted nowhere could still keep its files."""
    before = shared_memory()
    done = script(f"""
        import os, signal
        from nbddp.payload import block, huge_pages
        from tests.test_hugefiles import shared_memory
        huge_pages.begin(wait_s=20)
        fd = block.open_block("test")
        block.fill(fd, {16 * NBYTES}, [(0, memoryview(bytes({16 * NBYTES})))], lambda: True)
        print(os.readlink(f"/proc/self/fd/{{fd}}"), shared_memory(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    link, _, meanwhile = done.stdout.split()
    assert "nbddp-test" in link
    assert int(meanwhile) > before + 8 * NBYTES
    wait_until(lambda: shared_memory() < before + 8 * NBYTES, what="it is given back")


def shared_memory() -> int:
    """Bytes of files in memory, on the whole machine."""
    found = re.search(r"^Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    assert found
    return int(found[1]) << 10
