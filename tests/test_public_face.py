"""The public names, signatures and errors are as promised, and each process imports only what it needs."""

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
    "Cluster", "History", "HostLost", "LaunchError", "NanLogged", "NbddpError", "PayloadError", "RankDied", "RankError",
    "Run", "RunTimeout", "Session", "accumulate", "all_gather", "all_reduce", "barrier", "breakpoint",
    "broadcast", "cluster", "compare",
    "device", "export", "gather", "is_primary", "join", "last_run", "load_result",
    "load_snapshot", "loader", "local_rank", "log", "main_first", "preload", "print", "progress", "rank", "reduce",
    "restart_count", "run", "run_script", "runs", "save_snapshot", "session", "show", "shutdown", "spawn",
    "world_size", "wrap",
}  # fmt: skip

_OF_A_RUN = (
    "*, nprocs=None, device=None, gpus=None, backend=None, init=True, seed=None, deterministic=False, env=None, "
    "timeout=None, pg_timeout=None, max_restarts=0, stall_after=60.0, stop_on_nan=False, wait=True, show=None, "
    "name=None, start_method=None, hosts=None, min_hosts=None, grow=False, keep_children=False, oversubscribe=False, "
    "to=None, listen=True, pdb=None"
)
SIGNATURES = {
    "run": f"(fn, args=(), kwargs=None, {_OF_A_RUN})",
    "run_script": f"(path, argv=(), {_OF_A_RUN})",
    "Run.stop": "(self, grace=5.0)",
    "Run.wait": "(self, timeout=None)",
    "Run.logs": "(self, rank=None)",
    "Run.stacks": "(self)",
    "Run.show": "(self)",
    "Run.card": "(self, *, dark=False)",
    "Run.debug": "(self, rank=0)",
    "breakpoint": "(*, rank=None, when=True)",
    "session": f"({_OF_A_RUN})",
    "Session.run": f"(self, fn, args=(), kwargs=None, *, ranks=None, {_OF_A_RUN[3:]})",
    "Session.values": "(self, name)",
    "Session.names": "(self)",
    "Session.check": "(self, name)",
    "Session.sync": "(self, name, src=0)",
    "Session.free": "(self, *names)",
    "Session.reset": "(self)",
    "Session.restart": "(self, names=())",
    "Session.close": "(self)",
    "cluster": "(hosts, *, nodes=None, gpus_per_node=None, time=None, salloc=(), address=None, launcher=None, "
    "python=None, setup='', heartbeat=15.0, login_timeout=120.0)",
    "Cluster.run": "(self, fn, args=(), kwargs=None, **options)",
    "Cluster.close": "(self)",
    "History.load": "(path)",
    "History.plot": "(self, *names, log=False)",
    "spawn": "(fn, args=(), nprocs=1, join=True, daemon=False, start_method='spawn')",
    "preload": "(*modules)",
    "export": "(fn, path, args=(), kwargs=None)",
    "load_result": "(path)",
    "log": "(values=None, /, *, step=None, reduce=None, weight=1, **metrics)",
    "progress": "(iterable, total=None, desc=None)",
    "show": "(fig, name=None, *, step=None)",
    "wrap": "(model, **ddp)",
    "loader": (
        "(dataset, batch_size=1, *, shuffle=False, split_batch=False, exact=False, sampler=None, "
        "batch_sampler=None, **kw)"
    ),
    "all_reduce": "(x, op='mean')",
    "all_gather": "(x)",
    "broadcast": "(x, src=0)",
    "main_first": "()",
    "runs": "()",
    "shutdown": "()",
    "Run.result": "(self, timeout=None)",
    "Run.exception": "(self, timeout=None)",
    "Run.done": "(self)",
    "Run.cancel": "(self)",
    "reduce": "(x, op='mean')",
    "gather": "(x, *, exact=False)",
    "join": "(model)",
    "accumulate": "(model, k, *, last=False)",
    "barrier": "()",
    "rank": "()",
    "local_rank": "()",
    "world_size": "()",
    "is_primary": "()",
    "device": "()",
    "restart_count": "()",
    "last_run": "()",
    "compare": "(before, after, *names, log=False)",
    "save_snapshot": "(path, **state)",
    "load_snapshot": "(path, map_location=None, *, weights_only=True)",
    "print": "(*args, **kwargs)",
}

RUN_HAS = {
    "value", "values", "history", "state", "seconds", "error", "remark", "logs", "stacks", "stop", "wait", "__await__",
    "show", "result", "exception", "done", "cancel", "world_size", "pids", "restarts", "figures", "card",
}  # fmt: skip


def _bare(function: object) -> str:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_type_checkers_and_the_reference_see_every_public_name() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in ast.walk(blocks[0]) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname for node in imports for alias in node.names}
    assert imported >= PROMISED


def test_all_public_names_are_as_promised() -> None:
    assert set(nbddp.__all__) == PROMISED
    for name in nbddp.__all__:
        assert getattr(nbddp, name).__doc__, name
    assert set(dir(nbddp)) >= PROMISED
    with pytest.raises(AttributeError, match="nope"):
        _ = nbddp.nope


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_as_promised(name: str) -> None:
    assert _bare(operator.attrgetter(name)(nbddp)) == SIGNATURES[name]


def test_every_promised_function_has_a_promised_signature() -> None:
    assert {name for name in PROMISED if inspect.isfunction(getattr(nbddp, name))} == {
        name for name in SIGNATURES if "." not in name
    }


def test_a_run_has_the_promised_attributes(cell: Cells) -> None:
    done = run(cell("def train(): return 1").train)
    assert not [name for name in RUN_HAS if not hasattr(done, name)]


def test_the_error_tree_is_as_promised() -> None:
    for name in ("LaunchError", "PayloadError", "RankError", "RankDied", "HostLost", "RunTimeout", "NanLogged"):
        assert getattr(nbddp, name).__mro__[1] is nbddp.NbddpError
    assert not issubclass(nbddp.NbddpError, KeyboardInterrupt)


# The rooms of the notebook kernel and of the hosts: nothing of them is loaded in a rank.
NOT_IN_A_RANK = (
    *(f"nbddp.{room}" for room in ("launch", "history", "panel", "kernel", "sessions", "hosts", "job", "magic")),
    "nbddp.agent",
    "nbddp.forkserver.server",  # and server_process
    "nbddp.forkserver.process",
)


@pytest.mark.slow
def test_a_rank_imports_no_front_end_and_no_kernel_side_module(cell: Cells) -> None:
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
        assert not [name for name in modules if name.startswith(NOT_IN_A_RANK)]
        assert "nbddp.worker.entry" in modules


def test_importing_nbddp_imports_no_torch_ipython_or_numpy() -> None:
    ended = script("import sys, nbddp; print([m for m in ('torch', 'IPython', 'numpy') if m in sys.modules])")
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def test_every_module_has_a_docstring_and_no_function_over_60_lines() -> None:
    for path in OURS:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body:
                    lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                    assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_no_file_is_called_utils() -> None:
    assert not [path for path in OURS if path.name.startswith("util")]


def test_private_interfaces_of_torch_and_python_still_exist() -> None:
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
