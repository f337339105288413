"""`dt.training_step` in loops of a user's own, beside the same loops in plain PyTorch."""

import logging
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

import dovetail as dt
from benchmarks.own_loop.loops import (
    OPTIMIZERS,
    Loop,
    drawn_loop,
    largest_difference,
    outcome,
)
from dovetail.errors import RunError, UsageError
from dovetail.frontends.fused_updates import step_fused
from dovetail.machine import parse_machine
from dovetail.pipeline import training_steps
from dovetail.pipeline.sources import in_order, with_threads
from dovetail.plans import EAGER
from dovetail.runtime.torch_versions import is_step_watched

# What is computed is that of plain training bit for bit on equally many threads.
HERE = with_threads(parse_machine("here/cpu"), torch.get_num_threads())
cross_entropy = nn.functional.cross_entropy


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """A plan is of all ops in order, which takes no time to find. Counts the plans."""
    requests = []

    def find_plan(request, _progress):
        requests.append(request)
        return in_order(request.step.graph, HERE)

    monkeypatch.setattr(training_steps, "find_plan", find_plan)
    return requests


def a_step(model, loss=cross_entropy, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return dt.training_step(model, loss, optimizer, machine=HERE, **options)


def a_batch(size=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=draw), torch.randint(3, (size,), generator=draw)


def equals_plain(loop):
    return largest_difference(
        outcome(loop, planned=False), outcome(loop, planned=True, machine=HERE)
    )


def test_50_steps_with_warm_up_cosine_clipping_and_two_groups_are_those_of_plain_training(planned):
    assert equals_plain(Loop()) <= 1e-10 and len(planned) == 1


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")  # drawn sums are of several calls
@pytest.mark.parametrize("seed", range(30))
def test_a_drawn_loop_is_that_of_plain_training(seed):
    assert equals_plain(drawn_loop(seed)) <= 1e-10, drawn_loop(seed)


def test_a_loop_that_differentiates_by_itself_has_the_losses_and_gradients_of_the_plan(planned):
    def trained(loss_of):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compute, losses = loss_of(model, optimizer), []
        for seed in range(6):
            x, classes = a_batch(seed=seed)
            loss = compute(x.double(), classes)
            # Every other sum is of two batches.
            (loss / 3).backward()
            if seed % 3:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model.state_dict()

    plain = trained(lambda model, _: lambda x, y: cross_entropy(model(x), y))
    own = trained(lambda model, optimizer: a_step(model, optimizer=optimizer).loss)
    assert planned and largest_difference(own, plain) <= 1e-12
    step = a_step(nn.Linear(6, 3))
    step.loss(*a_batch())
    loss = step.loss(*a_batch())
    loss.backward()
    with pytest.raises(RuntimeError, match="compute it again"):
        loss.backward()
    with pytest.raises(UsageError, match="divides its sums"):
        a_step(nn.Linear(6, 3), accumulate=2).loss(*a_batch())


def test_schedulers_count_the_updates(planned):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = a_step(model, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*a_batch())
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_kind_of_call_that_comes_often_has_a_plan_of_its_own(planned, monkeypatch):
    monkeypatch.setattr(training_steps, "OFTEN", 3)
    step = a_step(nn.Linear(6, 3))
    sizes = [4, 2, 2, 4, 2, 2, 3]
    for size in sizes:
        step(*a_batch(size))
    assert [len(request.step.inputs[0]) for request in planned] == [4, 2]


def test_modes_frozen_parameters_and_the_models_own_loss_are_those_of_the_call(planned):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
            self.norm, self.unused = nn.BatchNorm1d(6), nn.Linear(2, 2)

        def forward(self, x, labels):
            return {"loss": cross_entropy(self.last(self.norm(self.first(x))), labels)}

    def trained(make_step):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = make_step(model, optimizer)
        x, labels = a_batch()
        losses = [step(x, labels=labels) for _ in range(3)]
        model.norm.eval()
        model.first.requires_grad_(False)
        losses += [step(x, labels=labels) for _ in range(3)]
        return losses, model.state_dict(), [p.grad for p in model.parameters()]

    def plainly(model, optimizer):
        def step(x, labels):
            optimizer.zero_grad()
            loss = model(x, labels)["loss"]
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    ours = trained(lambda model, optimizer: a_step(model, None, optimizer))
    plain = trained(plainly)
    assert [g is None for g in ours[2]] == [g is None for g in plain[2]]
    assert largest_difference(ours[:2], plain[:2]) == 0 and len(planned) == 1


def test_gradients_that_share_memory_are_each_clipped_once(planned):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(6)) for _ in range(3))

        def forward(self, x):
            # The first two have one gradient, and that of the last is one number in memory.
            return (x * (self.parts[0] + self.parts[1])).sum() + self.parts[2].sum()

    model = Sum()
    step = a_step(model, None, clip=1.0)
    step(torch.ones(1, 6))
    step(torch.ones(1, 6))
    for part in model.parts:
        torch.testing.assert_close(part.grad, torch.full((6,), 18**-0.5))
        torch.testing.assert_close(part.detach(), torch.full((6,), 1 - 0.2 * 18**-0.5))
    assert len(planned) == 1


def test_casts_a_decay_and_an_earlier_update_are_those_of_plain_training(planned):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    plain, weights = nn.Linear(6, 3), model.state_dict()
    plain.load_state_dict(weights)
    step = a_step(model, autocast=torch.bfloat16, ema=0.5, accumulate=3)
    losses = [step(*a_batch(seed=seed)) for seed in range(2)]
    step.update()

    average = AveragedModel(plain)
    for seed, loss in enumerate(losses):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs, targets = a_batch(seed=seed)
            value = cross_entropy(plain(inputs), targets)
        (value / 3).backward()
        assert torch.equal(loss, value)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    average.update_parameters(plain)
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(step.ema.module.weight, average.module.weight)


def test_what_cannot_be_captured_is_trained_plainly_and_the_log_says_why(planned, caplog):
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    torch.manual_seed(0)
    model = Branching(6, 3)
    plain = nn.Linear(6, 3)
    plain.load_state_dict(model.state_dict())
    step, (inputs, targets) = a_step(model), a_batch()
    with caplog.at_level(logging.WARNING):
        loss = step(inputs, targets)
        step(inputs, targets)
    (record,) = caplog.records
    assert "runs as plain training does" in record.message and "torch.where" in record.message
    assert step.describe().startswith("plain training runs: ") and step.plan is None
    assert torch.equal(loss, cross_entropy(plain(inputs) * (2 if inputs.sum() > 0 else 1), targets))


def test_values_in_python_that_change_end_a_plan(planned, caplog):
    model = nn.Sequential(nn.Linear(6, 3), nn.Softplus())
    plain = nn.Sequential(nn.Linear(6, 3), nn.Softplus())
    plain.load_state_dict(model.state_dict())
    step, optimizer = a_step(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for beta in (1.0, 1.0, 2.0):
        model[1].beta = plain[1].beta = beta
        loss, (inputs, targets) = step(*a_batch()), a_batch()
        optimizer.zero_grad()
        value = cross_entropy(plain(inputs), targets)
        value.backward()
        optimizer.step()
        assert torch.equal(loss, value)
    assert "they end a plan" in caplog.text


def test_a_value_that_a_model_sets_in_its_first_call_is_that_of_its_plan(planned):
    class Setting(nn.Linear):
        kind = None

        def forward(self, x):
            if self.kind is None:
                self.kind = "classification"
            return super().forward(x)

    torch.manual_seed(0)
    model = Setting(6, 3)
    torch.manual_seed(0)
    plain, step = nn.Linear(6, 3), a_step(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(4):
        loss, (inputs, targets) = step(*a_batch()), a_batch()
        optimizer.zero_grad()
        value = cross_entropy(plain(inputs), targets)
        value.backward()
        optimizer.step()
        assert torch.equal(loss, value)
    assert len(planned) == 2 and step.plan is not None


def test_a_model_that_counts_its_calls_in_python_is_trained_plainly(planned):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Counting(6, 3)
    step = a_step(model)
    for _ in range(3):
        step(*a_batch())
    assert model.calls == 3 and "values that the model holds" in step.describe()


def test_hooks_are_called_as_in_plain_training(planned):
    model, seen = nn.Linear(6, 3), []
    step = a_step(model)
    step(*a_batch())
    step(*a_batch())
    model.register_forward_hook(lambda *_: seen.append(1))
    step(*a_batch())
    step(*a_batch())
    assert len(seen) == 2 and len(planned) == 1


def test_hooks_on_gradients_are_called_as_in_plain_training(planned):
    model = nn.Linear(6, 3)
    step = a_step(model)
    step(*a_batch())
    step(*a_batch())
    model.weight.register_hook(torch.zeros_like)
    step(*a_batch())
    assert not model.weight.grad.any() and "hooks" in step.describe()


def test_an_error_of_one_batch_is_that_of_torch_and_the_next_one_is_planned(planned):
    model = nn.Embedding(4, 3)
    plain = nn.Embedding(4, 3)
    plain.load_state_dict(model.state_dict())
    step, optimizer = a_step(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    labels = torch.tensor([0, 1])
    for last in (1, 2, 9, 3, 1):
        inputs = torch.tensor([0, last])
        if last == 9:
            with pytest.raises(IndexError):
                step(inputs, labels)
            continue
        optimizer.zero_grad()
        value = cross_entropy(plain(inputs), labels)
        value.backward()
        optimizer.step()
        assert torch.equal(step(inputs, labels), value)
    assert torch.equal(model.weight, plain.weight)
    assert step.plan is not None and "a plan on" in step.describe()


def test_an_error_that_only_a_plan_raises_ends_it(planned, monkeypatch):
    step = a_step(nn.Linear(6, 3))
    step(*a_batch())
    ((_, known),) = step._of_kinds.items()

    def fail(*_):
        raise KeyError("weight_orig")

    monkeypatch.setattr(known.own, "step", fail)
    loss = step(*a_batch())
    assert loss.isfinite() and "weight_orig" in step.describe() and step.plan is None


@pytest.mark.parametrize("planned_calls", [0, 2])
def test_an_update_that_raises_leaves_no_gradients_in_the_next_sum(planned, planned_calls):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = a_step(model, optimizer=optimizer)
    for _ in range(planned_calls):
        step(*a_batch())

    def fail(*_):
        raise OverflowError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OverflowError):
        step(*a_batch())
    hook.remove()
    step(*a_batch())
    (gradient,) = torch.autograd.grad(
        cross_entropy(model(a_batch()[0]), a_batch()[1]), [model.weight]
    )
    assert torch.equal(model.weight.grad, gradient)


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_a_parameter_that_stands_twice_in_a_group_has_its_gradient_once(planned):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*model.parameters(), model.weight], lr=0.0)
    step = a_step(model, optimizer=optimizer)
    step(*a_batch())
    expected = model.weight.grad.clone()
    step(*a_batch())
    assert torch.equal(model.weight.grad, expected) and len(planned) == 1


def test_parameters_that_are_added_tied_or_replaced_train_as_in_plain_training(planned):
    def trained(make_step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = make_step(model, optimizer)
        losses = [step(*a_batch()) for _ in range(2)]
        model[1].weight = model[0].weight
        losses += [step(*a_batch()) for _ in range(2)]
        model[2] = nn.Linear(6, 3)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2})
        losses += [step(*a_batch()) for _ in range(2)]
        return losses, model.state_dict()

    def plainly(model, optimizer):
        def step(inputs, targets):
            optimizer.zero_grad()
            value = cross_entropy(model(inputs), targets)
            value.backward()
            optimizer.step()
            return value.detach()

        return step

    ours = trained(lambda model, optimizer: a_step(model, optimizer=optimizer))
    assert largest_difference(ours, trained(plainly)) == 0


def test_values_of_the_loss_end_a_plan_too(planned):
    model, loss = nn.Linear(6, 3), nn.CrossEntropyLoss()
    step = a_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0))
    step(*a_batch())
    step(*a_batch())
    loss.label_smoothing = 0.5
    inputs, targets = a_batch()
    assert torch.equal(step(inputs, targets), loss(model(inputs), targets))


def test_a_plan_to_run_eager_runs_the_module_as_it_is(monkeypatch):
    monkeypatch.setattr(
        training_steps,
        "find_plan",
        lambda request, _: replace(
            in_order(request.step.graph, HERE), way=EAGER, measured={"placed": 2e-3, EAGER: 1e-3}
        ),
    )
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    step, (inputs, targets) = (
        a_step(model, optimizer=torch.optim.SGD(model.parameters(), 0.0)),
        a_batch(),
    )
    torch.manual_seed(3)
    loss = step(inputs, targets)
    assert "2.00 times as fast as placed" in step.describe()
    torch.manual_seed(3)
    assert torch.equal(loss, cross_entropy(model(inputs), targets))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_fused_kernels_compute_what_the_optimizer_does_but_for_rounding(name):
    def trained(update):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        groups = [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.1},
        ]
        optimizer = OPTIMIZERS[name](groups, lr=0.01)
        for seed in range(5):
            inputs, targets = a_batch(seed=seed)
            optimizer.zero_grad()
            cross_entropy(model(inputs.double()), targets).backward()
            update(optimizer)
            optimizer.param_groups[0]["lr"] *= 0.9
        return model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]

    ours, plain = trained(step_fused), trained(lambda optimizer: optimizer.step())
    assert largest_difference(ours, plain) <= 1e-12


def test_fused_updates_leave_hooks_and_steps_of_an_instances_own_their_gradients():
    model, seen = nn.Linear(6, 3), []
    optimizer = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def look(*_):
        seen.append([parameter.grad is not None for parameter in model.parameters()])

    assert not is_step_watched(optimizer)
    cross_entropy(model(a_batch()[0]), a_batch()[1]).backward()
    step_fused(optimizer)
    hook = register_optimizer_step_pre_hook(look)
    step_fused(optimizer)
    hook.remove()
    optimizer.step = look
    step_fused(optimizer)
    assert seen == [[True, True]] * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": 3}, "model: is no torch.nn.Module"),
        ({"loss": 3}, "loss: is no function"),
        ({"optimizer": 3}, "optimizer: is a int"),
        ({"optimizer": nn.Linear(2, 2)}, "2 of 2 parameters that are not the model's"),
        ({"kind": torch.optim.LBFGS}, "calls the loss several times"),
        ({"clip": 0}, "clip: is 0"),
        ({"clip": 1.0, "clip_value": 1.0}, "does not go with clip"),
        ({"accumulate": 0}, "accumulate: is 0"),
        ({"autocast": torch.int8}, "autocast: is torch.int8"),
        ({"scaler": 3}, "scaler: is a int"),
        ({"ema": 1.5}, "ema: is 1.5"),
        ({"frozen": True}, "model: has no parameter that requires gradients"),
        ({"budget": "soon"}, "budget"),
        ({"machine": "here/1"}, "machine: is here/1; a step in a loop of your own runs on all"),
        ({"objective": "pipeline", "micro_batches": 2}, "objective: is not for a step in a loop"),
        ({"replicas": "auto"}, "replicas: is not for a step in a loop"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_does_not_fit_is_one_line(change, says):
    model = nn.Linear(6, 3).requires_grad_(not change.pop("frozen", False))
    optimizer = change.pop("kind", torch.optim.SGD)(model.parameters(), lr=0.1)
    if isinstance(change.get("optimizer"), nn.Module):
        change["optimizer"] = torch.optim.SGD(change["optimizer"].parameters(), lr=0.1)
    given = {"model": model, "loss": cross_entropy, "optimizer": optimizer} | change
    with pytest.raises(UsageError) as caught:
        dt.training_step(**given)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_closed_step_and_one_within_autocast_are_refused():
    step = a_step(nn.Linear(6, 3))
    assert "nothing has run" in step.describe()
    with torch.autocast("cpu"), pytest.raises(UsageError, match="give training_step its dtype"):
        step(*a_batch())
    step.close()
    assert "closed" in step.describe()
    with pytest.raises(RunError, match="closed"):
        step(*a_batch())
