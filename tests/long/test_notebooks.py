"""The claims of the notebooks that take longer hold, too."""

from pathlib import Path

import pytest

from tests.test_notebooks import executed

pytestmark = pytest.mark.timeout(600)


def test_the_interactive_one_trains_on_after_a_rank_was_broken(in_folder: Path) -> None:
    probe = "{'rates': found, 'last': len(search.history['loss, rate 0.1'].steps), 'after': after, 'model': str(model)}"
    found = executed("interactive", probe, in_folder)
    assert max(found["rates"].values()) == found["rates"]["0.1"] > 0.8
    assert found["last"] == 4 * 30  # of the session's run, although a name has come back after it
    assert found["after"] > 0.85
    assert found["model"].startswith("Sequential(")  # without DDP


def test_the_one_for_kaggle_learns_twice(in_folder: Path) -> None:
    assert min(executed("kaggle_two_gpus", "[accuracy(model), accuracy(run.value)]", in_folder)) > 0.85


def test_metrics_of_min_ddp_equal_those_of_plain_torch(in_folder: Path) -> None:
    probe = '{"plain": plain.value, "nbddp": mean, "ranks": ranks, "returned": run.values, "left": len(left)}'
    found = executed("min_ddp", probe, in_folder)
    assert found["plain"] == pytest.approx(found["nbddp"], abs=1e-6)
    assert found["nbddp"] == pytest.approx([(a + b) / 2 for a, b in zip(*found["ranks"])], abs=1e-7)
    assert found["nbddp"][-1] < 0.5 < 2 < found["nbddp"][0]
    assert found["returned"][0] == found["returned"][1] == pytest.approx(found["nbddp"][-1], abs=1e-6)
    assert found["left"] == 0


def test_from_one_gpu_to_many_ends_with_the_same_weights_after_a_crash(in_folder: Path) -> None:
    found = executed(
        "from_one_gpu_to_many",
        """{
            "accuracies": [alone, spawned, calm.value["accuracy"]],
            "ends": [v["fingerprint"] for v in calm.values + stormy.values], "start": fingerprint(make_model()),
            "resumed": stormy.logs(0), "script": run.logs(1),
        }""",
        in_folder,
    )
    assert all(accuracy > 0.9 for accuracy in found["accuracies"])
    assert len({*found["ends"]}) == 1
    assert found["start"] not in found["ends"]
    assert "resuming from the snapshot at epoch 3" in found["resumed"]
    assert found["script"] == "rank 1 of 2, arguments ['--epochs', '5']\n"


def test_gradients_averaged_by_hand_equal_ddps(in_folder: Path) -> None:
    found = executed(
        "collectives",
        """{
            "two": two_ranks, "three": [three_ranks, as_ddp_does], "world": len(started),
            "one rank": [total.item(), [t.item() for t in everybody], pieces],
            "in pieces": [sums, columns], "barrier": [came, went],
        }""",
        in_folder,
    )
    assert found["one rank"] == [3, [1, 2], [10, 20]]
    assert found["in pieces"] == [[10, 12], [[0, 10], [1, 11]]]
    assert min(found["barrier"][1]) > max(found["barrier"][0])  # both left after the later one came
    assert found["two"]["by hand - DDP"] == 0
    assert found["two"]["by hand - alone"] > 0.01
    assert found["two"]["by hand - start"] > 0.1
    assert 0 < found["three"][0] < 1e-5
    assert (found["three"][1], found["world"]) == (0, 2)


def test_an_interrupted_and_resumed_training_ends_with_the_same_weights(in_folder: Path) -> None:
    found = executed(
        "resume_and_seed",
        """[[v[key] for v in r.values for key in ("before", "after", "epochs", "accuracy")]
            for r in (through, first_half, second_half, other)]""",
        in_folder,
    )
    through, first, second, other = found
    assert through[:4] == through[4:]  # both ranks
    assert through[1] == second[1] != first[1] == second[0]
    assert (through[2], first[2], second[2]) == ([0, 5], [0, 2], [3, 5])
    assert through[0] != through[1] != other[1]
    assert through[3] > 0.9
