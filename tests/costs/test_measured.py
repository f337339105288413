import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.costs import CostCache, measured, measured_costs
from dovetail.costs.measured import FailedCall, TimedEntry, copies_for, time_calls
from dovetail.errors import CostError
from dovetail.frontends import Call, Ref, capture
from dovetail.machine import Link, Machine, local_machine
from dovetail.runtime import neighbours
from dovetail.runtime.processes import Worker
from dovetail.runtime.timers import Deadline
from tests.support.checked_models import Wrapped, asserted
from tests.support.setting_up import check_set_up

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def step():
    layers = torch.nn.Sequential(
        torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)
    )
    return capture(layers, torch.randint(0, 50, (4, 3)))


@pytest.fixture(scope="module")
def machine():
    return local_machine(f"here/{min(2, len(local_machine().devices[0].cores))}")


def test_equal_signatures_cost_the_same_and_are_measured_once(step, machine, tmp_path):
    cache = CostCache(tmp_path / "costs.sqlite")
    fractions = []
    costs = measured_costs(step.graph, step.program, machine, cache, progress=fractions.append)
    seconds = costs.compute_seconds
    assert costs.source == "measured"
    assert fractions[-1] == 1.0
    real = ~step.graph.is_source
    assert (seconds[~real] == 0).all()
    assert (seconds[real] > 0).all()
    by_signature = {}
    for op in np.flatnonzero(real).tolist():
        row = by_signature.setdefault(step.graph.signatures[op], seconds[op])
        np.testing.assert_array_equal(row, seconds[op])
    assert len(by_signature) < real.sum()  # the two linear layers share theirs

    again = measured_costs(step.graph, None, machine, cache)  # all of it from the cache
    np.testing.assert_array_equal(again.compute_seconds, seconds)


def test_checks_of_data_are_measured_though_random_numbers_would_not_pass(tmp_path):
    step = capture(Wrapped(asserted), torch.randn(2, 3))
    cache = CostCache(tmp_path / "costs.sqlite")
    costs = measured_costs(step.graph, step.program, local_machine("here/1"), cache)
    assert (costs.compute_seconds[step.graph.kinds.index("dovetail.check")] > 0).all()


def test_ops_measured_beside_other_programs_have_costs_that_are_told(step, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "BUSY_CORES", 0.0)  # whatever the others do disturbs
    monkeypatch.setattr(measured, "_NEIGHBOURS_SECONDS", 0.5)
    cache, told = CostCache(tmp_path / "costs.sqlite"), []
    machine = local_machine("here/1")
    costs = measured_costs(step.graph, step.program, machine, cache, beside=told.append)
    assert (costs.compute_seconds[~step.graph.is_source] > 0).all()
    assert len(told) > 1, "a batch is measured again before it counts"
    assert min(told) >= 0
    told.clear()
    again = measured_costs(step.graph, None, machine, cache, beside=told.append)
    np.testing.assert_array_equal(again.compute_seconds, costs.compute_seconds)
    assert len(told) == 1, "they are kept apart, and told again"


def test_ops_that_the_deadline_does_not_reach_have_costs_by_data_sheet(step, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_BATCH_OPS", 1)
    cache, deadline = CostCache(tmp_path / "costs.sqlite"), Deadline(0.0)
    machine = local_machine("here/1")
    costs = measured_costs(step.graph, step.program, machine, cache, deadline=deadline)
    assert np.isfinite(costs.compute_seconds).all()
    (missed,) = deadline.missed
    assert missed.endswith("kinds of ops, which are by data sheet")
    with pytest.raises(CostError, match="never measured here"):
        measured_costs(step.graph, None, machine, cache)


def test_a_device_that_uses_fewer_threads_has_costs_of_its_own():
    machine = local_machine()
    (device,) = machine.devices
    cores = len(device.cores)
    all_cores = replace(device, threads=cores)
    assert measured.device_key(all_cores, machine) == measured.device_key(device, machine)
    one = replace(device, threads=1)
    same = measured.device_key(one, machine) == measured.device_key(device, machine)
    assert same == (cores == 1)


def test_a_saved_graph_that_was_never_measured_names_its_first_op(step, machine, tmp_path):
    with pytest.raises(CostError) as raised:
        measured_costs(step.graph, None, machine, CostCache(tmp_path / "costs.sqlite"))
    assert raised.value.op == step.graph.names[int(np.flatnonzero(~step.graph.is_source)[0])]


def test_a_call_that_fails_while_it_is_measured_names_its_op(step, machine, tmp_path):
    op = int(np.flatnonzero(~step.graph.is_source)[0])
    calls = list(step.program.calls)
    calls[op] = replace(calls[op], args=())
    broken = replace(step.program, calls=tuple(calls))
    with pytest.raises(CostError, match="its call failed") as raised:
        measured_costs(step.graph, broken, machine, CostCache(tmp_path / "costs.sqlite"))
    assert raised.value.op == step.graph.names[op]


def test_ops_of_one_signature_are_told_apart_by_what_lies_cold(tmp_path, machine, monkeypatch):
    kept, add = {}, CostCache.add_costs

    def remember(cache, device, found):
        kept.update(found)
        add(cache, device, found)

    monkeypatch.setattr(CostCache, "add_costs", remember)

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 8))

        def forward(self, x, y):
            return x @ self.weight, x @ y, self.weight @ x

    step = capture(Scores(), torch.ones(8, 8), torch.ones(8, 8))
    products = [op for op, kind in enumerate(step.graph.kinds) if kind == "aten.mm"]
    assert len({step.graph.signatures[op] for op in products}) == 1
    costs = measured_costs(step.graph, step.program, machine, CostCache(tmp_path / "costs.sqlite"))
    assert len(kept) == len(products) == 3
    found = [costs.compute_seconds[op, 0] for op in products]
    assert sorted(found) == sorted(cost.seconds for cost in kept.values())


def test_a_device_with_nothing_left_to_measure_keeps_the_others_company(tmp_path, monkeypatch):
    one = local_machine().devices[0]
    one = replace(one, cores=one.cores[:1])
    two = replace(one, name="cpu1")
    links = tuple(Link(a, b, 1e9, 1e-6, a) for a, b in (("cpu0", "cpu1"), ("cpu1", "cpu0")))
    machine = Machine("two", (one, two), "cpu0", links)
    told, begin = [], Worker.begin

    def record(self, method, *arguments):
        told.append((self.name, method, arguments[-1]))
        begin(self, method, *arguments)

    monkeypatch.setattr(Worker, "begin", record)
    step = capture(torch.nn.Tanh(), torch.ones(4))
    measured_costs(step.graph, step.program, machine, CostCache(tmp_path / "costs.sqlite"))
    times = {name: patience for name, method, patience in told if method == "time_calls"}
    assert times == {"cpu0": measured._PATIENCE_SECONDS, "cpu1": 0.0}


class _Outputs:
    """Makes tensors and knows how many of them live."""

    def __init__(self):
        self.made, self.most = [], 0

    def __call__(self, x):
        made = x.clone()
        self.made = [*filter(lambda one: one() is not None, self.made), weakref.ref(made)]
        self.most = max(self.most, len(self.made))
        return made


def entry_of(target, shape=(4,), cold=()):
    strides = tuple(torch.empty(shape).stride())
    return TimedEntry(Call(target, (Ref(0),), {}, (1,)), {0: (shape, strides, "float32")}, cold)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measured, "_BUDGET_SECONDS", 0.0)


def test_results_are_freed_while_calls_are_timed(quick):
    outputs = _Outputs()
    time_calls([entry_of(outputs, cold=frozenset({0}))] * 3, 0.0, 0.0)
    assert outputs.most == 1


def test_on_cores_that_stay_disturbed_waiting_ends_and_all_rounds_count(quick, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(measured, "clock", lambda: float(next(now)))
    monkeypatch.setattr(measured, "pace_seconds", lambda: 2.0)
    found = time_calls([entry_of(torch.neg)], 1.0, 100.0)
    assert found.pace_seconds == 1.0
    assert 100 <= found.waited_seconds < 110
    again = time_calls([entry_of(torch.neg)], 1.0, 0.0)
    assert again.waited_seconds < found.waited_seconds
    assert again.timings[0].samples == 5


def test_disturbed_rounds_do_not_count_once_there_are_others(quick, monkeypatch):
    paces = iter([9.0, 9.0, *[1.0] * 100])
    durations = iter(range(10**6))
    monkeypatch.setattr(measured, "clock", lambda: float(next(durations)))
    monkeypatch.setattr(measured, "pace_seconds", lambda: next(paces))
    found = time_calls([entry_of(torch.neg)], 9.0, 100.0)
    assert found.pace_seconds == 1.0
    assert found.timings[0].samples == 5


def test_indices_lie_within_what_they_index_though_that_holds_integers_too(quick):
    layouts = {0: ((1, 1), (1, 1), "int64"), 1: ((5,), (1,), "int64")}
    call = Call(torch.ops.aten.index.Tensor, (Ref(0), [None, Ref(1)]), results=(2,))
    found = time_calls([TimedEntry(call, layouts, frozenset())], 0.0, 0.0)
    assert not isinstance(found, FailedCall)


def test_a_call_that_fails_says_which_and_why():
    found = time_calls([entry_of(torch.neg), entry_of(torch.linalg.inv)], 1.0, 0.0)
    assert isinstance(found, FailedCall)
    assert found.index == 1
    assert "must have at least 2 dimensions" in found.traceback


def test_the_process_that_measures_is_set_up_as_one_that_runs():
    device = local_machine().devices[0]
    with measured.start_worker(replace(device, cores=device.cores[:1])) as process:
        process.receive()
        found = process.ask("time_calls", [entry_of(check_set_up)], 0.0, 0.0)
    assert not isinstance(found, FailedCall), found.traceback


def test_batches_hold_no_more_than_they_may(step, monkeypatch):
    # Copies of what is cold are held at once, and so is what a call returns.
    entries = {
        op: measured._entry(step.graph, step.program, measured._cold_tensors(step.graph), op)
        for op in np.flatnonzero(~step.graph.is_source).tolist()
    }
    sizes = {op: measured._held_bytes(step.graph, op, entry) for op, entry in entries.items()}
    lookup = step.graph.kinds.index("aten.embedding")
    assert copies_for(50 * 8 * 4) == 8
    assert sizes[lookup] == 9 * 50 * 8 * 4 + 4 * 3 * 8 + 4 * 3 * 8 * 4
    monkeypatch.setattr(measured, "_BATCH_BYTES", max(sizes.values()))
    batches = measured._batches(step.graph, entries, 1)
    assert len(batches) > 1
    assert all(sum(sizes[op] for op in batch) <= max(sizes.values()) for batch in batches)
    assert [op for batch in batches for op in batch] == list(entries)
