"""What a plan promises is what the reference of the simulator says, op by op and byte by byte."""

import json

import pytest

import dovetail as dt
from tests.support.simulator_reference import reference

CASES = {
    "rnn on two GPUs": (
        "zoo:rnnlm?layers=2&hidden=32&steps=3&batch=4&vocabulary=50", "adam", "2 x p100 + haswell",
    ),
    "branches on four GPUs": ("zoo:squeezenet_1_1?batch=1&size=64", "", "4 x v100"),
    "attention on unlike GPUs": (
        "zoo:gpt2?layers=2&hidden=32&heads=2&context=8&vocabulary=60&batch=1", "sgd",
        "k80 + p100 + haswell",
    ),
}  # fmt: skip


class Given:
    """The costs that a plan carries, as the reference reads them."""

    def __init__(self, seconds):
        self.compute_seconds = seconds


@pytest.mark.parametrize("placer", ["etf", "local_search"])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_promises_what_the_reference_says(case, placer, shell):
    model, optimizer, machine = CASES[case]
    words = ["--train", optimizer] if optimizer else []
    words += ["--machine", machine, "--placer", placer, "--budget", "60e", "--seed", "1"]
    shell.works("plan", model, *words, "--out", "plan.json")
    plan = dt.load_plan(shell.folder / "plan.json")
    found = reference(
        plan.graph, plan.machine, Given(plan.compute_seconds), plan.placement, orders=plan.orders
    )
    assert not found.stuck
    assert found.step_seconds == pytest.approx(plan.value, rel=1e-12)
    assert tuple(found.peaks) == plan.peak_memory_bytes
    assert plan.lower_bound <= plan.value


def test_the_timeline_that_is_written_is_the_reference_s(shell):
    model, optimizer, machine = CASES["rnn on two GPUs"]
    words = ("--train", optimizer, "--machine", machine, "--placer", "etf", "--budget", "10e")
    shell.works("plan", model, *words, "--out", "plan.json")
    shell.works("export", "plan.json", "--to", "trace", "--out", "trace.json")
    plan = dt.load_plan(shell.folder / "plan.json")
    found = reference(
        plan.graph, plan.machine, Given(plan.compute_seconds), plan.placement, orders=plan.orders
    )
    events = json.loads((shell.folder / "trace.json").read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(found.step_seconds * 1e6, rel=1e-6)
    names = {plan.graph.names[op] for op in found.spans}
    assert names <= {event["name"] for event in events}
