"""Plans of recurrent layers by fused kernels: chosen by their costs, saved, and run."""

import io
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import mse_loss

import dovetail as dt
from dovetail.errors import CaptureError, GraphMismatchError
from dovetail.executors import run as execute
from dovetail.frontends import resolve
from dovetail.pipeline.candidates import Tried, candidates, forms_of
from dovetail.pipeline.opening import open_plan, planned, timeline_of, verify
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.searching import search_plan
from dovetail.placers import parse_limits
from dovetail.plans import load_plan, planned_graph
from dovetail.reports import plan_table
from dovetail.transforms import Form, the
from tests.support.placing import plan_for, random_placement
from tests.support.plain_steps import plain_steps

pytestmark = pytest.mark.usefixtures("forked_workers")
KERNEL = "aten.mkldnn_rnn_layer"
BUDGET = "60e"


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.LSTM(16, 16, 2)

    def forward(self, x):
        return self.layers(x)[0]


def example():
    torch.manual_seed(1)
    return torch.randn(12, 4, 16)


def trained():
    return dt.capture(
        Layers(), example(), loss=mse_loss, targets=torch.zeros(12, 4, 16), train=dt.Adam(lr=0.01)
    )


@pytest.fixture(scope="module")
def step():
    return dt.capture(Layers().eval(), example())


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


def test_a_plan_runs_the_step_as_it_was_captured_from_the_users_own(step):
    fused = Form(3).apply(step)
    # A plan on two devices may have copies of ops, which are made anew each time.
    request = PlanRequest(fused, "here/2", placer="single", budget=BUDGET)
    plan = search_plan(request, lambda *_: None)
    assert planned(plan, step).transforms[0] == Form(3)
    assert planned(plan, step) is planned(plan, step)
    with dt.run(plan, step) as placed:
        own = placed.step(example())
    with torch.no_grad():
        torch.testing.assert_close(own, step.module(example()), rtol=1e-5, atol=1e-6)


def loss_of(module):
    return mse_loss(module(example()), torch.zeros(12, 4, 16))


def test_random_placements_train_as_the_module_does():
    step = trained()
    fused = Form(3).apply(step)
    for seed in range(2):
        plan = plan_for(fused, random_placement(fused.graph, seed))
        assert len(set(plan.placement.tolist())) == 2
        module = Layers()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        with execute(plan, planned(plan, step)) as placed:
            placed.load_state_dict(module.state_dict())
            for loss in plain_steps(optimizer, partial(loss_of, module), 4):
                own = placed.step(example(), torch.zeros(12, 4, 16))
                torch.testing.assert_close(own, loss, rtol=1e-5, atol=1e-6)


def test_a_saved_plan_is_opened_with_its_chunks(tmp_path):
    model = "tests.pipeline.test_recurrent_plans:made"
    fused = Form(3).apply(resolve(model))
    plan = search_plan(PlanRequest(fused, "here/2", budget=BUDGET), lambda *_: None)
    plan.save(tmp_path / "plan.json")
    opened, step = open_plan(tmp_path / "plan.json", model)
    assert opened.transforms[0] == Form(3)
    assert step.graph.kinds.count(KERNEL) == 6


def made():
    return Layers().eval(), (example(),)


def test_parts_of_a_budget():
    assert parse_limits("10s").divided(4) == (2.5, float("inf"))
    assert parse_limits("10").divided(4) == (2.5, float("inf"))
    assert parse_limits("5000e").divided(3) == (float("inf"), 1666)
    assert parse_limits("2e").divided(3) == (float("inf"), 1)


def test_a_pin_on_an_op_that_a_form_does_not_have_leaves_the_step_unrolled(step):
    name = next(name for name in step.graph.names if name.endswith("/sigmoid"))
    request = PlanRequest(step, "here/2", budget=BUDGET, pins=((name, "cpu0"),))
    _, plan = recurrence(request)
    assert the(Form, plan.transforms) is None
    assert "with one fused kernel a recurrent layer: " in plan.notes[-1]


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
