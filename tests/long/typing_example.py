"""Checked by mypy, never run: what a type checker knows of a run."""

from __future__ import annotations

from typing import assert_type

import torch

import nbddp


def train(epochs: int) -> float:
    return 1.0 / epochs


def use() -> None:
    run = nbddp.run(train, (3,), nprocs=2, device="cpu", name="train")
    assert_type(run, nbddp.Run[float])
    assert_type(run.value, float)
    assert_type(run.values, list[float])
    assert_type(run.result(timeout=1.0), float)
    assert_type(run.wait(), nbddp.Run[float])
    assert_type(run.history, nbddp.History)
    assert_type(nbddp.run_script("train.py", ["--lr", 0.1], seed=1), nbddp.Run[None])
    with nbddp.Session(nprocs=2) as session:
        assert_type(session.run(train, (3,)), nbddp.Run[float])
    assert_type(nbddp.device(), torch.device)
    nbddp.run(train, (3,), nproc=2)  # type: ignore[call-arg]
    nbddp.run(train, (3,), nprocs="2")  # type: ignore[arg-type]
    nbddp.nowhere()  # type: ignore[attr-defined]


async def wait_for_it() -> None:
    assert_type(await nbddp.run(train, (3,), wait=False), nbddp.Run[float])
