"""Steps with one wait less: the CUDA that the CPU plays finds each that matters.

Which waits matter is found in another way than by its clocks: by the paths of a graph of all works.
"""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.executors.gpus import worker
from dovetail.executors.gpus.steps import steps_of
from dovetail.executors.gpus.worker import LoadedGpus, LoadGpus
from dovetail.executors.shares import share_out, tensor_at
from dovetail.executors.worker import Failed
from dovetail.frontends import Adam, capture, example_values, initial_values, resolve
from dovetail.frontends.instructions import (
    NO_FLAG,
    AwaitFlag,
    FreeTensors,
    ReadSource,
    SendTensor,
    Work,
    ops_of,
)
from dovetail.plans import Schedule, Stage
from dovetail.runtime.shared import Block
from tests.executors.test_gpus import plan_with_stages, random_plan
from tests.executors.test_stage_runs import Branches
from tests.support.faults import with_fault
from tests.support.placing import plan_for
from tests.support.played_cuda import PlayedCuda
from tests.support.played_gpus import HOST, gpu, linked

MACHINE = linked("three", HOST, gpu(0), gpu(1), gpu(2))
PROGRAMS = 6
MODEL = "zoo:rnnlm?layers=2&hidden=8&steps=3&batch=2&vocabulary=20"


class Program:
    """A right program for three GPUs, in this process."""

    def __init__(self, seed, captured=None, planner=random_plan):
        self.captured = captured or resolve(MODEL, train=Adam(lr=1e-3))
        self.graph = self.captured.graph
        plan = planner(MACHINE, self.captured, seed)
        self.shares = share_out(plan, self.graph, self.captured.program)
        self.steps = steps_of(plan, self.graph, self.shares.shares)

    def run(self, steps, count=1, first=None):
        """The reply to the last of so many steps of the plan, or to the first that failed. With
        `first`, these are run before, in four steps, of which the last two are graphs."""
        block = Block.create(self.shares.size_bytes)
        sources = self.captured.program.sources
        values = initial_values(self.captured)
        inputs, targets = example_values(self.captured)
        given = {f"input.{i}": value for i, value in enumerate(inputs)}
        given |= {f"target.{i}": value for i, value in enumerate(targets)}
        for op, source in enumerate(sources):
            if source is not None:
                tensor = self.graph.outputs_of(op)[0]
                value = given[source.name] if source.role == "input" else values[tensor]
                tensor_at(block, self.shares.sources[tensor]).copy_(value)
        calls = {op: call for op, call in enumerate(self.captured.program.calls) if call}
        names = {share.device: "cuda:0" for share in self.shares.shares}
        load = LoadGpus(
            1,
            self.shares.shares,
            tuple(first or steps),
            names,
            {"cuda:0": 1 << 33},
            1,
            calls,
            self.graph.tensors,
            0,
            first is not None,
        )
        with torch.inference_mode():
            try:
                loaded = LoadedGpus(load, calls, block, PlayedCuda())
                before = 4 if first is not None else 0
                for number in range(1, before + 1):
                    assert loaded.run(number, False) == "done"
                loaded.load = dataclasses.replace(load, steps=tuple(steps))
                for number in range(before + 1, before + count + 1):
                    reply = loaded.run(number, False)
                    if isinstance(reply, Failed):
                        return reply
                return reply
            finally:
                block.close()

    def orders(self, steps):
        """True if every tensor is there when it is read, by the paths between works."""
        reaches = _Paths()
        arrival, pushed, base = {}, {}, defaultdict(dict)
        for step in steps:
            device = step.lane
            for instruction in step.instructions:
                match instruction:
                    case ReadSource(source=source, tensor=tensor):
                        arrival[device, tensor] = reaches.add((source, device), [])
                    case SendTensor(slot=None, flag=flag):
                        pushed[flag] = reaches.last.get(device)
                    case SendTensor(destination=to, tensor=tensor, flag=flag):
                        node = reaches.add((device, to), [reaches.last.get(device)])
                        arrival[to, tensor] = pushed[flag] = node
                    case AwaitFlag(flag=flag, tensor=tensor):
                        here = arrival[device, tensor] if flag == NO_FLAG else pushed.get(flag)
                        reaches.wait(device, here)
            if isinstance(step.instructions[0], Work):
                node = reaches.add(device, [])
                for tensor in self.reads(made_by(step), base[device]):
                    came = arrival.get((device, tensor))
                    if came is not None and not reaches.reach(came, node):
                        return False
        return True

    def is_view(self, op):
        return getattr(self.captured.program.calls[op].target, "is_view", False)

    def reads(self, ops, base):
        """The tensors that ops read. A view reads none: who reads it reads what it is a view of."""
        read = set()
        for op in ops:
            inputs = [base.get(t, t) for t in self.graph.inputs_of(op).tolist()]
            if self.is_view(op):
                base |= dict.fromkeys(self.graph.outputs_of(op), inputs[0])
            else:
                read.update(inputs)
        return read


def made_by(step):
    """The ops that a step calls."""
    return [op for work in step.instructions for op in ops_of(work)]


def waits_of(program):
    """Where the program has a wait by itself, in front of what needs it."""
    found = enumerate(step.instructions for step in program.steps)
    return [place for place, own in found if len(own) == 1 and isinstance(own[0], AwaitFlag)]


class _Paths:
    """A graph of works: those of one stream in order, and waits between streams."""

    def __init__(self):
        self.before, self.last, self.awaited = [], {}, {}

    def add(self, stream, before):
        node = len(self.before)
        own = [self.last.get(stream), *before, *self.awaited.pop(stream, [])]
        self.before.append([b for b in own if b is not None])
        self.last[stream] = node
        return node

    def wait(self, stream, node):
        self.awaited.setdefault(stream, []).append(node)

    def reach(self, first, then):
        left, seen = [then], set()
        while left:
            node = left.pop()
            if node == first:
                return True
            if node not in seen:
                seen.add(node)
                left += self.before[node]
        return False


@pytest.fixture(scope="module", params=range(PROGRAMS))
def program(request):
    return Program(request.param)


def test_right_programs_have_no_race(program):
    assert program.orders(program.steps)
    assert program.run(program.steps, count=2) == "done"


def test_every_missing_wait_that_matters_is_found(program):
    waits = waits_of(program)
    matter = []
    for place in np.random.default_rng(0).permutation(waits).tolist():
        steps = [*program.steps[:place], *program.steps[place + 1 :]]
        if not program.orders(steps):
            matter.append(steps)
    assert matter
    for steps in matter[:4]:
        reply = program.run(steps)
        assert isinstance(reply, Failed) and "StreamRaceError" in reply.traceback


def test_memory_that_is_freed_under_a_copy_is_found(program):
    found = 0
    releases = [
        i for i, s in enumerate(program.steps) if isinstance(s.instructions[-1], FreeTensors)
    ]
    for place in np.random.default_rng(0).permutation(releases)[:6].tolist():
        step = program.steps[place]
        bare = dataclasses.replace(step, instructions=step.instructions[-1:])
        reply = program.run([*program.steps[:place], bare, *program.steps[place + 1 :]])
        found += isinstance(reply, Failed) and "freed" in reply.traceback
    assert found >= 1


def test_a_missing_wait_beside_graphs_is_found(program):
    waits = waits_of(program)
    for place in np.random.default_rng(1).permutation(waits).tolist():
        steps = [*program.steps[:place], *program.steps[place + 1 :]]
        if not program.orders(steps):
            reply = program.run(steps, first=program.steps)
            assert isinstance(reply, Failed) and "StreamRaceError" in reply.traceback
            return
    pytest.fail("no wait matters")


def test_a_push_ahead_of_what_makes_its_tensor_is_found(program):
    """In a later step the table has the tensor of the step before, so only the clocks tell."""
    for place, step in enumerate(program.steps[1:], 1):
        before = program.steps[place - 1]
        send = step.instructions[0]
        if isinstance(send, SendTensor) and isinstance(before.instructions[0], Work):
            made_here = step.lane == before.lane and send.op in made_by(before) and send.slot
            if made_here and not program.is_view(send.op):
                steps = list(program.steps)
                steps[place - 1 : place + 1] = [step, before]
                reply = program.run(steps, first=program.steps)
                assert isinstance(reply, Failed) and "StreamRaceError" in reply.traceback
                return
    pytest.fail("no push follows what makes its tensor")


def test_a_wait_ahead_of_its_push_is_refused(program):
    for place in waits_of(program):
        step = program.steps[place]
        if step.instructions[0].flag != NO_FLAG:
            steps = [step, *program.steps[:place], *program.steps[place + 1 :]]
            reply = program.run(steps)
            assert isinstance(reply, Failed) and "KeyError" in reply.traceback
            return
    pytest.fail("no device waits for another one")


@pytest.fixture(scope="module")
def staged():
    captured = capture(Branches().eval(), torch.randn(8, 8))
    return Program(0, captured, plan_with_stages)


def test_stages_on_streams_of_their_own_have_no_race(staged):
    assert staged.run(staged.steps, count=5) == "done"
    assert staged.run(staged.steps, first=staged.steps) == "done"


@pytest.mark.parametrize("part", ["fork", "join"])
def test_a_lane_without_a_wait_is_found(staged, part, monkeypatch):
    original = getattr(worker, part)

    # Lanes are a list; a copy, which forks and joins in the same way, gives a tuple of one stream.
    def for_copies_only(cuda, compute, sides):
        original(cuda, compute, sides if isinstance(sides, tuple) else ())

    monkeypatch.setattr(worker, part, for_copies_only)
    reply = staged.run(staged.steps)
    assert isinstance(reply, Failed) and "StreamRaceError" in reply.traceback


@pytest.mark.parametrize("lane", [0, -1])
def test_a_lane_that_cannot_be_captured_runs_without_a_graph(lane):
    class Asking(nn.Module):
        """Two groups, of which one needs a number from the GPU."""

        def forward(self, x):
            return x.sin(), (x * 2).cos(), x.exp()

    captured = capture(Asking(), torch.randn(8, 8))
    graph = captured.graph
    last = graph.kinds.index("aten.sin" if lane == 0 else "aten.exp")
    captured = with_fault(captured, last, _with_a_number)
    ops = [int(op) for op in np.flatnonzero(~graph.is_source)]

    def planner(machine, captured, _seed):
        plan = plan_for(captured, 1, machine=machine)
        stages = Schedule((Stage(tuple(ops), 1.0),))
        schedules = (Schedule(()), stages, Schedule(()), Schedule(()))
        return dataclasses.replace(plan, orders=None, schedules=schedules)

    program = Program(0, captured, planner)
    assert program.run(program.steps, first=program.steps, count=2) == "done"


def _with_a_number(x):
    return x * x.sum().item()
