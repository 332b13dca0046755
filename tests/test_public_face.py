"""Every public name is a promise; and who may import whom."""

from __future__ import annotations

import ast
import inspect
import operator
from pathlib import Path

import pytest

import nbddp
from tests.support import Cells, run, script

PACKAGE = Path(nbddp.__file__).parent
OURS = [path for path in sorted(PACKAGE.rglob("*.py")) if "node_modules" not in path.parts]

PROMISED = {
    "Cluster", "History", "HostLost", "LaunchError", "NbddpError", "PayloadError", "RankDied", "RankError", "Run",
    "RunTimeout", "barrier", "cluster", "device", "export", "gather", "is_primary", "last_run", "load_result",
    "load_snapshot", "loader", "local_rank", "log", "preload", "print", "progress", "rank", "reduce", "restart_count",
    "run", "run_script", "save_snapshot", "spawn", "world_size", "wrap",
}  # fmt: skip

_OF_A_RUN = (
    "*, nprocs=None, device=None, gpus=None, backend=None, init=True, seed=None, deterministic=False, env=None, "
    "timeout=None, pg_timeout=None, max_restarts=0, stall_after=60.0, wait=True, show=None, name=None, "
    "start_method=None, hosts=None, min_hosts=None, keep_children=False, oversubscribe=False"
)
SIGNATURES = {
    "run": f"(fn, args=(), kwargs=None, {_OF_A_RUN})",
    "run_script": f"(path, argv=(), {_OF_A_RUN})",
    "Run.stop": "(self, grace=5.0)",
    "Run.wait": "(self, timeout=None)",
    "Run.logs": "(self, rank=None)",
    "Run.stacks": "(self)",
    "Run.show": "(self)",
    "cluster": "(hosts, *, launcher=None, python=None, heartbeat=15.0)",
    "Cluster.run": "(self, fn, args=(), kwargs=None, **options)",
    "Cluster.close": "(self)",
    "History.load": "(path)",
    "spawn": "(fn, args=(), nprocs=1, join=True, daemon=False, start_method='spawn')",
    "preload": "(*modules)",
    "export": "(fn, path, args=(), kwargs=None)",
    "load_result": "(path)",
    "log": "(values=None, /, *, step=None, reduce=None, weight=1, **metrics)",
    "progress": "(iterable, total=None, desc=None)",
    "wrap": "(model, **ddp)",
    "loader": "(dataset, batch_size=1, *, shuffle=False, split_batch=False, **kw)",
    "reduce": "(x, op='mean')",
    "gather": "(x)",
    "barrier": "()",
    "rank": "()",
    "local_rank": "()",
    "world_size": "()",
    "is_primary": "()",
    "device": "()",
    "restart_count": "()",
    "last_run": "()",
    "save_snapshot": "(path, **state)",
    "load_snapshot": "(path, map_location=None, *, weights_only=True)",
    "print": "(*args, **kwargs)",
}

RUN_HAS = {
    "value", "values", "history", "state", "seconds", "error", "remark", "logs", "stacks", "stop", "wait", "__await__",
    "show"
}  # fmt: skip


def _bare(function: object) -> str:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_all_names_are_as_promised() -> None:
    assert set(nbddp.__all__) == PROMISED
    for name in nbddp.__all__:
        assert getattr(nbddp, name).__doc__, name
    assert set(dir(nbddp)) >= PROMISED
    with pytest.raises(AttributeError, match="nope"):
        _ = nbddp.nope


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_as_promised(name: str) -> None:
    assert _bare(operator.attrgetter(name)(nbddp)) == SIGNATURES[name]


def test_a_function_is_promised_without_its_signature() -> None:
    assert {name for name in PROMISED if inspect.isfunction(getattr(nbddp, name))} == {
        name for name in SIGNATURES if "." not in name
    }


def test_run_has_what_was_promised(cell: Cells) -> None:
    done = run(cell("def train(): return 1").train)
    assert not [name for name in RUN_HAS if not hasattr(done, name)]


def test_the_error_tree_is_as_promised() -> None:
    for name in ("LaunchError", "PayloadError", "RankError", "RankDied", "HostLost", "RunTimeout"):
        assert getattr(nbddp, name).__mro__[1] is nbddp.NbddpError
    assert not issubclass(nbddp.NbddpError, KeyboardInterrupt)


def test_a_rank_has_no_front_end_and_nothing_of_the_kernel_side(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            import sys
            nbddp.log(loss=1.0); nbddp.loader([1, 2]); nbddp.rank()
            return sorted(sys.modules)
    """)
    for method in ("forkserver", "spawn"):
        modules = run(names.train, start_method=method).value
        front_end = {"IPython", "ipywidgets", "anywidget", "ipykernel", "matplotlib", "pandas"}
        assert not front_end & set(modules)
        assert not [name for name in modules if name.startswith(("nbddp.kernel", "nbddp.panel"))]
        assert "nbddp.worker.entry" in modules


def test_importing_nbddp_is_light() -> None:
    ended = script("import sys, nbddp; print([m for m in ('torch', 'IPython', 'numpy') if m in sys.modules])")
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("nbddp")}


def _modules(part: str) -> list[Path]:
    return sorted((PACKAGE / part).glob("*.py"))


@pytest.mark.parametrize("path", _modules("worker"), ids=lambda path: path.name)
def test_the_worker_side_never_imports_the_kernel_side(path: Path) -> None:
    assert not [name for name in _imports(path) if name.startswith(("nbddp.kernel", "nbddp.panel"))]


@pytest.mark.parametrize("path", _modules("panel"), ids=lambda path: path.name)
def test_the_panel_knows_no_process(path: Path) -> None:
    allowed = ("nbddp.kernel.history", "nbddp.wire", "nbddp.errors", "nbddp.panel")
    assert not [n for n in _imports(path) if n not in ("nbddp", "nbddp.kernel") and not n.startswith(allowed)]


SIDES = ("nbddp.kernel", "nbddp.worker", "nbddp.panel", "nbddp.host")
DOORS = ("__init__.py", "__main__.py")  # to the kernel side, for a notebook; to the worker side, for a launcher


@pytest.mark.parametrize("path", [path for path in _modules("") if path.name not in DOORS], ids=lambda path: path.name)
def test_shared_modules_import_neither_side(path: Path) -> None:
    assert not [name for name in _imports(path) if name.startswith(SIDES)]


def test_the_kernel_side_crosses_to_the_worker_side_elsewhere() -> None:
    """The launcher starts a rank; the others know a word of its language, or read a script as it does."""
    of_workers = {f"nbddp.worker.{path.stem}" for path in _modules("worker")}
    crossing = {path.name: sorted(_imports(path) & of_workers) for path in _modules("kernel")}
    assert {name: found for name, found in crossing.items() if found} == {
        "failure.py": ["nbddp.worker.entry"],
        "launcher.py": ["nbddp.worker.entry"],
        "local_worker.py": ["nbddp.worker.output"],
        "magic.py": ["nbddp.worker.script"],
        "notebook_cell.py": ["nbddp.worker.script"],
        "script.py": ["nbddp.worker.script"],
    }


def test_every_module_names_its_side_and_no_function_is_a_monster() -> None:
    for path in OURS:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body:
                    lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                    assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_no_file_called_utils() -> None:
    assert not [path for path in OURS if path.name.startswith("util")]


def test_private_interfaces_of_others_are_still_there() -> None:
    """Used, guarded and commented in the package; this fails when a new version drops one."""
    import atexit
    import threading
    from multiprocessing import forkserver, popen_forkserver, reduction

    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    assert hasattr(forkserver.ForkServer, "connect_to_new_process")
    assert hasattr(forkserver.ForkServer(), "_forkserver_pid")
    assert hasattr(popen_forkserver.Popen, "_launch")
    assert reduction.HAVE_SEND_HANDLE
    assert hasattr(torch.cuda, "_is_in_bad_fork")
    assert hasattr(atexit, "_run_exitfuncs")
    assert hasattr(threading, "_shutdown")
    assert hasattr(torch.UntypedStorage, "_cdata")
    assert "master_listen_fd" in (dist.TCPStore.__init__.__doc__ or "")
    assert hasattr(distributed_c10d, "init_process_group")
