"""Two ranks on two nodes of a local Ray: nbddp beside Ray Train, from the call to the first metric, and to an error."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap

from tests.benchmarks.measure import Table
from tests.benchmarks.settings import Settings
from tests.hosts.rig import ROOT

METRIC, ERROR = "to the first metric", "from an exception to the error"
NAMES = ("nbddp, cluster('ray') kept", "nbddp, with cluster('ray')", "Ray Train, TorchTrainer")
NEEDS = ("ray", "pyarrow", "pandas")  # the last two are Ray Train's
LIMIT_S = 900.0

# Prints a line for each value: candidate, column, seconds.
_PROGRAM = """
    import json, os, sys, time
    import nbddp, torch
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    FOLDER, ROUNDS, (KEPT, MADE, TRAIN), (METRIC, ERROR) = json.loads(sys.argv[1])
    OPTIONS = {"device": "cpu", "show": False, "nprocs": 1}

    def say(*values):
        print(json.dumps(values), flush=True)

    def note(name):
        with open(os.path.join(FOLDER, name), "w") as file: file.write(str(time.time()))

    def noted(name):
        with open(os.path.join(FOLDER, name)) as file: return float(file.read())

    def work():
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == 2
        return total.item()

    def fail(rank):
        work()
        if rank == 1:
            note("raised")
            raise ValueError("on purpose")
        time.sleep(1000)

    def with_nbddp():
        nbddp.log(loss=work())

    def failing_with_nbddp():
        fail(nbddp.rank())

    def with_train():
        loss = work()
        if ray.train.get_context().get_world_rank() == 0: note("reported")
        ray.train.report({"loss": loss})

    def failing_with_train():
        fail(ray.train.get_context().get_world_rank())

    def metric(hosts):
        run = hosts.run(with_nbddp, wait=False, **OPTIONS)
        while not len(run.history["loss"].steps if "loss" in run.history else ()): time.sleep(0.001)
        seen = time.time()
        run.wait()
        return seen

    def error(act):
        try:
            act()
        except Exception as caught:
            assert "on purpose" in str(caught), caught
            return time.time() - noted("raised")
        raise AssertionError("no error")

    def trainer(fn):
        config = RunConfig(storage_path=FOLDER, failure_config=FailureConfig(max_failures=0))
        scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}, placement_strategy="STRICT_SPREAD")
        return TorchTrainer(fn, torch_config=TorchConfig(backend="gloo"), scaling_config=scaling, run_config=config)

    def fit(fn):
        trainer(fn).fit()

    def once_nbddp():
        began = time.time()
        with nbddp.cluster("ray", nodes=2, address=ADDRESS) as hosts:
            say(MADE, METRIC, metric(hosts) - began)
            say(MADE, ERROR, error(lambda: hosts.run(failing_with_nbddp, **OPTIONS)))

    def once_train():
        began = time.time()
        fit(with_train)
        say(TRAIN, METRIC, noted("reported") - began)
        say(TRAIN, ERROR, error(lambda: fit(failing_with_train)))

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    ADDRESS = cluster.address
    ray.init(address=ADDRESS, log_to_driver=False, logging_level="ERROR")
    for _ in range(ROUNDS):
        once_nbddp()
        once_train()
    with nbddp.cluster("ray", nodes=2, address=ADDRESS) as hosts:
        hosts.run(work, **OPTIONS)
        for _ in range(ROUNDS):
            began = time.time()
            say(KEPT, METRIC, metric(hosts) - began)
            say(KEPT, ERROR, error(lambda: hosts.run(failing_with_nbddp, **OPTIONS)))
    ray.shutdown()
    cluster.shutdown()
"""


def measure(settings: Settings) -> list[Table]:
    """Both on the same Ray, turn by turn; nbddp also on a cluster that is kept. Left out where Ray is not installed."""
    table = Table("Two ranks on two nodes of Ray, and a metric; one raises, the other waits", (METRIC, ERROR))
    settings.keep(table)
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        table.notes.append(f"Left out: {', '.join(missing)} not installed (pip install 'ray[train]')")
    else:
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # a short name, for Ray's sockets
            _fill(table, folder, settings.rounds)
    settings.show(table)
    return [table]


def _fill(table: Table, folder: str, rounds: int) -> None:
    given = json.dumps([folder, rounds, NAMES, (METRIC, ERROR)])
    patient = {"RAY_raylet_start_wait_time_s": "120", "RAY_agent_register_timeout_ms": "120000"}
    own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    environ = {**os.environ, **patient, **own}
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder, env=environ)
    for line in done.stdout.splitlines():
        if line.startswith("["):
            name, column, seconds = json.loads(line)
            table.add(name, seconds, column)
    if done.returncode:
        table.notes.append(f"The program ended with {done.returncode}: {done.stderr[-1000:]}")
