"""Restarts after a failure: steps, errors and counts are right, and a stop, interrupt or timeout is not restarted."""

import os
import pickle
import signal
from pathlib import Path

import pytest

import nbddp
from tests.support import Cells, error_of, run, start, wait_until


def test_the_last_error_is_raised_and_names_the_first(cell: Cells) -> None:
    names = cell("""
        import nbddp, os
        def train():
            if nbddp.rank() == 1:
                print("attempt", nbddp.restart_count())
                if nbddp.restart_count() == 0: os._exit(7)
                raise ValueError(f"attempt {nbddp.restart_count()}")
            nbddp.barrier()
    """)
    error = error_of(names.train, max_restarts=2)
    assert "attempt 2" in str(error)
    assert isinstance(error.first, nbddp.RankDied)
    assert (error.rank, error.restarts, error.first.exitcode) == (1, 2, 7)
    told = "Failed after 2 restarts; the first failure was RankDied: rank 1 of 2 ended with exit code 7"
    assert told in str(error)
    assert told in "\n".join(error._render_traceback_())
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert nbddp.last_run().logs(1) == "attempt 0\nattempt 1\nattempt 2\n"
    assert nbddp.last_run()._tail(1, 10) == "attempt 2\n"


def test_one_killed_rank_of_four_restarts_all_four(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, time
        def train():
            nbddp.barrier()
            if nbddp.restart_count(): return nbddp.world_size(), nbddp.all_reduce(1.0, op="sum")
            open(f"ready-{nbddp.rank()}", "w").close()
            time.sleep(1000)
    """)
    going = start(names.train, nprocs=4, max_restarts=1)
    wait_until(lambda: len(os.listdir()) == 4)
    old = list(going.pids)
    os.kill(old[2], signal.SIGKILL)
    assert going.wait().values == [(4, 4.0)] * 4
    assert not set(old) & set(going.pids)


def test_a_resumed_run_has_every_step_once(cell: Cells, in_folder: Path) -> None:
    names = cell("""
        import nbddp, os, signal, torch
        def train():
            found = nbddp.load_snapshot("s.pt") or {"step": -1, "weights": torch.zeros(3)}
            weights = found["weights"]
            for step in range(found["step"] + 1, 12):
                weights += 1
                nbddp.log(loss=float(weights[0]))
                nbddp.barrier()
                if nbddp.rank() and (step, nbddp.restart_count()) == (7, 0): raise ValueError("seven")
                if nbddp.rank() and (step, nbddp.restart_count()) == (11, 1): os.kill(os.getpid(), signal.SIGKILL)
                nbddp.barrier()  # a rank must not be beyond the step in which another dies
                if step % 5 == 4:
                    nbddp.save_snapshot("s.pt", step=step, weights=weights)
                    nbddp.barrier()
            told = [os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")]
            return float(weights[0]), nbddp.restart_count(), *told
    """)
    finished = run(names.train, max_restarts=3)
    assert finished.values == [(12.0, 2, "2", "3")] * 2
    # log() counted on from the snapshot, and what was logged twice counts once.
    found = [column.tolist() for column in finished.history["loss"]]
    assert found == [[*range(12)], [step + 1.0 for step in range(12)]]
    steps, (raised, killed) = zip(*((each.step, each.reason) for each in finished.history.restarts))
    assert (steps, "ValueError: seven" in raised) == ((5, 10), True)
    assert "RankDied: rank 1 of 2 was killed by SIGKILL" in killed


def test_what_a_restart_cannot_heal_is_not_restarted(cell: Cells, in_folder: Path) -> None:
    Path("s.pt").write_bytes(b"no snapshot")
    with pytest.raises(nbddp.RankError, match="can't be read as a snapshot"):
        run(cell("import nbddp\ndef train(): nbddp.load_snapshot('s.pt')").train, max_restarts=3)
    assert nbddp.last_run().restarts == 0


def test_a_timeout_is_that_of_all_attempts_together_and_names_the_first_failure(cell: Cells) -> None:
    names = cell('import time\ndef train():\n    time.sleep(0.3)\n    raise ValueError("once more")')
    with pytest.raises(nbddp.RunTimeout, match=r"Failed after \d restarts?; the first failure was RankError"):
        run(names.train, max_restarts=30, timeout=2)
