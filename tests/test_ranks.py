"""What a rank finds: its process group, environment, device, threads and seeds, and any group that it makes itself."""

import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nbddp.process import store
from tests.support import Cells, Notebook, free_port, out, run, script, start

CONTRACT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_the_process_group_is_ready_and_collectives_are_right_on_1_and_32_ranks(cell: Cells) -> None:
    names = cell("""
        import torch, torch.distributed as dist
        def train():
            x = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(x)
            seen = [None] * dist.get_world_size()
            dist.all_gather_object(seen, dist.get_rank())
            return dist.get_backend(), dist.get_rank(), x.item(), seen
    """)
    for size in (1, 32):
        expected = [("gloo", rank, size * (size + 1) / 2, list(range(size))) for rank in range(size)]
        assert run(names.train, nprocs=size, timeout=120).values == expected


def test_the_environment_is_torchruns_with_and_without_a_process_group(cell: Cells) -> None:
    wanted = (*CONTRACT, "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "ACCELERATE_USE_CPU")
    names = cell(f"""
        import os, nbddp, torch.distributed as dist
        def train():
            found = {{k: v for k, v in os.environ.items() if k.startswith("TORCHELASTIC") or k in {wanted!r}}}
            return found, (dist.is_initialized(), nbddp.rank(), nbddp.world_size())
    """)
    for init in (True, False):
        values = run(names.train, nprocs=3, init_process_group=init).values
        assert len({value["MASTER_PORT"] for value, _ in values}) == 1
        for rank, (value, told) in enumerate(values):
            assert told == (init, rank, 3)
            assert value["RANK"] == value["LOCAL_RANK"] == value["ROLE_RANK"] == str(rank)
            assert value["WORLD_SIZE"] == value["LOCAL_WORLD_SIZE"] == value["ROLE_WORLD_SIZE"] == "3"
            assert (value["MASTER_ADDR"], value["ACCELERATE_USE_CPU"]) == ("127.0.0.1", "true")
            assert value["GROUP_RANK"] == "0"
            assert value["TORCHELASTIC_RESTART_COUNT"] == value["TORCHELASTIC_MAX_RESTARTS"] == "0"
            assert value["TORCHELASTIC_RUN_ID"].startswith("nbddp-")
    assert not any(key in os.environ for key in CONTRACT)


@pytest.mark.parametrize("init", [True, False], ids=["group ready", "init_process_group=False"])
@pytest.mark.parametrize("url", ["default", "env://", "own port", "tcp://", "file://", "store"])
def test_a_function_can_make_its_own_process_group(cell: Cells, tmp_path: Path, url: str, init: bool) -> None:
    """With a group already up torch says "trying to initialize the default process group twice"."""
    names = cell("""
        import os, nbddp, torch, torch.distributed as dist
        def train(url, port, path):
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            numbers, before = dict(rank=rank, world_size=world_size), dict(os.environ)
            if url == "default": dist.init_process_group("gloo")
            elif url == "env://": dist.init_process_group("gloo", init_method="env://", **numbers)
            elif url == "own port":
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
                dist.init_process_group("gloo", **numbers)
            elif url == "tcp://": dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", **numbers)
            elif url == "file://": dist.init_process_group("gloo", init_method=f"file://{path}/meet", **numbers)
            else: dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", world_size), **numbers)
            x = torch.ones(1)
            dist.all_reduce(x)
            dist.barrier()
            dist.destroy_process_group()
            assert os.environ == before or url == "own port"
            return x.item(), dist.is_initialized(), nbddp.world_size()
    """)
    done = run(names.train, url, free_port(), str(tmp_path), init_process_group=init, timeout=60)
    assert done.values == [(2.0, False, 2)] * 2


def test_the_store_does_without_libuv_where_torchs_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_LIBUV", "0")
    opened = store.Store(1)
    opened.open()
    assert not opened._store.libuvBackend
    opened.close()


def test_a_store_that_a_rank_hosts_at_master_port_is_for_the_other_ranks(cell: Cells) -> None:
    names = cell("""
        import os, nbddp, torch.distributed as dist
        def train():
            host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), nbddp.rank()
            store = dist.TCPStore(host, port, 2, is_master=rank == 0)
            store.set(f"from {rank}", "here")
            got = store.get(f"from {1 - rank}")
            nbddp.barrier()  # rank 0 must not leave with its store
            return got, os.environ["MASTER_PORT"] == str(port)
    """)
    assert run(names.train, timeout=60).values == [(b"here", True)] * 2


@pytest.mark.parametrize("port", ["ours", "own"])
def test_processes_that_a_rank_launches_form_a_group_of_their_own(cell: Cells, port: str) -> None:
    """As under ``python``; under torchrun only at its port."""
    launched_processes_form_a_group(cell, "fork", port)


def launched_processes_form_a_group(cell: Cells, method: str, port: str) -> None:
    names = cell("""
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        def child(rank, port):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port)
            dist.init_process_group("gloo")
            x = torch.tensor([rank + 1.0])
            dist.all_reduce(x)
            print(f"total {x.item()}", flush=True)  # in one piece
            os._exit(0)  # as Python ends, torch aborts one process in eight, also without nbddp
        def launch(method, port):
            mp.start_processes(child, (port or os.environ["MASTER_PORT"],), 2, start_method=method)
    """)
    launched = run(names.launch, method, "" if port == "ours" else str(free_port()), nprocs=1, timeout=90)
    assert launched.logs(0).count("total 3.0") == 2


def test_dataloader_workers_work_inside_ranks(cell: Cells) -> None:
    dataloader_workers_work(cell, "fork")


def dataloader_workers_work(cell: Cells, method: str) -> None:
    names = cell("""
        import torch, torch.distributed as dist
        from multiprocessing.reduction import ForkingPickler
        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.tensor(i * i)
        def collate(items): return torch.stack(items) + offset
        offset = 1
        def train(method):
            loader = torch.utils.data.DataLoader(
                Squares(), batch_size=2, num_workers=2, collate_fn=collate, multiprocessing_context=method)
            total = sum(int(batch.sum()) for epoch in range(2) for batch in loader)
            dist.barrier()
            return total, ForkingPickler.loads(ForkingPickler.dumps(collate)) is collate
    """)
    expected = 2 * sum(i * i + 1 for i in range(8)), False  # a worker can't find it by its name
    assert run(names.train, method, timeout=100).values == [expected] * 2


def test_seeds_differ_by_rank_and_repeat_by_run_and_the_notebooks_own_numbers_stay(cell: Cells) -> None:
    """A forked process inherits the generator's state: every rank of every run would draw the same numbers."""
    names = cell("""
        import os, random, numpy, torch
        def train():
            strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            strict += torch.backends.cudnn.deterministic, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
            return random.random(), float(numpy.random.rand()), torch.rand(1).item(), torch.initial_seed(), strict
    """)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    # NumPy's seeds end below 2**32; one rank of the third run is beyond.
    first, again, other = (run(names.train, seed=2**32 - n, deterministic=True).values for n in (2, 2, 1))
    strict = True, False, True, os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert first == again
    assert [value[3:] for value in first] == [(2**32 - 2, strict), (2**32 - 1, strict)]
    assert first[0] != first[1]
    assert other[0] == first[1]  # seed + rank
    for column in zip(*(value[:4] for _ in range(2) for value in run(names.train).values)):
        assert len(set(column)) == 4
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert not torch.are_deterministic_algorithms_enabled()


def test_threads_are_divided_among_the_ranks(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell('import os, torch\ndef train(): return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for nprocs in (1, 2, 3):
        threads = max(1, cores // nprocs)
        assert run(names.train, nprocs=nprocs).values == [(threads, str(threads))] * nprocs
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(names.train).values == [(3, "3")] * 2
    assert run(names.train, env={"OMP_NUM_THREADS": "4"}).values == [(4, "4")] * 2


def test_what_python_reads_when_it_starts_is_that_runs_only_and_no_other_run_is_waited_for() -> None:
    hashed, environ = script("print(hash('a'))", PYTHONHASHSEED="1").stdout, subprocess.check_output("env")
    going = start(time.sleep, 1000)
    assert run(lambda: hash("a"), env={"PYTHONHASHSEED": "1"}).values == [int(hashed)] * 2
    assert (going.done(), subprocess.check_output("env")) == (False, environ)
    going.stop(0)


def test_the_notebooks_environment_and_arguments_are_the_ranks_but_not_its_kernels_own(notebook: Notebook) -> None:
    notebook.ok("""
        import nbddp, os, sys, time
        def train(): return time.strftime("%H", time.localtime(0)), sys.argv, os.environ.get("PATH")
        def ran(argv, orig_argv=sys.orig_argv):
            sys.argv, sys.orig_argv = argv, orig_argv
            return nbddp.run(train, nprocs=1, device="cpu", show=False).value
        kernels = sys.argv, sys.orig_argv
        os.environ["TZ"], path = "Asia/Tokyo", os.environ.pop("PATH")
    """)
    notebook.ok("colab = ['colab_kernel_launcher', '-f', 'kernel.json']")
    for arguments, expected in (
        ("sys.argv", "['train']"),
        ("['x.py', '--lr', '1']", "['x.py', '--lr', '1']"),
        ("['x.py']", "['x.py']"),
        ("colab, ['python', '-m', *colab]", "['train']"),
    ):
        assert out(notebook.ok(f"ran({arguments})")) == f"('09', {expected}, None)"
    notebook.ok("sys.argv, sys.orig_argv = kernels; del os.environ['TZ']; os.environ['PATH'] = path")
