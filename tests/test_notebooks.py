"""Every claim of the example notebooks holds in a fresh kernel on two CPU ranks."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
MAX_KB = 400
MAX_COLUMNS = 88
IMAGE = re.compile(r"!\[([^]]*)\]\(([^)]+)\)")


def executed(name: str, probe: str, folder: Path) -> Any:
    """Run a copy of the notebook in ``folder``, and then ``probe``: a dict for JSON, of its variables."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({probe}))", id="probe"))
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    # In a process of its own: nbclient leaves an event loop open.
    done = subprocess.run([sys.executable, FOLDER / "execute.py", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(nbformat.read(path, as_version=4).cells[-1].outputs[-1]["text"])


pytestmark = pytest.mark.slow


def test_the_quickstart_learns_and_its_ranks_hold_the_same_weights(in_folder: Path) -> None:
    found = executed(
        "quickstart",
        """{
            "accuracy": test_accuracy,
            "prints": [[v["rank"], v["before"], v["after"]] for v in run.values],
            "returned": fingerprint(model),
            "steps": len(run.history["loss"].steps),
            "pictured": int(confusion.sum()),
            "by_a_cell": Out[max(Out)] if isinstance(Out[max(Out)], float) else None,
        }""",
        in_folder,
    )
    assert found["accuracy"] > 0.95
    (rank_0, before_0, after_0), (rank_1, before_1, after_1) = found["prints"]
    assert (rank_0, rank_1) == (0, 1)
    assert before_0 == before_1 != after_0 == after_1 == found["returned"]
    assert found["steps"] == 10 * -(-4000 // 2 // 32)  # every rank saw half of the images, in every epoch
    assert found["pictured"] == 1000
    assert found["by_a_cell"] == pytest.approx(found["accuracy"])  # the %%ddp cell, on both ranks


def test_the_interactive_one_trains_on_after_a_rank_was_broken(in_folder: Path) -> None:
    found = executed(
        "interactive",
        """{
            "rates": search.value,
            "after": after,
            "shares": len(active),
        }""",
        in_folder,
    )
    assert max(found["rates"].values()) > 0.85
    assert found["after"] > 0.88
    assert found["shares"] == 128


def test_from_one_gpu_to_many_ends_with_the_same_weights_after_a_crash(in_folder: Path) -> None:
    found = executed(
        "from_one_gpu_to_many",
        """{
            "accuracies": [alone, spawned, calm.value["accuracy"]],
            "calm": [v["fingerprint"] for v in calm.values],
            "stormy": [v["fingerprint"] for v in stormy.values],
            "start": fingerprint(make_model()),
            "resumed": stormy.logs(0),
            "script": run.logs(1),
        }""",
        in_folder,
    )
    assert all(accuracy > 0.9 for accuracy in found["accuracies"])
    assert len({*found["calm"], *found["stormy"]}) == 1
    assert found["start"] != found["calm"][0]
    assert "going on from the snapshot, with epoch 3" in found["resumed"]
    assert found["script"] == "rank 1 of 2, arguments ['--epochs', '5']\n"


def test_the_one_for_kaggle_learns_twice(in_folder: Path) -> None:
    found = executed("kaggle_two_gpus", "[accuracy(model), accuracy(run.value)]", in_folder)
    assert min(found) > 0.85


def test_metrics_of_min_ddp_equal_those_of_plain_torch(in_folder: Path) -> None:
    found = executed(
        "min_ddp",
        """{
            "plain": plain.value,
            "nbddp": run.history["loss"].values.tolist(),
            "ranks": [run.history[f"loss of rank {r}"].values.tolist() for r in range(2)],
            "returned": run.values,
            "left": len(left),
        }""",
        in_folder,
    )
    assert found["plain"] == pytest.approx(found["nbddp"], abs=1e-6)
    assert found["nbddp"] == pytest.approx([(a + b) / 2 for a, b in zip(*found["ranks"])], abs=1e-7)
    assert found["nbddp"][-1] < 0.5 < 2 < found["nbddp"][0]
    assert found["returned"][0] == found["returned"][1] == pytest.approx(found["nbddp"][-1], abs=1e-6)
    assert found["left"] == 0


def test_gradients_averaged_by_hand_equal_ddps(in_folder: Path) -> None:
    found = executed(
        "collectives",
        """{
            "two": two_ranks, "three": [three_ranks, as_ddp_does], "world": [len(started)],
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
    assert found["three"][1] == 0
    assert found["world"] == [2]


def test_an_interrupted_and_resumed_training_ends_with_the_same_weights(in_folder: Path) -> None:
    found = executed(
        "resume_and_seed",
        """{name: [v[key] for v in r.values for key in ("before", "after", "epochs", "accuracy")]
            for name, r in dict(through=through, first=first_half, second=second_half, other=other).items()}""",
        in_folder,
    )
    through, first, second, other = (found[name] for name in ("through", "first", "second", "other"))
    assert through[:4] == through[4:]  # both ranks
    assert through[1] == second[1] != first[1] == second[0]
    assert (through[2], first[2], second[2]) == ([0, 5], [0, 2], [3, 5])
    assert through[0] != through[1] != other[1]
    assert through[3] > 0.9


def test_the_language_model_learns(in_folder: Path) -> None:
    found = executed(
        "chargpt",
        """{
            "val": run.history["val loss"].values.tolist(),
            "loss": len(run.history["loss"].values),
            "norms": run.history["gradient norm"].values.tolist(),
            "returned": [v["val"] for v in run.values],
            "letters": len(letters), "frequency": by_frequency,
            "samples": run.logs(0).count("--- step"),
        }""",
        in_folder,
    )
    assert found["val"][0] == pytest.approx(math.log(found["letters"]), rel=0.1)
    assert found["val"][-1] < 2.1 < found["frequency"]
    assert found["returned"] == [pytest.approx(found["val"][-1])] * 2
    assert (found["loss"], found["samples"]) == (600, 4)
    assert all(0 < norm < 10 for norm in found["norms"])


def test_half_precision_reaches_the_accuracy_of_float32(in_folder: Path) -> None:
    found = executed("mixed_precision", "[accuracies, {k: str(v) for k, v in dtypes['bfloat16'].items()}]", in_folder)
    accuracies, dtypes = found
    assert len(accuracies) == 3
    assert max(accuracies.values()) - min(accuracies.values()) < 0.02 < 0.9 < min(accuracies.values())
    assert dtypes == {
        "scores": "torch.bfloat16",
        "loss": "torch.float32",
        "weights": "torch.float32",
        "gradients": "torch.float32",
    }


def test_fsdp2_trains_as_ddp_does_and_goes_on_with_three_ranks(in_folder: Path) -> None:
    found = executed(
        "fsdp2",
        """{
            "held": held, "three": [value[0] for value in second.values], "names": list(fsdp.value[1]),
            "from ddp": from_ddp, "from uninterrupted": from_uninterrupted, "accuracy": accuracy,
            "losses": [run.history["loss"].values[-1] for run in (ddp, fsdp, second, mixed)],
        }""",
        in_folder,
    )
    assert found["held"] == {"DDP": [17290, 17290], "FSDP2": [8645, 8645]}
    assert sum(found["three"]) == 17290 > 17290 / 2 > max(found["three"])
    assert found["names"] == [f"{i}.0.{kind}" for i in range(4) for kind in ("weight", "bias")] + ["4.weight", "4.bias"]
    assert found["from ddp"] < 1e-6
    assert found["from uninterrupted"] < 1e-5
    assert found["accuracy"] > 0.8
    assert found["losses"] == pytest.approx([found["losses"][0]] * 4, rel=0.1)


def test_accelerate_and_fabric_train_to_the_same_weights(in_folder: Path) -> None:
    found = executed("accelerate_and_lightning", "results", in_folder)
    for library, module in (("accelerate", "accelerate"), ("fabric", "lightning_fabric")):
        assert (library in found) == (importlib.util.find_spec(module) is not None)
    for values in found.values():
        assert [value["world_size"] for value in values] == [2, 2]
        assert values[0]["loss"] != values[1]["loss"]  # each rank sees its own data
        assert {value["weights"] for value in values} == {found["nbddp"][0]["weights"]}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_its_outputs_without_errors_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    failed = [cell for cell in code if any(output.output_type == "error" for output in cell.outputs)]
    assert failed == [cell for cell in code if "raises-exception" in cell.metadata.get("tags", [])]  # on purpose
    assert not [cell.source for cell in code if _shows(cell.source) and not cell.outputs]
    assert [cell for cell in code if _shows(cell.source)]
    assert path.stat().st_size < MAX_KB * 1000


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_line_of_a_cells_code_is_wider_than_the_page(path: Path) -> None:
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [line for source in code for line in source.splitlines() if len(line) > MAX_COLUMNS] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_picture_of_a_notebook_is_there_and_described(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        for description, target in IMAGE.findall(cell.source) if cell.cell_type == "markdown" else []:
            assert (FOLDER / target).is_file()
            assert len(description) > 20


def test_the_drawings_are_as_their_script_draws_them_and_all_in_use(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "draw.py", tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in (FOLDER / "drawings").iterdir()}
    shown = " ".join(path.read_text() for path in FOLDER.glob("*.ipynb"))
    assert [name for name in drawn if f"(drawings/{name})" not in shown] == []


def _shows(source: str) -> bool:
    """Does this cell end with something to look at, or run something?"""
    if source.startswith("%"):
        return not source.startswith("%load_ext")
    return "nbddp.run(" in source or isinstance(ast.parse(source).body[-1], ast.Expr)
