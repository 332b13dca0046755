"""Nodes that are cut off, and actors that are killed."""

import os
import signal
import textwrap
from pathlib import Path

from tests.support import gone, script, wait_until


def test_ranks_on_a_node_that_is_cut_off_end() -> None:
    """The process is an actor's; nobody tells it any more that the notebook is there."""
    over = script("""
        import os, time
        from nbddp.messages import Settings
        from nbddp.ray import actor
        node = actor.Node("127.0.0.1", os.getppid())
        node.open(1)
        settings = Settings("train", 2, indices=(0, 1), environ={"A": "1"}, contract=False)
        node.call(1, "start", settings, [0, 1])
        pids = []
        while len(pids) < 2:
            pids += [event.data.pid for event in node.call(1, "events", 0.1)[1] if event.kind == "message"]
            node.beat()
        print(*pids, flush=True)
        actor.SILENCE_S = 1.0
        time.sleep(30)
    """)
    assert over.returncode == 1
    pids = [*map(int, over.stdout.split())]
    assert len(pids) == 2
    wait_until(lambda: all(map(gone, pids)))


def test_what_an_actor_that_was_killed_has_left_is_removed_when_the_next_one_starts(tmp_path: Path) -> None:
    begin = "import os, sys; from nbddp.process import server; server.use_own_folder(); server.temporary_folder();"
    killed = script(f"{begin} os.kill(os.getpid(), {int(signal.SIGKILL)})", TMPDIR=str(tmp_path))
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    look = textwrap.dedent("""
        import subprocess, sys, tempfile
        first = os.listdir(tempfile.gettempdir())
        subprocess.run([sys.executable, "-c", "from nbddp.process import server; server.use_own_folder()"])
        print(*first, "then", *os.listdir(tempfile.gettempdir()))
        server.remove_own_folder()
    """)
    first, _, rest = script(begin + look, TMPDIR=str(tmp_path)).stdout.partition(" then ")
    assert first != left
    assert first in rest.split()  # it's locked
