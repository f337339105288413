"""One small cluster for all tests of the backend, on the loopback interface."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.server_faults import Lives

ray = pytest.importorskip("ray")

STORE_BYTES = 80 << 20
FAST = {  # a lost node is noticed in some seconds, a slow one is not taken for lost
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 10,
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A server that a busy machine takes its time to start is not thought to have no node."""
    from dovetail.training.backends.ray import transport

    monkeypatch.setattr(transport, "SILENCE_SECONDS", 600.0)


@pytest.fixture(scope="session")
def cluster():
    """A head node, to which the caller is connected."""
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    here = str(Path(__file__).parents[3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))
        patch.setenv("OMP_NUM_THREADS", "1")
        # Ray would let whatever else runs on the cores, such as other tests, go before its actors.
        patch.setenv("RAY_worker_niceness", "0")
        head = {"num_cpus": 2, "include_dashboard": False, "_system_config": FAST}
        shared = {"object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.1"}
        found = Cluster(initialize_head=True, head_node_args=head | shared)
        try:
            ray.init(address=found.address, log_to_driver=False, configure_logging=False)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """Has each life of the server end at a (crash point, count) of its own."""
    from dovetail.training.backends.ray import transport
    from tests.support.ray_runs import dying_server

    def ends(*crashes):
        lives = Lives(tmp_path / "lives.json", crashes)
        monkeypatch.setattr(transport, "ParameterServer", dying_server(lives.path))

    return ends


@pytest.fixture
def add_node(cluster):
    """Adds nodes that have a resource of that name, and so many GPUs, which need not be there. The
    nodes are gone after the test, and the cluster knows it: no later actor is given to them."""
    nodes = []

    def add(resource, gpus=0):
        node = cluster.add_node(
            num_cpus=2,
            num_gpus=gpus,
            resources={resource: 1},
            object_store_memory=STORE_BYTES,
            node_ip_address="127.0.0.1",
        )
        nodes.append(node)
        return node

    yield add
    for node in nodes:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=False)
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        time.sleep(0.1)
