"""What a process inherits: shown by a plain child of the notebook and by a rank alike, to be compared."""

from __future__ import annotations

LOOK = '''
def look(folder):
    """Of a process: what the one that started it had at that moment."""
    import os, resource, tempfile, time
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        path = inside + "/file"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o777))
        mode = os.stat(path).st_mode & 0o777
    limits = {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")}
    return {
        "localtime": list(time.localtime(1751328000)[:6]),
        "tzname": list(time.tzname),
        "mode of a new file": oct(mode),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": {name: list(pair) for name, pair in limits.items()},
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "TMPDIR": tempfile.gettempdir(),
    }


def effects():
    """Of a process with torch: what environment variables did that are read when something starts or is imported."""
    import os, sys, warnings
    import numpy, torch, torch.distributed as dist
    return {
        "PYTORCH_JIT": torch.jit._state._enabled.enabled,
        "TORCH_DISTRIBUTED_DEBUG": str(dist.get_debug_level()),
        "TORCHDYNAMO_VERBOSE": sys.modules["torch._dynamo.config"].verbose if "torch._dynamo" in sys.modules else None,
        "PYTHONHASHSEED": hash("a name") if os.environ.get("PYTHONHASHSEED", "random") != "random" else None,
        "PYTHONOPTIMIZE": sys.flags.optimize,
        "PYTHONDEVMODE": sys.flags.dev_mode,
        "PYTHONWARNINGS": [o for o in sys.warnoptions if o.endswith("Warning")],
        "PYTHONUTF8": sys.flags.utf8_mode,
        "OPENBLAS_NUM_THREADS": _blas_threads(),
    }


def _blas_threads():
    from threadpoolctl import threadpool_info
    return [found["num_threads"] for found in threadpool_info() if found["internal_api"] == "openblas"]


def child(call):
    """What that call gives in a plain child of this process."""
    import json, subprocess, sys
    source = SOURCE + f"\\nimport json; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def ranks(fn, *args, **options):
    """What it gives in each of two ranks, as JSON does, and what they printed."""
    import json, nbddp
    run = nbddp.run(fn, args, nprocs=2, device="cpu", init=False, show=False, **options)
    return json.loads(json.dumps(run.values)), run.logs(0)
'''
LOOK = f"SOURCE = {LOOK!r}\n{LOOK}"
