import dataclasses
import os
import threading

import pytest
import torch
from torch import nn

from dovetail.errors import (
    GraphMismatchError,
    OrderError,
    OutOfMemoryError,
    RunError,
    UsageError,
)
from dovetail.executors import Workers, run
from dovetail.executors import placed as placed_runs
from dovetail.executors.shares import share_out
from dovetail.frontends import SGD, Adam, capture, example_values, initial_values, run_step
from dovetail.machine import Device, Machine
from tests.support.faults import with_fault
from tests.support.placing import plan_for, random_placement, two_devices
from tests.support.setting_up import check_set_up


class Tied(nn.Module):
    """Tied weights, a frozen parameter, a written and an unwritten buffer, dropout, an expanded
    and a transposed tensor between ops."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.register_buffer("scale", torch.linspace(1, 2, 8))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = self.norm(self.first(x)) * self.scale + self.frozen
        column = x.sum(1, keepdim=True).expand(-1, 8)
        return self.second(self.dropout(x * column.sigmoid()) + x.t().contiguous().t())


def squared(output, target):
    return ((output - target) ** 2).mean()


def training_step(**options):
    torch.manual_seed(3)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    return capture(Tied(), inputs, targets=targets, loss=squared, train=SGD(lr=0.1, **options))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y):
        hidden = self.layer(x)
        return {"sum": hidden + y, "pair": (hidden.relu(), [x.t()])}


def inference():
    torch.manual_seed(1)
    return capture(Two().eval(), torch.randn(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize("seed", range(6))
def test_views_ties_buffers_and_random_ops_survive_any_placement(seed, workers, one_thread):
    captured = training_step(momentum=0.9)
    values = initial_values(captured)
    expected = [
        run_step(captured, values, captured.inputs, captured.targets, seed=7, step=i)
        for i in range(3)
    ]
    plan = plan_for(captured, random_placement(captured.graph, seed))
    with run(plan, captured, seed=7, workers=workers) as placed:
        found = [placed.step(*captured.inputs, *captured.targets) for _ in range(3)]
        state = placed.state_dict() | placed.optimizer_state_dict()
    assert all(map(torch.equal, found, expected))
    for op, source in enumerate(captured.program.sources):
        if source is not None and source.role in ("parameter", "buffer", "state"):
            assert torch.equal(state[source.name], values[captured.graph.outputs_of(op)[0]])


def test_another_seed_draws_other_numbers(workers):
    captured = training_step()
    losses = []
    for seed in (1, 1, 2):
        with run(plan_for(captured, 0), captured, seed=seed, workers=workers) as placed:
            losses.append(float(placed.step(*captured.inputs, *captured.targets)))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("seed", range(4))
def test_inference_returns_what_the_model_returns(seed, workers, one_thread):
    captured = inference()
    with torch.no_grad():
        expected = captured.module(*captured.inputs)
    plan = plan_for(captured, random_placement(captured.graph, seed))
    with run(plan, captured, workers=workers) as placed:
        found = placed.step(*captured.inputs)
    assert torch.equal(found["sum"], expected["sum"])
    assert torch.equal(found["pair"][0], expected["pair"][0])
    assert torch.equal(found["pair"][1][0], expected["pair"][1][0])


class Awkward(nn.Module):
    """Tensors to send that are lazily negated, lazily conjugated, empty, scalar, or have gaps."""

    def forward(self, x):
        turned = torch.complex(x, x + 1).conj()
        sent = (turned.imag, turned, x[:0], x.sum(), x[:, 1:3], x.t(), x[2:])
        return tuple(part * 2 for part in sent)


@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_tensors_of_every_kind_arrive_as_they_are(way, workers, one_thread):
    x = torch.randn(4, 4)
    captured = capture(Awkward(), x)
    placement = [way[kind == "aten.mul"] for kind in captured.graph.kinds]
    with run(plan_for(captured, placement), captured, workers=workers) as placed:
        for given in (x, torch.randn(4, 4)):
            found, expected = placed.step(given), Awkward()(given)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class OfTorchsTuples(nn.Module):
    def forward(self, x):
        return {"top": x.topk(2), "parts": (torch.linalg.eigh(x @ x.T), x.max(1), x.sort())}


def test_tuples_of_torchs_own_types_are_returned_as_such(workers, one_thread):
    captured, x = capture(OfTorchsTuples(), torch.randn(4, 4)), torch.randn(4, 4)
    plan = plan_for(captured, random_placement(captured.graph, 1))
    with run(plan, captured, workers=workers) as placed:
        found, expected = placed.step(x), OfTorchsTuples()(x)
    assert type(found["top"]) is torch.return_types.topk
    assert torch.equal(found["top"].indices, expected["top"].indices)
    for own, other in zip(found["parts"], expected["parts"], strict=True):
        assert type(own) is type(other)
        assert all(map(torch.equal, own, other))


@pytest.mark.parametrize("seed", [0, 1])
def test_threads_that_call_one_run_take_turns(seed, workers, one_thread):
    captured, wrong = inference(), []
    plan = plan_for(captured, random_placement(captured.graph, seed))

    def call(number):
        x, y = torch.full((4, 4), float(number)), torch.zeros(4, 4)
        with torch.no_grad():
            expected = captured.module(x, y)["sum"]
        wrong.extend(
            number for _ in range(50) if not torch.equal(placed.step(x, y)["sum"], expected)
        )

    with run(plan, captured, workers=workers) as placed:
        threads = [threading.Thread(target=call, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_other_inputs_give_other_results(workers, one_thread):
    captured = inference()
    x, y = torch.ones(4, 4), torch.zeros(4, 4).t()
    with run(plan_for(captured, 1), captured, workers=workers) as placed, torch.no_grad():
        placed.step(*captured.inputs)
        found = placed.step(x, y)
        assert torch.equal(found["sum"], captured.module(x, y)["sum"])


def test_a_result_does_not_change_with_the_next_step(workers):
    captured = inference()
    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        first = placed.step(*captured.inputs)["sum"]
        kept = first.clone()
        placed.step(torch.zeros(4, 4), torch.zeros(4, 4))
    assert torch.equal(first, kept)


def test_the_state_dict_has_the_plain_models_names_and_values(workers):
    captured = training_step()
    plain = captured.module.state_dict()
    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        found = placed.state_dict()
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)
        placed.step(*captured.inputs, *captured.targets)
        trained = placed.state_dict()
    assert not torch.equal(trained["first.weight"], plain["first.weight"])
    assert torch.equal(trained["first.weight"], trained["second.weight"])
    assert torch.equal(trained["frozen"], plain["frozen"])
    assert not torch.equal(trained["norm.running_mean"], plain["norm.running_mean"])
    captured.module.load_state_dict(trained)


def test_training_goes_on_from_a_loaded_state(workers, one_thread):
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    data = (torch.randn(8, 4), torch.randn(8, 4))
    captured = capture(layers, data[0], targets=data[1], loss=squared, train=Adam(lr=0.1))

    def states(placed):
        return placed.state_dict(), placed.optimizer_state_dict()

    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        for _ in range(2):
            placed.step(*data)
        model, optimizer = states(placed)
        losses = [placed.step(*data) for _ in range(2)]
        expected = states(placed)
    with run(plan_for(captured, random_placement(captured.graph, 1)), captured) as other:
        other.step(*data)  # somewhere else, to be brought back
        other.load_state_dict(model)
        other.load_optimizer_state_dict(optimizer)
        assert all(map(torch.equal, [other.step(*data) for _ in range(2)], losses))
        found = states(other)
    for one, same in zip(found, expected, strict=True):
        assert one.keys() == same.keys()
        assert all(torch.equal(one[name], same[name]) for name in one)
    assert "0.weight/exp_avg_sq" in optimizer


def test_an_optimizers_state_that_does_not_fit_is_refused_whole(workers):
    captured = training_step(momentum=0.9)
    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        placed.step(*captured.inputs, *captured.targets)
        state = placed.optimizer_state_dict()
        wrong = {name: torch.full_like(value, 9) for name, value in state.items()}
        last = list(state)[-1]
        with pytest.raises(UsageError, match="but the plan was made for"):
            placed.load_optimizer_state_dict(wrong | {last: torch.zeros(3, 3, 3)})
        with pytest.raises(UsageError, match=r"optimizer_state_dict: lacks \[\], has unknown"):
            placed.load_optimizer_state_dict(wrong | {"nobody/exp_avg": torch.zeros(3)})
        found = placed.optimizer_state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_what_cannot_fit_into_memory_is_refused_before_it_is_asked_for(workers, monkeypatch):
    captured = inference()
    plan = plan_for(captured, 0)
    needed = share_out(plan, captured.graph).size_bytes
    monkeypatch.setattr(placed_runs, "available_bytes", lambda: needed)
    run(plan, captured, workers=workers).close()
    monkeypatch.setattr(placed_runs, "available_bytes", lambda: needed - 1)
    with pytest.raises(OutOfMemoryError) as raised:
        run(plan, captured, workers=workers)
    assert (raised.value.needed_bytes, raised.value.available_bytes) == (needed, needed - 1)


def test_what_fails_while_parameters_are_filled_in_leaves_nothing(workers, monkeypatch):
    captured = inference()
    monkeypatch.setattr(placed_runs, "held_values", lambda *_: {})
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError):
        run(plan_for(captured, 0), captured, workers=workers)
    assert len(os.listdir("/proc/self/fd")) == files


def test_the_process_of_a_device_is_set_up_for_ops(workers):
    class Negated(nn.Module):
        def forward(self, x):
            return -x

    captured = capture(Negated(), torch.ones(4))
    op = captured.graph.kinds.index("aten.neg")
    checked = with_fault(captured, op, check_set_up)
    with run(plan_for(checked, 0), checked, workers=workers) as placed:
        assert torch.equal(placed.step(torch.ones(4)), torch.ones(4))


def test_a_state_dict_that_does_not_fit_is_refused_whole(workers):
    captured = training_step()
    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        state = placed.state_dict()
        wrong = {name: torch.zeros_like(value) for name, value in state.items()}
        with pytest.raises(UsageError, match=r"scale.*, but the plan was made for"):
            placed.load_state_dict(wrong | {"scale": torch.zeros(3)})
        with pytest.raises(UsageError, match=r"lacks \['scale'\]"):
            placed.load_state_dict({k: v for k, v in wrong.items() if k != "scale"})
        found = placed.state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_inputs_that_do_not_fit_are_named(workers):
    captured = inference()
    x = torch.zeros(4, 4)
    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        with pytest.raises(UsageError, match=r"takes x, y by position, but got 1"):
            placed.step(x)
        with pytest.raises(UsageError) as raised:
            placed.step(x, torch.zeros(4, 5))
        assert raised.value.option == "y"
        with pytest.raises(UsageError, match="float64"):
            placed.step(x.double(), x)
        placed.step(x, x)  # none of that has harmed it


def test_a_closed_run_says_so(workers):
    captured = inference()
    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        pass
    with pytest.raises(RunError, match="closed"):
        placed.step(*captured.inputs)
    with pytest.raises(RunError, match="closed"):
        placed.state_dict()


def test_a_measured_timeline_has_every_op_in_order_and_every_transfer(workers):
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    data = (torch.ones(2, 4), torch.zeros(2, 4))
    captured = capture(layers, data[0], targets=data[1], loss=squared, train=SGD())
    graph = captured.graph
    # The second weight is read by the backward pass: its update must wait for that.
    placements = (random_placement(graph, seed) for seed in range(100))
    crossing = (p for p in placements if (p[graph.control[:, 0]] != p[graph.control[:, 1]]).any())
    plan = plan_for(captured, next(crossing))
    with run(plan, captured, workers=workers) as placed:
        timeline = placed.timeline()
    assert sorted(timeline.ops.tolist()) == [i for i in range(len(graph)) if not graph.is_source[i]]
    assert (timeline.order_of(0), timeline.order_of(1)) == plan.orders
    assert (timeline.op_ends >= timeline.op_starts).all()
    assert (timeline.op_starts >= 0).all()
    assert timeline.op_ends.max() <= timeline.step_seconds
    ends = dict(zip(timeline.ops.tolist(), timeline.op_ends.tolist(), strict=True))
    starts = dict(zip(timeline.ops.tolist(), timeline.op_starts.tolist(), strict=True))
    for op in starts:
        for tensor in graph.inputs_of(op):
            assert ends.get(int(graph.producers[tensor]), 0) <= starts[op]
    for before, after in graph.control.tolist():
        assert ends[before] <= starts[after]
    sent = list(
        zip(
            timeline.transfer_tensors, timeline.transfer_ops, timeline.transfer_sources, strict=True
        )
    )
    assert {int(graph.producers[t]) == op for t, op, _ in sent if t >= 0} == {True}
    assert (timeline.transfer_sources != timeline.transfer_destinations).all()
    assert any(t < 0 for t, _, _ in sent)


def test_a_measurement_drops_the_first_step(workers):
    captured = inference()
    with run(plan_for(captured, 0), captured, workers=workers) as placed:
        measurement = placed.measure(steps=4, warmup=1)
        # One warms up, four are timed, and three are stamped.
        assert placed.steps == 8
        with pytest.raises(UsageError, match="first is dropped"):
            placed.measure(steps=1)
    assert len(measurement.step_seconds) == 3
    assert measurement.minimum_seconds <= measurement.median_seconds
    assert measurement.timeline.step_seconds > 0


def test_plans_are_measured_in_turn_on_the_same_processes(workers):
    captured = inference()
    pids = workers.pids
    with (
        run(plan_for(captured, 0), captured, workers=workers) as first,
        run(plan_for(captured, 1), captured, workers=workers) as second,
    ):
        found = [one.measure(steps=3) for one in (first, second, first)]
    assert [len(measurement.step_seconds) for measurement in found] == [2, 2, 2]
    assert found[0].timeline.op_devices.tolist() != found[1].timeline.op_devices.tolist()
    assert workers.pids[:2] == pids[:2]


def test_a_fake_network_is_made_and_fed_with_examples(workers, one_thread):
    from dovetail.frontends import parse_optimizer, resolve

    captured = resolve(
        "zoo:rnnlm?layers=1&hidden=8&steps=2&batch=2&vocabulary=20", train=parse_optimizer("sgd")
    )
    inputs, targets = example_values(captured, 4)
    values = initial_values(captured, 4)
    expected = run_step(captured, values, inputs, targets)
    with run(plan_for(captured, 0), captured, seed=4, workers=workers) as placed:
        assert torch.equal(placed.step(*inputs, *targets), expected)


def test_a_plan_for_another_graph_is_refused(workers):
    plan = dataclasses.replace(plan_for(inference(), 0), graph_fingerprint="0" * 16)
    with pytest.raises(GraphMismatchError):
        run(plan, inference(), workers=workers)


def test_orders_that_wait_for_each_other_are_refused(workers):
    captured = inference()
    plan = plan_for(captured, 0)
    backwards = dataclasses.replace(plan, orders=(plan.orders[0][::-1], ()))
    with pytest.raises(OrderError, match="would wait for ever") as raised:
        run(backwards, captured, workers=workers)
    assert raised.value.device == "cpu0"


def test_a_machine_that_is_not_here_is_refused():
    k80 = Device("k80", "gpu", "k80", 1 << 30, {"float32": 1e12}, 1e11, 1e-6)
    captured = inference()
    plan = plan_for(captured, 0, machine=Machine("k80", (k80,), "k80"))
    with pytest.raises(UsageError, match="'k80' is not part of the machine we stand on"):
        run(plan, captured)


def test_cores_that_are_not_here_are_named():
    here = two_devices()
    far = dataclasses.replace(here.devices[1], cores=(4094, 4095))
    machine = dataclasses.replace(here, devices=(here.devices[0], far))
    with pytest.raises(UsageError, match=r"'cpu1' wants cores \[4094, 4095\]"):
        Workers(machine)


def test_workers_for_other_devices_are_refused(workers):
    here = two_devices()
    one = Machine("one", here.devices[:1], "cpu0")
    captured = inference()
    with pytest.raises(UsageError, match="for other devices"):
        run(plan_for(captured, 0, machine=one), captured, workers=workers)
