"""Cases of the fault suite: a program, a fault, its moment, and how it's called; and which ends are right."""

import random
import re
from dataclasses import dataclass

ENDLESS = 1_000_000
GRACE_S = 1.0  # after an interrupt; the suite sets it in its kernel

# Programs yield where a fault may come, and return what only the right course of all steps gives.
PROGRAMS = """
import collections, itertools, multiprocessing, os, signal, subprocess, sys, threading, time
import nbddp, torch
from torch import nn
def training(make):
    torch.manual_seed(0)
    model = nbddp.wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    return model, make(model.parameters(), lr=0.01)
def step_of(model, optimizer, batch, step=None):
    optimizer.zero_grad()
    yield
    loss = model(batch).pow(2).mean()
    yield
    loss.backward()
    yield
    optimizer.step()
    nbddp.log(loss=loss.item(), step=step)
def weights(model): return [p.tolist() for p in model.parameters()]
def batch_of(step): return torch.full((4, 4), (step % 100 + nbddp.rank() / 8) / 8)
def trains(steps, make=torch.optim.Adam):
    model, optimizer = training(make)
    for step in range(steps): yield from step_of(model, optimizer, batch_of(step))
    return weights(model)
def trains_with_sgd(steps): return (yield from trains(steps, torch.optim.SGD))
class Data(torch.utils.data.Dataset):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, i): return torch.full((4,), i / 8)
def loads(steps):
    model, optimizer = training(torch.optim.SGD)
    for epoch in range(steps):
        data = Data(32 if steps < ENDLESS else 10**6)  # torch doesn't miss a worker that's killed between epochs
        for batch in nbddp.loader(data, batch_size=8, num_workers=1): yield from step_of(model, optimizer, batch)
    return weights(model)
def resumes(steps):
    model, optimizer = training(torch.optim.Adam)
    state = nbddp.load_snapshot(path)
    if state:
        getattr(model, "module", model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(state["step"] if state else 0, steps):
        yield from step_of(model, optimizer, batch_of(step), step)
        nbddp.save_snapshot(path, model=model, optimizer=optimizer, step=step + 1)
    return weights(model)
def reduces(steps):
    total = 0.0
    for step in range(steps):
        yield
        total += nbddp.all_reduce(torch.ones(3) * (step + nbddp.rank())).sum().item()
        yield
    return total
def gathers(steps):
    for step in range(steps):
        yield
        found = nbddp.all_gather({"rank": nbddp.rank(), "text": "x" * (step % 100)})
        yield
    return found
def waits(steps):
    for step in range(steps):
        yield
        if nbddp.rank() == 0: time.sleep(0.02 if steps < ENDLESS else 1000)
        nbddp.barrier()
        yield
    return steps
def computes(steps):  # holds the GIL in C, so that no interrupt ends it
    for step in range(steps):
        yield
        collections.deque(range(10**5) if steps < ENDLESS else itertools.count(), maxlen=0)
        yield
    return steps
def floods(steps):
    for step in range(steps):
        yield
        for i in range(100): print(f"{i:06d}" + "x" * 500)
        yield
    return steps
def calls(steps):
    for step in range(steps):
        yield
        subprocess.run(["sleep", "0.02" if steps < ENDLESS else "1000"], check=True)
        yield
    return steps
def forks(steps):
    for step in range(steps):
        seconds = 0.02 if steps < ENDLESS else 1000
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,))
        child.start()
        yield
        child.join()
        yield
    return child.exitcode
def spawns(steps):
    from torch.multiprocessing import start_processes
    for step in range(steps):
        yield
        start_processes(sleeps, (0.02 if steps < ENDLESS else 1000,), nprocs=2, start_method="fork")
        yield
    return steps
def sleeps(rank, seconds): time.sleep(seconds)
def refuse(text):
    if "RANK" not in os.environ: raise RuntimeError("not in the notebook")
    return Unloadable(text)
class Unloadable(Exception):
    def __reduce__(self): return refuse, self.args
def harm(fault):
    if fault == "raises": raise ValueError("boom")
    if fault == "raises what the notebook can't unpickle": raise Unloadable("boom")
    if fault == "os._exit": os._exit(3)
    if fault == "sys.exit": sys.exit(3)
    if fault.startswith("SIG"): os.kill(os.getpid(), getattr(signal, fault))
def train(program, steps, fault, ranks, moment):
    value = None
    def work():
        nonlocal value
        value = yield from program(steps)
    hit = nbddp.rank() in ranks
    for number, _ in enumerate(work()):
        if hit and number == moment and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": harm(fault)
    return [value, threading.Lock()] if hit and fault == "result that doesn't pickle" else value
""".replace("ENDLESS", str(ENDLESS))
EVERY = re.findall(r"^def (\w+)\(steps", PROGRAMS, re.MULTILINE)
WITHIN = [  # the function does it to itself
    *("raises", "raises what the notebook can't unpickle", "os._exit", "sys.exit"),
    *("SIGKILL", "SIGTERM", "SIGSEGV", "SIGSTOP", "result that doesn't pickle"),
]
STRUCK = ["interrupt", "rank killed", "fork server killed", "worker killed"]  # by the test
FROM_OUTSIDE = [*STRUCK, "stop", "timeout"]
SURVIVED = {"none", "raises", "raises what the notebook can't unpickle", "sys.exit", "worker killed", "interrupt"}


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        call: "run", "wait=False", "session" (a cell of it), or "%%ddp".
        ranks: that are hit.
        moment: at which yield a rank does it to itself.
        delay_s: from the cell's first line until it's done from outside.
        pauses_s: between interrupts, as many as there are.
    """

    seed: int
    index: int
    call: str
    program: str
    fault: str
    nprocs: int
    steps: int
    ranks: tuple[int, ...]
    moment: int
    delay_s: float
    pauses_s: tuple[float, ...]
    how: str
    grace_s: float
    restarts: int
    timeout_s: float | None

    @property
    def source(self) -> str:
        """The cell; what it returns is in ``value``."""
        args = f"{self.program}, {self.steps}, {self.fault!r}, {self.ranks}, {self.moment}"
        options = f"nprocs={self.nprocs}, device='cpu'"
        in_a_run = f"{options}, show=False, max_restarts={self.restarts}, timeout={self.timeout_s}"
        return {
            "run": f"run = nbddp.run(train, ({args}), {in_a_run})\nvalue = run.value",
            "wait=False": f"run = nbddp.run(train, ({args}), {in_a_run}, wait=False)\nvalue = run.result()",
            "session": f"session = nbddp.Session({options})\nsession.cell(PROGRAMS)\nsession.push(path=path)\n"
            f"session.cell({f'value = train({args})'!r})\nvalue = session.pull('value')",
            "%%ddp": f"get_ipython().run_cell_magic('ddp', '-n {self.nprocs} --device cpu -o value', "
            f'"""value = train({args})""")',
        }[self.call]

    @property
    def reference(self) -> str:
        """The same without a fault."""
        args = f"({self.program}, {self.steps}, '', (), 0)"
        return f"nbddp.run(train, {args}, nprocs={self.nprocs}, device='cpu', show=False)"

    @property
    def may_succeed(self) -> bool:
        """It may end before the fault comes, or be healed by a restart."""
        return self.steps < ENDLESS and (self.fault not in WITHIN or self.restarts > 0)

    @property
    def may_fail(self) -> bool:
        return self.fault not in ("none", *WITHIN) or not self.may_succeed

    @property
    def may_lose_ranks(self) -> bool:
        """A session may end by it; also by a third interrupt."""
        return self.fault not in SURVIVED or len(self.pauses_s) > 2

    def is_right(self, error: str, text: str, traceback: str) -> bool:
        """Whether this is the error that its fault has to end in; of a cell on ranks, it has the name of the rank's."""
        if self.call in ("session", "%%ddp") and self.fault in CELLS_ERRORS:
            kinds, pattern = CELLS_ERRORS[self.fault]
            where = rf"rank {self.ranks[0]} of {self.nprocs}" if len(self.ranks) == 1 else "rank"
            return error in kinds.split() and all(map(re.search, (pattern, where), (f"{error}: {text}", traceback)))
        kinds, pattern = ERRORS["stop, wait=False" if self.fault == "stop" and "=" in self.call else self.fault]
        several = r"(all \d|both) ranks failed, rank \d first|" if len(self.ranks) > 1 else ""
        who = rf"({several}rank ({'|'.join(map(str, self.ranks))}) of {self.nprocs})"
        return error in kinds.split() and re.search(pattern.replace("WHO", who), text, re.DOTALL) is not None


CELLS_ERRORS = {
    "raises": ("ValueError", "boom"),
    "raises what the notebook can't unpickle": ("Unloadable", "boom"),
    "sys.exit": ("SystemExit", "3"),
    # Or the end of its connection, if torch asks is_alive() a moment too early.
    "worker killed": ("RuntimeError EOFError ConnectionResetError", "DataLoader worker|^EOFError|^Connection"),
}
ERRORS = {
    "raises": ("RankError", r"^(WHO failed|WHO): ValueError: boom"),
    "raises what the notebook can't unpickle": ("RankError", "^(WHO failed|WHO): .*boom"),
    "os._exit": ("RankDied", "^WHO ended with exit code 3"),
    "sys.exit": ("RankDied", r"^WHO called sys.exit\(3\)"),
    "SIGKILL": ("RankDied", "^WHO was killed by SIGKILL"),
    "SIGTERM": ("RankDied", "^WHO was terminated by SIGTERM"),
    "SIGSEGV": ("RankDied", r"^WHO crashed in native code \(SIGSEGV\)"),
    "SIGSTOP": ("RunTimeout", "was still running after its timeout"),
    "result that doesn't pickle": ("PayloadError", r"the value that train returned on rank \d can't be sent"),
    "interrupt": ("KeyboardInterrupt", ""),
    "rank killed": ("RankDied LaunchError", "WHO was killed by SIGKILL"),
    "fork server killed": ("RankDied LaunchError", r"exit code 255|couldn't be started"),
    "worker killed": ("RankError", "WHO failed: (.*DataLoader worker|EOFError|Connection)"),
    "stop": ("KeyboardInterrupt", "train was stopped"),
    "stop, wait=False": ("NbddpError", "train is stopped"),
    "timeout": ("RunTimeout", "was still (running|starting) after its timeout"),
}


def draw(seed: int, index: int) -> Case:
    """Return the case of that seed and index: always the same."""
    rng = random.Random(f"{seed}:{index}")
    fault = rng.choice(["none", *WITHIN, *FROM_OUTSIDE, "interrupt", "interrupt", "interrupt"])
    only_runs = fault in ("SIGSTOP", "result that doesn't pickle", "stop", "timeout")
    call = rng.choice(["run", "run", "wait=False", *(["session", "%%ddp"] if not only_runs else [])])
    endless = (fault in FROM_OUTSIDE and rng.random() < 0.7) or fault == "timeout"
    in_a_cell = call in ("session", "%%ddp")
    # A session waits 10 s for ranks that no interrupt ends, and 30 s for the children of one that leaves.
    deaf = {"computes", "floods", *(["forks"] if call == "session" else [])} if in_a_cell else set()
    nprocs = rng.choice([1, 2, 2, 3])
    ranks = tuple(range(nprocs)) if fault in WITHIN and rng.random() < 0.2 else (rng.randrange(nprocs),)
    heals = not endless and not in_a_cell and fault not in ("SIGSTOP", "interrupt", "result that doesn't pickle")
    return Case(
        seed=seed,
        index=index,
        call=call,
        program="loads" if fault == "worker killed" else rng.choice([each for each in EVERY if each not in deaf]),
        fault=fault,
        nprocs=nprocs,
        steps=ENDLESS if endless else 4,
        ranks=ranks,
        moment=rng.randrange(8),
        delay_s=rng.choice([rng.uniform(0, 0.06), rng.uniform(0, 0.5)]),
        pauses_s=tuple(rng.choice([0.0, 0.01, 0.1]) * rng.random() for _ in range(rng.choice([1, 1, 2, 3]))),
        how=rng.choice(["kill", "killpg"]),
        grace_s=rng.choice([0.0, GRACE_S]),
        restarts=rng.choice([0, 1, 2]) if heals else 0,
        timeout_s={"SIGSTOP": 1.5, "timeout": rng.choice([0.05, 0.2, 0.6])}.get(fault),
    )
