"""The public names, signatures, and errors are as promised, and each process imports only what it needs."""

import ast
import importlib
import inspect
import operator
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import nbddp
from nbddp import errors
from nbddp.kernel.settings import Given, Options
from tests.support import Cells, run, script

PACKAGE = Path(nbddp.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
ALSO = {"breakpoint", "print"}  # a star import doesn't bring these
OPTIONS = (
    "nprocs=None, nnodes=None, device=None, gpus=None, backend=None, init_process_group=True, seed=None, "
    "deterministic=False, env=None, timeout=None, pg_timeout=None, max_restarts=0, stop_on_nan=False, wait=True, "
    "show=None, name=None, log_to=None, autolog=True, pdb=None"
)
SIGNATURES = {
    **dict.fromkeys(["barrier", "device", "is_primary", "last_run", "local_rank", "main_first", "rank"], "()"),
    **dict.fromkeys(["restart_count", "runs", "shutdown", "world_size"], "()"),
    **dict.fromkeys(["all_gather", "gather_for_metrics"], "(x)"),
    **dict.fromkeys(["Run.exception", "Run.result", "Run.wait"], "(self, timeout=None)"),
    **dict.fromkeys(["Run.logs", "Session.logs"], "(self, rank=None)"),
    **dict.fromkeys(["load_result", "History.load"], "(path)"),
    **dict.fromkeys(["Run.cancel", "Run.done", "Run.show", "Run.stacks", "Session.close"], "(self)"),
    "accumulate": "(model, k, *, last=False)", "all_reduce": "(x, op='sum')",
    "breakpoint": "(*, rank=None, when=True)", "broadcast": "(x, src=0)", "export": "(fn, path, args=(), kwargs=None)",
    "join": "(model)", "preload": "(*modules)",
    "print": "(*args, **kwargs)", "progress": "(iterable, total=None, desc=None, *, leave=True, disable=False)",
    "run": f"(fn, args=(), kwargs=None, *, {OPTIONS})", "save_snapshot": "(path, **state)", "wrap": "(model, **ddp)",
    "Run.stop": "(self, grace=5.0)", "Session.__init__": f"(self, *, {OPTIONS})",
    "Session.pull": "(self, *names, rank=None)", "Session.push": "(self, **values)",
    "Session.run": "(self, fn, args=(), kwargs=None)",
    "load_snapshot": "(path, map_location=None, *, weights_only=True)",
    "loader": "(dataset, batch_size=1, *, shuffle=False, split_batches=False, exact=False, sampler=None, "
    "batch_sampler=None, **kw)",
    "log": "(values=None, /, *, step=None, reduce=None, weight=1, **metrics)",
    "run_script": f"(path, argv=(), *, module=False, {OPTIONS})",
    "spawn": "(fn, args=(), nprocs=1, join=True, daemon=False, start_method='spawn')",
    "History.plot": "(self, *names, log=False, before=None)",
    "Session.cell": "(self, source, ranks=None, *, pdb=False, keep=False)",
}  # fmt: skip
ERRORS = {
    *("CellError", "LaunchError", "NanLogged", "NodeLost", "PayloadError", "RankDied", "RankError", "RunTimeout"),
    "SessionLost",
}
OF_A_RUN = {
    *("name", "nprocs", "history", "state", "error", "restarts", "remark", "partial", "value", "values", "seconds"),
    *("pids", "logs", "stacks", "stop", "show", "wait", "result", "exception", "done", "cancel"),
}

# What is used and private: where it is, and why.
PRIVATE = {
    # the fork server: its address, its end, and a start without the user's __main__
    "multiprocessing.forkserver:ForkServer": "_forkserver_address _forkserver_alive_fd _forkserver_pid _stop "
    "connect_to_new_process",
    "multiprocessing.forkserver": "_forkserver",
    "multiprocessing.popen_forkserver:Popen": "_launch _fds",
    "multiprocessing.context": "_default_context",  # no start method is chosen for the user
    "multiprocessing.context:_default_context": "_actual_context",
    "multiprocessing.process:current_process": "_config",  # the rank's own folder
    "multiprocessing.resource_tracker": "_resource_tracker _CLEANUP_FUNCS",  # what a killed rank has left
    # a forked rank ends as a process that Python has started
    "atexit": "_clear _run_exitfuncs",
    "threading": "_shutdown",
    "sys": "_getframe",
    "pdb:Pdb": "_cmdloop",  # an interrupt stops the rank, not only the command
    "pickle": "_Pickler",  # says the way to what can't be sent
    "functools": "_lru_cache_wrapper",
    # tensors are sent in the block's memory, and what torch.compile has made is made again
    "torch:UntypedStorage": "_cdata",
    "torch:TypedStorage": "_untyped_storage",
    "torch.storage": "_new_dtypes",
    "torch": "_library",  # where custom operators are, which can't be sent
    "torch._utils": "_rebuild_parameter _rebuild_parameter_with_state _rebuild_tensor_v3",
    "torch/_dynamo/eval_frame.py": "_torchdynamo_orig_callable _dynamic",
    # groups: their store, and the number of collectives, by which ranks that wait are told apart
    "torch._C._distributed_c10d": "FileStore HashStore PrefixStore set_debug_level_from_env _register_comm_hook",
    "torch._C._distributed_c10d:ProcessGroup": "_device_types _get_backend _get_sequence_number_for_group",
    "torch.distributed.distributed_c10d": "_get_default_store _new_process_group_helper _world",
    "torch.distributed.distributed_c10d:_world": "pg_map pg_names",
    "torch.distributed.utils": "_sync_module_states _verify_param_shape_across_processes",
    # a DDP model gets a new reducer after a failure; hangs are named by its methods
    "torch.nn.parallel:DistributedDataParallel": "_ddp_init_helper _update_process_group _get_ddp_logging_data "
    "_comm_hooks _static_graph_delay_allreduce_enqueued _pre_forward _post_forward _sync_buffers _join_config "
    "_remove_autograd_hooks _set_static_graph",
    "torch.distributed.algorithms.join": "_JoinConfig",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.nn:Module": "_parameters _buffers _modules",
    "torch.utils.data.dataloader": "_BaseDataLoaderIter _MultiProcessingDataLoaderIter",
    "torch.utils.data.dataloader:_BaseDataLoaderIter": "_dataset _index_sampler _num_yielded",  # whose batches train
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": "_workers _persistent_workers",
    "numpy": "_core",  # of pickles from numpy 2
    "numpy._core.multiarray": "_reconstruct",
    "IPython.core.interactiveshell:InteractiveShell": "_get_exc_info",
    "ipykernel.kernelbase:Kernel": "_publish_status",  # JupyterLab takes a subshell's end for the kernel's
}
# Of libraries whose own tests are test_autolog.py and test_live.py; of named tuples; modules; torch 2.6's folder.
ELSEWHERE = (
    "_C _distributed_c10d _dynamo _utils _local_step _batches_that_stepped _setup_devices _reply_subshell_for "
    "_repr_mimebundle_ _fields _make _replace _TEMP_DIR _process_emscripten"
)


def _bare(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_all_public_names_and_the_error_tree_are_as_promised_also_for_type_checkers() -> None:
    assert {*nbddp.__all__} == {*_FUNCTIONS, "History", "NbddpError", "Run", "Session", *ERRORS} - ALSO
    assert dir(nbddp) == sorted({*nbddp.__all__, *ALSO, "__version__"})
    assert [name for name in nbddp.__all__ if not getattr(nbddp, name).__doc__] == []
    assert len(dir(nbddp)) <= 45
    with pytest.raises(AttributeError, match=r"^module 'nbddp' has no attribute 'nope'$"):
        _ = nbddp.nope  # type: ignore[attr-defined]
    assert nbddp.NbddpError.__mro__[1] is Exception
    for name in ERRORS:
        assert getattr(nbddp, name).__mro__[1] is nbddp.NbddpError
    assert {*re.findall("[├└]── (\\w+)", str(errors.__doc__))} == ERRORS
    block = next(node for node in TREES[PACKAGE / "__init__.py"].body if ast.unparse(node).startswith("if TYPE_CHECK"))
    imports = [node for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == nbddp._HOME
    assert get_type_hints(Given) == get_type_hints(Options)


_FUNCTIONS = [name for name in SIGNATURES if "." not in name]


def test_every_function_has_its_promised_signature() -> None:
    assert {name: _bare(operator.attrgetter(name)(nbddp)) for name in SIGNATURES} == SIGNATURES
    assert {name for name in dir(nbddp) if inspect.isfunction(getattr(nbddp, name))} == {*_FUNCTIONS} - {"progress"}
    for kind in (nbddp.Run, nbddp.Session):
        own = {f"{kind.__name__}.{name}" for name in _public(kind) if inspect.isfunction(getattr(kind, name))}
        assert own == {name for name in SIGNATURES if name.startswith(f"{kind.__name__}.")} - {"Session.__init__"}
    assert len(inspect.signature(nbddp.run).parameters) <= 3 + 19, "a new option has to replace one"
    assert set(re.findall(r"^    (\w+):", str(inspect.getdoc(nbddp.run)), re.M)) >= Given.__annotations__.keys()


def test_a_name_of_another_version_or_library_is_answered_with_the_one_here() -> None:
    for name, here in [
        *(("session", "Session"), ("reduce", "all_reduce(x, op='mean')"), ("gather", "all_gather")),
        *(("show", "IPython's display"), ("compare", "History.plot(before=)"), ("launch", "run")),
        *(("notebook_launcher", "run"), ("cluster", "run(nnodes=)")),
    ]:
        with pytest.raises(AttributeError, match=re.escape(f"no attribute '{name}'; did you mean {here}?")):
            getattr(nbddp, name)
    for option, here in [
        *(("to", "log_to"), ("init", "init_process_group"), ("listen", "autolog"), ("world_size", "nprocs")),
        *(("num_processes", "nprocs"), ("nproc_per_node", "nprocs"), ("nproc", "nprocs")),
        *(("hosts", "nnodes"), ("min_hosts", "nnodes"), ("num_machines", "nnodes"), ("num_nodes", "nnodes")),
    ]:
        with pytest.raises(TypeError, match=rf"^run\(\) got an .* argument '{option}'; did you mean {here}\?$"):
            nbddp.run(print, **{option: 1, "z": 1})  # type: ignore[arg-type]
    for call, option, here in (nbddp.run_script, "sed", "seed"), (nbddp.Session, "gpu", "gpus"):
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got an .* '{option}'; did you mean {here}\?$"):
            call(**{option: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^loader\(\) got an .* argument 'split_batch'; did you mean split_batches\?$"):
        nbddp.loader([1, 2], split_batch=True)


def test_a_run_has_the_promised_attributes_and_its_values_by_rank_and_rank_0s_value(cell: Cells) -> None:
    done = run(cell("import nbddp\ndef train(): return {'rank': nbddp.rank()}").train, nprocs=3)
    assert (done.values, done.value) == ([{"rank": 0}, {"rank": 1}, {"rank": 2}], {"rank": 0})
    assert (done.state, done.nprocs, done.error) == ("finished", 3, None)
    assert 0 < (seconds := done.seconds) < 60
    assert _public(done) == OF_A_RUN
    assert inspect.isawaitable(done)
    assert len(_public(done.history)) <= 20
    assert _public(nbddp.Session) == {"cell", "close", "logs", "pull", "push", "run"}  # and nprocs, lost
    assert done.seconds == seconds


def test_a_rank_imports_no_front_end_and_no_kernel_side_module(cell: Cells) -> None:
    names = cell("""
        import nbddp
        def train():
            import sys
            nbddp.log(loss=1.0); nbddp.loader([1, 2]); nbddp.rank()
            return sorted(sys.modules)
    """)
    modules = run(names.train).value
    assert not {"ipywidgets", "anywidget", "ipykernel", "matplotlib", "pandas"} & {*modules}
    rooms = tuple(f"nbddp.{room}" for room in ("kernel", "job", "magic", "panel", "loggers.log_to", "history.history"))
    assert [name for name in modules if name.startswith(rooms)] == []
    assert "nbddp.worker.rank" in modules


def test_importing_nbddp_imports_no_torch_ipython_or_numpy() -> None:
    ended = script("import sys, nbddp; print([m for m in ('torch', 'IPython', 'numpy') if m in sys.modules])")
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def test_every_module_has_a_docstring_no_function_over_60_lines_and_no_name_like_utils() -> None:
    for path, tree in TREES.items():
        assert ast.get_docstring(tree) or not tree.body, path
        assert not path.name.startswith("util")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_private_interfaces_of_torch_and_python_are_all_listed_and_still_exist() -> None:
    gone = {}
    for owner, names in PRIVATE.items():
        module, _, name = owner.partition(":")
        if owner.endswith(".py"):  # slow to import
            source, missing = (Path(torch.__file__).parents[1] / owner).read_text(), names.split()
        else:
            found: Any = importlib.import_module(module)
            found = getattr(found, name) if name else found
            found = found() if name in ("ForkServer", "current_process") else found
            missing = [each for each in names.split() if not hasattr(found, each)]
            source = inspect.getsource(found) if missing else ""  # attributes of an object
        gone[owner] = [each for each in missing if not re.search(rf"\b{each}\b", source)]
    assert {owner: names for owner, names in gone.items() if names} == {}
    text = "".join(path.read_text() for path in TREES)
    ours = {*re.findall(r"(?:\bself\.|\bdef |\bclass |^)(_\w+)", text, re.MULTILINE)}
    used = {*re.findall(r"(?<!\bself)\.(_[A-Za-z]\w*)", text)}
    used |= {name for names in re.findall(r"^from .* import (.*)", text, re.MULTILINE) for name in names.split(", ")}
    assert {name for name in used - ours if name.startswith("_")} <= {*" ".join([*PRIVATE.values(), ELSEWHERE]).split()}
