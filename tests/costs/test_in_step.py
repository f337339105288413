"""Costs of ops within a step: the whole step runs on all devices at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.costs import CostCache, measured, messages
from dovetail.costs.measured import costs_in_step, time_step, timed_step
from dovetail.frontends import SGD, Call, Ref, capture
from dovetail.machine import local_machine
from dovetail.runtime import neighbours

pytestmark = pytest.mark.usefixtures("forked_workers")


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.dropout(self.second(self.first(x).tanh()), 0.5)


@pytest.fixture(scope="module")
def step():
    return capture(Layers(), torch.ones(4, 8), loss=lambda y: y.square().mean(), train=SGD(lr=0.1))


@pytest.fixture(scope="module")
def machine():
    return local_machine(f"here/{min(2, len(local_machine().devices[0].cores))}")


def test_ops_of_one_signature_cost_the_same_and_a_step_is_measured_once(
    step, machine, tmp_path, monkeypatch
):
    cache = CostCache(tmp_path / "costs.sqlite")
    costs = costs_in_step(step, machine, cache)
    seconds, real = costs.compute_seconds, ~step.graph.is_source
    assert costs.source == "measured"
    assert (seconds[~real] == 0).all()
    assert (seconds[real] > 0).all()
    cold = measured._cold_tensors(step.graph)
    rows = {}
    for op in np.flatnonzero(real).tolist():
        row = rows.setdefault(measured._signature_key(step.graph, cold, op), seconds[op])
        np.testing.assert_array_equal(row, seconds[op])
    assert len(rows) < real.sum()

    monkeypatch.setattr(measured, "_run_everywhere", None)
    for known in (step, step.graph):  # all of it from the cache
        again = costs_in_step(known, machine, cache)
        np.testing.assert_array_equal(again.compute_seconds, seconds)


def test_other_steps_do_not_share_these_costs(step, machine, tmp_path):
    cache = CostCache(tmp_path / "costs.sqlite")
    assert costs_in_step(step.graph, machine, cache) is None
    costs_in_step(step, machine, cache)
    other = capture(Layers().eval(), torch.ones(4, 8))
    assert costs_in_step(other.graph, machine, cache) is None


def test_a_step_does_not_train_the_users_module(step, machine, tmp_path):
    before = {name: value.clone() for name, value in step.module.state_dict().items()}
    costs_in_step(step, machine, CostCache(tmp_path / "costs.sqlite"))
    for name, value in step.module.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_cannot_run_everywhere_is_not_timed_so(step, machine, tmp_path, monkeypatch):
    cache = CostCache(tmp_path / "costs.sqlite")
    calls = list(step.program.calls)
    op = int(np.flatnonzero(~step.graph.is_source)[0])
    calls[op] = replace(calls[op], args=())
    broken = replace(step, program=replace(step.program, calls=tuple(calls)))
    assert costs_in_step(broken, machine, cache) is None
    monkeypatch.setattr(measured, "available_bytes", lambda: 1000)
    assert not measured._may_run_everywhere(step.graph, machine)
    assert costs_in_step(step, machine, cache) is None


def test_a_step_of_many_seconds_is_not_timed_as_a_whole(step, machine, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(measured, "_run_everywhere", None)
    assert costs_in_step(step, machine, CostCache(tmp_path / "costs.sqlite")) is None


def test_weights_that_are_fake_cannot_be_timed(machine, tmp_path):
    with torch.device("meta"):
        module, x = Layers(), torch.ones(4, 8)
    assert costs_in_step(capture(module, x), machine, CostCache(tmp_path / "costs.sqlite")) is None


def test_disturbed_costs_are_told_and_serve_until_the_cores_are_calm(step, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "BUSY_CORES", 0.0)  # whatever the others do disturbs
    cache, told, machine = CostCache(tmp_path / "costs.sqlite"), [], local_machine("here/1")
    costs = costs_in_step(step, machine, cache, beside=told.append)
    measured_again, run = [], measured._run_everywhere
    monkeypatch.setattr(
        measured, "_run_everywhere", lambda *given: measured_again.append(given) or run(*given)
    )
    for known in (step, step.graph):
        again = costs_in_step(known, machine, cache, beside=told.append)
        np.testing.assert_array_equal(again.compute_seconds, costs.compute_seconds)
    assert len(set(told)) == 1 and len(told) == 3
    assert not measured_again
    monkeypatch.setattr(neighbours, "BUSY_CORES", float("inf"))
    assert costs_in_step(step, machine, cache, beside=told.append) is not None
    assert len(told) == 3 and len(measured_again) == 1
    assert costs_in_step(step.graph, machine, cache, beside=told.append) is not None
    assert len(told) == 3, "what was measured on calm cores takes the place of the other"


def test_every_op_is_timed_in_every_step(step, monkeypatch):
    monkeypatch.setattr(messages, "STEPS_SECONDS", 0.0)
    times = time_step(timed_step(step))
    count = sum(call is not None for call in step.program.calls)
    assert times.seconds.shape == (messages.LEAST_STEPS, count)
    assert (times.seconds > 0).all()


def test_an_op_that_fails_is_named(step):
    given = timed_step(step)
    op = max(given.calls)
    calls = {**given.calls, op: Call(torch.ops.aten.mm.default, (Ref(0), Ref(1)))}
    failed = time_step(replace(given, calls=calls))
    assert isinstance(failed, measured.FailedCall)
    assert failed.index == op
