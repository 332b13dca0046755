"""The benchmarks run to the end and fill their tables; no test says how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import data, ends, gpu, kept, log, memory, on_ray, start, timeline, training
from tests.benchmarks.kernel import ROOT, Kernel, prepared
from tests.benchmarks.measure import LeftOut, Table
from tests.benchmarks.peers import CANDIDATES, DEBUG_LAUNCHER, NBDDP, NBDDP_SILENT, Peer, installed, missing
from tests.benchmarks.settings import Settings

SHORT = Settings(rounds=1, ranks=[2], nbytes=[1 << 20], steps=0.001, peers=[NBDDP_SILENT])


def filled(tables: list[Table], rows: set[str] | None = None, *, differences: bool = False) -> None:
    """Every row has a number in every column, a positive one if it is no difference; and all rows are there."""
    assert tables
    for table in tables:
        assert table.failures == {}, table.title
        if rows is not None:
            assert set(table.values) == rows, table.title
        for name, columns in table.values.items():
            assert set(columns) == set(map(str, table.columns)), (table.title, name)
            assert differences or all(value > 0 for values in columns.values() for value in values), (
                table.title,
                name,
                columns,
            )
        assert all(f"| {name} |" in table.markdown() for name in table.values)


NAMES = {NBDDP_SILENT.name}


@pytest.fixture(scope="module")
def _kernel() -> Iterator[Kernel]:
    with prepared(NBDDP_SILENT, 2) as kernel:
        yield kernel


@pytest.fixture
def one_kernel(_kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """All parts measure in one kernel; only a start and a death need one of their own."""

    @contextmanager
    def prepared_before(peer: Peer, ranks: int) -> Iterator[Kernel]:
        if peer is NBDDP_SILENT:
            yield _kernel
        else:
            with prepared(peer, ranks) as kernel:
                yield kernel

    for part in (start, data, ends, training):
        monkeypatch.setattr(part, "prepared", prepared_before)
    for part in (kept, memory):
        monkeypatch.setattr(part, "Kernel", lambda: nullcontext(_kernel))
    return _kernel


@pytest.mark.slow
def test_a_first_run_is_timed_in_a_new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "THINK_S", 0.1)
    tables = start.cold(SHORT)
    filled(tables, NAMES)
    for table in tables:
        for name in NAMES:
            first, end = (table.values[name][str(column)][0] for column in table.columns)
            assert first < end


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel")
def test_warm_runs_are_timed_by_number_of_ranks() -> None:
    peers = installed([NBDDP_SILENT, DEBUG_LAUNCHER])  # that takes no seconds
    names = {peer.name for peer in peers}
    first, whole, work, growth = start.warm(replace(SHORT, ranks=[1, 2], peers=peers))
    filled([first, whole, work], names)
    assert set(growth.values) == names  # a difference may be negative
    assert list(growth.columns) == ["1 to 2"]


@pytest.mark.slow
def test_cells_on_ranks_that_stay_are_timed(one_kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEEPERS", kept.KEEPERS[:1])
    filled(kept.measure(SHORT), {"nbddp, %ddp open"})
    one_kernel.cell("%ddp close")


@pytest.mark.slow
def test_the_timeline_lists_kernel_and_rank_events_in_order() -> None:
    (table,) = timeline.measure(SHORT)
    rows = list(table.values)
    assert any(row.startswith("kernel: ") for row in rows)
    assert rows[-1] == "cell is over"
    assert table.values["rank: make the group"]["how many"] == [0.002]
    begins = [table.median(row, "first begins") for row in rows]
    assert begins == sorted(begins)  # type: ignore[type-var]
    assert table.median("kernel: copy the data", "last ends") <= table.median("rank: is there", "first begins")  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel")
def test_memory_is_measured_for_every_rank() -> None:
    private, share, whole = memory.measure(replace(SHORT, peers=[NBDDP_SILENT]))
    filled([private, share, whole], {NBDDP_SILENT.name})
    assert len(private.values[NBDDP_SILENT.name]["2"]) == 2
    assert private.median(NBDDP_SILENT.name, 2) > 1 << 20  # type: ignore[operator]
    assert whole.median(NBDDP_SILENT.name, 2) > 2 * private.median(NBDDP_SILENT.name, 2)  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("kind", ["tensor", "numpy array", "pandas frame"])
def test_sending_data_is_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "INTO", [(kind, 2, (1,))])
    cost, peak = data.into(SHORT)
    copy = next(iter(cost.values))
    assert copy.endswith(("clone()", "copy()"))
    filled([cost], {copy, data.ALONE, *NAMES}, differences=True)
    assert cost.values[copy]["1 MiB"][0] > 0
    assert cost.values[data.ALONE]["1 MiB"][0] > 0
    assert set(peak.values) == NAMES


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel")
def test_returning_a_result_is_measured() -> None:
    tables = data.back(SHORT)
    assert [next(iter(table.values)) for table in tables] == ["tensor.clone()", "array.copy()"]
    filled(tables, differences=True)


def test_data_larger_than_memory_is_left_out_with_the_reason() -> None:
    with pytest.raises(LeftOut, match="may need"):
        data._check_memory(NBDDP, 1 << 45, 4)


def test_each_way_to_log_is_timed() -> None:
    (table,) = log.measure(SHORT)
    filled([table])
    assert "nbddp.log, floats" in table.values
    assert len(table.values) + len(table.notes) == 4


@pytest.mark.slow
def test_training_is_timed_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WAYS", [training.WAYS[3], training.WAYS[1]])  # torchrun leaves its folders
    monkeypatch.setattr(training, "STEPS", {"gpt": 5})
    monkeypatch.setattr(training, "TURNS", 3)
    (table,) = training.measure(replace(SHORT, ranks=[2], steps=1.0))
    filled([table], {peer.name for peer, _ in training.WAYS})
    assert {len(row["gpt"]) for row in table.values.values()} == {3}
    assert "gpt, nbddp, log at every step, panel: turn by turn " in table.markdown()


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("part", [ends.failure, ends.stop, ends.restart], ids=lambda part: part.__name__)
def test_failure_stop_and_restart_are_timed(part: object) -> None:
    filled(part(SHORT), NAMES)  # type: ignore[operator]


@pytest.mark.slow
def test_the_death_of_a_kernel_is_timed() -> None:
    filled(ends.death(SHORT), NAMES)


def test_ray_is_left_out_by_name_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "NEEDS", ("ray_that_is_not_installed", "json"))
    (table,) = on_ray.measure(SHORT)
    assert table.notes == ["Left out: ray_that_is_not_installed not installed (pip install 'ray[train]')"]


@pytest.mark.gpu
def test_gpu_steps_are_measured_with_and_without_logging() -> None:
    tables = gpu.measure(replace(SHORT, rounds=2))
    assert len(tables) == 4
    waits = tables[2]
    assert waits.median("nbddp.log(loss=loss)") == waits.median("no logging")
    assert waits.median("loss.item()") >= 200  # type: ignore[operator]


def test_a_candidate_that_fails_is_a_row_with_the_reason() -> None:
    table = Table("some")
    table.add("works", 0.5)
    table.fail("fails", OSError("no such peer"))
    table.fail("fails", OSError("another"))
    assert "| fails | failed: OSError: no such peer |" in table.markdown()


def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.peers.version_of", lambda name: "" if name == "ipyparallel" else "1")
    assert missing() == "Not installed, and so left out: ipyparallel"
    assert "ipyparallel, engines kept" not in [peer.name for peer in installed(CANDIDATES)]


@pytest.mark.slow
def test_a_killed_benchmark_keeps_the_figures_measured_so_far(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from tests.benchmarks import __main__ as program
from tests.benchmarks.measure import Table

def cut_off(settings):
    table = Table("a table")
    settings.keep(table)
    table.add("a row", 0.25)
    os.kill(os.getpid(), signal.SIGKILL)

program.PARTS = {"cut off": cut_off}
sys.exit(program.main())
"""
    markdown, figures = tmp_path / "tables.md", tmp_path / "tables.json"
    command = [sys.executable, "-c", program, "--json", str(figures), "--markdown", str(markdown)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "a row: 250 ms" in done.stderr
    assert "| a row | 250 | 250 | 250 | 1.000 |" in markdown.read_text()
    assert json.loads(figures.read_text())["tables"][0]["values"] == {"a row": {"": [0.25]}}


@pytest.mark.slow
def test_other_parts_keep_their_tables_when_one_part_fails(tmp_path: Path) -> None:
    program = """
import sys
from tests.benchmarks import __main__ as program
from tests.benchmarks.measure import Table

def works(settings):
    table = Table("a table")
    table.add("a row", 0.25)
    settings.show(table)

def breaks(settings):
    raise RuntimeError("it broke")

program.PARTS = {"works": works, "breaks": breaks, "again": works}
sys.exit(program.main())
"""
    markdown, figures = tmp_path / "tables.md", tmp_path / "tables.json"
    command = [sys.executable, "-c", program, "--json", str(figures), "--markdown", str(markdown)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout.count("| a row | 250 | 250 | 250 | 1.000 |") == 2
    assert "failed: RuntimeError: it broke" in done.stdout
    assert markdown.read_text().strip() == done.stdout.strip()
    assert [table["values"] for table in json.loads(figures.read_text())["tables"]] == [{"a row": {"": [0.25]}}] * 2
