"""The magics' lines: every set of options is parsed, and every other line is refused with a message."""

import random
import shlex
from typing import Any
from unicodedata import category

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError

from nbddp.magic import magic, options, routing
from tests.support import CHARACTERS

FEWER = settings(max_examples=max(1, settings().max_examples // 3))  # 20 ms each; NBDDP_CASES scales them
NAMES = st.lists(
    st.text(st.sampled_from("azé_09"), min_size=1, max_size=6).filter(str.isidentifier), min_size=1, max_size=3
)
WORDS = st.text(
    st.sampled_from("aZ09é中🙂 -=,.;\\'\"$%{}()[]<>|&#!?*~`") | CHARACTERS.filter(lambda each: category(each) != "Cc"),
    min_size=1,
    max_size=12,
).filter(lambda word: not word.startswith("-"))
OPTIONS: dict[str, tuple[list[str], st.SearchStrategy[Any]]] = {
    "nprocs": (["-n", "--nprocs"], st.integers(0, 99)),
    "nnodes": (["--nnodes"], st.integers(0, 9)),
    "device": (["--device"], WORDS),
    "gpus": (["-g", "--gpus"], st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    "backend": (["--backend"], WORDS),
    "seed": (["--seed"], st.integers(0, 2**40)),
    "max_restarts": (["--max-restarts"], st.integers(0, 9)),
    "timeout": (["--timeout"], st.floats(0.001, 1e6)),
    "deterministic": (["--deterministic"], st.just(True)),
    "pdb": (["--pdb"], st.just(True)),
    "background": (["--background"], st.just(True)),
    "keep": (["--as"], NAMES.map(lambda names: names[0])),
    "out": (["-o", "--out"], NAMES),
}


def written(name: str, value: Any, dice: random.Random) -> str:
    flag = dice.choice(OPTIONS[name][0])
    if value is True:
        return flag
    if name == "gpus" and dice.random() < 0.5:
        return " ".join(f"-g {gpu}" for gpu in value)
    text = shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return flag + dice.choice([" ", "  ", "=" if flag.startswith("--") else ""]) + text


@st.composite
def given_options(draw: st.DrawFn) -> dict[str, Any]:
    return {name: draw(OPTIONS[name][1]) for name in draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True))}


def own_and_runs(parsed: Any) -> dict[str, Any]:
    """What was given, without defaults."""
    found = {**vars(parsed), **parsed.options}.items()
    return {key: each for key, each in found if key != "options" and each not in ([], "", None) and each is not False}


@FEWER
@given(given_options(), st.randoms(use_true_random=False))
def test_options_in_any_order_and_spelling_are_parsed(chosen: dict[str, Any], dice: random.Random) -> None:
    line = " ".join(written(name, value, dice) for name, value in chosen.items())
    parsed = magic._CELL.parse(options.split(line))
    assert own_and_runs(parsed) == chosen
    assert magic._DEFAULTS.parse(options.split(options.text(parsed.options))).options == parsed.options


@FEWER
@given(given_options(), WORDS, st.lists(WORDS, max_size=4), st.randoms(use_true_random=False))
def test_a_scripts_arguments_are_passed_on_unparsed(
    chosen: dict[str, Any], script: str, argv: list[str], dice: random.Random
) -> None:
    chosen.pop("out", None)
    theirs = [word for pair in zip(argv, ["--lr", "-n", "--", "-o"]) for word in reversed(pair)]
    words = options.split(" ".join(written(name, value, dice) for name, value in chosen.items()))
    parsed = own_and_runs(magic._SCRIPT.parse([*words, script, *theirs]))
    assert parsed == {**chosen, "script": script, **({"argv": theirs} if theirs else {})}


SCRAPS = [
    "-n", "-o", "--gpus", "--as", "--seed", "a,b", "0,1", "x", "'", '"', "\\", "--", "-", "=", "--dev", "-n4", "1e9",
    "%", "{x}", "$x",
]  # fmt: skip


@FEWER
@given(st.one_of(st.text(CHARACTERS, max_size=30), st.lists(st.sampled_from(SCRAPS), max_size=6).map(" ".join)))
def test_any_line_is_parsed_or_refused_with_a_message(line: str) -> None:
    for parser in (magic._CELL, magic._DEFAULTS, magic._OPEN, magic._SCRIPT):
        said = "nothing wrong"
        try:
            parser.parse(options.split(line))
        except UsageError as error:
            said = str(error)
        assert said.strip()


@pytest.mark.timeout(20)
def test_where_a_cell_belongs_is_known_at_once() -> None:
    """Its comments and blank lines may be cut into lines in one way only."""
    ours = "# a comment\n\n" * 200 + "%ddp status", "%pip install x", "%conda install x\n%pip list", "%load_ext nbddp"
    assert all(map(routing._OURS.match, ours))
    for of_the_ranks in ("# a comment\n \n" * 200 + "x = 1", "%pip install x\ny = 1"):
        assert not routing._OURS.match(of_the_ranks)
