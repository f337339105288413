"""Plans of recurrent layers by fused kernels: saved, and run."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import dovetail as dt
from dovetail.executors import run as execute
from dovetail.frontends import resolve
from dovetail.pipeline.opening import open_plan, planned
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.searching import search_plan
from dovetail.transforms import Form
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
