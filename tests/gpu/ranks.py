"""Runs with NCCL, on a shared GPU, and after CUDA was used in the notebook."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

import nbddp
from tests.gpu import work
from tests.gpu.report import Report, Skip
from tests.support import Notebook

TEARDOWNS = 3
STEPS = 20
ALLOWS_SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def _run(report: Report, function: Any, *args: Any, ranks: int = 1, **options: Any) -> nbddp.Run[Any]:
    chosen = eval(f"dict({report.options(ranks)})")
    return nbddp.run(function, args, show=False, **{**chosen, **options})


def nccl(report: Report) -> None:
    backend = "nccl" if report.on_cuda else "gloo"
    found = _run(report, work.backend_and_device).value
    report.check("the backend is the device's own", found == (backend, report.first_device), found)
    found = _run(report, work.collectives).value
    report.check("collectives with one rank", found == expected(1), found)
    _teardown(report, backend)
    if report.on_cuda:
        _teardown(report, "gloo")
        both = _run(report, work.collectives, backend="cpu:gloo,cuda:nccl").value
        report.check("collectives with a backend for each device", both == expected(1), both)


def expected(ranks: int) -> dict[str, Any]:
    """What :func:`work.collectives` gives."""
    total = sum(range(1, ranks + 1))
    return {
        "all_reduce": [float(total)] * 3,
        "gather_object": list(range(ranks)),
        "reduce": (ranks - 1) / 2,
        "reduce half": float(ranks),
        "gather": [float(rank + 1) for rank in range(ranks)],
        "broadcast": [0, 1, 2],
    }


def _teardown(report: Report, backend: str) -> None:
    seconds = [_run(report, work.leave_group, backend=backend).value for _ in range(TEARDOWNS)]
    report.value(f"destroy_process_group of {backend}", statistics.median(seconds) * 1e3, "ms")
    whole = []
    for _ in range(TEARDOWNS):
        began = time.monotonic()
        _run(report, work.backend_and_device, backend=backend)
        whole.append(time.monotonic() - began)
    report.value(f"a whole run with {backend}", statistics.median(whole) * 1e3, "ms")


def shared(report: Report) -> None:
    alone = _run(report, work.fit, STEPS).value["weights"]
    for ranks in (2, 3, 4):
        found = _run(report, work.collectives, ranks=ranks).values
        report.check(f"collectives with {ranks} ranks", found == [expected(ranks)] * ranks, found[0])
        run = _run(report, work.fit, STEPS, ranks=ranks)
        weights = [value["weights"] for value in run.values]
        equal = all(torch.equal(weights[0], each) for each in weights)
        report.check(f"{ranks} ranks end with the same weights", equal)
        far = float((weights[0] - alone).abs().max())
        report.check(f"{ranks} ranks end with the weights of one", far < 1e-5, f"{far:.1e}")
        report.check(f"{ranks} ranks have logged {STEPS} steps", len(run.history["loss"].steps) == STEPS)
    report.needs_cuda("the notice and the refusal are about GPUs")
    with Notebook() as notebook:
        options = report.options(2)
        shown = notebook.ok(f"import nbddp\nfrom tests.gpu import work\nnbddp.run(work.collectives, {options})").shown
        report.check("a line says that ranks share a GPU", shown.count("2 processes with gloo: 2 on GPU 0") == 1, shown)
    try:
        nbddp.run(work.collectives, gpus=[0, 0], show=False)
        report.check("NCCL on a shared GPU is refused", False)
    except nbddp.LaunchError as error:
        report.check("NCCL on a shared GPU is refused", "NCCL needs a GPU for each rank" in str(error), error)


def nccl_shared(report: Report) -> None:
    """New versions of NCCL can be told to let ranks share a GPU: then a session's recovery can be tried as well."""
    report.needs_cuda("NCCL needs a GPU")
    if not _nccl_knows(next(iter(ALLOWS_SHARING))):
        raise Skip(f"this NCCL does not know {next(iter(ALLOWS_SHARING))}")
    options: dict[str, Any] = {"nprocs": 2, "device": "cuda", "gpus": [0, 0], "env": ALLOWS_SHARING}
    try:
        found = nbddp.run(work.collectives, show=False, pg_timeout=30, timeout=60, **options).values
    except nbddp.NbddpError as error:
        raise Skip(f"this NCCL refuses: {str(error)[:300]}") from None
    report.check("collectives of two NCCL ranks", found == [expected(2)] * 2, found[0])
    with nbddp.session(**options) as session:
        session.run(_remember)
        began = time.monotonic()
        try:
            session.run(_fail_while_the_other_waits, show=False)
        except nbddp.RankError as error:
            report.check("the error is that of the rank that failed", "on purpose" in str(error), error)
        report.value("until the cell has the error, and the ranks a new group", time.monotonic() - began, "s")
        report.check("both ranks are left, with their names", session.run(_remembered, show=False).values == [42, 42])


def _remember() -> None:
    import __main__

    __main__.kept = 42  # type: ignore[attr-defined]


def _remembered() -> int:
    import __main__

    nbddp.barrier()
    return int(__main__.kept)  # type: ignore[attr-defined]


def _fail_while_the_other_waits() -> None:
    if nbddp.rank() == 1:
        time.sleep(1.0)
        raise ValueError("on purpose")
    x = torch.ones(4, device=nbddp.device())
    torch.distributed.all_reduce(x)
    x.sum().item()


def _nccl_knows(variable: str) -> bool:
    """Return whether the library that torch has loaded reads this variable."""
    torch.cuda.nccl.version()
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl" in line}
    return any(variable.removeprefix("NCCL_").encode() in Path(name).read_bytes() for name in names)


def cuda_before(report: Report) -> None:
    with Notebook() as notebook:
        notebook.ok(f"""
            import nbddp, torch
            from tests.gpu import work
            used = torch.nn.Linear(64, 64, device={report.first_device!r})
            used(torch.ones(8, 64, device={report.first_device!r})).sum().backward()
        """)
        report.check(
            "the notebook has a context",
            notebook.ok("torch.cuda.is_initialized()").shown.strip() == str(report.on_cuda),
        )
        for ranks in (1, 2):
            run = f"nbddp.run(work.collectives, {report.options(ranks)}, show=False)"
            report.check(f"a run of {ranks} after it", notebook.ok(f"{run}.state").shown.strip() == "'finished'")
        shown = notebook.ok(f"""
            back = nbddp.run(lambda model: model.weight.sum() * 1, (used,), {report.options()}, show=False).value
            print(str(back.device), torch.allclose(back, used.weight.sum().cpu(), rtol=1e-4))
        """).shown.strip()
        report.check("a model of the device goes along, and results are back on the CPU", shown == "cpu True", shown)
        alive = notebook.cell("used.weight.sum().item() is not None")
        report.check("the notebook's model still works", alive.status == "ok", alive.traceback[-300:])
