"""Steps on all cores run within the caller's process, and leave it as it was."""

import copy
import math
import os
import resource
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dovetail.errors import RunError, WorkerError
from dovetail.executors import PlainNetwork, Workers, run, workers
from dovetail.executors.workers import LocalWorker, is_this_process
from dovetail.frontends import SGD, Adam, capture
from dovetail.machine import parse_machine
from dovetail.pipeline.sources import in_order, with_threads
from dovetail.runtime import neighbours
from dovetail.runtime.files import cache_folder
from dovetail.runtime.native import has_compiler
from dovetail.runtime.neighbours import Spinning
from dovetail.runtime.setup import op_threads, rest_openmp
from tests.support.placing import plan_for, two_devices

HERE = parse_machine("here/cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # A bias before the norm has a gradient of rounding alone, which Adam makes large.
        self.first, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return {"scores": self.last(self.norm(self.first(x)).relu()), "shift": self.norm.bias}


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + torch.rand_like(x)


def squared(output, target):
    return ((output["scores"] - target) ** 2).mean()


def trained(optimizer):
    torch.manual_seed(1)
    module = Net()
    inputs, targets = torch.randn(6, 8), torch.randn(6, 4)
    return module, capture(module, inputs, targets=targets, loss=squared, train=optimizer)


def networks(step):
    """The step by a plan and as it is, both in this process."""
    return [run(in_order(step.graph, HERE), step), PlainNetwork(step, HERE)]


def threads_of_this_process():
    return len(os.listdir("/proc/self/task"))


def test_all_cores_as_one_device_are_this_process_and_parts_of_them_are_not():
    assert is_this_process(HERE) and not is_this_process(two_devices())
    with Workers(HERE) as workers:
        (worker,) = workers.start((0,))
        assert isinstance(worker, LocalWorker) and workers.pids == ()


@pytest.mark.parametrize("busy_cores", [0.25, math.inf], ids=["others-compute", "calm"])
def test_openmp_is_held_back_while_others_compute_until_the_run_closes(monkeypatch, busy_cores):
    monkeypatch.setattr(neighbours, "BUSY_CORES", busy_cores)
    told, others = (
        [],
        SimpleNamespace(
            look=lambda: 0.9,
            pause=lambda: None,
            resume=lambda: None,
            leave_out=lambda processes: None,
        ),
    )

    def hold_back(team):
        told.append(f"held back by {team}")
        return lambda: told.append("released")

    watch = Spinning((0, 1), 2, neighbours=others, hold_back=hold_back)
    monkeypatch.setattr(workers, "Spinning", lambda cores, threads: watch)
    _, step = trained(SGD(lr=0.1))
    with run(in_order(step.graph, HERE), step) as placed:
        placed.step(torch.randn(6, 8), torch.randn(6, 4))
        placed.step(torch.randn(6, 8), torch.randn(6, 4))
        assert told == (["held back by 3"] if busy_cores < 1 else [])
    assert told == (["held back by 3", "released"] if busy_cores < 1 else [])


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01)], ids=["sgd", "adam"]
)
def test_several_steps_train_as_plain_pytorch(optimizer):
    module, step = trained(optimizer)
    batches = [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(4)]
    for network in networks(step):
        plain = copy.deepcopy(module)
        kind = torch.optim.SGD if isinstance(optimizer, SGD) else torch.optim.Adam
        options = {"momentum": 0.9} if isinstance(optimizer, SGD) else {}
        own = kind(plain.parameters(), optimizer.lr, **options)
        with network:
            for inputs, targets in batches:
                own.zero_grad()
                loss = squared(plain(inputs), targets)
                loss.backward()
                own.step()
                torch.testing.assert_close(network.step(inputs, targets), loss.detach())
            found = network.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value)
        assert all(p.grad is None for p in module.parameters())


def test_a_step_leaves_the_callers_random_numbers_threads_and_modes_as_they_were():
    step = capture(Noisy(), torch.randn(3, 4))
    inputs = torch.randn(3, 4)
    machine = with_threads(HERE, 2)
    for network in (run(in_order(step.graph, machine), step), PlainNetwork(step, machine)):
        with network, torch.no_grad(), torch.autocast("cpu", torch.bfloat16), op_threads(1):
            network.step(inputs)
            torch.manual_seed(4)
            first = torch.rand(3)
            torch.manual_seed(4)
            network.step(inputs)
            assert torch.equal(torch.rand(3), first)
            assert torch.get_num_threads() == 1
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")


def test_the_callers_modes_do_not_reach_into_a_step():
    module, step = trained(SGD(lr=0.1))
    batch = torch.randn(6, 8), torch.randn(6, 4)
    for network in networks(step):
        with network:
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                loss = network.step(*batch)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(
                loss, squared(copy.deepcopy(module)(batch[0]), batch[1]).detach()
            )


def test_results_are_the_callers_own():
    step = capture(Net().eval(), torch.randn(6, 8))
    for network in networks(step):
        with network:
            first = network.step(torch.ones(6, 8))
            kept = copy.deepcopy(first)
            # Neither inference mode nor the module's memory reaches the caller.
            first["scores"].add_(1.0)
            first["shift"].add_(5.0)
            weight = nn.Parameter(torch.ones(4))
            (first["scores"] * weight).sum().backward()
            again = network.step(torch.ones(6, 8))
        assert torch.equal(again["shift"], kept["shift"])
        torch.testing.assert_close(again["scores"], kept["scores"])


class Nested(nn.Module):
    def forward(self, x):
        return x + 1, (x * 2, {"third": x * 3}), [x.sum()]


def test_results_within_tuples_are_the_callers_own_and_no_random_number_is_used():
    x = torch.randn(3, 4)
    step = capture(Nested(), x)
    for network in networks(step):
        with network:
            torch.manual_seed(4)
            expected = torch.rand(3)
            torch.manual_seed(4)
            found = network.step(x)
            assert torch.equal(torch.rand(3), expected)
            for kind, part in zip((torch.Tensor, tuple, list), found, strict=True):
                assert type(part) is kind
            first, (second, named), (last,) = found
            wanted = (x + 1, x * 2, x * 3, x.sum())
            for value, other in zip((first, second, named["third"], last), wanted, strict=True):
                assert torch.equal(value, other) and not value.is_inference()
                (value * nn.Parameter(torch.ones(()))).sum().backward()
                value.zero_()
            assert torch.equal(network.step(x)[0], x + 1)


def test_a_step_finds_the_memory_mapped_that_the_one_before_has_freed(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    inputs = torch.randn(256, 1024)
    step = capture(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh()), inputs)

    def page_faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    for network in networks(step):
        with network:
            for _ in range(3):
                network.step(inputs)
            before = page_faults()
            for _ in range(10):
                network.step(inputs)
            # Each of the three results has 256 pages, which no huge page holds.
            assert page_faults() - before < 256


def test_an_op_that_raises_ends_the_run_by_its_name():
    step = capture(nn.Embedding(4, 2), torch.zeros(3, dtype=torch.long))
    with run(in_order(step.graph, HERE), step) as placed:
        with pytest.raises(WorkerError, match="index out of range"):
            placed.step(torch.full((3,), 9))
        with pytest.raises(RunError, match="closed"):
            placed.step(torch.zeros(3, dtype=torch.long))


def test_what_openmp_started_for_the_caller_ends_before_other_processes_work():
    with op_threads(2):
        rest_openmp()
        alone = threads_of_this_process()
        torch.ones(1 << 18).add_(1.0)
        assert threads_of_this_process() > alone
        rest_openmp()
        assert threads_of_this_process() == alone
        assert torch.get_num_threads() == 2


def test_a_step_of_other_processes_leaves_no_thread_that_spins(workers):
    inputs = torch.randn(64, 8192)
    step = capture(nn.ReLU(), inputs)
    plan = plan_for(step, 0)
    with op_threads(2), run(plan, step, workers=workers) as placed:
        placed.step(inputs)
        rest_openmp()
        alone = threads_of_this_process()
        inputs = inputs + 1.0
        assert threads_of_this_process() > alone
        placed.step(inputs)
        assert threads_of_this_process() == alone


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
def test_each_of_many_steps_is_compiled_and_keeps_its_code_in_our_cache(monkeypatch):
    """torch stops after some compilations of one function."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    import torch._dynamo.config as settings

    counted = torch._dynamo.utils.counters["frames"]
    with settings.patch(recompile_limit=1):
        for width in (2, 3, 4):
            step = capture(nn.Linear(width, width).eval(), torch.randn(2, width))
            before = counted["ok"]
            with PlainNetwork(step, HERE, mode="default") as network:
                network.step(torch.randn(2, width))
            assert counted["ok"] > before
    assert (cache_folder() / "compiled" / "inductor").is_dir()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
