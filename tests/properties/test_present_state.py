"""In any state of a notebook, its ranks have what a plain child process has that is started at the same moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.present_state import Program
from tests.properties.budget import examples

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity and limits are Linux's")

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/St_Johns",
    "Asia/Kathmandu",
    "EST5EDT",
    "XYZ-3:17",
    "",
    ":UTC",
    "no such zone",
]
LIMITS = {
    "NOFILE": st.integers(200, 4000),
    "CORE": st.integers(0, 1 << 40),
    "FSIZE": st.integers(1 << 33, 1 << 40),
    "MEMLOCK": st.integers(0, 1 << 20),
    "SIGPENDING": st.integers(200, 4000),
}
STATES = st.fixed_dictionaries(
    {},
    optional={
        "zone": st.sampled_from(ZONES),
        "umask": st.integers(0, 0o777).map(lambda mask: mask & 0o077),  # the owner makes files in folders of its own
        "nice": st.integers(0, 3),
        "limits": st.fixed_dictionaries({}, optional=LIMITS),
        "cores": st.sets(st.sampled_from(CORES), min_size=1),
        "environ": st.dictionaries(
            st.from_regex(r"[A-Z_]{1,8}_OF_MINE", fullmatch=True), st.text("abc =é\n\udcff"), max_size=3
        ),
    },
)
# What is read when Python starts, or when torch or a library in C is loaded.
AT_THE_START = {
    "PYTORCH_JIT": ["0", "1"],
    "TORCHDYNAMO_VERBOSE": ["0", "1"],
    "TORCH_LOGS": ["+graph_breaks", "graph_breaks", "recompiles"],
    "PYTHONHASHSEED": ["0", "7", "random"],
    "PYTHONWARNINGS": ["ignore::ResourceWarning", "default::DeprecationWarning"],
    "PYTHONUTF8": ["0", "1"],
    "OPENBLAS_NUM_THREADS": ["1", "2"],
    "TORCH_DISTRIBUTED_DEBUG": ["INFO", "DETAIL", "OFF"],
}
VARIABLES = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in AT_THE_START.items()})


@pytest.fixture(scope="module")
def program(_warm: None) -> Iterator[Program]:
    """A notebook whose fork server began long ago."""
    program = Program()
    assert program.value("value = ranks(lambda: 1)") == [[1, 1], ""]
    yield program
    program.close()


@pytest.mark.slow
@examples(15)
@given(state=STATES)
def test_ranks_have_the_process_state_of_a_plain_child(
    program: Program, tmp_path_factory: pytest.TempPathFactory, state: dict[str, object]
) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    expected, (found, note) = program.value(f"""
folder, state = {folder!r}, {state!r}
def all_of(folder):
    return [look(folder), {{k: os.fsencode(v).hex() for k, v in os.environ.items() if k.endswith("_OF_MINE")}}]
if "zone" in state: os.environ["TZ"] = state["zone"]
if "umask" in state: os.umask(state["umask"])
if "nice" in state: os.nice(state["nice"])
for name, soft in state.get("limits", {{}}).items():
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (soft if hard == -1 else min(soft, hard), hard))
if "cores" in state: os.sched_setaffinity(0, state["cores"])
os.environ.update(state.get("environ", {{}}))
mine = "{{k: os.fsencode(v).hex() for k, v in os.environ.items() if k.endswith('_OF_MINE')}}"
value = [child(f"[look({{folder!r}}), (lambda os: {{mine}})(__import__('os'))]"), ranks(all_of, folder)]
""")
    assert found == [expected, expected]
    assert note == ""


@pytest.mark.slow
@examples(2)
@given(present=VARIABLES, of_the_run=VARIABLES)
def test_environment_variables_affect_ranks_as_they_affect_a_plain_child(
    program: Program, present: dict[str, str], of_the_run: dict[str, str]
) -> None:
    """Those of the notebook's environment, and over it those of one run."""
    expected, (found, note) = program.value(f"""
os.environ.update({present!r})
ranks(effects)
value = [child("effects()", {of_the_run!r}), ranks(effects, env={of_the_run!r})]
""")
    assert found == [expected, expected]
    differing = {name for name, value in of_the_run.items() if present.get(name) != value}
    assert ("This run's ranks are started by spawn" in note) == bool(differing - {"TORCH_DISTRIBUTED_DEBUG"})


def test_the_oracle_distinguishes_two_states(program: Program, tmp_path: Path) -> None:
    """Else the comparison above would be one of nothing."""
    usual, other = program.value(f"""
value = [child("look({str(tmp_path)!r})")]
os.environ["TZ"] = "Asia/Kathmandu"; os.umask(0o077); os.nice(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.sched_setaffinity(0, {{{CORES[0]}}})
value.append(child("look({str(tmp_path)!r})"))
""")
    assert {name for name in usual if usual[name] != other[name]} >= {
        "localtime", "tzname", "mode of a new file", "nice", "limits", *(["affinity"] if len(CORES) > 1 else []),
    }  # fmt: skip
