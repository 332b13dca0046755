"""A Ray of several nodes on this machine, until stdin ends; prints its address."""

import os
import socket
import sys
from typing import Any

from ray._private import services
from ray.cluster_utils import Cluster

_start_raylet = services.start_raylet


def _start(redis: str, gcs: str, node_id: str, *args: Any, **kwargs: Any) -> Any:
    """A raylet ends if its dashboard's agent, which we don't need, hasn't written this within a minute."""
    session_dir = args[8]
    for port in ("metrics_agent", "metrics_export", "dashboard_agent_listen"):
        with open(os.path.join(session_dir, f"{port}_port_{node_id}"), "w") as file:
            file.write("-1")
    return _start_raylet(redis, gcs, node_id, *args, **kwargs)


def _node() -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 600 << 20}
    return {**size, "include_dashboard": False, "runtime_env_agent_port": port}


if __name__ == "__main__":
    services.start_raylet = _start
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the GPUs are made up
    cluster = Cluster(initialize_head=True, head_node_args={**_node(), "no_monitor": True})
    for _ in range(1, int(sys.argv[1])):
        cluster.add_node(**_node())
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
