"""State that a step reads or leaves outside of parameters and buffers is refused by name, and the
model is left as it was."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import CaptureError, ModelError
from dovetail.frontends import SGD, capture, initial_values, run_step


class Parts(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.several = nn.Sequential(nn.Linear(4, 4))
        self.register_buffer("late", None)
        self.scale = nn.Parameter(torch.ones(4))
        self.numbers, self.array = itertools.count(1), np.ones(1)
        self.run = run

    def forward(self, *inputs):
        return self.run(self, *inputs)


def drawn_by_python(model, x):
    return model.b(x) if random.random() < 0.5 else model.a(x)


def drawn_by_numpy(model, x):
    return model.a(x) * float(np.random.rand())  # noqa: NPY002


def drawn_by_an_own_generator(model, x):
    return model.a(x) + torch.randn(4, generator=torch.Generator().manual_seed(3))


def seeded(model, x):
    torch.manual_seed(3)
    return model.a(x) + torch.randn(4)


def seeded_in_a_fork(model, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return model.a(x) + torch.randn_like(x)


STATE = torch.Generator().manual_seed(3).get_state()


def state_set(model, x):
    torch.set_rng_state(STATE)
    return model.a(x) + torch.randn(4)


def state_set_after_the_draws(model, x):
    y = model.a(x) + torch.randn(4)
    torch.random.set_rng_state(STATE)
    return y


def state_put_back(model, x):
    with torch.random.fork_rng(devices=[]):
        return model.a(x) + torch.randn(4)


def own_generator_with_a_state(model, x):
    generator = torch.Generator()
    generator.set_state(STATE)
    return model.a(x) + torch.randn(4, generator=generator)


def default_generator_seeded(model, x):
    torch.default_generator.manual_seed(3)
    return model.a(x) + torch.rand_like(x)


def seed_read(model, x):
    return model.a(x) * (torch.initial_seed() % 7)


def seed_of_the_generator_read(model, x):
    return model.a(x) * (torch.default_generator.initial_seed() % 7)


def swapped(model, x):
    model.a, model.b = model.b, model.a
    return model.a(x)


def other_mode(model, x):
    y = model.norm(x)
    model.norm.eval()
    return y


def one_more_hook(model, x):
    model.a.register_forward_hook(lambda _module, _inputs, output: output * 2)
    return model.a(x)


def one_more_module(model, x):
    model.several.append(nn.Tanh())
    return model.several(x)


def next_number(model, x):
    return model.a(x) * next(model.numbers)


def counted_in_an_array(model, x):
    model.array += 1
    return model.a(x) * float(model.array[0])


COUNTED = []


def counted_globally(model, x):
    COUNTED.append(1)
    return model.a(x) * len(COUNTED)


def late_buffer(model, x):
    model.late = x.mean(0) if model.late is None else model.late * 0.5
    return model.a(x) - model.late


def late_parameter(model, x):
    if not hasattr(model, "added"):
        model.added = nn.Parameter(torch.ones(4))
    return model.a(x) * model.added


def removed(model, x):
    y = model.a(x)
    model.a = nn.Identity()
    return y * model.scale


SAYS = {
    drawn_by_python: "draws from Python's random",
    drawn_by_numpy: "draws from numpy.random",
    drawn_by_an_own_generator: "a generator of the model's own",
    seeded: "sets torch's seed",
    seeded_in_a_fork: "sets torch's seed or the state of its generator",
    state_set: "sets torch's seed or the state of its generator",
    state_set_after_the_draws: "sets torch's seed or the state of its generator",
    state_put_back: "sets torch's seed or the state of its generator",
    own_generator_with_a_state: "a generator of the model's own",
    default_generator_seeded: "sets torch's seed",
    seed_read: "reads torch's seed",
    seed_of_the_generator_read: "its next step is another one",
    swapped: "changes a, b",
    other_mode: "changes norm.training",
    one_more_hook: "its next step is another one",
    one_more_module: "changes several.1",
    next_number: "changes what is in no module",
    counted_in_an_array: "changes array",
    counted_globally: r"changes .*test_capture_hidden_state\.COUNTED",
    late_buffer: "late is made while the model runs",
    late_parameter: "added is made while the model runs",
    removed: "a.weight is removed while the model runs",
}


def counts_later(model, x):
    model.array += 1
    return model.a(x) if model.array[0] < 100 else model.b(x)


def counter_in_a_closure():
    count = 0

    def forward(model, x):
        nonlocal count
        count += 1
        return model.a(x) * (0.5 if count % 10 else 1.0)

    return forward


class Counter:
    def __init__(self, of):
        self.of, self.count, self.counts, self.rate = of, 0, [0], 1.0

    def __call__(self, model, x):
        self.count += 1
        self.counts[0] += 2
        self.rate *= 0.999
        return model.a(x) * (0.5 if self.of(self) else 1.0)


LATER = {
    "array": counts_later,
    r"counter_in_a_closure\.<locals>\.forward\.count": counter_in_a_closure(),
    r"Counter\.count, .*Counter\.rate": Counter(lambda counter: counter.count > 2),
    r"Counter\.counts\.0": Counter(lambda counter: counter.counts[0] > 1000),
    r"Counter\.rate": Counter(lambda counter: counter.rate < 0.1),
    r"Counter\.count": Counter(lambda counter: ["a", "b", "c", "d"][counter.count] == "d"),
}


@pytest.mark.parametrize("name", LATER)
def test_a_number_that_matters_only_later_is_named(name):
    model, x = Parts(LATER[name]), torch.randn(3, 4)
    before = noted(model)
    with pytest.raises(CaptureError, match=f"a later step is another one, .* changes .*{name}"):
        capture(model, x)
    assert noted(model) == before


def test_numbers_that_never_matter_are_noted_and_put_back():
    counter = Counter(lambda _counter: False)
    captured = capture(Parts(counter), torch.randn(3, 4))
    assert "Counter.count" in captured.notes[0]
    assert (counter.count, counter.counts, counter.rate) == (0, [0], 1.0)


def test_a_later_step_of_a_loss_is_another_one():
    count = 0

    def loss(output):
        nonlocal count
        count += 1
        return output.square().mean() * (1.0 if count > 5 else 0.1)

    with pytest.raises(CaptureError, match=r"a later step is another one, .*loss\.count"):
        capture(nn.Linear(4, 4), torch.randn(3, 4), loss=loss, train=SGD())


def noted(model):
    hooks = [len(module._forward_hooks) for module in model.modules()]
    modes = [module.training for module in model.modules()]
    tensors = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    return repr(model), hooks, modes, tensors, model.array.tolist(), sorted(vars(model))


# Training goes through all that inference does.
@pytest.mark.parametrize(
    ("run", "training"), [*((run, True) for run in SAYS), *((run, False) for run in [*SAYS][:3])]
)
def test_state_that_no_buffer_holds_is_named_and_the_model_is_left_as_it_was(run, training):
    model, x = Parts(run), torch.randn(3, 4)
    before = noted(model)
    python, numpy_, torch_ = random.getstate(), np.random.get_state()[2], torch.get_rng_state()  # noqa: NPY002
    more = {"loss": lambda output: output.square().mean(), "train": SGD()} if training else {}
    with pytest.raises(CaptureError, match=SAYS[run]):
        capture(model, x, **more)
    assert noted(model) == before
    assert random.getstate() == python
    assert np.random.get_state()[2] == numpy_  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_)


def drawn_again(model, x):
    state = torch.get_rng_state()
    first = torch.randn(4)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    again = torch.randn(4)
    torch.set_rng_state(after)
    return model.a(x) + first - again + torch.rand(4)


def test_a_state_of_the_same_step_may_be_set_again():
    model, x = Parts(drawn_again), torch.randn(3, 4)
    captured = capture(model, x)
    found = run_step(captured, initial_values(captured), (x,)) - model.a(x).detach()
    assert -1e-6 <= float(found.min()) < float(found.max()) <= 1 + 1e-6


def doubled_first(model, x, y):
    x.mul_(2)
    return model.a(x + y)


def test_an_input_that_is_written_over_is_said_and_must_not_share_memory():
    whole = torch.randn(6, 4)
    for x, y in ((whole, whole), (whole[:4], whole[2:])):
        with pytest.raises(CaptureError, match="is written over and shares memory with input"):
            capture(Parts(doubled_first), x, y)
    captured = capture(Parts(doubled_first), whole[:3], whole[3:])
    assert "is written over by the model" in captured.notes[0]
    assert capture(Parts(lambda model, x, y: model.a(x + y)), whole, whole).notes == ()


def test_an_input_that_is_a_parameter_of_the_model_is_named():
    model = Parts(lambda model, x: model.a(x) * model.scale)
    with pytest.raises(ModelError, match=r"shares memory with parameter a\.weight; give a clone"):
        capture(model, model.a.weight.detach()[:2])
    capture(model, model.a.weight.detach()[:2].clone())


def test_a_hook_on_several_gradients_is_named():
    model = Parts(lambda model, x: model.b(model.a(x)))
    weights = [model.a.weight, model.b.weight]
    torch.autograd.graph.register_multi_grad_hook(weights, lambda gradients: None)
    capture(model, torch.randn(3, 4))
    with pytest.raises(CaptureError, match=r"parameter a\.weight has a hook .* of several tensors"):
        capture(model, torch.randn(3, 4), loss=torch.mean, train=SGD())


def test_a_hook_on_a_gradient_changes_it_in_every_step():
    model, x = Parts(lambda model, x: model.a(x)), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    for part in (model, plain):
        part.a.weight.register_hook(lambda gradient: gradient * 0.5)
    captured = capture(model, x, loss=torch.mean, train=SGD(0.5))
    values, optimizer = initial_values(captured), torch.optim.SGD(plain.parameters(), 0.5)
    for step in range(3):
        optimizer.zero_grad()
        expected = plain(x).mean()
        expected.backward()
        optimizer.step()
        assert torch.equal(run_step(captured, values, (x,), step=step), expected.detach())


def test_a_hook_on_a_gradient_that_each_step_adds_is_named():
    def one_more(model, x):
        model.a.weight.register_hook(lambda gradient: gradient * 0.5)
        return model.a(x)

    capture(Parts(one_more), torch.randn(3, 4))
    with pytest.raises(CaptureError, match=r"a\.weight gets a hook on its gradient each time"):
        capture(Parts(one_more), torch.randn(3, 4), loss=torch.mean, train=SGD())
