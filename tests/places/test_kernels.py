"""Real kernels with the versions of Colab and of Kaggle, from ``python -m tests.places.make FOLDER``.

``NBDDP_TEST_PLACES``: the interpreters of these environments, with a colon between two.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import Notebook, out, tab, wait_until, wait_until_alone

ENVIRON = {"colab": {"COLAB_RELEASE_TAG": "release-colab"}, "kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}}
MADE = {Path(path).parent.parent.name: path for path in os.environ.get("NBDDP_TEST_PLACES", "").split(":") if path}
PLACES = {place: path for place, path in MADE.items() if place in ENVIRON}
WIDGETS = {"colab": "7.7.1", "kaggle": "8.1.5"}

pytestmark = pytest.mark.skipif(not PLACES, reason="needs NBDDP_TEST_PLACES, see tests/places/make.py")


@pytest.fixture(scope="module", params=sorted(PLACES))
def _kernel(request: pytest.FixtureRequest, _warm: None) -> Iterator[tuple[str, Notebook]]:
    with Notebook(ENVIRON[request.param], python=PLACES[request.param]) as notebook:
        notebook.ok("%load_ext nbddp\nimport nbddp\n%ddp -n 2 --device cpu")
        notebook.ok("%%ddp\nrank")
        yield request.param, notebook


@pytest.fixture
def place(_kernel: tuple[str, Notebook]) -> str:
    return _kernel[0]


@pytest.fixture
def notebook(_kernel: tuple[str, Notebook]) -> Iterator[Notebook]:
    yield _kernel[1]
    wait_until_alone(_kernel[1].pid)


def test_the_versions_are_those_of_the_place(place: str, notebook: Notebook) -> None:
    names = "IPython, ipykernel, ipywidgets, traitlets, anywidget"
    shown = out(notebook.ok(f"import {names}\nprint(*(m.__version__ for m in ({names})))"))
    assert shown == f"7.34.0 6.17.1 {WIDGETS[place]} 5.7.1 0.9.21"


def test_a_cell_takes_every_option(notebook: Notebook, tmp_path: Path) -> None:
    options = "--backend gloo --seed 3 --deterministic --max-restarts 1 --stall-after 9 --stop-on-nan --timeout 99"
    more = f"--keep-children --oversubscribe --pdb --as kept --to csv:{tmp_path}/m.csv -o x,y"
    shown = notebook.ok(
        f"%%ddp -n 3 --device cpu {options} {more}\nx = [rank]\ny = 2\nnbddp.log(loss=rank)\nworld_size"
    )
    assert out(shown) == "3"
    assert out(notebook.ok("print(x, y, kept.values, kept.history['loss'].values)")) == "[0] 2 [3, 3, 3] [0.]"
    assert (tmp_path / "m.csv").read_text().startswith("step,loss\n")
    assert out(notebook.ok("%%ddp --background --as later\nrank + 5")).startswith("<Run In[")
    assert out(notebook.ok("later.wait()\nlater.values")) == "[5, 6]"
    assert "--nprocs 2" in notebook.ok("%ddp status").shown


def test_run_spawn_and_scripts(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['WORLD_SIZE'])\n")
    notebook.ok("def f(a):\n    return a + nbddp.rank()\ndef main(rank, a):\n    open(a + str(rank), 'w').close()")
    assert out(notebook.ok("nbddp.run(f, (4,), nprocs=2, device='cpu').values")) == "[4, 5]"
    notebook.ok(f"nbddp.spawn(main, ({str(tmp_path / 'rank')!r},), nprocs=2)")
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]
    assert "['--lr', '1'] 2" in notebook.ok(f"%ddp run {script} --lr 1").shown
    assert "['-x'] 3" in notebook.ok(f"nbddp.run_script({str(script)!r}, ['-x'], nprocs=3, device='cpu').value").shown
    notebook.ok("nbddp.preload('json')")
    assert out(notebook.ok("%%ddp\nimport sys\n'json' in sys.modules")) == "True"


def test_a_failure_shows_the_cells_line_and_its_type(notebook: Notebook) -> None:
    reply = notebook.cell("%%ddp\nx = 3\nif rank == 1:\n    raise OSError(f'no file {x}')  # here\nnbddp.barrier()")
    assert (reply.status, reply.ename) == ("error", "RankError")
    assert "rank 1 of 2 failed" in reply.traceback
    assert "----> 4     raise OSError" in reply.traceback
    assert "OSError: no file 3" in reply.traceback
    assert "nbddp/" not in reply.traceback
    call = "nbddp.run(lambda a: a + 1, ('a',), nprocs=2, device='cpu')"
    caught = f"try:\n    {call}\nexcept nbddp.RankError as error:\n    print(type(error.cause))"
    assert out(notebook.ok(caught)) == "<class 'TypeError'>"


def test_a_killed_rank_is_restarted(notebook: Notebook) -> None:
    body = "import os, signal\nif nbddp.restart_count() == 0 and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)"
    reply = notebook.ok(f"%%ddp --max-restarts 1 --as r\n{body}\nnbddp.restart_count()")
    assert out(reply) == "1"
    assert "RankDied" in notebook.cell("%%ddp\nimport os\nos._exit(3)").ename


def test_an_interrupt_ends_the_ranks(notebook: Notebook) -> None:
    cell = notebook.begin("%%ddp --as r\nprint('begun')\nimport time\ntime.sleep(60)")
    notebook.shown_so_far(cell, "begun")
    notebook.interrupt()
    reply = notebook.end_of(cell)
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    assert reply.seconds < 5
    assert out(notebook.ok("r.state")) == "'stopped'"


def test_stop_ends_a_run_in_the_background(notebook: Notebook) -> None:
    notebook.ok("%%ddp --background --as r\nimport time\ntime.sleep(60)")
    wait_until(lambda: out(notebook.ok("r.state")) == "'running'")
    assert "stopped" in notebook.ok("%ddp stop").shown


def test_tab_completes_options_and_commands(notebook: Notebook) -> None:
    assert tab(notebook, "%%ddp --ba") == ["--background", "--backend"]
    assert tab(notebook, "%ddp sta") == ["status", "stacks"]


def test_a_page_without_comms_sees_curves_that_are_at_most_two_seconds_old(notebook: Notebook) -> None:
    """The client drops every comm message, and there is none."""
    begun = notebook.begin(
        "%%ddp\nimport time\nend = time.monotonic() + 7\nwhile time.monotonic() < end:\n"
        "    nbddp.log(loss=time.monotonic())\n    time.sleep(0.01)"
    )
    kinds, pictures = set(), []
    for kind, content in messages_of(notebook, begun):
        kinds.add(kind)
        if kind in ("display_data", "update_display_data"):
            pictures.append((time.monotonic(), content["transient"]["display_id"], content["data"]["text/html"]))
    assert not {kind for kind in kinds if kind.startswith("comm")}
    assert len({display for _, display, _ in pictures}) == 1
    assert len(pictures) >= 5
    assert max(b[0] - a[0] for a, b in itertools.pairwise(pictures)) <= 2.0 + 1.0  # the machine may be busy
    assert "■ ends the run" in pictures[-2][2]
    assert "Finished" in pictures[-1][2]


def messages_of(notebook: Notebook, message_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    while True:
        message = notebook._client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        yield message["msg_type"], message["content"]
        if message["content"].get("execution_state") == "idle":
            return
