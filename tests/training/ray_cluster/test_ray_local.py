"""A run that starts a Ray of its own."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("ray")
SCRIPT = Path(__file__).parents[2] / "support" / "ray_local_run.py"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_a_run_of_its_own_listens_on_the_loopback_interface_alone_and_leaves_nothing_behind():
    from tests.support.ray_local_run import processes

    mark = f"mark-{uuid.uuid4().hex}"
    paths = os.pathsep.join(sys.path)
    environment = os.environ | {
        "RAY_RUN_MARK": mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths,
        "RAY_worker_niceness": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["right"]
    assert len(said["listening"]) > 3  # the caller, the server, workers, and Ray's own
    assert set(said["listening"]) <= LOOPBACK
    while processes(mark):  # for ever: pytest has a limit of its own
        time.sleep(0.1)


def test_the_server_and_its_shards_import_no_torch():
    actors = "dovetail.training.backends.ray.server, dovetail.training.backends.ray.shard"
    check = f"import sys, {actors}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
