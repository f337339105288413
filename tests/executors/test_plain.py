"""A step as its user runs it: the numbers are plain PyTorch's, over several steps."""

import copy
import os
import threading

import pytest
import torch
from torch import nn

from dovetail.errors import RunError, UsageError, WorkerError
from dovetail.executors import PlainNetwork
from dovetail.executors.plain import _alone
from dovetail.frontends import SGD, Adam, AdamW, GradScaler, RMSProp, capture, resolve
from dovetail.frontends.optimizers import torch_optimizer
from dovetail.machine import parse_machine
from dovetail.runtime.native import has_compiler
from dovetail.transforms import towers
from tests.support import forked

pytestmark = pytest.mark.usefixtures("forked_compilers")
HERE = parse_machine("here/1")
STEPS = 3
OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": RMSProp(lr=0.01, momentum=0.5, centered=True),
    "adam": Adam(lr=0.01, weight_decay=0.1),
    "adamw": AdamW(lr=0.01),
}


class Normed(nn.Module):
    """A tied weight, a frozen one, and a buffer that each step writes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)

    def forward(self, x, scale=1.0):
        return {"out": self.second(self.norm(self.first(x)).tanh()) * scale + self.frozen}


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + torch.rand(4)


class Raising(nn.Module):
    """Runs while it is captured, and raises in a process of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        if not torch._subclasses.fake_tensor.is_fake(x):
            raise ValueError("a model's own mistake")
        return self.layer(x)


def squared(output, target):
    return ((output["out"] - target) ** 2).mean()


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(6, 8, generator=generator), torch.randn(6, 8, generator=generator))
        for _ in range(count)
    ]


def trained(optimizer):
    torch.manual_seed(3)
    module = Normed()
    inputs, targets = batches(1)[0]
    step = capture(module, inputs, scale=2.0, targets=targets, loss=squared, train=optimizer)
    return module, step


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_plain_pytorchs_bit_for_bit(optimizer):
    module, step = trained(optimizer)
    plain = copy.deepcopy(module)
    own = torch_optimizer(optimizer, [p for p in plain.parameters() if p.requires_grad])
    with PlainNetwork(step, HERE) as network:
        before = network.optimizer_state_dict()
        assert before.keys() == {s.name for s in step.program.sources if s and s.role == "state"}
        for inputs, targets in batches():
            own.zero_grad()
            loss = squared(plain(inputs, scale=2.0), targets)
            loss.backward()
            own.step()
            assert torch.equal(network.step(inputs, targets, scale=2.0), loss.detach())
        found = network.state_dict()
        state = network.optimizer_state_dict()
    assert found.keys() == plain.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    assert state.keys() == before.keys()
    assert not any(parameter.grad is not None for parameter in module.parameters())


def test_a_state_that_is_given_back_goes_on_as_if_nothing_had_stopped():
    _, step = trained(Adam(lr=0.01))
    first, *rest = batches()
    with PlainNetwork(step, HERE) as network:
        network.step(*first, scale=2.0)
        kept, kept_state = network.state_dict(), network.optimizer_state_dict()
        wanted = [network.step(*batch, scale=2.0) for batch in rest]
    with PlainNetwork(step, HERE) as again:
        again.load_state_dict(kept)
        again.load_optimizer_state_dict(kept_state)
        assert [again.step(*batch, scale=2.0) for batch in rest] == wanted
        with pytest.raises(UsageError, match="lacks"):
            again.load_state_dict({})
        with pytest.raises(UsageError, match="has unknown"):
            again.load_optimizer_state_dict(kept_state | {"x/step": torch.ones(())})


def test_inference_returns_the_models_own_type_and_changes_nothing():
    module = Normed().eval()
    inputs = batches(1)[0][0]
    step = capture(module, inputs)
    with PlainNetwork(step, HERE) as network, torch.no_grad():
        found = network.step(inputs)
        assert list(found) == ["out"]
        assert torch.equal(found["out"], module(inputs)["out"])
        assert not network.optimizer_state_dict()
        with pytest.raises(UsageError, match="shape"):
            network.step(inputs[:3])


class Forces(nn.Module):
    """Differentiates within an inference step."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(x.pow(3).sum(), x)
        return forces


class Remembering(nn.Module):
    """Assigns its buffer, and returns views of one tensor within an object."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean / 2 + x.mean(0)
        both = torch.cat([x, x + self.mean])
        return {"both": both, "parts": [both[:2], both.mT.conj()]}


def test_an_inference_step_returns_tensors_that_can_be_written_and_differentiated():
    module, (first, second) = Remembering(), torch.randn(2, 6, 4)
    step, plain = capture(module, first), copy.deepcopy(module)
    with PlainNetwork(step, parse_machine("here")) as network:
        assert network.pid == os.getpid()
        for x in (first, second):
            found, expected = network.step(x), plain(x)
            values = [found["both"], *found["parts"]]
            for value, other in zip(values, [expected["both"], *expected["parts"]], strict=True):
                assert torch.equal(value, other)
                assert not value.is_inference()
            weight = torch.ones(4, requires_grad=True)
            (found["both"] * weight).sum().backward()
            found["both"].zero_()
            assert not found["parts"][0].any(), "parts of one tensor share its memory"
        assert torch.equal(network.state_dict()["mean"], plain.mean)
        network.load_state_dict({"mean": torch.ones(4)})
        with torch.inference_mode():
            found = network.step(first)["both"]
        assert torch.equal(found[6:], first + (0.5 + first.mean(0)))


def test_an_inference_step_may_differentiate():
    x = torch.randn(3)
    step = capture(Forces(), x)
    with PlainNetwork(step, HERE) as network:
        torch.testing.assert_close(network.step(x), 3 * x * x)
    with PlainNetwork(step, HERE, apart=True) as network:
        assert len(network.step_seconds(3)) == 2
        with pytest.raises(UsageError, match="steps: is 1"):
            network.step_seconds(1)


@pytest.mark.parametrize("machine", ["here", "here/1"])
def test_threads_take_turns(machine):
    step, wrong = capture(Normed().eval(), batches(1)[0][0]), []

    def call(number):
        x = torch.full_like(batches(1)[0][0], float(number))
        expected = network.step(x)["out"].clone()
        for _ in range(100):
            if not torch.equal(network.step(x)["out"], expected):
                wrong.append(number)

    with PlainNetwork(step, parse_machine(machine)) as network:
        threads = [threading.Thread(target=call, args=[n]) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_equal_seeds_draw_equal_numbers():
    step = capture(Noisy(), torch.zeros(4))
    drawn = []
    for seed in (0, 0, 1):
        with PlainNetwork(step, HERE, seed=seed) as network:
            drawn.append([network.step(torch.zeros(4)) for _ in range(2)])
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(*drawn[0])


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("mode", "machine"),
    [
        ("default", "here/1"),
        ("reduce-overhead", "here/1"),
        pytest.param("reduce-overhead", "here/gpu", marks=pytest.mark.gpu),
    ],
)
def test_a_compiled_step_computes_the_same_but_for_rounding(mode, machine):
    module, step = trained(SGD(lr=0.1, momentum=0.9))
    plain = copy.deepcopy(module)
    own = torch_optimizer(
        SGD(lr=0.1, momentum=0.9), [p for p in plain.parameters() if p.requires_grad]
    )
    with PlainNetwork(step, parse_machine(machine), mode=mode) as network:
        network.begin()
        network.load_state_dict(plain.state_dict())
        network.load_optimizer_state_dict(
            {name: torch.zeros_like(v) for name, v in network.optimizer_state_dict().items()}
        )
        for inputs, targets in batches():
            own.zero_grad()
            loss = squared(plain(inputs, scale=2.0), targets)
            loss.backward()
            own.step()
            torch.testing.assert_close(network.step(inputs, targets, scale=2.0), loss.detach())
        found = network.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_network_with_fake_weights_is_built_in_the_process():
    step = resolve("zoo:rnnlm?hidden=8&steps=2&batch=2&vocabulary=20")
    with PlainNetwork(step, HERE, seed=4) as network, PlainNetwork(step, HERE, seed=4) as other:
        network.feed()
        assert len(network.step_seconds(3)) == 2
        measured = network.measure(steps=3)
        assert measured.median_seconds > 0 and not len(measured.timeline.ops)
        state, same = network.state_dict(), other.state_dict()
        assert all(torch.equal(state[name], same[name]) for name in state)


def test_what_the_model_raises_is_told_with_its_traceback_and_ends_the_run():
    step = capture(Raising(), torch.zeros(2))
    with PlainNetwork(step, HERE) as network:
        with pytest.raises(WorkerError, match="a model's own mistake"):
            network.step(torch.zeros(2))
        with pytest.raises(RunError, match="a step failed"):
            network.step(torch.zeros(2))


def test_steps_without_a_plain_form_are_refused():
    module, step = trained(SGD())
    with pytest.raises(UsageError, match="has no plain form"):
        PlainNetwork(towers(step, 2), HERE)
    inputs, targets = batches(1)[0]
    scaled = capture(
        module, inputs, targets=targets, loss=squared, train=SGD(), scaler=GradScaler()
    )
    with pytest.raises(UsageError, match="has no plain form"):
        PlainNetwork(scaled, HERE)


def test_a_module_that_cannot_be_sent_is_refused():
    module = Normed().eval()
    module.lock = threading.Lock()
    step = capture(module, batches(1)[0][0])
    with pytest.raises(UsageError, match="cannot be copied to run"):
        PlainNetwork(step, HERE)


def test_a_slice_is_sent_without_what_it_is_a_slice_of():
    whole = torch.arange(1000.0)
    part = _alone(whole[8:16])
    assert torch.equal(part, whole[8:16]) and part.untyped_storage().nbytes() == 32
    assert _alone(whole).data_ptr() == whole.data_ptr()


SCRIPT = """
import torch
from torch import nn
import dovetail as dt
from dovetail.executors import PlainNetwork
from dovetail.machine import parse_machine

WIDTH = 4

class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.RNNCell(WIDTH, WIDTH)])

    def forward(self, inputs):
        zeros = torch.zeros(inputs.shape[1], WIDTH)
        states = [zeros for _ in self.cells]
        for x in inputs.unbind(0):
            for number, cell in enumerate(self.cells):
                x = states[number] = cell(x, states[number])
        return torch.stack([x])

def squared(output, target):
    return ((output - target) ** 2).mean() / WIDTH

if __name__ == "__main__":
    x = torch.ones(1, 3, WIDTH)
    step = dt.capture(Cells(), x, targets=torch.zeros(1, 3, WIDTH), loss=squared,
                      train=dt.SGD(0.1))
    with PlainNetwork(step, parse_machine("here/1"), mode="default") as network:
        network.begin()
        print("compiled")
"""


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
def test_a_module_of_a_script_is_compiled(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = forked.start([script], cwd=tmp_path, env=dict(os.environ))
    out, errors = process.communicate()
    assert out == "compiled\n", errors
