"""What a process inherits, as a plain child of a notebook and as its ranks report it; and a notebook that asks both."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

# Runs in the notebook, in its plain children and in its ranks.
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
        "affinity": sorted(os.sched_getaffinity(0)),
        "TMPDIR": tempfile.gettempdir(),
    }


def effects():
    """Of a process with torch: what environment variables did that are read when something starts or is imported."""
    import os, sys
    from threadpoolctl import threadpool_info
    import numpy, torch, torch.distributed, torch._dynamo
    blas = [found["num_threads"] for found in threadpool_info() if found["internal_api"] == "openblas"]
    return {
        "PYTORCH_JIT": torch.jit._state._enabled.enabled,
        "TORCH_DISTRIBUTED_DEBUG": str(torch.distributed.get_debug_level()),
        "TORCHDYNAMO_VERBOSE": torch._dynamo.config.verbose,
        "TORCH_LOGS": torch._logging._internal.log_state.is_artifact_enabled("graph_breaks"),
        "PYTHONHASHSEED": hash("a name") if os.environ.get("PYTHONHASHSEED", "random") != "random" else None,
        "PYTHONOPTIMIZE": sys.flags.optimize,
        "PYTHONDEVMODE": sys.flags.dev_mode,
        "PYTHONWARNINGS": sys.warnoptions,
        "PYTHONUTF8": sys.flags.utf8_mode,
        "OPENBLAS_NUM_THREADS": blas if "OPENBLAS_NUM_THREADS" in os.environ else None,
    }
'''

_NOTEBOOK = '''
import contextlib, io, json, os, resource, subprocess, sys, threading
import nbddp


def child(call, env={}):
    """What that call gives in a plain child of this thread."""
    source = LOOK + f"import json; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ranks(fn, *args, **options):
    """What it gives in each of two ranks, as JSON does, and what the first printed."""
    run = nbddp.run(fn, args, nprocs=2, device="cpu", init=False, show=False, **options)
    return json.loads(json.dumps(run.values)), run.logs(0)


def answer(source):
    """Run a cell on a thread of its own: nice value and affinity are a thread's, and end with it."""
    answers = []
    def run_cell():
        try:
            exec(source, globals())
            answers.append({"value": globals()["value"]})
        except BaseException as error:
            answers.append({"error": repr(error)})
    umask, environ = os.umask(0o022), dict(os.environ)
    os.umask(umask)
    limits = {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")}
    thread = threading.Thread(target=run_cell)
    thread.start()
    thread.join()
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environ)
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), limit)
    return answers[0]


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
'''


class Program:
    """A program that runs cells, each of which leaves its environment, umask and limits as they were."""

    def __init__(self) -> None:
        source = f"LOOK = {LOOK!r}\n{LOOK}\n{_NOTEBOOK}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: Any = subprocess.Popen([sys.executable, "-c", source], text=True, **pipes)

    def value(self, cell: str) -> Any:
        """Run it; returns what it has called ``value``."""
        self._process.stdin.write(json.dumps(cell) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def close(self) -> None:
        """End it, and with it what it has started."""
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()
