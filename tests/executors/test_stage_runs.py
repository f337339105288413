"""Stages on a device with cores for them: groups at the same time, and no bit changed."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import WorkerError
from dovetail.executors import Workers, run
from dovetail.executors.shares import groups_of, lanes_of, share_out
from dovetail.frontends import SGD, capture, initial_values, run_step
from dovetail.frontends.instructions import RunLanes, ops_of
from dovetail.plans import Schedule, Stage, check
from tests.executors.test_shares import UPDATE, A, B, C, small_graph, words
from tests.executors.test_shares import plan_for as plan_of_small
from tests.support.faults import count_threads, fail, meet, with_fault
from tests.support.placing import plan_for, random_placement, random_schedules, two_devices

STEPS = 3


@pytest.fixture(scope="module")
def wide():
    """The processes of two CPU devices, the first of two cores."""
    with Workers(two_devices(2)) as started:
        yield started


def stages(*ops):
    return Schedule(tuple(Stage(tuple(stage), 1.0) for stage in ops))


def staged(plan, *schedules):
    return dataclasses.replace(plan, schedules=schedules)


def forked_graph():
    """`small_graph`, but C reads A, and the update A: after A there are two groups."""
    graph = small_graph()
    reads = graph.input_tensors.copy()
    reads[graph.input_offsets[C]] = A
    reads[graph.input_offsets[UPDATE]] = A
    return dataclasses.replace(graph, input_tensors=reads, control=np.array([[B, UPDATE]]))


def test_groups_are_what_hangs_together_within_a_stage():
    #   A ──► B ┄┄► update        control: B before the update
    #     └─► C
    groups = groups_of([((A,), (B, C, UPDATE))], forked_graph())
    assert groups[B] == groups[UPDATE]
    assert len({groups[op] for op in (A, B, C)}) == 3


def test_groups_beyond_the_cores_are_spread_longest_first():
    #   lane 0   ├──── 4 ────┤├ 3 ┤
    #   lane 1   ├─── 1, 2 ───┤├ 0 ┤
    seconds, group_of = np.array([1.0, 2, 3, 1, 6]), np.array([0, 1, 1, 2, 3])
    assert lanes_of((0, 1, 2, 3, 4), group_of, seconds, 2) == ((4, 3), (1, 2, 0))
    assert lanes_of((0, 1, 2, 3, 4), group_of, seconds, 9) == ((4,), (1, 2), (0,), (3,))
    assert lanes_of((0, 1), np.array([0, 1]), np.zeros(2), 2) == ((0,), (1,))


@pytest.mark.parametrize(
    ("cores", "runs"), [(1, ["run 3 -3", "run 4"]), (2, ["together 3 | 4 -3"])]
)
def test_a_stage_waits_first_then_runs_its_groups_and_then_sends(cores, runs):
    #   cpu0                B, C ┄┐        C is an output, B's end lets the update begin
    #   cpu1   weight ─ A ─►│     └┄► update
    graph = forked_graph()
    plan = plan_of_small(graph, [0, 1, 1, 0, 0, 1])
    plan = dataclasses.replace(plan, machine=two_devices(cores))
    plan = staged(plan, stages((B, C)), stages((A,), (UPDATE,)))
    first, second = share_out(plan, graph).shares
    assert words(first) == [
        "send 0 to 1", "wait 2 for 3", "wait 1 for 3", *runs, "send end of 3 to 1"
    ]  # fmt: skip
    assert words(second)[-2:] == ["wait end for 5", "run 5 -2 -5"]
    assert first.ops == [B, C]


class Branches(nn.Module):
    """Branches of unlike length, with dropout, a written buffer and tied weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.layers[2].weight = self.layers[0].weight
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        parts = [self.drop(layer(x).tanh()) for layer in self.layers]
        parts.append(self.norm(self.drop(x)))
        parts.append(self.drop(x.t()).t())
        return torch.cat([part * (i + 1) for i, part in enumerate(parts)], 1)


def squared(output, target):
    return ((output - target) ** 2).mean()


def training_step():
    torch.manual_seed(3)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 40)
    return capture(
        Branches(), inputs, targets=targets, loss=squared, train=SGD(lr=0.1, momentum=0.9)
    )


def assert_stages_in_turn(timeline, schedules):
    starts = dict(zip(timeline.ops.tolist(), timeline.op_starts.tolist(), strict=True))
    ends = dict(zip(timeline.ops.tolist(), timeline.op_ends.tolist(), strict=True))
    for schedule in schedules:
        now = 0.0
        for stage in schedule.stages:
            assert all(starts[op] >= now for op in stage.ops)
            now = max((ends[op] for op in stage.ops), default=now)
    assert (timeline.busy_seconds <= timeline.step_seconds * (1 + 1e-12)).all()


def with_threads(captured, plan):
    """The captured network, each op of which sets as many threads as it has in the plan."""
    calls = list(captured.program.calls)
    for share in share_out(plan, captured.graph).shares:
        every = len(plan.machine.devices[share.device].cores)
        for instruction in share.instructions:
            threads = 1 if isinstance(instruction, RunLanes) else every
            for op in ops_of(instruction):
                calls[op] = dataclasses.replace(calls[op], target=on(threads, calls[op].target))
    program = dataclasses.replace(captured.program, calls=tuple(calls))
    return dataclasses.replace(captured, program=program)


def on(threads, target):
    def call(*args, **kwargs):
        torch.set_num_threads(threads)
        return target(*args, **kwargs)

    return call


@pytest.mark.parametrize("seed", range(5))
def test_random_stages_change_no_bit(seed, wide, one_thread):
    # At equal thread counts: a normalisation rounds with two threads as it does not with one.
    captured = training_step()
    graph, data = captured.graph, (captured.inputs, captured.targets)
    placement = random_placement(graph, seed) if seed else np.zeros(len(graph), np.int32)
    schedules = random_schedules(graph, placement, seed, most=12)
    plan = staged(plan_for(captured, placement, machine=two_devices(2)), *schedules)
    check(plan, graph)
    assert any(isinstance(i, RunLanes) for i in share_out(plan, graph).shares[0].instructions)
    values, same = initial_values(captured), with_threads(captured, plan)
    expected = [run_step(same, values, *data, seed=7, step=i) for i in range(STEPS)]
    with run(plan, captured, seed=7, workers=wide) as placed:
        found = [placed.step(*captured.inputs, *captured.targets) for _ in range(STEPS)]
        state = placed.state_dict() | placed.optimizer_state_dict()
        timeline = placed.timeline()
    assert all(map(torch.equal, found, expected))
    for op, source in enumerate(captured.program.sources):
        if source is not None and source.role in ("parameter", "buffer", "state"):
            assert torch.equal(state[source.name], values[graph.outputs_of(op)[0]])
    assert sorted(timeline.ops.tolist()) == np.flatnonzero(~graph.is_source).tolist()
    assert_stages_in_turn(timeline, schedules)


class Draws(nn.Module):
    """Nothing but random ops, in groups of their own."""

    def forward(self, x):
        return tuple(nn.functional.dropout(x * i, 0.5, training=True) for i in range(1, 9))


def test_random_ops_of_groups_that_run_together_draw_their_own_numbers(wide, one_thread):
    captured = capture(Draws(), torch.ones(64, 64))
    graph = captured.graph
    ops = np.flatnonzero(~graph.is_source).tolist()
    plan = plan_for(captured, 0, machine=two_devices(2))
    plan = staged(plan, stages(ops), stages())
    with run(plan, captured, seed=5, workers=wide) as placed:
        for step in range(20):
            found = placed.step(*captured.inputs)
            expected = run_step(captured, {}, captured.inputs, seed=5, step=step)
            assert all(map(torch.equal, found, expected))


class Pair(nn.Module):
    def forward(self, x):
        return (-x, x.abs(), x.neg().exp())


def pair_with(**targets):
    """(captured, plan) of one stage for `neg` and `abs`, then the rest; kinds call `targets`."""
    captured = capture(Pair(), torch.ones(4))
    kinds = captured.graph.kinds
    chosen = {kind: kinds.index(f"aten.{kind}") for kind in ("neg", "abs", "exp")}
    for kind, target in targets.items():
        captured = with_fault(captured, chosen[kind], target)
    first = [chosen["neg"], chosen["abs"]]
    rest = [op for op in np.flatnonzero(~captured.graph.is_source).tolist() if op not in first]
    plan = plan_for(captured, 0, machine=two_devices(2))
    return captured, staged(plan, stages(first, *[[op] for op in rest]), stages())


def test_groups_run_at_the_same_time_in_a_thread_each_and_all_else_has_every_thread(wide):
    captured, plan = pair_with(neg=meet, abs=meet, exp=count_threads)
    with run(plan, captured, workers=wide) as placed:
        for _ in range(3):
            one, other, threads = placed.step(torch.ones(4))
            assert torch.equal(one, torch.ones(4))
            assert torch.equal(other, torch.ones(4))
            assert torch.equal(threads, torch.full((4,), 2.0))


@pytest.mark.parametrize("kind", ["neg", "abs"])
def test_what_fails_in_a_group_is_named(kind, wide):
    captured, plan = pair_with(**{kind: fail})
    with run(plan, captured, workers=wide) as placed, pytest.raises(WorkerError) as raised:
        placed.step(torch.ones(4))
    assert raised.value.op == captured.graph.names[captured.graph.kinds.index(f"aten.{kind}")]
    assert "the numbers are off" in str(raised.value)
