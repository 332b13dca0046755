"""The magic's argument line: every set of options is parsed, and every other line is refused with a message."""

from __future__ import annotations

import random
import shlex
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError  # noqa: TID253

from nbddp.magic import magic
from nbddp.magic.options import DEFAULTS_PARSER, SCRIPT_PARSER
from tests.properties.budget import examples

NAMES = st.lists(st.from_regex(r"[a-zé_][a-z0-9_]{0,5}", fullmatch=True), min_size=1, max_size=3)
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda word: not word.startswith("-")
)
OPTIONS: dict[str, tuple[list[str], st.SearchStrategy[Any]]] = {
    "nprocs": (["-n", "--nprocs"], st.integers(0, 99)),
    "device": (["--device"], WORDS),
    "gpus": (["--gpus"], st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    "backend": (["--backend"], WORDS),
    "seed": (["--seed"], st.integers(0, 2**40)),
    "max_restarts": (["--max-restarts"], st.integers(0, 9)),
    "timeout": (["--timeout"], st.floats(0.001, 1e6)),
    "deterministic": (["--deterministic"], st.just(True)),
    "background": (["--background"], st.just(True)),
    "keep": (["--as"], NAMES.map(lambda names: names[:1])),
    "out": (["-o", "--out"], NAMES),
}


def written(name: str, value: Any, dice: random.Random) -> str:
    flag = dice.choice(OPTIONS[name][0])
    if value is True:
        return flag
    text = shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return flag + dice.choice([" ", "  ", "=" if flag.startswith("--") else ""]) + text


@st.composite
def given_options(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True))
    return {name: draw(OPTIONS[name][1]) for name in names}


@examples(100)
@given(given_options(), st.randoms(use_true_random=False))
def test_options_in_any_order_and_spelling_are_parsed(options: dict[str, Any], dice: random.Random) -> None:
    line = " ".join(written(name, value, dice) for name, value in options.items())
    assert magic._given(magic.DdpMagics.cell.parser.parse_args(magic._words(line))) == options


@examples(100)
@given(given_options(), WORDS, st.lists(WORDS, max_size=4), st.randoms(use_true_random=False))
def test_a_scripts_arguments_are_passed_on_unparsed(
    options: dict[str, Any], script: str, argv: list[str], dice: random.Random
) -> None:
    options.pop("out", None)
    theirs = [word for pair in zip(argv, ["--lr", "-n", "--", "-o"]) for word in reversed(pair)]
    words = shlex.split(" ".join(written(name, value, dice) for name, value in options.items()))
    parsed = magic._given(SCRIPT_PARSER.parse_args([*words, script, *theirs]))
    assert parsed == {**options, "script": script, "argv": theirs}


SCRAPS = [
    "-n", "-o", "--gpus", "--as", "--seed", "a,b", "0,1", "x", "'", '"', "\\", "--", "-", "=", "--dev", "-n4", "1e9",
    "%", "{x}", "$x",
]  # fmt: skip


@examples(100)
@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(SCRAPS), max_size=6).map(" ".join)))
def test_any_line_is_parsed_or_refused_with_a_message(line: str) -> None:
    for parser in (magic.DdpMagics.cell.parser, DEFAULTS_PARSER, SCRIPT_PARSER):
        said = "nothing wrong"
        try:
            parser.parse_args(magic._words(line))
        except UsageError as error:
            said = str(error)
        assert said.strip()
