"""Which command listens on what: none of ours on anything, a group of gloo's on loopback alone."""

import sys
from pathlib import Path

import pytest

from tests.support.listening import watch

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net")

MODEL = "tests.support.small_models:branches"
TRAINED = "tests.support.trained_models:quadrants"
QUICK = ("--batch", 24, "--workers", 2, "--epochs", 2)


def dovetail(folder, *arguments):
    watched = watch("-m", "dovetail", *arguments, folder=folder)
    assert watched.status == 0, watched.output
    return watched


LISTENING = """
import os, socket, time
listeners = [socket.socket(), socket.socket(type=socket.SOCK_DGRAM),
             socket.socket(socket.AF_UNIX)]
for listener, address in zip(listeners, [("127.0.0.1", 0), ("127.0.0.1", 0), "here.socket"]):
    listener.bind(address)
listeners[0].listen(), listeners[2].listen()
if not os.fork():
    [listener.close() for listener in listeners[:2]]
time.sleep(1)
"""


def test_what_listens_is_seen_in_every_process(tmp_path):
    watched = watch("-c", LISTENING, folder=tmp_path)
    assert {kind for kind, _ in watched.sockets} == {"tcp", "udp", "unix"}
    assert ("unix", "here.socket") in watched.sockets
    assert watched.processes == 2


def test_planning_running_and_scheduling_listen_on_nothing(tmp_path):
    planned = dovetail(tmp_path, "plan", MODEL, "--machine", "here/2", "--placer", "heft",
                       "--no-compile", "--out", "plan.json")  # fmt: skip
    ran = dovetail(tmp_path, "run", "plan.json", MODEL, "--steps", 2)
    scheduled = dovetail(tmp_path, "schedule", MODEL, "--scheduler", "greedy", "--rounds", 2)
    assert planned.sockets == ran.sockets == scheduled.sockets == set()
    # One of them is the server that forks the others.
    assert min(planned.processes, ran.processes) > 2


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_training_and_predicting_listen_on_nothing(backend, tmp_path):
    trained = dovetail(tmp_path, "train", TRAINED, "--backend", backend, *QUICK,
                       "--out", "weights.pt")  # fmt: skip
    predicted = dovetail(tmp_path, "predict", TRAINED, "weights.pt", "validation", "--evaluate",
                         "--backend", backend)  # fmt: skip
    assert trained.sockets == predicted.sockets == set()
    if backend == "processes":
        assert min(trained.processes, predicted.processes) > 3


def test_learning_with_controllers_listens_on_nothing(tmp_path):
    learned = dovetail(
        tmp_path, "learn", "one", MODEL, "--machine", "2 x p100 + haswell", "--trials", 16,
        "--setting", "trials=8", "--controllers", 2, "--out", "policy.safetensors",
    )  # fmt: skip
    assert learned.sockets == set()
    assert learned.processes > 4


GROUP = """
from tests.support.trained_models import arrays, network
from torch import nn
from dovetail.training.trainer import Trainer

if __name__ == "__main__":
    Trainer(network(), nn.functional.cross_entropy, "sgd", lr=0.1, workers=1, group=2, batch=24,
            epochs=1).fit(arrays())
"""


def test_a_worker_of_several_processes_listens_on_loopback_alone(tmp_path):
    trained = watch("-c", GROUP, folder=tmp_path)
    assert trained.status == 0, trained.output
    assert trained.sockets, "gloo connects its ranks by TCP"
    assert sys.byteorder == "little"
    loopback = {("tcp", "0100007F"), ("tcp6", 24 * "0" + "01000000")}
    assert {(kind, address.split(":")[0]) for kind, address in trained.sockets} <= loopback
