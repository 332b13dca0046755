"""The package's subpackages and their imports: none goes upwards or in a circle, and no subpackage is too large."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nbddp

PACKAGE = Path(nbddp.__file__).parent

# Each room may import the rooms below it, and those that are named; modules directly in nbddp/ are the ground.
BELOW = {
    "payload": [],
    "listening": [],
    "worker": ["payload", "listening"],
    "forkserver": ["payload", "worker"],
    "launch": ["payload", "worker", "forkserver"],
    "history": [],
    "panel": ["history"],
    "sinks": ["history"],
    "kernel": ["payload", "worker", "forkserver", "launch", "history", "panel", "sinks"],
    "sessions": ["payload", "worker", "launch", "kernel"],
    "hosts": ["payload", "launch", "kernel", "panel"],
    "job": ["payload", "worker", "history", "kernel"],
    "magic": ["payload", "worker", "forkserver", "launch", "kernel", "sessions", "hosts"],
    "agent": ["payload", "worker", "forkserver", "launch", "hosts"],
}
FACE = {"nbddp", "nbddp.__main__"}  # may import all of them
LARGEST_SHARE = 0.25


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in PACKAGE.rglob("*.py")}


def _room(module: str) -> str:
    """ "" for the ground."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else ""


def _imports(module: str) -> set[str]:
    """Also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "nbddp"}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "nbddp":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found - {module}


def test_every_subpackage_has_an_import_rule() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(BELOW)


@pytest.mark.parametrize("module", sorted(set(MODULES) - FACE))
def test_a_module_imports_only_what_is_below_it(module: str) -> None:
    room, imported = _room(module), _imports(module)
    allowed = {room, "", *BELOW.get(room, [])}
    assert not imported & FACE
    assert {name for name in imported if _room(name) not in allowed} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {module: _imports(module) - FACE for module in set(MODULES) - FACE}
    while leaves := {module for module, imported in left.items() if not imported & set(left)}:
        left = {module: imported for module, imported in left.items() if module not in leaves}
    assert left == {}


def test_no_subpackage_holds_over_a_quarter_of_the_lines() -> None:
    lines = {module: path.read_text().count("\n") for module, path in MODULES.items()}
    for room in BELOW:
        share = sum(count for module, count in lines.items() if _room(module) == room) / sum(lines.values())
        assert share <= LARGEST_SHARE, f"{room}: {share:.0%}"
