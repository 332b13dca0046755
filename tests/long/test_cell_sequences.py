"""A session is one kernel: random sequences of cells show and leave on rank 0 what they do in a plain kernel.

``NBDDP_CASES=500 NBDDP_SEED=7 python -m pytest tests/long/test_cell_sequences.py --timeout=0`` tries that many new ones.
"""

# ruff: noqa: E501 - a cell is one line
import difflib
import os
import random
import re
from pathlib import Path
from typing import Any

from tests.support import Notebook, Reply, without_colours

CASES, SEED = int(os.environ.get("NBDDP_CASES", "3")), int(os.environ.get("NBDDP_SEED", "0"))
CELLS = 12  # of a sequence

# The names that cells bind: n, m numbers; xs, ys lists; d a dict; f, g functions; K, L classes; k, q objects.
BEGIN = """
import asyncio, collections, contextlib, copy, dataclasses, functools, importlib, itertools, math, pickle, random, sys
import numpy as np, torch
from IPython.display import HTML, Markdown, clear_output, display
n, m, xs, ys, d = 2, 5, [3, 1, 2], [], {"a": 1}
def f(x): return x + n
def g(x, *more, key=xs): return [x, *more, *key]
class K:
    made = []
    def __init__(self, v=0): self.v = v; type(self).made.append(v)
    def __repr__(self): return f"K({self.v})"
class L(K): pass
k, q = K(1), L(2)
"""
WORKS = [
    # names
    "{v} = {i}", "{v} += {i}\n{v}", "del {any}", "xs = ys", "globals()['{v}'] = {i}",
    "exec('{v} = {i}; fresh_{i} = [{i}]')\neval('{v}')", "get_ipython().user_ns['{v}'] = {i}",
    "get_ipython().run_cell('{v} = {i}');",
    "locals() is globals(), __name__, vars() is sys.modules['__main__'].__dict__",
    "n: int = {i}\n__annotations__",
    # functions, closures, generators
    "def f(x): return x * {i} + n", "def g(x, *more, key=xs): return [x, *more, *key, {i}]",
    "def counter(start):\n    def count():\n        nonlocal start\n        start += {i}\n        return start\n    return count\n"
    "count = counter(n)\nagain = count\ncount()",
    "count(), again()",
    "def change():\n    global {v}, made_by_change\n    {v} = made_by_change = {i}\nchange()",
    "gen = (x * n for x in range({i}, 9))\nnext(gen)", "next(gen)",
    "@functools.cache\ndef cached(x):\n    print('computed', x)\n    return x + n\ncached({i}), cached({i})",
    "cached({i})", "f({i}), g({v})",
    # classes and objects
    "class K:\n    made = []\n    def __init__(self, v={i}): self.v = v\n    def __repr__(self): return f'K{i}({{self.v}})'\nk",
    "class L(K):\n    def __len__(self): return {i}\nq = L(n)\nlen(q), isinstance(q, K), isinstance(k, K)",
    "K.made.append({i})\nL.made", "k.v = q.v = xs\nk, q", "k = K({i})\nk",
    "@dataclasses.dataclass\nclass Point:\n    x: int = {i}\n    y: list = dataclasses.field(default_factory=list)\np = Point()\np",
    "Pair = collections.namedtuple('Pair', 'left right')\npair = Pair(xs, {i})\npair",
    "pickle.loads(pickle.dumps(k)).v, type(pickle.loads(pickle.dumps(k))) is K",
    "c = copy.deepcopy([k, k, xs])\nc[0] is c[1], c",
    "class Shown:\n    def _repr_html_(self): return '<i>{i}</i>'\nShown()",
    "class Odd:\n    def __repr__(self): raise ValueError('no repr {i}')\nodd = Odd()",
    # modules
    "from made import *\nvalue, helper(n)", "import made\nmade.items.append({i})\nmade.items",
    "importlib.reload(made).value", "WRITE", "import made as alias\nalias is made, made.helper({i})",
    "del sys.modules['made']\nimport made\nmade.items", "%run program.py {i}\nfrom_program",
    "%run -i program.py\nfrom_program", "%run fails.py",
    # comprehensions, walrus, control flow
    "xs = [x * n for x in range({i}) if x % 2]\nxs", "[(last := x) for x in range({i})]\nlast",
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    n = {i}\nfinally:\n    m = n\n'e' in globals()",
    "try: xs[99]\nexcept IndexError as e: kept = e\nkept",
    # changes in place
    "xs.append({i})", "xs += ys; xs is ys", "d['xs'] = xs; d['d'] = d\nlen(d)", "d.clear()",
    "t = torch.arange({i}.); u = t[1:]; u += 1\nt",
    "arr = np.arange(6).reshape(2, 3); row = arr[0]; row[:] = {i}\narr",
    "random.seed({i}); torch.manual_seed({i}); np.random.seed({i})\nrandom.random(), torch.rand(1), np.random.rand()",
    # what cells show
    "{v}", "{v};", "xs\nd", "print({v}, end='')", "print('é 😀', {i})\n'ü'", "display({v}, xs)",
    "display(HTML('<b>{i}</b>')); display(Markdown('*{i}*'))",
    "handle = display({i}, display_id='shown {i}')\nhandle.update(n)",
    "print('before'); clear_output(); print('after {i}')", "'x' * 2000", "{{x: 'y' * 30 for x in range(12)}}",
    "0.1 + 0.2, 1e300 * {i}", "import pandas; pandas.DataFrame({{'x': xs}})",
    # the last values
    "_", "_, __, ___", "_i, _ii", "len(In), In[-2:]", "sorted(Out)[-3:], Out.get({i})", "Out[sorted(Out)[-1]]",
    "_oh is Out, _ih is In, get_ipython().execution_count", "_ = {i}", "%history -l 1", "%recall -1", "%rerun -l 1",
    # magics, shell
    "%time {v} = {i}", "%%time\n{v} = f({i})\nprint('timed', {v})\n{v}", "%timeit -n1 -r1 {v}",
    "%%capture cap\nprint('captured {i}')\ndisplay({v})\n{v}", "cap.stdout, len(cap.outputs)", "cap.show()",
    "%precision 3\n0.1 + {i}", "%pprint", "%who", "%whos list", "%xdel {v}", "%reset_selective -f ^{v}$",
    "%reset -f out", "%reset -f in",
    "%env NBDDP_TRIED={i}\nimport os; os.environ['NBDDP_TRIED']",
    "!echo {i} $NBDDP_TRIED {{n}} $xs", "out = !echo a; echo {i}\nout.n, out", "%%bash\necho bash {i}",
    "%%bash --out captured\necho bash {i}", "%%html\n<p>{i}</p>", "%%python\nprint('another Python', {i})",
    "%cd -q sub\n%pwd", "%cd -q ..\n%pwd", "%xmode {mode}", "%alias say echo said", "%say {i}", "f?", "f??", "K?",
    "nothing_there?", "%pdef g", "%%nosuch\n1",
    "from IPython.core.magic import register_line_magic\n@register_line_magic\ndef twice(line): return line * 2\ndel twice",
    "after = %twice x{i}\nafter", "%config TerminalInteractiveShell", "%load program.py",
    "get_ipython().ev('n'), get_ipython().ex('m = {i}'), m", "import inspect; inspect.getsource(g)", "%automagic",
    "pwd", "{v}; None", "%sql", "%tb", "%page {v}",
    # await
    "async def later(x):\n    await asyncio.sleep(0)\n    return x + {i}\nawait later(n)",
    "async def some():\n    for x in range({i}): yield x\n[x async for x in some()]",
    "await asyncio.gather(later(1), later(2))",
    "from __future__ import annotations\ndef hinted(x: nowhere): pass\nhinted.__annotations__",
    "# a comment only {i}", "", "   \n", "  {v} = {i}\n  {v}", ">>> {v}\n{i}", "In [3]: {v}",
]  # fmt: skip
FAILS = [
    "{v} = {i}; 1 / 0", "print('before'); nowhere_{i}",
    "def inner(): raise ValueError('inner {i}')\ndef outer():\n    x = n\n    inner()\nouter()",
    "outer()",
    "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('from {i}') from e",
    "try: 1 / 0\nfinally: {v} = {i}; nowhere", "assert n is None, 'not {i}'",
    "class Own(Exception):\n    def __str__(self): return 'own {i}'\nraise Own",
    "x = = {i}", "if n:\nprint({i})", "print('never'); return {i}", "await nowhere({i})", "import nowhere_{i}",
    "raise KeyboardInterrupt('{i}')", "sys.exit({i})",
    "raise ExceptionGroup('two', [ValueError({i}), TypeError('t')])",
    "next(iter([]))", "display(n); odd", "torch.ones(2) @ torch.ones({i} + 3)", "xs = [1 / x for x in [1, {i}, 0]]",
    "e = ValueError('noted'); e.add_note('note {i}'); raise e", "%time 1 / 0", "%%capture cap\nprint('lost'); 1 / 0",
    "'unclosed", "f(1, 2, 3, {i})",
]  # fmt: skip
PROBE = """
import re, sys, types
GIVEN = {"nbddp", "torch", "dist", "rank", "world_size", "device"}
IPYTHONS = {"In", "Out", "exit", "quit", "open", "get_ipython"}
def give(shell):  # a kernel what a session has
    import nbddp, torch, torch.distributed as dist
    given = dict(nbddp=nbddp, torch=torch, dist=dist, rank=0, world_size=2, device=torch.device("cpu"))
    if not type(shell).__module__.startswith("nbddp"): shell.push(given, interactive=False)
def show(names):
    seen, alive = {}, []
    def tell(value, path):
        if isinstance(value, (int, float, complex, str, bytes, type(None), type(...))): return repr(value)
        if id(value) in seen: return f"<same as {seen[id(value)]}>"
        seen[id(value)] = path
        alive.append(value)
        each = lambda items: {str(key): tell(item, f"{path}.{key}") for key, item in items}
        kind = type(value).__name__
        if isinstance(value, dict):
            return kind, [(tell(key, path), tell(item, f"{path}[{key!r}]")) for key, item in value.items()]
        if isinstance(value, (list, tuple)): return kind, [tell(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)): return kind, sorted(map(repr, value))
        if isinstance(value, types.FunctionType) and value.__module__ in ("__main__", "made"):
            cells = zip(value.__code__.co_freevars, (cell.cell_contents for cell in value.__closure__ or ()))
            return kind, value.__qualname__, value.__module__, each(cells), repr(value.__code__.co_consts[:1]), tell(
                [value.__defaults__, value.__kwdefaults__, value.__dict__], path), value.__globals__ is names
        if isinstance(value, type) and value.__module__ in ("__main__", "made"):
            return kind, value.__qualname__, [base.__name__ for base in value.__mro__], each(
                (key, item) for key, item in vars(value).items() if not key.startswith("__"))
        if isinstance(value, types.ModuleType):
            own = vars(value).items() if value.__name__ == "made" else ()
            return kind, value.__name__, each((key, item) for key, item in own if not key.startswith("__"))
        if isinstance(value, types.GeneratorType):
            return kind, value.gi_frame and {k: v for k, v in value.gi_frame.f_locals.items() if k != ".0"}
        if type(value).__module__ in ("__main__", "made"):
            return kind, tell(type(value), path), each(getattr(value, "__dict__", {}).items())
        try: return kind, re.sub(r"0x[0-9a-f]+", "0x", repr(value))
        except Exception as error: return kind, repr(error)
    for name, value in sorted(names.items()):
        if name in IPYTHONS or name.startswith("_") or name in GIVEN and name != "torch": continue
        print("STATE", name, tell(value, name))
    print("STATE", {name: type(names.get(name)).__name__ for name in ("_", "__", "___")})
    print("STATE", [sorted(names["Out"]), len(names["In"]), names["In"][-10:], names["_dh"]])
    print("STATE", sorted(name for name in names if name.startswith("_") and not name.startswith("__")))
    print("STATE", sorted(name for name in sys.modules if name in ("made", "program")), sys.path[:2], sys.argv[1:][:0])
"""
CLEAN = """
import os, sys
get_ipython().run_line_magic("xmode", "Context")
sys.modules.pop("made", None)
os.chdir({folder!r})
os.environ.pop("NBDDP_TRIED", None)
get_ipython().reset(new_session=False)
__import__("nb_probe").give(get_ipython())
"""
# Times, addresses; the names of cells' files, which have the kernel's PID; what !echo ends lines with; a class that's
# replaced, until it's collected.
MASKED = re.compile(
    r"(CPU times|Wall time).*|[\d.]+ \w*s ± .*|0x[0-9a-f]+|"
    r"[\w/.-]{0,99}(ipykernel_\d+/\d+\.py|<ipython-input.*?>)|\d+\.py|\r|(?<= L), L"
)
FRAME = re.compile(r"(Cell In\[\d+\]|File [^\s:]+)")


def sequence(rng: random.Random) -> list[str]:
    cells = [BEGIN]
    for _ in range(CELLS):
        template = rng.choice(FAILS if rng.random() < 0.2 else WORKS)
        last = [each for each in cells if each.strip()][-1]
        if re.match("%(history|re(run|call))", template) and re.search("async|await|%re|%time", last):
            continue  # a kernel's loop is running, its history is on the disk, and it would rerun itself forever
        names = {"v": rng.choice("nm"), "i": rng.randrange(1, 6), "any": rng.choice(["n", "xs", "f", "K", "k", "d"])}
        cells.append(template.format(mode=rng.choice(["Plain", "Context", "Verbose"]), **names))
    return cells


def prepare(folder: Path, value: int) -> None:
    """Write the module, so that its size says that it's another one, and the programs."""
    made = f"value, items = {value}, []\ndef helper(x): return x + {value}\n__all__ = ['value', 'helper']\n"
    (folder / "made.py").write_text(made + "#" * value)
    (folder / "program.py").write_text("import sys\nfrom_program = sys.argv[1:], __name__, 'xs' in globals()\n")
    (folder / "fails.py").write_text("def fail(): return 1 / 0\nkept_from_fails = 3\nfail()\n")


def shown(reply: Reply) -> dict[str, Any]:
    """What the cell shows; of a traceback the frames and the error.

    IPython doesn't find the file of a kernel's cell, so it shows lines of a frame without marks, and sometimes not the
    one that failed. An error in how a magic is used goes to stderr.
    """
    lines = without_colours(reply.traceback).partition("\n\nrank")[0].splitlines()
    is_usage = reply.ename == "UsageError"
    said = {
        "text": reply.shown + is_usage * reply.traceback.partition("\n")[0],
        "data": repr(reply.data),
        "payload": repr(reply.payload),
        "error": f"{reply.ename}: {'' if is_usage else reply.evalue}",
        "frames": repr([each[1] for line in lines if (each := FRAME.match(line))]),
    }
    if "Group" in reply.shown + reply.ename or "NoneType: None" in reply.shown:  # a kernel's go to stderr, %tb is empty
        said["error"] = ""
        said["text"] = re.split("  \\+ Exception Group|NoneType: None", said["text"])[0]
    if "ime: " in reply.shown or "per loop" in reply.shown:  # ranks take different times
        said["text"] = re.sub(r"(?m)^\[rank 1\].*\n", "", said["text"])
    return {what: re.sub(r"\s+$", "", MASKED.sub("", text), flags=re.M) for what, text in said.items()}


def difference(session: Notebook, plain: Notebook, folder: Path, cells: list[str]) -> str:
    """Run the cells in both; returns what the first cell that differs shows."""
    prepare(folder, 1)
    clean = CLEAN.format(folder=str(folder))
    session.ok(clean)
    plain.ok(clean)
    for number, cell in enumerate([*cells, "__import__('nb_probe').show(globals())"]):
        if cell.startswith("WRITE"):
            prepare(folder, number + 1)
            continue
        other = plain.begin(cell)
        mine, its = shown(session.cell(cell)), shown(plain.end_of(other))
        for what in mine:
            if mine[what] != its[what]:
                before = "\n---\n".join(cells[: number + 1])
                lines = its[what].splitlines(), mine[what].splitlines(), "kernel", "session"
                return "\n".join([before, f"=== {what}", *difflib.unified_diff(*lines, n=0, lineterm="")])
    return ""


def test_random_sequences_of_cells_do_what_they_do_in_one_kernel(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "nb_probe.py").write_text(PROBE)
    with Notebook(cwd=tmp_path) as session, Notebook(cwd=tmp_path) as plain:
        session.ok("%load_ext nbddp")
        session.ok("%ddp open -n 2 --device cpu")
        plain.ok("None")
        plain.ok("None")
        for case in range(CASES):
            seed = SEED * 10_000 + case
            found = difference(session, plain, tmp_path, sequence(random.Random(seed)))
            assert not found, f"seed {seed}\n{found}"
