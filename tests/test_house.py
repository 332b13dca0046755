"""The package's rooms and their imports: none goes upwards or in a circle, and no two files have one name."""

import ast
from collections import Counter
from pathlib import Path

import nbddp

PACKAGE = Path(nbddp.__file__).parent
# A room may import those below it; modules directly in nbddp/ are the ground.
ROOMS = [
    *("__main__", "magic", "job", "kernel", "ray", "process"),
    *("worker", "helpers", "panel", "loggers", "history", "payload", ""),
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


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


def test_a_module_imports_only_what_is_below_it_and_none_in_a_circle() -> None:
    left = {module: _imports(module) for module in MODULES}
    for module, imported in left.items():
        assert {name for name in imported if ROOMS.index(_room(name)) < ROOMS.index(_room(module))} == set(), module
        assert "nbddp" not in imported  # the face imports all of them
    while leaves := {module for module, imported in left.items() if not imported & set(left)}:
        left = {module: imported for module, imported in left.items() if module not in leaves}
    assert left == {}


def test_no_room_has_the_name_of_a_public_one_and_no_two_files_have_one_name() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(ROOMS)
    assert rooms & set(dir(nbddp)) == set()
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_what_long_tests_import_from_others_is_there() -> None:
    """The gate doesn't collect them."""
    for path in (Path(__file__).parent / "long").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests."):
                exec(f"from {node.module} import {', '.join(alias.name for alias in node.names)}", {})
