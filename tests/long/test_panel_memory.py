"""A kernel's memory grows by the history of its runs alone, whatever the views have drawn."""

from tests.support import Notebook

FOLLOW = """
import gc, sys, time, tracemalloc, types
from nbddp.kernel.run import Run
from nbddp.kernel.settings import Options
from nbddp.messages import Settings
from nbddp.panel import html, live, svg, widget
now = 0.0
clock = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: now})
live.time = widget.time = clock
run = Run(Settings("train", 2), Options())
run._views += [live.view_for(run._source(), kind) for kind in KINDS]
run.state = "running"
def follow(minutes):
    global now
    for _ in range(minutes * 60):
        now += 1
        for rank in range(2):
            steps = [round(now * 20) + n for n in range(20)]
            records = [[now + n / 20, n, False, "mean", 1, {"loss": n % 7, "acc": n % 5}] for n in steps]
            run._recording.add(rank, [*records, {"bar": [0, "epoch", 1, 5], "time": now}])
        run._draw()
def kept():
    blocks = [block for metric in run._recording.metrics.values() for block in metric.blocks]
    return sum(array.nbytes for block in blocks for array in block.rows._arrays.values())
def used():
    time.sleep(0.5)  # for what the kernel still sends
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - kept()
tracemalloc.start()
follow(1)
history, before = kept(), used()
follow(2)
print(kept() - history, used() - before)
tracemalloc.stop()
run._conclude("finished")
run._draw()
live.time = widget.time = time
"""


def test_a_kernels_memory_grows_by_the_history_alone(notebook: Notebook) -> None:
    shown = notebook.ok(f"KINDS = ['panel', 'picture', 'text']{FOLLOW}", timeout_s=110.0).shown
    history, rest = map(int, next(line for line in shown.splitlines() if line[0].isdigit()).split())
    assert history > 300_000
    assert abs(rest) < 100_000, shown  # a picture has 20 kB
