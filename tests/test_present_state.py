"""A rank has what a plain child has that the notebook starts at the same moment, not what the fork server had once."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.present_state import LOOK
from tests.support import script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity and limits are Linux's")
METHODS = pytest.mark.parametrize("method", ["forkserver", "spawn"])

STATES = {
    "TZ": "os.environ['TZ'] = 'America/New_York'",
    "a private umask": "os.umask(0o077)",
    "nice": "os.nice(2)",
    "a limit of files": "resource.setrlimit(resource.RLIMIT_NOFILE, (500, 1000))",
    "no core files": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "large stacks": "resource.setrlimit(resource.RLIMIT_STACK, (16 << 20, resource.RLIM_INFINITY))",
    "one core": "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})",
    "TMPDIR": "os.environ['TMPDIR'] = folder",
}


def _notebook(program: str, folder: Path, *, warm: bool = True, **env: str) -> Any:
    """What a program prints as JSON that starts runs, after a fork server has begun with the usual state."""
    warm_up = "assert ranks(lambda: 1) == ([1, 1], '')" if warm else ""
    source = f"import json, os, resource\nfolder = {str(folder)!r}\n{LOOK}\n{warm_up}\n{textwrap.dedent(program)}"
    done = script(source, **env)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout.splitlines()[-1])


@METHODS
@pytest.mark.parametrize("state", STATES)
def test_a_rank_has_the_notebooks_present_state(state: str, method: str, tmp_path: Path) -> None:
    expected, (values, _), before, after = _notebook(
        f"""
        usual = child(f"look({{folder!r}})")
        {STATES[state]}
        before = child(f"look({{folder!r}})")
        found = ranks(look, folder, start_method={method!r})
        print(json.dumps([before, found, usual, child(f"look({{folder!r}})")]))
        """,
        tmp_path,
    )
    assert expected != before, "the state that is to be seen is another one"
    assert values == [expected, expected]
    assert after == expected, "the run changed the notebook's own state"
