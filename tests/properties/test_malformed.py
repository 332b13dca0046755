"""A damaged file loads as what it was, or ends in one NbddpError that names it, without much time or memory."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nbddp
from nbddp import payload, wire
from nbddp.history import metrics_file
from nbddp.hosts import frames
from nbddp.hosts.addresses import choose_addresses
from nbddp.job import job_file
from nbddp.job.rank import _open_metrics
from nbddp.versions import versions
from nbddp.worker.metrics_pipe import MetricsPipe
from tests.properties.budget import examples
from tests.properties.mutations import loaded, mutated

RANKS = 3
VALUE = {"weights": torch.arange(40.0), "table": np.arange(30).reshape(5, 6)[:, ::2], "text": ["a", 1, None]}


def _in_new_folder(name: str = "file") -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / name


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    yield from _in_new_folder()


# ---------------------------------------------------------------------------- metrics


def _write_attempt(path: Path, rank: int, world_size: int) -> None:
    job: Any = SimpleNamespace(rank=rank, world_size=world_size)
    fd = _open_metrics(str(path), job)
    pipe = MetricsPipe(fd)
    for step in range(6):
        pipe.log({"loss": 1.0 / (step + 1), "é" * 30: float(rank)}, None, wire.REDUCE_MEAN, 1.0)
        pipe.log({"lr": 0.1}, 10 * step, wire.REDUCE_NONE, 1.0)
        pipe.record(wire.KIND_PROGRESS, "epoch", 6, float(step))
        pipe.record(wire.KIND_SAMPLES, "", 0, 32.0 * step)
    pipe.flush()
    os.close(fd)


@pytest.fixture(scope="module")
def metrics_files(path: Path) -> dict[Path, bytes]:
    """One file for each rank, of a job that was started twice."""
    for _ in range(2):
        for rank in range(RANKS):
            _write_attempt(path, rank, RANKS)
    names = [Path(metrics_file.path_of(str(path), rank)) for rank in range(RANKS)]
    return {name: name.read_bytes() for name in names}


def _looked_at(path: Path) -> nbddp.History:
    """Loaded, and read in every way there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a rank's metrics are missing
        history = nbddp.History.load(path)
    for name in history:
        assert len(history.counts(name).steps) >= len(history[name].steps) or not len(history.counts(name).steps)
        assert np.all(np.isin(list(history.by_rank(name)), range(len(history.ranks))))
        assert len(history.spread(name).low) == len(history.spread(name).high)
    assert len(history.to_pandas().columns) == len(history) == len(history.names)
    assert len(history.notices) <= len(history)
    assert set(history.latest()) <= set(history.names)
    assert repr(history).startswith("History(")
    assert all((bar.seconds_left or 0.0) >= 0 for rank in history.ranks for bar in rank.bars)
    return history


@examples(150)
@given(data=st.data())
def test_damaged_metrics_load_or_are_refused(metrics_files: dict[Path, bytes], data: st.DataObject) -> None:
    for name, content in metrics_files.items():
        name.write_bytes(content)
    changed = data.draw(st.sampled_from(sorted(metrics_files)))
    changed.write_bytes(data.draw(mutated(metrics_files[changed], wire.RECORD.size)))
    loaded(lambda: _looked_at(min(metrics_files)), changed)


def test_undamaged_metrics_load(metrics_files: dict[Path, bytes]) -> None:
    for name, content in metrics_files.items():
        name.write_bytes(content)
    history = _looked_at(min(metrics_files))
    assert history.names == ["loss", "é" * 30, "lr"]
    assert [len(history[name].steps) for name in history] == [6, 6, 6]
    assert len(history.restarts) == 1


# ---------------------------------------------------------------------------- jobs and results


@pytest.fixture(scope="module")
def packed_files(path: Path) -> dict[str, bytes]:
    """By kind, the same value as its writer leaves it."""
    files = {}
    for kind in (job_file.JOB, job_file.RESULT):
        job_file.write(path, kind, "train", lambda fd: payload.pack(VALUE, fd, inheriting=False).nbytes)
        files[kind] = path.read_bytes()
    return files


@pytest.mark.parametrize("kind", [job_file.JOB, job_file.RESULT])
@examples(120)
@given(data=st.data())
def test_a_damaged_job_or_result_is_refused(
    path: Path, packed_files: dict[str, bytes], kind: str, data: st.DataObject
) -> None:
    whole = packed_files[kind]
    path.write_bytes(content := data.draw(mutated(whole)))
    found = loaded(lambda: _unpacked(path, kind), path)
    assert isinstance(found, nbddp.NbddpError) == (content != whole)
    assert isinstance(found, nbddp.NbddpError) or _same(found, VALUE)


def _unpacked(path: Path, kind: str) -> Any:
    if kind == job_file.RESULT:
        return nbddp.load_result(path)
    fd, head = job_file.open_block(path, kind)
    try:
        return payload.unpack(fd, head.nbytes).value
    finally:
        os.close(fd)


def _same(found: Any, value: Any) -> bool:
    return (
        found.keys() == value.keys()
        and torch.equal(found["weights"], value["weights"])
        and np.array_equal(found["table"], value["table"])
        and found["text"] == value["text"]
    )


# ---------------------------------------------------------------------------- snapshots


@pytest.fixture(scope="module")
def snapshot(path: Path) -> bytes:
    nbddp.save_snapshot(path, **VALUE)
    return path.read_bytes()


@pytest.mark.parametrize("weights_only", [True, False])
@examples(120)
@given(data=st.data())
def test_a_damaged_snapshot_loads_unchanged_or_is_refused(
    path: Path, snapshot: bytes, weights_only: bool, data: st.DataObject
) -> None:
    path.write_bytes(data.draw(mutated(snapshot, 64)))
    found = loaded(lambda: nbddp.load_snapshot(path, weights_only=weights_only), path)
    assert isinstance(found, nbddp.NbddpError) or _same(found, VALUE)


# ---------------------------------------------------------------------------- the greeting of a host


HERE = {
    "kind": "hello",
    "versions": versions(),
    "devices": {"cuda": 2},
    "networks": [{"name": "eth0", "address": "10.0.0.2", "network": "10.0.0.0/24"}],
    "asked_at": "10.0.0.2",
    "identity": "the one",
    "machine": "the one",
    "now": 100.0,
}


@examples(60)
@given(data=st.data())
def test_a_damaged_greeting_of_a_host_is_accepted_or_refused(path: Path, data: st.DataObject) -> None:
    greeting = frames.MARK + b"".join(frames.encode(data.draw(_twisted(HERE))))
    path.write_bytes(data.draw(st.just(greeting) | mutated(greeting)))
    loaded(lambda: _greeted(path), "box1")


def _greeted(path: Path) -> None:
    with nbddp.cluster(["box1"], launcher=["sh", "-c", f"cat {path}", "{host}"]) as cluster:
        assert all(count >= 0 for count in cluster.known_devices()["box1"].values())
        another = [{"name": "eth0", "address": "10.0.0.3", "network": "10.0.0.0/24"}]
        choose_addresses({"box1": cluster._all[0].facts, "box2": {**HERE, "networks": another, "machine": "another"}})


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("10.0.0.1"),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=4,
)


@st.composite
def _twisted(draw: st.DrawFn, value: Any) -> Any:
    """The value, or with something else in one place of it, or without that."""
    if draw(st.integers(0, 3)) == 0 or not isinstance(value, (dict, list)) or not value:
        return draw(st.just(value) | _VALUES) if not isinstance(value, dict) or "kind" not in value else value
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    changed = value.copy()
    if draw(st.integers(0, 5)) == 0:
        del changed[key]
    else:
        changed[key] = draw(_twisted(value[key]))
    return changed
