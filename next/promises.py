"""Checks PROMISES.md against the tests of both packages, and counts it; -v prints what is open."""

import re
import sys
from collections import Counter
from pathlib import Path

NEXT, TODAY = Path(__file__).parent / "tests", Path(__file__).parent.parent / "tests"
LINE = re.compile(r"- `(\S+::\w+)` (open|given up: .+|internal: .+|\S+::\w+)$")


def tests_in(file: Path) -> list[str]:
    return re.findall(r"^def test_(\w+)\(", file.read_text(), re.MULTILINE)


chosen, counts, open_ones = set(), Counter[tuple[str, str]](), []
for line in (TODAY / "promises.txt").read_text().splitlines():
    file, _, name = line.partition("[")[0].partition("::")
    if line and not line.startswith(("#", "test_house")):
        chosen |= {f"{file}::{each}" for each in ([name] if name else tests_in(TODAY / file))}
held_by = {f"{file.relative_to(NEXT)}::{name}" for file in NEXT.rglob("test_*.py") for name in tests_in(file)}
for part, lines in re.findall(r"^## (\w+)\n\n((?:- .*\n)+)", (NEXT.parent / "PROMISES.md").read_text(), re.MULTILINE):
    for line in lines.splitlines():
        match = LINE.match(line)
        assert match, f"unreadable: {line}"
        promise, state = match[1], match[2].partition(":")[0] if " " in match[2] else match[2]
        assert promise in chosen, f"no promise, or named twice: {line}"
        assert "::" not in match[2].split()[0] or match[2] in held_by, f"held by no test: {line}"
        chosen.remove(promise)
        counts[part, "held" if match[2] in held_by else state] += 1
        open_ones += [f"{part}: {promise}"] * (state == "open")
assert not chosen, f"without a line: {chosen}"
print(*(open_ones if "-v" in sys.argv else []), sep="\n", end="\n" if "-v" in sys.argv else "")
for part, state in counts:
    print(f"{part}: {counts[part, state]} {state}")
print(f"{len(open_ones)} open of {counts.total()}")
