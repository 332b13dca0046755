"""What a rank finds: its process group, environment, device, threads and seeds, and any group that it makes itself."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nbddp
from nbddp.kernel import plan as plans
from nbddp.kernel.options import complete
from nbddp.launch.devices import device_index
from tests.support import Cells, run, script

CONTRACT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_the_process_group_is_ready_and_collectives_are_right(cell: Cells) -> None:
    names = cell("""
        import torch, torch.distributed as dist
        def train():
            x = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(x)
            seen = [None] * dist.get_world_size()
            dist.all_gather_object(seen, dist.get_rank())
            return dist.get_backend(), dist.get_world_size(), x.item(), seen
    """)
    assert run(names.train, nprocs=4).values == [("gloo", 4, 10.0, [0, 1, 2, 3])] * 4


@pytest.mark.parametrize("more_nbytes", [mib << 20 for mib in (1, 5, 9, 13, 17, 21)])
def test_a_rank_without_memory_for_gloos_threads_does_not_hang(cell: Cells, more_nbytes: int) -> None:
    """torch's constructor does, for its first thread, when the second is refused; some rest of a stack may be left."""
    train = cell(
        """
        import resource, torch, torch.distributed as dist
        def train():
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + MORE_NBYTES, resource.RLIM_INFINITY))
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))
    """.replace("MORE_NBYTES", str(more_nbytes))
    ).train
    with contextlib.suppress(nbddp.RankError, nbddp.RankDied):  # no thread can be started; or there is room enough
        run(train, init=False, timeout=20)


def test_the_environment_is_torchruns(cell: Cells) -> None:
    names = cell("""
        import os
        def train(): return {k: v for k, v in os.environ.items() if k.startswith("TORCHELASTIC") or k in wanted}
    """)
    names = cell(f"wanted = {CONTRACT + ('GROUP_RANK', 'ROLE_RANK', 'ROLE_WORLD_SIZE', 'ACCELERATE_USE_CPU')!r}")
    for init in (True, False):
        values = run(names.train, nprocs=3, init=init).values
        assert len({value["MASTER_PORT"] for value in values}) == 1
        for rank, value in enumerate(values):
            assert value["RANK"] == value["LOCAL_RANK"] == value["ROLE_RANK"] == str(rank)
            assert value["WORLD_SIZE"] == value["LOCAL_WORLD_SIZE"] == value["ROLE_WORLD_SIZE"] == "3"
            assert value["MASTER_ADDR"] == "127.0.0.1"
            assert value["GROUP_RANK"] == "0"
            assert value["TORCHELASTIC_RESTART_COUNT"] == value["TORCHELASTIC_MAX_RESTARTS"] == "0"
            assert value["TORCHELASTIC_RUN_ID"].startswith("nbddp-")
            assert value["ACCELERATE_USE_CPU"] == "true"
    assert not any(key in os.environ for key in CONTRACT)


def test_init_false_makes_no_process_group(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch.distributed as dist
        def train(): return dist.is_initialized(), nbddp.rank(), nbddp.world_size()
    """)
    assert run(names.train, init=False).values == [(False, 0, 2), (False, 1, 2)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("init", [True, False], ids=["group ready", "init=False"])
@pytest.mark.parametrize("url", ["default", "env://", "own port", "tcp://", "file://", "store"])
def test_a_function_can_make_its_own_process_group(cell: Cells, tmp_path: Path, url: str, init: bool) -> None:
    """With a group already up torch says "trying to initialize the default process group twice"."""
    names = cell("""
        import os, nbddp, torch, torch.distributed as dist
        def train(url, port, path):
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            numbers = dict(rank=rank, world_size=world_size)
            if url == "default":
                dist.init_process_group("gloo")
            elif url == "env://":
                dist.init_process_group("gloo", init_method="env://", **numbers)
            elif url == "own port":
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
                dist.init_process_group("gloo", **numbers)
            elif url == "tcp://":
                dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", **numbers)
            elif url == "file://":
                dist.init_process_group("gloo", init_method=f"file://{path}/meet", **numbers)
            else:
                dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", world_size), **numbers)
            x = torch.ones(1)
            dist.all_reduce(x)
            dist.barrier()
            dist.destroy_process_group()
            return x.item(), dist.is_initialized(), nbddp.world_size()
    """)
    assert run(names.train, url, _free_port(), str(tmp_path), init=init, timeout=60).values == [(2.0, False, 2)] * 2


def test_a_function_that_makes_two_groups_gets_torchs_error(cell: Cells) -> None:
    """Only the ready-made group steps aside; twice their own stays torch's error."""
    names = cell("""
        import torch.distributed as dist
        def train():
            dist.init_process_group("gloo")
            dist.init_process_group("gloo")
    """)
    with pytest.raises(nbddp.RankError, match="twice"):
        run(names.train)


def test_ddp_trains_and_every_rank_holds_the_same_moved_weights(cell: Cells) -> None:
    names = cell("""
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        def train(steps):
            rank = dist.get_rank()
            model = DDP(torch.nn.Linear(4, 1))
            before = model.module.weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(100 + rank)
            for _ in range(steps):
                x = torch.randn(8, 4)
                loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            return dist.get_world_size(), before, model.module.weight.detach(), loss.item()
    """)
    first, second = run(names.train, 50, seed=0).values
    assert first[0] == second[0] == 2
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    assert (first[2] - first[1]).abs().max() > 0.3
    assert first[3] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["fork", "spawn", "forkserver"])
def test_dataloader_workers_work_inside_ranks_with_every_start_method(cell: Cells, workers: str) -> None:
    """Their start method is the platform's or the user's, never an accident of how the rank was started."""
    names = cell("""
        import torch, torch.distributed as dist
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
            return total
    """)
    expected = 2 * sum(i * i + 1 for i in range(8))
    assert run(names.train, workers, timeout=100).values == [expected, expected]


def test_the_default_start_method_in_a_rank_is_the_platforms_except_forkserver(cell: Cells) -> None:
    names = cell("""
        import multiprocessing, torch
        def child(queue): queue.put(5)
        def train():
            method = multiprocessing.get_start_method()
            queue = multiprocessing.Queue()
            process = multiprocessing.Process(target=child, args=(queue,))
            process.start()
            got = queue.get(timeout=30)
            process.join()
            return method, got, process.exitcode
    """)
    import multiprocessing

    default = multiprocessing.get_all_start_methods()[0]
    method = "fork" if default == "forkserver" else default
    assert run(names.train).values == [(method, 5, 0)] * 2


def test_seeds_differ_by_rank_and_repeat_by_run(cell: Cells) -> None:
    names = cell("""
        import random, numpy, torch
        def train(): return random.random(), float(numpy.random.rand()), torch.rand(1).item(), torch.initial_seed()
    """)
    first, again, other = (run(names.train, seed=seed).values for seed in (7, 7, 8))
    assert first == again
    assert [value[3] for value in first] == [7, 8]
    assert first[0] != first[1]
    assert other[0] == first[1]  # seed + rank
    unseeded = run(names.train).values
    assert unseeded[0][2] != unseeded[1][2]
    assert unseeded != run(names.train).values


def test_a_run_leaves_the_notebooks_random_state_alone(cell: Cells) -> None:
    import random

    import numpy as np

    names = cell("def train(): return 1")
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    run(names.train, seed=3, deterministic=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert not torch.are_deterministic_algorithms_enabled()


def test_unseeded_ranks_of_two_runs_do_not_repeat_the_fork_servers_numbers(cell: Cells) -> None:
    """A forked process inherits the generator's state: every rank of every run would draw the same numbers."""
    names = cell("""
        import random, numpy, torch, uuid
        def train(): return torch.rand(1).item(), random.random(), float(numpy.random.rand())
    """)
    drawn = [value for _ in range(2) for value in run(names.train).values]
    for column in zip(*drawn):
        assert len(set(column)) == 4


def test_deterministic_sets_torchs_flags(cell: Cells) -> None:
    names = cell("""
        import os, torch
        def train():
            return (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
                    torch.backends.cudnn.deterministic, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    """)
    assert run(names.train, deterministic=True).values == [(True, False, True, ":4096:8")] * 2
    assert run(names.train).values[0][0] is False


def test_threads_are_divided_among_the_ranks(cell: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell("""
        import os, torch
        def train(): return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    """)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for nprocs in (1, 2, 3):
        threads = max(1, cores // nprocs)
        assert run(names.train, nprocs=nprocs).values == [(threads, str(threads))] * nprocs
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(names.train).values == [(3, "3")] * 2


def test_sys_argv_in_a_rank_holds_no_argument_of_the_kernel(cell: Cells) -> None:
    """A script that parses ``sys.argv`` must not find the kernel's ``-f connection.json``."""
    names = cell("import sys\ndef train(): return sys.argv")
    assert run(names.train).values == [["train"]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
def test_memory_freed_by_one_step_is_reused_by_the_next(cell: Cells) -> None:
    """As torchrun leaves it, activations are given back to the system and faulted in again, at every step."""
    names = cell("""
        import ctypes, resource
        def train():
            libc = ctypes.CDLL(None)
            libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
            def faults_of_a_step():
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                blocks = [libc.malloc(1 << 20) for _ in range(40)]
                for block in blocks: libc.memset(block, 1, 1 << 20)
                for block in blocks: libc.free(block)
                return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            return [faults_of_a_step() for _ in range(6)]
    """)
    for faults in run(names.train).values:
        assert min(faults[1:]) < 100, faults  # of 10,240 pages


def test_garbage_collection_in_a_rank_has_the_default_thresholds(cell: Cells) -> None:
    """As in the fork server while it imports torch: cycles of tensors would fill the memory."""
    ns = cell("""
        import gc
        def thresholds(): return gc.isenabled(), gc.get_threshold()
    """)
    assert run(ns.thresholds).values == [(True, gc.get_threshold())] * 2


@pytest.mark.slow
def test_the_spawn_start_method_gives_each_rank_a_fresh_interpreter(cell: Cells) -> None:
    names = cell("""
        import os, torch.distributed as dist
        def train():
            seen = [None] * 2
            dist.all_gather_object(seen, os.getpid())
            with open(f"/proc/{os.getppid()}/cmdline") as file:
                return dist.get_rank(), len(set(seen)), "forkserver" in file.read()
    """)
    assert run(names.train, start_method="spawn").values == [(0, 2, False), (1, 2, False)]
    assert run(names.train, start_method="forkserver").values == [(0, 2, True), (1, 2, True)]


@pytest.mark.slow
def test_a_spawned_rank_prints_nothing_of_its_own(cell: Cells) -> None:
    """torch's exit handlers, taken away, complained at the interpreter's end, a hundred lines for each rank."""
    names = cell("import torch\ndef train(): torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)")
    assert run(names.train, start_method="spawn").logs() == ""


@pytest.mark.slow
def test_runs_work_with_a_path_object_on_sys_path(in_folder: Path) -> None:
    """``sys.path.append(Path("lib"))``: Python passes over it; the standard library's fork server cannot be started."""
    done = script("""
        import pathlib, sys
        sys.path.append(pathlib.Path("lib"))
        import nbddp
        nbddp.preload("mailbox")
        for method in ("forkserver", "spawn"):
            print(nbddp.run(lambda: 1, nprocs=2, device="cpu", show=False, start_method=method).values)
        nbddp.export(lambda: 1, "job.nbddp")
        print(pathlib.Path("lib") in sys.path)
    """)
    assert (done.stdout, done.stderr) == ("[1, 1]\n[1, 1]\nTrue\n", "")


def test_each_rank_has_its_own_session(cell: Cells) -> None:
    """Jupyter interrupts the kernel's whole process group; only the kernel side decides about ranks."""
    names = cell("import os\ndef train(): return os.getsid(0), os.getpgrp(), os.getpid()")
    values = run(names.train).values
    assert all(session == group == pid for session, group, pid in values)
    assert os.getsid(0) not in {value[0] for value in values}


def test_runs_of_1_and_of_32_ranks_work(cell: Cells) -> None:
    names = cell("import nbddp\ndef train(): return nbddp.rank(), nbddp.world_size(), nbddp.reduce(1, 'sum')")
    assert run(names.train, nprocs=1).values == [(0, 1, 1)]
    assert run(names.train, nprocs=32, timeout=120).values == [(rank, 32, 32) for rank in range(32)]


def test_restart_count_grows_with_each_failure_up_to_max_restarts(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, os
        def train():
            count = nbddp.restart_count()
            open(f"ran-{count}-{nbddp.rank()}", "w").close()
            nbddp.barrier()
            if count < 2 and nbddp.rank() == 1:
                raise RuntimeError(f"attempt {count}")
            return count, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
    """)
    assert run(names.train, max_restarts=3).values == [(2, "2", "3")] * 2
    assert len(list(in_folder.iterdir())) == 6
    with pytest.raises(nbddp.RankError, match="attempt 1") as caught:
        run(names.train, max_restarts=1)
    assert caught.value.rank == 1


def test_a_crashed_run_resumes_from_its_snapshot(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, torch
        def train():
            model = torch.nn.Linear(2, 1)
            torch.nn.init.zeros_(model.weight)
            first = 0
            if snapshot := nbddp.load_snapshot("s.pt"):
                model.load_state_dict(snapshot["model"])
                first = snapshot["epoch"] + 1
            for epoch in range(first, 4):
                with torch.no_grad():
                    model.weight += 1
                nbddp.save_snapshot("s.pt", model=nbddp.wrap(model), epoch=epoch)
                nbddp.barrier()
                if epoch == 1 and nbddp.restart_count() == 0:
                    raise RuntimeError("crash")
            return first, model.weight[0, 0].item()
    """)
    assert run(names.train, max_restarts=1).values == [(2, 4.0)] * 2
    assert [path.name for path in in_folder.iterdir()] == ["s.pt"]


@pytest.mark.gpu
def test_nccl_is_the_default_on_gpus(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch, torch.distributed as dist
        def train():
            x = torch.ones(1, device=nbddp.device())
            dist.all_reduce(x)
            return dist.get_backend(), str(nbddp.device()), torch.cuda.current_device(), x.cpu()
    """)
    count = torch.cuda.device_count()
    values = nbddp.run(names.train, show=False).values
    assert [value[:3] for value in values] == [("nccl", f"cuda:{i}", i) for i in range(count)]
    assert all(value[3].item() == count for value in values)


@pytest.mark.gpu
def test_gpus_picks_the_device_and_the_result_comes_back_on_the_cpu(cell: Cells) -> None:
    names = cell("""
        import os, torch, nbddp
        def train():
            return os.environ["CUDA_VISIBLE_DEVICES"], torch.ones(3, device=nbddp.device())
    """)
    last = torch.cuda.device_count() - 1
    visible, tensor = nbddp.run(names.train, gpus=[last], show=False).value
    assert visible == str(last) or "CUDA_VISIBLE_DEVICES" in os.environ
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == [1.0] * 3


@pytest.mark.gpu
def test_ranks_share_a_gpu_with_gloo(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch, torch.distributed as dist
        def train():
            model = nbddp.wrap(torch.nn.Linear(2, 1))
            model(torch.full((1, 2), nbddp.rank() + 1.0, device=nbddp.device())).sum().backward()
            return dist.get_backend(), str(nbddp.device()), next(model.parameters()).grad.flatten().tolist()
    """)
    values = nbddp.run(names.train, gpus=[0, 0], backend="gloo", show=False).values
    assert values == [("gloo", "cuda:0", [1.5, 1.5])] * 2


def test_ranks_that_share_a_gpu_see_it_once_and_a_notice_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "choose_device", lambda device, gpus: ("cuda", 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    plan = plans.make_plan("train", complete({"gpus": [3, 3, 1], "backend": "gloo"}))
    assert plan.environ["CUDA_VISIBLE_DEVICES"] == "7,5"
    assert [device_index(rank, plan.gpus) for rank in range(3)] == [0, 0, 1]
    assert plan.notice == "3 processes with gloo: 2 on GPU 3"


@pytest.mark.parametrize("options", [{}, {"init": False}])
def test_nccl_ranks_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(plans, "choose_device", lambda device, gpus: ("cuda", 1))
    monkeypatch.setattr(plans, "choose_backend", lambda backend, device, local: backend or "nccl")
    with pytest.raises(nbddp.LaunchError, match="names GPU 0 twice, and NCCL needs a GPU for each rank"):
        plans.make_plan("train", complete({"gpus": [0, 0], **options}))
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert plans.make_plan("train", complete({"gpus": [0, 0], "env": env, **options})).gpus == (0, 0)
