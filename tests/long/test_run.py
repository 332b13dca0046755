"""Runs in scripts of their own: odd streams and signals, a fork server that doesn't start."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support import script

_PRINTS = """
    import nbddp
    def schnee():
        print("grüß 雪")
        nbddp.log(größe=1.0)
        nbddp.barrier()
        return nbddp.rank()
    for _ in range(2):  # also with a fork server that runs already
        assert nbddp.run(schnee, nprocs=2, device="cpu", timeout=30).values == [0, 1]
"""


def test_a_script_runs_with_ascii_output_and_all_signals_blocked() -> None:
    began = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    ended = script(began + textwrap.dedent(_PRINTS), PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, "")
    shown = re.sub(r"after [\d.:]+( s)?", "after", ended.stdout)
    printed = "gr\\xfc\\xdf \\u96ea\n"
    assert shown == (printed + "schnee: finished after \\xb7 2 ranks \\xb7 gloo \\xb7 gr\\xf6\\xdfe 1\n") * 2


def test_a_script_runs_with_closed_standard_streams() -> None:
    shell = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
    assert subprocess.run([*shell, sys.executable, "-c", textwrap.dedent(_PRINTS)], timeout=100).returncode == 0


def test_a_fork_server_that_ends_while_it_starts_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(1)\n")
    ended = script(
        """
        import nbddp
        nbddp.preload("ends")
        for _ in range(2):
            try: nbddp.run(print, nprocs=2, device="cpu")
            except nbddp.LaunchError as error: print(error)
        """,
        PYTHONPATH=f"{os.environ['PYTHONPATH']}:{tmp_path}",
    )
    why = "the ranks couldn't be started: the fork server exited unexpectedly; its output on stderr shows why\n"
    assert (ended.stdout, ended.stderr) == (why * 2, "")
