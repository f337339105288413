"""Steps in place: a plan on all cores as one device works on the module's own tensors."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dovetail.errors import UsageError
from dovetail.frontends import capture
from dovetail.machine import parse_machine
from dovetail.pipeline import run
from dovetail.pipeline.sources import in_order
from dovetail.plans import EAGER, PLACED
from dovetail.transforms import Form
from tests.support.placing import plan_for

MACHINE = parse_machine("here/cpu")
X, Y = torch.randn(5, 3, 8, 8, dtype=torch.float64), torch.randint(0, 4, (5,))


class Gradients(nn.Module):
    """A loss, and the gradients of a model's parameters."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        with torch.enable_grad():
            own = {n: p.detach().requires_grad_() for n, p in self.model.named_parameters()}
            loss = cross_entropy(torch.func.functional_call(self.model, own, (x,)), y)
            return loss.detach(), *torch.autograd.grad(loss, list(own.values()))


def convolutional():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    ).double()


def plain_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), Y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("way", [PLACED, EAGER, "channels last"])
def test_training_by_steps_in_place_is_plain_training_whatever_the_module_is_given(way):
    ours, plain = convolutional(), convolutional()
    step = capture(Gradients(ours), X, Y)
    if way == "channels last":
        step = Form(channels_last=True).apply(step)
    plan = replace(
        in_order(step.graph, MACHINE),
        way=EAGER if way == EAGER else PLACED,
        transforms=step.transforms,
    )
    own, theirs = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (ours, plain))
    with run(plan, step, in_place=True) as placed:
        for number in range(9):
            x = X + number
            if number == 3:  # what a checkpoint brings
                ours.load_state_dict(plain.state_dict())
            if number == 5:  # other memory, and another parameter
                ours[4].bias.data = ours[4].bias.data.clone()
                ours[4].weight = nn.Parameter(ours[4].weight.detach().clone())
                own, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (ours, plain))
            loss, *gradients = placed.step(x, Y)
            for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
                parameter.grad = gradient
            own.step()
            assert loss.item() == pytest.approx(plain_step(plain, theirs, x).item(), abs=1e-12)
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(
                    ours.state_dict()[name], value, rtol=0, atol=1e-11, check_stride=False
                )
    assert ours[1].num_batches_tracked == 9


def test_results_and_inputs_in_place_are_handed_over_as_they_are():
    module = nn.Linear(4, 4)
    step = capture(module, X[0, 0, :4, :4].float())
    with run(in_order(step.graph, MACHINE), step, in_place=True) as placed:
        x = torch.randn(4, 4)
        y = placed.step(x.T)  # lies otherwise than the example
        torch.testing.assert_close(y, module(x.T))
        assert placed.state_dict().keys() == module.state_dict().keys()
        kept = y.clone()
        placed.step(torch.zeros(4, 4))
        assert y.equal(kept)
        y.requires_grad_().sum().backward()
        module.weight.data = module.weight.data.double()
        with pytest.raises(UsageError, match=r"weight: is torch\.float64"):
            placed.step(x)


def test_several_devices_do_not_work_in_place():
    step = capture(nn.Linear(8, 8).double(), X[0, 0])
    with pytest.raises(UsageError, match="only a step on all cores as one device"):
        run(plan_for(step, 0, machine=parse_machine("here/2")), step, in_place=True)


class Returning(nn.Module):
    """Results that share memory with an input, a parameter, a constant and each other, and a list
    and a table that hold no tensor."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        y = x * 2
        results = [x.clone(), self.table.clone(), torch.tensor([1.0, 2.0]), y, y.clone()]
        return results, [], {"n": 1}


def test_what_a_step_in_place_returns_is_the_callers_to_change():
    module, x = Returning(), torch.ones(4)
    step = capture(module, x)
    with run(in_order(step.graph, MACHINE), step, in_place=True) as placed:
        for _ in range(2):
            results, kept, table = placed.step(x)
            wanted, *rest = module(x)
            assert (kept, table) == tuple(rest)
            for result, value in zip(results, wanted, strict=True):
                torch.testing.assert_close(result, value)
            for result in results:
                result.add_(1.0)
            kept.append(1)
            table["m"] = 2
        assert x.equal(torch.ones(4)) and module.table.equal(torch.arange(4.0))
        assert results[3].equal(results[4]) and results[3].equal(torch.full((4,), 3.0))


def test_weights_that_are_written_through_data_count_also_where_a_copy_is_read():
    model = nn.Conv2d(3, 4, 3).double()
    step = Form(channels_last=True).apply(capture(model, X))
    plan = replace(in_order(step.graph, MACHINE), transforms=step.transforms)
    with run(plan, step, in_place=True) as placed, torch.no_grad():
        torch.testing.assert_close(placed.step(X), model(X), check_stride=False)
        model.weight.data.mul_(2.0)
        torch.testing.assert_close(placed.step(X), model(X), check_stride=False)


def test_a_weight_that_is_read_as_a_copy_is_each_steps_own_where_it_is_returned():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return self.last(self.first(x)), self.first.weight

    torch.manual_seed(1)
    model = Shows()
    x = X.float()
    step = Form(channels_last=True).apply(capture(model, x))
    plan = replace(in_order(step.graph, MACHINE), transforms=step.transforms)
    with run(plan, step, in_place=True) as placed:
        before, shown = placed.step(x)
        wanted, weight = (each.detach().clone() for each in model(x))
        torch.testing.assert_close(before, wanted, rtol=1e-4, atol=1e-5)
        for context in (torch.inference_mode, torch.no_grad):
            with context():
                model.first.weight.data.mul_(2)
                model.last.weight.data.add_(1)
                model.last.bias = nn.Parameter(model.last.bias + 1)
                model.first.weight = nn.Parameter(model.first.weight.clone())
                found, wanted = placed.step(x), model(x)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, check_stride=False)
        assert torch.equal(shown, weight)


def test_a_weight_that_is_turned_where_it_lies_counts():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1)).double()
    for form in (Form(), Form(channels_last=True)):
        step = form.apply(capture(model, X))
        plan = replace(in_order(step.graph, MACHINE), transforms=step.transforms)
        with run(plan, step, in_place=True) as placed, torch.no_grad():
            for _ in range(2):
                model[0].weight.data = model[0].weight.data.transpose(2, 3)
                model[1].weight.data = model[1].weight.data.transpose(0, 1)
                for _ in range(2):
                    found = placed.step(X)
                    torch.testing.assert_close(found, model(X), check_stride=False)
