"""What can be planned for a request: the forms of a step, the table of kinds, and their budget."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import mse_loss

import dovetail as dt
from dovetail.costs import analytic_costs
from dovetail.errors import CaptureError, GraphMismatchError, InfeasibleError
from dovetail.graph import layered
from dovetail.pipeline import searching, sources
from dovetail.pipeline.candidates import (
    AS_COMPILED,
    AS_IT_IS,
    Candidate,
    Tried,
    candidates,
    forms_of,
    shares,
)
from dovetail.pipeline.opening import timeline_of, verify
from dovetail.pipeline.planning import find_plan
from dovetail.pipeline.requests import CANDIDATES, CandidateKind, PlanRequest
from dovetail.placers import parse_limits
from dovetail.plans import load_plan, planned_graph
from dovetail.reports import plan_table
from dovetail.runtime.native import SWITCH
from dovetail.transforms import Form, Parts, the
from dovetail.units import HERE
from tests.pipeline.test_recurrent_plans import BUDGET, KERNEL, Layers, example


@pytest.fixture(scope="module")
def step():
    return dt.capture(Layers().eval(), example())


@pytest.fixture
def by_data_sheet(monkeypatch):
    """Two kernels are predicted faster than hundreds of calls, whatever else computes here."""

    def costs_of(step, machine, *_):
        return analytic_costs(step.graph, machine)

    monkeypatch.setattr(searching, "costs_of", costs_of)


def recurrence(request):
    """(request, plan) of the best form, as it is predicted."""
    tried = Tried()
    for candidate in candidates(request, tried):
        if not candidate.rival:
            tried.add(candidate, lambda *_: None)
        if tried.interrupted:
            break
    best = tried.best(request.resolved_gain)
    return replace(tried.requests[best], machine=request.machine), tried.told(best)


@pytest.mark.usefixtures("by_data_sheet")
def test_fused_kernels_are_taken_where_they_are_predicted_to_be_faster(step):
    request, plan = recurrence(PlanRequest(step, "here/1", budget=BUDGET))
    # A small layer of 12 steps takes 2 kernels instead of some hundreds of calls.
    assert the(Form, plan.transforms) == Form(1)
    assert request.step.graph.kinds.count(KERNEL) == 2
    assert any("the step as predicted: as it is" in note for note in plan.notes)
    verify(plan, request.step.graph)


def test_chunks_are_tried_on_several_devices_alone(step, monkeypatch):
    tried = []

    def note(form, _captured):
        tried.append(form.recurrent_chunks)
        raise CaptureError("Layers", "it is not tried here", "")

    monkeypatch.setattr(Form, "apply", note)
    for machine, wanted in (("here/1", [1]), ("here/2", [1, 4, 8])):
        tried.clear()
        _, plan = recurrence(PlanRequest(step, machine, budget=BUDGET))
        assert tried == wanted
        assert the(Form, plan.transforms) is None
        assert "it is not tried here" in plan.notes[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"placer": "heft"},
        {"machine": "2 x v100 + haswell"},
        {"stages": True},
        {"per_op": True, "placer": "gdp"},
    ],
    ids=["another placer", "a machine of data sheets", "stages", "per op"],
)
def test_other_requests_stay_unrolled(step, options):
    assert forms_of(PlanRequest(step, "here/2"))
    assert not forms_of(PlanRequest(step, **{"machine": "here/2", **options}))


def test_a_pin_on_an_op_that_a_form_does_not_have_leaves_the_step_unrolled(step):
    name = next(name for name in step.graph.names if name.endswith("/sigmoid"))
    request = PlanRequest(step, "here/2", budget=BUDGET, pins=((name, "cpu0"),))
    _, plan = recurrence(request)
    assert the(Form, plan.transforms) is None
    assert "with one fused kernel a recurrent layer: " in plan.notes[-1]


@pytest.mark.usefixtures("by_data_sheet")
def test_ctrl_c_while_a_form_is_measured_keeps_the_best_plan_so_far(step, monkeypatch):
    tried, apply = [], Form.apply

    def interrupted(form, captured):
        tried.append(form.recurrent_chunks)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return apply(form, captured)

    monkeypatch.setattr(Form, "apply", interrupted)
    _, plan = recurrence(PlanRequest(step, "here/2", budget=BUDGET))
    assert plan.interrupted
    assert the(Form, plan.transforms) == Form(1)


@pytest.mark.usefixtures("by_data_sheet")
def test_the_users_own_graph_is_enough_for_a_plan_of_another_form(step, tmp_path):
    request, plan = recurrence(PlanRequest(step, "here/2", budget=BUDGET))
    own = request.step.graph
    assert the(Form, plan.transforms) and len(own) != len(step.graph)
    assert planned_graph(plan, step.graph) is own
    text = Console(width=100, file=io.StringIO(), record=True)
    text.print(plan_table(plan, step.graph))
    assert "the step as predicted" in text.export_text()
    assert timeline_of(plan, step.graph).step_seconds == pytest.approx(plan.value)
    verify(plan, step.graph)
    # A file keeps the graph. Without it, that of another form is refused.
    plan.save(tmp_path / "plan.json")
    assert plan_table(load_plan(tmp_path / "plan.json"), step.graph)
    file = json.loads((tmp_path / "plan.json").read_text())
    del file["planned_graph"]
    (tmp_path / "plan.json").write_text(json.dumps(file))
    with pytest.raises(GraphMismatchError):
        plan_table(load_plan(tmp_path / "plan.json"), step.graph)


def test_a_plan_in_another_form_says_how_its_machine_was_measured(step, monkeypatch):
    probed_machine = sources.probed_machine

    def disturbed(*arguments, beside, **options):
        beside(2.0)
        return probed_machine(*arguments, beside=beside, **options)

    monkeypatch.setattr(sources, "probed_machine", disturbed)
    monkeypatch.setenv(SWITCH, "python")
    _, plan = recurrence(PlanRequest(step, "here/2", budget=BUDGET))
    assert the(Form, plan.transforms) is not None
    for said in ("calls are made from Python", "cores while the machine"):
        assert sum(said in note for note in plan.notes) == 1


# The table of kinds, and the budget


def another_seed(request, tried):
    """The same search with another seed."""
    assert tried.plan(AS_IT_IS) is not None or request.replicas
    yield Candidate("with another seed", lambda: replace(request, seed=request.seed + 1))


def test_a_kind_that_is_added_to_the_table_has_its_share_and_stands_in_the_notes(monkeypatch):
    request, given = PlanRequest(layered(60), "2 x p100", budget="60e"), []

    def noted(shared, tried):
        given.append(shared.limits.evaluations)
        yield from another_seed(shared, tried)

    assert shares(request)["as it is"] == request.limits
    monkeypatch.setitem(CANDIDATES, "another seed", CandidateKind(noted))
    assert shares(request)["as it is"].evaluations == 40
    plan = find_plan(request)
    assert given == [20]
    assert "the step as predicted: as it is" in plan.notes[-1]
    assert "with another seed" in plan.notes[-1]


def convolutions():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    return dt.capture(
        module, torch.randn(8, 3, 8, 8), loss=mse_loss, targets=torch.zeros(8, 2),
        train=dt.SGD(lr=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("fits", [True, False], ids=["all fit", "parts of the batch do not fit"])
@pytest.mark.parametrize("replicas", ["", "auto"])
def test_what_is_tried_has_one_budget_together(monkeypatch, replicas, fits):
    monkeypatch.setitem(CANDIDATES, "another seed", CandidateKind(another_seed))
    step, tried, evaluations = convolutions(), Tried(), {}
    whole = dt.plan(step, "2 x p100", placer="single", budget="1e")
    request = PlanRequest(step, "here/2", budget="300e", replicas=replicas)

    def search(asked, _progress):
        evaluations[name] = evaluations.get(name, 0) + asked.limits.evaluations
        if not fits and the(Parts, asked.step.transforms) is not None:
            raise InfeasibleError("nothing fits")
        return whole

    for candidate in candidates(request, tried):
        name = candidate.name
        tried.add(replace(candidate, search=search), lambda *_: None)
    # The rival of the best of all comes last. It has nothing to search for.
    assert list(evaluations)[-1] == HERE
    del evaluations[HERE]
    assert {"with channels last", "with another seed"} < evaluations.keys()
    assert ("2 towers of 4 micro-batches" in evaluations) == (bool(replicas) and not fits)
    evaluations[AS_COMPILED] = shares(request)[AS_COMPILED].evaluations
    assert evaluations[AS_COMPILED] == evaluations["with another seed"] == 60
    assert sum(evaluations.values()) == 300


def test_parts_of_a_budget():
    assert parse_limits("10s").divided(4) == (2.5, float("inf"))
    assert parse_limits("10").divided(4) == (2.5, float("inf"))
    assert parse_limits("5000e").divided(3) == (float("inf"), 1666)
    assert parse_limits("2e").divided(3) == (float("inf"), 1)
    assert parse_limits("5000e").divided(3, 2) == (float("inf"), 3333)
    assert parse_limits("9s").divided(3, 2) == (6.0, float("inf"))
