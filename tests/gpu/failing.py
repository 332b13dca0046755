"""Out of memory and a device-side assert: what the cell shows, and that the next run works."""

from __future__ import annotations

from tests.gpu.report import Report
from tests.support import Notebook, Reply

TOO_MANY = 1 << 17  # × 4 GiB


def failures(report: Report) -> None:
    with Notebook() as notebook:
        notebook.ok("%load_ext nbddp\nimport nbddp\nfrom tests.gpu import work")
        for ranks in (1, 2):
            options = f"{report.options(ranks)}, show=False"
            name = f"{ranks} rank{'s' * (ranks > 1)}"
            shown = notebook.cell(f"nbddp.run(work.ask_for_too_much, ({TOO_MANY},), {options})")
            _out_of_memory(report, f"out of memory, {name}", shown)
            _works(report, f"out of memory, {name}", notebook, options)
            shown = notebook.cell(f"nbddp.run(work.index_out_of_range, (), {options})")
            _assert(report, f"index out of range, {name}", shown)
            _works(report, f"index out of range, {name}", notebook, options)


def _out_of_memory(report: Report, name: str, reply: Reply) -> None:
    wanted = "out of memory" if report.on_cuda else "can't allocate memory"
    report.check(f"{name}: the message", wanted in reply.traceback, _tail(reply))
    report.check(f"{name}: the failing line", "too_large = torch.ones(batch, 1 << 30" in reply.traceback)
    names = (f"batch    {TOO_MANY}", f"Tensor (4,) float32 {report.first_device}")
    report.check(f"{name}: the line's names", _has_names(reply, names), _names(reply))


def _assert(report: Report, name: str, reply: Reply) -> None:
    wanted = "device-side assert" if report.on_cuda else "out of bounds"
    report.check(f"{name}: the message", wanted in reply.traceback, _tail(reply))
    report.check(f"{name}: the failing line", "return weights[index].sum().item()" in reply.traceback)
    names = (f"Tensor (4,) float32 {report.first_device}", f"Tensor (2,) int64 {report.first_device}")
    report.check(f"{name}: the line's names", _has_names(reply, names), _names(reply))


def _has_names(reply: Reply, names: tuple[str, ...]) -> bool:
    words = " ".join(reply.traceback.split())
    return all(" ".join(name.split()) in words for name in names)


def _names(reply: Reply) -> str:
    return "; ".join(line.strip() for line in reply.traceback.splitlines() if "Tensor (" in line or "batch" in line)


def _tail(reply: Reply) -> str:
    return " / ".join(line for line in reply.traceback.strip().splitlines()[-6:] if line.strip())[-400:]


def _works(report: Report, name: str, notebook: Notebook, options: str) -> None:
    reply = notebook.cell(f"nbddp.run(work.collectives, {options}).state")
    report.check(f"{name}: the next run works", reply.shown.strip() == "'finished'", reply.traceback[-400:])
