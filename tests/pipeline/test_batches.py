"""`replicas auto`: how a batch is shared, that no number changes by it, and what is refused."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import FileFormatError, InfeasibleError, UsageError
from dovetail.frontends import initial_values, run_step
from dovetail.graph.copies import tower_count, towers_of
from dovetail.machine import parse_machine
from dovetail.machine.local import local_machine
from dovetail.pipeline import candidates, planning, ways
from dovetail.pipeline.candidates import WHOLE, Candidate, Sharing, Tried, sharings
from dovetail.pipeline.opening import open_plan, verify
from dovetail.pipeline.pipelining import plan_pipeline, towers_devices
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.sources import silent
from dovetail.placers import Budget, keeping_interrupts
from dovetail.plans import load_plan
from dovetail.transforms import MicroBatches, Parts, Towers, applied, batch_of, the, without
from tests.support.placing import plan_for

pytestmark = pytest.mark.usefixtures("forked_workers")
FOUR_GPUS = "4 x k80 + haswell"
MODEL = "tests.support.small_models:trained"
MANY = "tests.support.small_models:of_many_examples"


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def examples(batch=16):
    torch.manual_seed(1)
    return torch.randn(batch, 6).double(), torch.randn(batch, 3).double()


def captured(module=None, batch=16, train=None):
    inputs, targets = examples(batch)
    return dt.capture(
        module or network(),
        inputs,
        loss=nn.functional.mse_loss,
        targets=(targets,),
        train=train or dt.Adam(lr=0.01),
    )


def plain_training(batch=16, steps=3):
    """(losses, state) of torch's own training on the whole batch."""
    module, (inputs, targets) = network(), examples(batch)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def piped(step, towers, micro_batches, machine):
    """The plan of towers that are pipelines, made as `replicas auto` makes it."""
    request = PlanRequest(
        Parts(towers * micro_batches).apply(step),
        machine,
        micro_batches=micro_batches,
        budget="20e",
    )
    return plan_pipeline(request, replicas=towers)


def add(tried, sharing, plan_it):
    """Try a way to share a batch, whose plan a function makes."""

    def search(_request, _progress):
        return plan_it()

    tried.add(Candidate(str(sharing), lambda: None, search, sharing.parts), silent)


# What is tried


def test_towers_and_micro_batches_divide_the_batch():
    step = captured()
    found = list(sharings(step, 128, parse_machine(FOUR_GPUS)))
    assert found[0] == Sharing(1, 1)
    assert {s.towers for s in found if s.micro_batches == 1} == {1, 2, 4}
    assert {s.micro_batches for s in found if s.towers == 1} == {1, 4, 8, 16}
    assert {s.micro_batches for s in found if s.towers == 2} == {1, 2, 4, 8}
    assert all(128 % s.parts == 0 for s in found)
    assert list(sharings(step, 7, parse_machine(FOUR_GPUS))) == [Sharing(1, 1)]
    assert Sharing(3, 1) in list(sharings(step, 12, parse_machine(FOUR_GPUS)))


def test_towers_of_stages_have_like_devices():
    mixed = parse_machine("2 x a100 + 2 x v100")
    devices = towers_devices(mixed, 2)
    models = [device.model for device in mixed.devices]
    first, second = (devices.of[tower, list(devices.firsts)].tolist() for tower in (0, 1))
    assert [models[d] for d in first] == [models[d] for d in second]
    assert sorted(first + second) == [0, 1, 2, 3]
    # One a100 cannot be shared by two towers.
    odd = parse_machine("1 x a100 + 3 x v100")
    with pytest.raises(UsageError, match="cannot be split into as many like sets"):
        towers_devices(odd, 2)
    assert all(s.micro_batches == 1 for s in sharings(captured(), 16, odd) if s.towers == 2)


def test_a_step_that_writes_buffers_has_no_towers_of_micro_batches():
    step = captured(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
    found = list(sharings(step, 16, parse_machine(FOUR_GPUS)))
    assert Sharing(4, 1) in found and Sharing(1, 4) in found
    assert not [s for s in found if s.towers > 1 and s.micro_batches > 1]


# What is chosen


def test_a_batch_of_much_work_is_shared_by_towers():
    layers = [nn.Sequential(nn.Linear(width, 64), nn.Tanh()) for width in (6, 64, 64)]
    step = captured(nn.Sequential(*layers, nn.Linear(64, 3)).double(), batch=1 << 14)
    plan = dt.plan(step, FOUR_GPUS, replicas="auto", budget="400e")
    assert plan.transforms[:2] == (Parts(4), Towers(4))
    rows = plan.baselines
    assert rows["whole batch"] > 1.5 * plan.value
    assert rows["4 towers"] <= min(v for name, v in rows.items() if "batch" in name)
    verify(plan, plan.graph)
    assert "the batch is shared by 4 towers" in plan.notes[-1]


def test_a_batch_of_little_work_stays_whole():
    plan = dt.plan(captured(), FOUR_GPUS, replicas="auto", budget="100e")
    assert plan.repeats == 1 and the(Parts, plan.transforms) is None
    assert plan.baselines["whole batch"] == plan.value < plan.baselines["4 towers"]


def test_micro_batches_are_taken_where_memory_is_short():
    step = captured(batch=4096)
    machine = "2 x k80 + haswell"
    whole = dt.plan(step, machine, replicas="auto", budget="60e")
    least = min(peak for peak in whole.peak_memory_bytes if peak)
    caps = [(name, least // 3) for name in whole.machine.device_names]
    plan = dt.plan(step, machine, replicas="auto", budget="60e", caps=caps)
    assert plan.micro_batches is not None
    assert plan.baselines["whole batch"] is None
    assert all(peak <= least // 3 for peak in plan.peak_memory_bytes)


def test_of_nearly_equal_plans_the_one_with_fewest_parts_is_taken():
    tried = Tried()
    one = dt.plan(captured(), "1 x k80 + haswell", placer="single", budget="1e")
    for sharing, value in ((WHOLE, 1.0), (Sharing(2), 0.6), (Sharing(4), 0.592), (Sharing(8), 0.5)):
        add(tried, sharing, lambda value=value: replace(one, value=value, lower_bound=value / 2))
    assert tried.best(0.0) == str(Sharing(8))
    assert tried.best(0.18) == str(Sharing(2))
    assert tried.told(str(Sharing(4))).lower_bound == 0.25
    assert tried.told(str(Sharing(8))).bound_proof == one.bound_proof


def test_a_bound_of_another_candidate_is_not_demanded_of_the_plans_own_graph(tmp_path):
    """A search's bound of the whole batch is above what opening proves again, and so may be that of
    another candidate."""
    step, tried = captured(), Tried()
    whole = dt.plan(step, "2 x k80 + haswell", budget="60e")
    higher = replace(whole, lower_bound=whole.value, bound_proof="CP-SAT")
    add(tried, WHOLE, lambda: higher)
    between = 0.999 * whole.value
    add(tried, Sharing(2), lambda: replace(whole, lower_bound=between, bound_proof="critical path"))
    plan = tried.told(str(WHOLE))
    assert plan.lower_bound == between
    verify(plan, plan.graph)


@pytest.mark.parametrize("flags", [{"schedule": "1f1b"}, {"recompute": "never"}, {"gap": 0.1}])
def test_options_of_pipelines_hold_for_the_candidates_that_have_them(flags):
    plan = dt.plan(captured(), "2 x k80 + haswell", replicas="auto", budget="40e", **flags)
    assert plan.baselines["4 micro-batches"] > 0
    assert not any("is for objective" in note for note in plan.notes)


def test_ctrl_c_in_a_search_that_finds_nothing_ends_the_others():
    tried = Tried()
    one = dt.plan(captured(), "1 x k80 + haswell", placer="single", budget="1e")
    add(tried, WHOLE, lambda: one)

    def interrupted():
        error = InfeasibleError("nothing fits")
        error.interrupted = True
        raise error

    add(tried, Sharing(2), interrupted)
    assert tried.interrupted and tried.told(str(WHOLE)).interrupted


def test_a_search_says_that_it_was_interrupted_where_nothing_fits():
    budget = Budget(evaluations=10)
    with pytest.raises(InfeasibleError) as caught, keeping_interrupts(budget):
        os.kill(os.getpid(), signal.SIGINT)
        raise InfeasibleError("nothing fits")
    assert caught.value.interrupted


def test_the_same_seed_gives_the_same_plan():
    first, second = (
        dt.plan(captured(), FOUR_GPUS, replicas="auto", budget="60e", seed=3) for _ in range(2)
    )
    assert np.array_equal(first.placement, second.placement)
    assert (first.value, first.source) == (second.value, second.source)


# Numbers


@pytest.mark.parametrize(("towers", "micro_batches"), [(2, 1), (4, 1), (1, 4), (2, 2), (2, 4)])
def test_no_number_changes_by_how_a_batch_is_shared(towers, micro_batches):
    """The whole batch by torch beside the shared one, by the calls of its own graph."""
    step = captured()
    parts = towers * micro_batches
    transforms = (
        Parts(parts),
        *([MicroBatches(micro_batches)] if micro_batches > 1 else []),
        *([Towers(towers)] if towers > 1 else []),
    )
    shared = applied(step, transforms)
    assert shared.transforms == transforms
    assert shared.source == replace(step.source, shapes=((16 // parts, 6),))
    assert tower_count(shared.graph) == towers
    inputs, targets = examples()
    assert torch.equal(torch.cat(shared.inputs), inputs)
    assert torch.equal(torch.cat(shared.targets), targets)
    losses, state = plain_training()
    values = initial_values(shared)
    for number, loss in enumerate(losses):
        found = run_step(shared, values, shared.inputs, shared.targets, step=number)
        assert abs(float(found) - loss) < 1e-12
    for op, origin in enumerate(shared.program.sources):
        if origin is not None and origin.role == "parameter":
            value = values[shared.graph.outputs_of(op)[0]]
            assert torch.allclose(value, state[origin.name], rtol=0, atol=1e-12)


def test_towers_of_stages_run_here(tmp_path):
    step = captured()
    plan = piped(step, 2, 2, "here/2")
    assert (the(Towers, plan.transforms).count, plan.micro_batches.count) == (2, 2)
    plan.save(tmp_path / "plan.json")
    plan = replace(load_plan(tmp_path / "plan.json"), graph=None)
    losses, state = plain_training()
    inputs, targets = examples()
    with dt.run(plan, step) as placed:
        found = [float(placed.step(inputs, targets)) for _ in losses]
        trained = placed.state_dict()
        with pytest.raises(UsageError, match="4 equal parts along dimension 0, but a"):
            placed.step(inputs[:7], targets[:7])
    assert np.allclose(found, losses, rtol=0, atol=1e-10)
    for name, value in state.items():
        assert torch.allclose(trained[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("fastest", ["this plan", "a plan for the whole batch", "eager"])
def test_here_a_shared_batch_is_measured_beside_the_whole_one(monkeypatch, fastest):
    def in_turns(timers, repeats, _tell, **_options):
        return {n: (0.1 if n.startswith(fastest) else 0.2,) * repeats.most for n in timers}

    monkeypatch.setattr(ways, "in_turns", in_turns)
    step = captured()
    shared = applied(step, (Parts(2), Towers(2)))
    machine, of_towers = local_machine("here/2"), np.maximum(towers_of(shared.graph), 0)
    whole = plan_for(step, 0, machine=machine)
    of_shared = replace(plan_for(shared, of_towers, machine=machine), transforms=shared.transforms)
    plan = ways.fastest_way(
        (of_shared, of_shared), step, parse_machine("here/1"),
        rivals={str(WHOLE): (whole, whole)}, whole=whole,
        replaces=True, compile_seconds=0.0, progress=silent,
    )  # fmt: skip
    assert "this plan 200 ms, a plan for the whole batch" in " ".join(plan.notes) or (
        fastest == "this plan"
    )
    graph = shared.graph if fastest == "this plan" else step.graph
    assert plan.graph_fingerprint == graph.fingerprint
    assert plan.way == ("eager" if fastest == "eager" else "placed")
    inputs, targets = examples()
    with dt.run(plan, step) as placed:
        assert float(placed.step(inputs, targets)) == pytest.approx(plain_training()[0][0])


@pytest.mark.compares_ways
def test_here_a_pipeline_of_micro_batches_is_raced_too():
    step, tried = captured(), Tried()
    request = PlanRequest(step, "here/2", replicas="auto", budget="40e", compile_budget="0s")
    for sharing in (WHOLE, Sharing(1, 4)):
        tried.add(candidates._sharing_candidate(request, step, sharing, request.limits), silent)
    best = str(Sharing(1, 4))
    plan = planning._raced(request, tried, best, tried.told(best), silent)
    assert plan.measured["eager"] > 0
    inputs, targets = examples()
    with dt.run(plan, step) as placed:
        assert float(placed.step(inputs, targets)) == pytest.approx(plain_training()[0][0])


def test_each_tower_has_its_stages_on_its_own_devices():
    plan = piped(captured(batch=1 << 16), 2, 4, "4 x a100")
    verify(plan, plan.graph)
    used = {}
    runs = np.flatnonzero(~plan.graph.is_source).tolist()
    for op in runs:
        if plan.graph.names[op].startswith("tower."):
            used.setdefault(plan.graph.names[op][:7], set()).add(int(plan.placement[op]))
    assert not used["tower.0"] & used["tower.1"]
    assert len(used["tower.0"]) == len(used["tower.1"]) == len(set(plan.micro_batches.devices))
    # The schedule that is exported is that of each replica.
    rows = dt.export(plan, captured(batch=1 << 16), "torch-schedule").strip().splitlines()
    assert len(rows) == len(used["tower.0"])


# From the command line


def test_a_shared_batch_is_planned_saved_and_opened(dovetail, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = dovetail(
        "plan", MANY, "--train", "sgd", "--replicas", "auto", "--machine", FOUR_GPUS,
        "--budget", "60e", "--out", path, "--json", "--report", tmp_path / "p.html",
    )  # fmt: skip
    assert status == 0, err
    assert "whole batch" in json.loads(out)["baselines"]
    opened, step = open_plan(path, MANY)
    assert the(Parts, opened.transforms).count == opened.repeats > 1
    assert len(step.graph) == json.loads(out)["ops"]
    assert opened.source == step.source
    assert opened.transforms == step.transforms


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--replicas", "many"], "use a number of towers, or auto"),
        (["--replicas", "0"], "use a number of towers, or auto"),
        (["--replicas", "auto"], "use --train"),
        (["--replicas", "auto", "--train", "sgd", "--asynchronous"], "asynchronous"),
        (["--replicas", "auto", "--train", "sgd", "--micro-batches", "4"], "micro_batches"),
        (["--replicas", "auto", "--train", "sgd", "--placer", "etf"], "placer"),
        (["--replicas", "auto", "--train", "sgd", "--pin", "a=haswell"], "pins"),
        (["--replicas", "auto", "--train", "sgd", "--objective", "load"], "objective"),
        (["--replicas", "auto", "--train", "sgd", "--phases", "decode=1"], "--replicas"),
        (["--replicas", "2", "--phases", "decode=1"], "--replicas"),
    ],
)
def test_what_does_not_go_together_is_refused(dovetail, flags, what):
    status, _, err = dovetail("plan", MODEL, "--machine", FOUR_GPUS, *flags)
    assert status == 2, err
    assert what in err
    assert len(err.strip().splitlines()) == 1


# What is no batch


class OverTime(nn.Module):
    """Takes [time, examples, features], a step of a cell at a time."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(6, 3)

    def forward(self, values):
        state = values.new_zeros(values.shape[1], 3)
        for value in values:
            state = self.cell(value, state)
        return state.expand(values.shape[0], -1, -1)


def test_a_dimension_that_is_no_batch_is_refused():
    step = dt.capture(
        OverTime(), torch.randn(4, 2, 6), loss=nn.functional.mse_loss,
        targets=(torch.randn(4, 2, 3),), train=dt.SGD(lr=0.1),
    )  # fmt: skip
    assert batch_of(step) == 4
    with pytest.raises(UsageError, match="it is no batch"):
        Parts(2).apply(step)


class Contrasts(nn.Module):
    """Compares all examples with each other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, values):
        rows = self.layer(values)
        return (rows @ rows.t()).softmax(1) @ rows


def test_examples_that_depend_on_each_other_are_refused():
    step = captured(Contrasts().double())
    with pytest.raises(UsageError, match="examples depend on each other"):
        Parts(2).apply(step)
    with pytest.raises(UsageError, match="examples depend on each other"):
        dt.plan(step, FOUR_GPUS, replicas="auto", budget="20e")


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (
            lambda output, target: nn.functional.mse_loss(output, target, reduction="sum"),
            "mse_loss",
        ),
        (lambda output, target: (output - target).abs().sum(), "aten.sum"),
    ],
)
def test_a_loss_that_is_a_sum_is_refused(loss, kind):
    inputs, targets = examples()
    step = dt.capture(network(), inputs, loss=loss, targets=(targets,), train=dt.SGD(lr=0.1))
    with pytest.raises(UsageError, match=f"but the loss is a sum .*{kind}"):
        Parts(2).apply(step)


def test_a_plan_whose_parts_nobody_takes_is_refused(tmp_path):
    plan = piped(captured(), 1, 4, "2 x k80 + haswell")
    transforms = (Parts(8), *without(Parts, plan.transforms))
    replace(plan, transforms=transforms).save(tmp_path / "plan.json")
    with pytest.raises(FileFormatError, match="not as many parts as towers and"):
        load_plan(tmp_path / "plan.json")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, values, scale):
        return self.layer(values) * scale


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.ones(1, 3), torch.ones(3)])
def test_an_input_without_the_batch_is_named(scale):
    step = dt.capture(
        Scaled(), torch.randn(4, 6), scale, loss=nn.functional.mse_loss,
        targets=(torch.randn(4, 3),), train=dt.SGD(lr=0.1),
    )  # fmt: skip
    with pytest.raises(UsageError, match="which is 4 of values, but scale has"):
        batch_of(step)


def test_parts_must_be_equal():
    with pytest.raises(UsageError, match="a batch of 16 is no multiple"):
        Parts(3).apply(captured())


def test_a_shared_step_is_not_shared_again():
    with pytest.raises(UsageError, match="shared already"):
        PlanRequest(dt.towers(captured(), 2), FOUR_GPUS, replicas="auto")
