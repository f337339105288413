"""Plans on GPUs that the CPU plays: the numbers, and every wait that they need."""

import dataclasses
import functools
from contextlib import nullcontext

import pytest
import torch

from dovetail.errors import OutOfMemoryError
from dovetail.executors import Workers, run
from dovetail.executors.gpus import worker
from dovetail.executors.shares import most_bytes, share_out
from dovetail.frontends import SGD, Adam, capture, example_values, initial_values, resolve, run_step
from dovetail.frontends.instructions import AwaitFlag, ReadSource, RunLanes
from dovetail.machine import parse_machine
from dovetail.plans import Schedule, check
from tests.executors.test_placed import inference, training_step
from tests.executors.test_stage_runs import Branches
from tests.executors.test_stage_runs import training_step as branches
from tests.support.placing import plan_for, random_order, random_placement, random_schedules
from tests.support.played_cuda import played
from tests.support.played_gpus import MACHINES, cpu, gpu, linked

pytestmark = pytest.mark.usefixtures("forked_workers")
STEPS = 5
NETWORKS = {
    "rnnlm": ("zoo:rnnlm?layers=2&hidden=16&steps=3&batch=4&vocabulary=50", Adam(lr=1e-3)),
    "nmt": ("zoo:nmt?hidden=16&steps=3&batch=2&vocabulary=30", SGD(lr=0.1, momentum=0.9)),
    # Adam would drive the bias of keys, whose gradient is nothing but noise, anywhere.
    "gpt2": ("zoo:gpt2?layers=2&batch=1&context=8&hidden=16&heads=2&vocabulary=50", SGD(lr=0.1)),
    "moe": (
        "zoo:moe?layers=1&hidden=16&heads=2&key_heads=1&inner=16&experts=2&context=8&vocabulary=30",
        SGD(lr=0.1),
    ),
    "vit": ("zoo:vit?batch=1&layers=1&hidden=16&heads=2&inner=16&size=32", SGD(lr=0.1)),
}


REAL = [pytest.param(text, marks=pytest.mark.gpu) for text in ("here/gpu*2", "here")]


@pytest.fixture(scope="module", params=[*MACHINES, *REAL])
def machine_and_workers(request):
    machine = MACHINES.get(request.param) or parse_machine(request.param)
    with played() if is_played(machine) else nullcontext(), Workers(machine) as started:
        yield machine, started


def is_played(machine):
    return machine in MACHINES.values()


def computing(machine):
    return [d for d, device in enumerate(machine.devices) if device.kind != "host"]


def placement_on(machine, graph, seed):
    """Random devices of those that compute; sources are where the plan's rules put them."""
    devices = torch.tensor(computing(machine)).numpy()
    return devices[random_placement(graph, seed, len(devices))]


def random_plan(machine, captured, seed):
    placement = placement_on(machine, captured.graph, seed)
    orders = random_order(captured.graph, placement, seed)
    orders += ((),) * (len(machine.devices) - len(orders))
    return plan_for(captured, placement, orders, machine)


@pytest.fixture
def in_float64():
    """Networks are captured, and their weights drawn, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@functools.cache
def expected_of(name):
    model, optimizer = NETWORKS[name]
    captured = resolve(model, train=optimizer)
    values = initial_values(captured)
    inputs, targets = example_values(captured)
    results = [run_step(captured, values, inputs, targets, step=i) for i in range(STEPS)]
    return captured, results, values


def close(found, expected, error=1e-5):
    found, expected = (torch.utils._pytree.tree_leaves(tree) for tree in (found, expected))
    return all(
        torch.allclose(a, b, rtol=error, atol=error / 10)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_random_placements_give_the_numbers_of_one_process(
    name, machine_and_workers, one_thread, in_float64
):
    machine, workers = machine_and_workers
    captured, expected, values = expected_of(name)
    inputs, targets = example_values(captured)
    seed = sum(map(ord, name)) + 1
    with run(random_plan(machine, captured, seed), captured, workers=workers) as placed:
        found = [placed.step(*inputs, *targets) for _ in range(STEPS)]
        state = placed.state_dict() | placed.optimizer_state_dict()
    assert close(found, expected, 1e-10)
    for op, source in enumerate(captured.program.sources):
        if source is not None and source.name in state:
            tensor = captured.graph.outputs_of(op)[0]
            assert close(state[source.name], values[tensor], 1e-10), source.name


@pytest.mark.parametrize("seed", range(2))
def test_views_ties_buffers_and_random_ops_survive(seed, machine_and_workers, one_thread):
    machine, workers = machine_and_workers
    captured = training_step(momentum=0.9)
    values = initial_values(captured)
    expected = [
        run_step(captured, values, captured.inputs, captured.targets, seed=7, step=i)
        for i in range(STEPS)
    ]
    with run(random_plan(machine, captured, seed), captured, seed=7, workers=workers) as placed:
        found = [placed.step(*captured.inputs, *captured.targets) for _ in range(STEPS)]
    # Generators of GPUs draw other numbers than those of CPUs.
    if is_played(machine):
        assert close(found, expected)
    else:
        assert found[-1] < found[0]


@pytest.mark.parametrize("seed", range(2))
def test_inference_returns_what_the_model_returns(seed, machine_and_workers, one_thread):
    machine, workers = machine_and_workers
    captured = inference()
    with torch.no_grad():
        expected = captured.module(*captured.inputs)
    with run(random_plan(machine, captured, seed), captured, workers=workers) as placed:
        assert close(placed.step(*captured.inputs), expected)
        timeline = placed.timeline()
    ran = sum(map(bool, captured.program.calls))
    assert len(timeline.ops) == ran
    assert (timeline.op_ends >= timeline.op_starts).all()
    assert (timeline.op_starts >= 0).all() and (timeline.transfer_starts >= 0).all()


def plan_with_stages(machine, captured, seed):
    placement = placement_on(machine, captured.graph, seed)
    schedules = random_schedules(captured.graph, placement, seed, most=12)
    schedules += (Schedule(()),) * (len(machine.devices) - len(schedules))
    plan = plan_for(captured, placement, machine=machine)
    plan = dataclasses.replace(plan, orders=None, schedules=schedules)
    check(plan, captured.graph)
    return plan


@pytest.mark.parametrize("train", [False, True])
def test_stages_run_their_groups_on_streams_of_their_own(train, machine_and_workers, one_thread):
    machine, workers = machine_and_workers
    captured = branches() if train else capture(Branches().eval(), torch.randn(8, 8))
    values = initial_values(captured)
    data = captured.inputs, captured.targets
    expected = [run_step(captured, values, *data, seed=7, step=i) for i in range(STEPS)]
    lanes = 0
    for seed in range(3):
        plan = plan_with_stages(machine, captured, seed)
        for share in share_out(plan, captured.graph, captured.program).shares:
            if machine.devices[share.device].kind == "gpu":
                lanes += sum(isinstance(i, RunLanes) for i in share.instructions)
        with run(plan, captured, seed=7, workers=workers) as placed:
            found = [placed.step(*captured.inputs, *captured.targets) for _ in range(STEPS)]
            timeline = placed.timeline()
        # Generators of GPUs draw other numbers than those of CPUs.
        if is_played(machine) or not train:
            assert close(found, expected)
        assert (timeline.op_ends >= timeline.op_starts).all()
    assert lanes


def test_states_travel_to_gpus_and_back(machine_and_workers, one_thread):
    machine, workers = machine_and_workers
    captured = training_step(momentum=0.9)
    inputs = captured.inputs, captured.targets
    # Generators of GPUs draw other numbers than those of CPUs, so ops stay where they are.
    other = 1 if is_played(machine) else 0
    with run(random_plan(machine, captured, 0), captured, seed=7, workers=workers) as placed:
        placed.step(*inputs[0], *inputs[1])
        state, of_optimizer = placed.state_dict(), placed.optimizer_state_dict()
        second = placed.step(*inputs[0], *inputs[1])
    with run(random_plan(machine, captured, other), captured, seed=7, workers=workers) as placed:
        placed.step(*inputs[0], *inputs[1])
        placed.load_state_dict(state)
        placed.load_optimizer_state_dict(of_optimizer)
        assert close(placed.step(*inputs[0], *inputs[1]), second)


def test_timelines_begin_with_the_step_on_control_edges_too(machine_and_workers, one_thread):
    machine, workers = machine_and_workers
    captured = training_step(momentum=0.9)
    for seed in range(4):
        with run(random_plan(machine, captured, seed), captured, workers=workers) as placed:
            placed.feed()
            timeline = placed.timeline()
        for starts in (timeline.op_starts, timeline.transfer_starts):
            assert (starts >= 0).all() and (starts <= timeline.step_seconds).all()


def test_each_step_has_its_own_inputs(machine_and_workers, one_thread):
    machine, workers = machine_and_workers
    captured = inference()
    with run(random_plan(machine, captured, 0), captured, workers=workers) as placed:
        for number in range(STEPS):
            inputs = [torch.full_like(value, float(number)) for value in captured.inputs]
            with torch.no_grad():
                expected = captured.module(*inputs)
            assert close(placed.step(*inputs), expected)


@played()
def test_what_a_gpu_holds_must_fit_into_its_memory():
    captured = training_step(momentum=0.9)
    plan = random_plan(linked("small", cpu(0), gpu(0)), captured, 1)
    shares = share_out(plan, captured.graph, captured.program).shares
    share = next(s for s in shares if plan.machine.devices[s.device].torch_device)
    most = most_bytes(share, captured.graph, captured.program)
    kept = [i.slot.bytes for i in share.instructions if isinstance(i, AwaitFlag | ReadSource)]
    assert most > sum(kept) > 0
    for lacking in (0, 1):
        small = dataclasses.replace(gpu(0), memory_bytes=most - lacking)
        fitting = dataclasses.replace(plan, machine=linked("small", cpu(0), small))
        if lacking:
            with pytest.raises(OutOfMemoryError, match="gpu0"):
                run(fitting, captured)
        else:
            run(fitting, captured).close()


def test_torch_says_how_much_was_asked_for():
    message = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB"
    for said, asked in ((message, 5 << 29), ("no more", 0)):
        failed = worker._failed(-1, torch.OutOfMemoryError(said))
        assert failed.lacking is not None and failed.lacking[0] == asked
