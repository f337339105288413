"""Segments: the devices wait for each other as before, and the numbers stay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.executors import compiling, run
from dovetail.executors.compiling import Compiled, CompileTarget
from dovetail.executors.shares import (
    compiled_stages,
    ops_of,
    share_out,
)
from dovetail.frontends import SGD, capture, resolve
from dovetail.frontends.fused import FusedCall, may_be_fused
from dovetail.frontends.instructions import (
    AwaitFlag,
    RunCompiled,
    RunOp,
    RunUpdates,
    SendTensor,
)
from dovetail.frontends.optimizers import update_sgd
from dovetail.graph import Phase
from dovetail.graph.cells import cells_of
from dovetail.graph.kernels import compiled_ties
from dovetail.machine import local_machine
from dovetail.pipeline import planning, searching, segmenting
from dovetail.pipeline.opening import verify
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.segmenting import compiled_seconds, with_segments
from dovetail.pipeline.using import uncompiled
from dovetail.plans import load_plan
from dovetail.runtime.native import has_compiler
from tests.support.placing import plan_for, random_order, random_placement
from tests.support.small_models import branches

pytestmark = pytest.mark.usefixtures("forked_workers")
SHARE = 0.5


class Mixed(nn.Module):
    """Views of parameters that other devices and the backward pass read, dropout, a buffer that is
    written, and branches that meet."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.right.weight = self.left.weight
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        a = self.norm(self.left(x)).tanh()
        b = self.right(self.dropout(x)).chunk(2, dim=1)
        return (a + torch.cat([b[1].sigmoid(), b[0] * 2], dim=1)).relu()


def squared(output, target):
    return ((output - target) ** 2).mean()


def training_step():
    torch.manual_seed(2)
    inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
    return capture(Mixed(), inputs, targets=targets, loss=squared, train=SGD(lr=0.1, momentum=0.9))


@pytest.fixture
def halved(monkeypatch):
    """Everything but updates compiles, to code that takes half of the time and is nowhere to be
    found."""
    asked = []

    def compile_all(fused, target, places, **_options):
        asked.extend(call.key for call in fused)
        return {call.key: Compiled(SHARE) for call in fused if not call.is_update}

    monkeypatch.setattr(segmenting, "compile_all", compile_all)
    monkeypatch.setattr(segmenting, "has_compiler", lambda: True)
    return asked


def segmented(plan, step):
    return with_segments(plan, step, compile_seconds=9.0, progress=lambda *_: None)


@pytest.mark.parametrize("seed", range(6))
def test_no_device_waits_or_sends_within_a_segment(halved, seed):
    step = training_step()
    graph = step.graph
    placement = random_placement(graph, seed)
    plan = plan_for(step, placement)
    plan = replace(plan, compute_seconds=np.ones((len(graph), 2)))
    bare, found = segmented(plan, step)
    assert found.schedules is not None
    shares = share_out(found, graph, step.program).shares
    before = share_out(bare, graph, step.program).shares
    for share, other in zip(shares, before, strict=True):
        assert share.ops != [] and sorted(share.ops) == sorted(other.ops)
        assert any(isinstance(i, RunCompiled) for i in share.instructions)
        for kind in (AwaitFlag, SendTensor):
            assert _named(share, kind) == _named(other, kind)
        for instruction in share.instructions:
            if isinstance(instruction, RunCompiled):
                assert all(may_be_fused(graph, step.program, op) for op in instruction.ops)
            else:
                assert isinstance(instruction, (RunOp, AwaitFlag, SendTensor))
    verify(found, graph)


def _named(share, kind):
    return [(i.op, i.tensor) for i in share.instructions if isinstance(i, kind)]


class Difference(nn.Module):
    """The gradient of one parameter is read by its update and by the op that negates it."""

    def __init__(self):
        super().__init__()
        self.p, self.q, self.w = (nn.Parameter(torch.randn(6, 8)) for _ in range(3))

    def forward(self, x):
        return (x + (self.p - self.q)).tanh() * self.w


def _before_waits(graph, share):
    """The ops, but for updates, that run before each wait."""
    done, found = [], []
    for instruction in share.instructions:
        if isinstance(instruction, AwaitFlag):
            found.append(sorted(done))
        done += [op for op in ops_of(instruction) if graph.phases[op] != Phase.UPDATE]
    return found


def test_what_ran_before_a_wait_still_does(halved):
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
    step = capture(Difference(), inputs, targets=targets, loss=squared, train=SGD(lr=0.1))
    graph = step.graph
    placement = np.array([int(kind == "aten.tanh_backward") for kind in graph.kinds])
    for seed in range(40):
        plan = plan_for(step, placement, orders=random_order(graph, placement, seed))
        plan = replace(plan, compute_seconds=np.ones((len(graph), 2)))
        for share, other in zip(
            *(share_out(each, graph, step.program).shares for each in segmented(plan, step)),
            strict=True,
        ):
            pairs = zip(_before_waits(graph, share), _before_waits(graph, other), strict=True)
            assert all(set(bare) <= set(found) for bare, found in pairs)


@pytest.mark.parametrize("seed", range(3))
def test_without_code_segments_run_call_by_call_with_the_same_bits(halved, seed, tmp_path):
    step = training_step()
    placement = random_placement(step.graph, seed)
    plan = replace(plan_for(step, placement), source=step.source)
    bare, found = segmented(plan, step)
    found.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert [s.compiled for s in again.schedules[0].stages] == [
        s.compiled for s in found.schedules[0].stages
    ]
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(6, 8, generator=generator), torch.randn(6, 8, generator=generator))
        for _ in range(3)
    ]
    results = []
    for chosen in (bare, again):
        with run(chosen, step, seed=3) as placed:
            losses = [placed.step(*batch) for batch in batches]
            results.append((losses, placed.state_dict()))
    assert f"{len(compiled_stages(found))} have no code here" in uncompiled(again, step)
    assert uncompiled(bare, step) == ""
    (losses, state), (other_losses, other_state) = results
    assert losses == other_losses
    assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_equal_cells_are_compiled_once_and_the_plan_is_predicted_faster(halved):
    step = resolve("zoo:rnnlm?hidden=8&steps=6&batch=2&vocabulary=20")
    plan = plan_for(step, [0] * len(step.graph))
    plan = replace(plan, compute_seconds=np.ones((len(step.graph), 2)))
    bare, found = segmented(plan, step)
    stages = found.schedules[0].stages
    compiled = [stage for stage in stages if stage.compiled]
    assert len(compiled) > 2 * len(halved) and len(halved) == len(set(halved))
    assert found.value == pytest.approx(sum(len(s.ops) * (1 - SHARE * s.compiled) for s in stages))
    assert found.lower_bound == 0.0
    assert found.notes == (*bare.notes, f"{len(compiled)} segments run compiled")
    assert bare.schedules is None


def test_nothing_is_cut_where_nothing_is_faster_or_stages_are_there(halved, monkeypatch):
    step = training_step()
    plan = plan_for(step, [0] * len(step.graph))
    staged = replace(plan, schedules=segmented(plan, step)[1].schedules)
    assert segmented(staged, step) == (staged, staged)
    monkeypatch.setattr(
        segmenting, "compile_all", lambda fused, *_, **__: {fused[0].key: Compiled(1.0, "no luck")}
    )
    bare, found = segmented(plan, step)
    assert found is bare and found.schedules is None
    assert "were not reached" in found.notes[-1] and "no luck" in found.notes[-1]
    monkeypatch.setattr(segmenting, "has_compiler", lambda: False)
    assert segmented(plan, step) == (plan, plan)


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
def test_a_compiled_plan_trains_as_the_plain_module_does_but_for_rounding(monkeypatch):
    torch.manual_seed(0)
    module, inputs = branches()
    target = torch.randn(8, 32)
    step = capture(module, *inputs, targets=target, loss=nn.functional.mse_loss, train=SGD(lr=0.05))
    placement = [int(".right" in f".{name}") for name in step.graph.modules]
    plan = plan_for(step, placement)
    monkeypatch.setattr(compiling, "FASTER", float("inf"))
    _, found = with_segments(plan, step, compile_seconds=300, progress=lambda *_: None)
    assert all(any(s.compiled for s in schedule.stages) for schedule in found.schedules)
    for device, ops in compiled_stages(found):
        fused = FusedCall.of(step.graph, step.program, ops)[0]
        kind = CompileTarget.of(found.machine.devices[device])
        assert fused.is_update or compiling.load_code(fused.key, kind) is not None
    assert uncompiled(found, step) == ""
    own = torch.optim.SGD(module.parameters(), lr=0.05)
    with run(found, step) as placed:
        for _ in range(3):
            own.zero_grad()
            loss = nn.functional.mse_loss(module(*inputs), target)
            loss.backward()
            own.step()
            torch.testing.assert_close(placed.step(*inputs, target), loss.detach())
        state = placed.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name], value)


class Conjugated(nn.Module):
    """Reads a view that torch negates lazily."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.7))

    def forward(self, x):
        imaginary = torch.view_as_complex(x.reshape(8, 2)).conj().imag
        return (imaginary * self.weight).tanh() * imaginary + imaginary.exp()


def test_what_reads_lazily_negated_views_is_not_compiled(halved):
    torch.manual_seed(0)
    x, target = torch.randn(16), torch.zeros(8)
    step = capture(Conjugated(), x, targets=target, loss=squared, train=SGD(lr=0.1))
    assert any("_neg_view" in str(call.target) for call in step.program.calls if call is not None)
    plan = plan_for(step, [0] * len(step.graph))
    plan = replace(plan, compute_seconds=np.ones((len(step.graph), 2)))
    _, found = segmented(plan, step)
    lazy = segmenting._lazy_storages(step.graph, step.program)
    for _, ops in compiled_stages(found):
        for op in ops:
            read = step.graph.storages[step.graph.inputs_of(op)]
            assert lazy.isdisjoint(read.tolist())


def test_a_plan_whose_segments_do_not_fit_stays_op_by_op(halved):
    step = resolve("zoo:rnnlm?hidden=8&steps=6&batch=2&vocabulary=20")
    plan = plan_for(step, [0] * len(step.graph))
    plan = replace(plan, compute_seconds=np.ones((len(step.graph), 2)))
    free = segmented(plan, step)[1].peak_memory_bytes[0]
    capped = replace(plan, caps=((plan.machine.device_names[0], free - 1),))
    bare, found = segmented(capped, step)
    assert found is bare and found.schedules is None
    assert "does not fit" in found.notes[-1]


@pytest.mark.parametrize("seed", range(4))
def test_updates_that_are_faster_fused_run_fused(monkeypatch, tmp_path, seed):
    monkeypatch.setattr(
        segmenting,
        "compile_all",
        lambda fused, *_, **__: {call.key: Compiled(SHARE) for call in fused if call.is_update},
    )
    monkeypatch.setattr(segmenting, "has_compiler", lambda: True)
    step = training_step()
    plan = replace(plan_for(step, random_placement(step.graph, seed)), source=step.source)
    bare, found = segmented(plan, step)
    shares = share_out(found, step.graph, step.program).shares
    calls = [i.ops for share in shares for i in share.instructions if isinstance(i, RunUpdates)]
    fused = [op for ops in calls for op in ops]
    updates = [op for op, call in enumerate(step.program.calls) if call and call.in_place]
    updates = [op for op in updates if step.program.calls[op].target is update_sgd]
    assert sorted(fused) == updates and len(updates) == 5
    assert found.notes[-1] == "0 segments run compiled, and 5 updates fused"
    assert uncompiled(found, step) == ""
    found.save(tmp_path / "plan.json")
    batches = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(4)]
    states = []
    for chosen in (bare, load_plan(tmp_path / "plan.json")):
        with run(chosen, step, seed=3) as placed:
            for batch in batches:
                placed.step(*batch)
            states.append(placed.state_dict() | placed.optimizer_state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-6)


def test_updates_wait_for_one_call_until_their_gradients_are_many_bytes(monkeypatch):
    monkeypatch.setattr(
        segmenting, "compile_all", lambda fused, *_, **__: {f.key: Compiled(SHARE) for f in fused}
    )
    monkeypatch.setattr(segmenting, "has_compiler", lambda: True)
    step = training_step()
    plan = plan_for(step, [0] * len(step.graph))
    plan = replace(plan, compute_seconds=np.ones((len(step.graph), 2)))

    def calls():
        shares = share_out(segmented(plan, step)[1], step.graph, step.program).shares
        return [len(i.ops) for s in shares for i in s.instructions if isinstance(i, RunUpdates)]

    assert calls() == [5]
    monkeypatch.setattr(segmenting, "MOST_BYTES", 1)
    assert calls() == [1] * 5


def test_what_ops_take_as_compiled_goes_by_kind_and_number_of_threads(halved):
    step = training_step()
    graph = step.graph
    plan = plan_for(step, random_placement(graph, 0))
    seconds = np.random.default_rng(0).uniform(1, 2, (len(graph), 2))
    plan = replace(plan, compute_seconds=seconds)
    _, found = segmented(plan, step)
    compiled = compiled_seconds(found, graph, graph, seconds)
    within = {op for _, ops in compiled_stages(found) for op in ops}
    kinds = {}
    for op, name in enumerate(graph.signatures):
        kinds.setdefault(name, []).append(op)
    shares = compiled / seconds
    placement = found.placement
    for ops in kinds.values():
        of_plan = np.array([seconds[op, placement[op]] for op in ops])
        inside = np.array([op in within for op in ops])
        if graph.is_source[ops[0]]:
            wanted = 1.0
        else:
            wanted = 1 - (1 - SHARE) * of_plan[inside].sum() / of_plan.sum()
        np.testing.assert_allclose(shares[ops], wanted, rtol=1e-12)
    assert (shares < 1).any()
    # A device with another number of threads was not compiled for.
    first, second = plan.machine.devices
    machine = replace(plan.machine, devices=(first, replace(second, cores=(0, 1), threads=2)))
    idle = replace(found, machine=machine, schedules=(found.schedules[0], None))
    other = compiled_seconds(idle, graph, graph, seconds)
    np.testing.assert_array_equal(other[:, 1], seconds[:, 1])
    assert (other[:, 0] < seconds[:, 0]).any()


def placed_again(step, monkeypatch, placement):
    """The plans before and after, if the search with compiled costs finds this placement."""
    graph = step.graph
    machine = local_machine("here/2")
    chosen = plan_for(step, random_placement(graph, 0), machine=machine)
    chosen = replace(chosen, compute_seconds=np.ones((len(graph), 2)), notes=("first",))
    before = segmented(chosen, step)
    asked = []

    def search_plan(_request, _progress, costs, *, ties):
        assert ties.shape[1] == 2
        asked.append(costs.compute_seconds)
        found = plan_for(step, placement, machine=machine)
        return replace(found, compute_seconds=costs.compute_seconds)

    monkeypatch.setattr(planning, "search_plan", search_plan)
    request = PlanRequest(step, "here/2")
    found = planning.with_compiled(chosen, request, 9.0, lambda *_: None, limits=request.limits)
    assert len(asked) == 1
    assert (asked[0] < 1).any()
    return before, found


def test_another_placement_is_taken_if_it_is_faster_with_segments(halved, monkeypatch):
    step = training_step()
    before, found = placed_again(step, monkeypatch, 0)
    if found[1].value >= before[1].value:
        assert found[1].schedules == before[1].schedules
    else:
        assert set(found[1].placement[~step.graph.is_source].tolist()) == {0}
    for plan in found:
        verify(plan, step.graph)
        assert plan.notes[0] == "first"
        assert "placed again with the costs of compiled segments" in plan.notes[-1]
    # Its promises are by the costs of ops one by one.
    assert (found[0].compute_seconds == 1).all()


def test_the_same_placement_changes_nothing(halved, monkeypatch):
    step = training_step()
    before, found = placed_again(step, monkeypatch, random_placement(step.graph, 0))
    for one, other in zip(before, found, strict=True):
        assert other.value == one.value
        np.testing.assert_array_equal(other.placement, one.placement)


class Branch(nn.Module):
    """Ends with pointwise ops of its own, outside the modules within it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        return (h.tanh() * h.sigmoid() + h.relu()).tanh()


class Sides(nn.Module):
    """Only a sum reads what two branches make."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Branch(), Branch()

    def forward(self, x):
        return self.left(x) + self.right(x)


def test_ops_that_are_pinned_apart_are_no_kernel():
    torch.manual_seed(0)
    step = capture(Sides(), torch.randn(4, 8))
    pins = [("left", "cpu0"), ("right", "cpu1")]
    request = PlanRequest(step, "here/2", budget="20e", pins=pins)
    costs = searching.costs_of(step, local_machine("here/2"))
    ties = compiled_ties(step.graph, cells_of(step.graph))
    found = searching.search_plan(request, lambda *_: None, costs, ties=ties)
    for name, device in pins:
        of_module = [op for op, module in enumerate(step.graph.modules) if module.startswith(name)]
        assert of_module
        assert set(found.placement[of_module].tolist()) == {int(device[-1])}
