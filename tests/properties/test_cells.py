"""A ``%%ddp`` cell does on a rank what it does in the notebook, for every name that it may read."""

from __future__ import annotations

import ast
import json
import re
import warnings

import pytest
from hypothesis import assume, given, note

from nbddp.magic import analysis
from tests.properties.budget import examples
from tests.properties.cells import FUNCTIONS, NAMES, Program, difference, outcome, programs
from tests.support import Notebook

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


def parsed(program: Program) -> ast.Module:
    note(program.source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(program.source)
            compile(tree, "<cell>", "exec", dont_inherit=True)
    except SyntaxError:  # x is local and declared global, say
        assume(False)
    return tree


@examples(250)
@given(programs())
def test_a_cell_does_the_same_with_only_the_names_it_needs(program: Program) -> None:
    assert difference(program, analysis.names_of(parsed(program)).needed) == ""


@pytest.mark.slow
def test_a_real_cell_does_on_a_rank_what_python_does(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp\nimport json, sys\nfrom tests.properties.cells import helpers")

    @examples(6)
    @given(programs())
    def check(program: Program) -> None:
        parsed(program)
        expected = outcome(program, dict(program.notebook))
        notebook.ok(
            f"[globals().pop(name, None) for name in {NAMES + FUNCTIONS}]\nglobals().update({program.notebook})"
        )
        reply = notebook.cell(f"{_HEAD.format(program.choices)}\n{program.source}\njson.dumps(seen)")
        if expected.error:
            assert re.findall(r"^(\w+)(?::|$)", reply.traceback, re.MULTILINE)[-1] == expected.error
        else:
            assert json.loads(reply.shown.strip().splitlines()[-1].strip("'")) == expected.seen

    check()


_HEAD = """\
%%ddp -n 1 --device cpu
seen = []
see, flag, tick, some, keep, kept, call, Base, enter, suppress = helpers(seen, {}).values()"""
