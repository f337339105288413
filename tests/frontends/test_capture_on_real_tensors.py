"""What a model sees of its tensors while it is captured is what it sees when it runs: a small step
runs once on real tensors, and must make the same calls there, or give the same numbers."""

import pytest
import torch
from torch import nn

from dovetail.errors import CaptureError
from dovetail.frontends import SGD, capture, initial_values, run_step, tracing
from dovetail.runtime.torch_versions import FakeTensor


class Sees(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.a, self.norm, self.run = nn.Linear(4, 4), nn.BatchNorm1d(4), run
        self.kept = nn.Buffer(torch.ones(4))

    def forward(self, x):
        return self.run(self, x)


class Own(nn.Parameter):
    pass


def class_of_an_input(model, x):
    return model.a(x * 2 if type(x) is torch.Tensor else x)


def class_of_a_parameter(model, x):
    return model.a(x * 2 if type(model.a.weight) is nn.Parameter else x)


def class_of_a_buffer(model, x):
    return model.a(x * 2 if model.kept.__class__ is torch.Tensor else x)


def class_of_a_result(model, x):
    y = model.a(x)
    return y * 2 if type(y) is torch.Tensor else y


def own_class_of_a_parameter(model, x):
    return model.a(x * 2 if isinstance(model.a.bias, Own) else x)


def text_of_a_tensor(model, x):
    return model.a(x if "Fake" in repr(x) else x * 2)


def number_where_there_is_one(model, x):
    return model.a(x if isinstance(x, FakeTensor) else x * float(x.sum()))


def noise_where_it_is_real(model, x):
    return model.a(x if isinstance(x, FakeTensor) else x + torch.randn_like(x))


REFUSED = (
    class_of_an_input,
    class_of_a_parameter,
    class_of_a_buffer,
    class_of_a_result,
    own_class_of_a_parameter,
    text_of_a_tensor,
    number_where_there_is_one,
    noise_where_it_is_real,
)


def captured_step(model, x, training):
    more = {"loss": lambda output: output.square().mean(), "train": SGD()} if training else {}
    return capture(model, x, **more)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("run", REFUSED)
def test_a_model_that_computes_something_else_on_real_tensors_is_refused(run, training):
    model, x = Sees(run), torch.randn(3, 4)
    model.a.bias = Own(model.a.bias.detach())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="something else on real tensors"):
        captured_step(model, x, training)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def class_that_is_returned(model, x):
    return model.a(x), type(x) is torch.Tensor


def number_that_goes_up(model, x):
    model.count = getattr(model, "count", 0) + 1
    return model.a(x), model.count


def test_constants_that_a_step_returns_are_compared_as_well():
    with pytest.raises(CaptureError, match="something else on real tensors"):
        capture(Sees(class_that_is_returned), torch.randn(3, 4))
    with pytest.raises(
        CaptureError, match="its next step is another one, as this one changes count"
    ):
        capture(Sees(number_that_goes_up), torch.randn(3, 4))


def subclass_of_a_parameter(model, x):
    return model.a(x * 2 if isinstance(model.a.weight, nn.Parameter) else x)


def subclass_of_a_buffer(model, x):
    return model.a(x * 2 if isinstance(model.kept, nn.Buffer) else x)


def attribute_of_a_parameter(model, x):
    return model.a(x * 2 if getattr(model.a.weight, "is_doubled", False) else x)


def attribute_of_an_input(model, x):
    return model.a(x * 2 if getattr(x, "is_doubled", False) else x)


def chance_and_statistics(model, x):
    return model.norm(nn.functional.dropout(model.a(x * 2))) * 0 + model.a(x * 2)


SEEN = (
    subclass_of_a_parameter,
    subclass_of_a_buffer,
    attribute_of_a_parameter,
    attribute_of_an_input,
    chance_and_statistics,
)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("run", SEEN)
def test_what_a_model_may_see_of_a_tensor_is_there_while_it_is_captured(run, training):
    model, x = Sees(run), torch.randn(3, 4)
    model.a.weight.is_doubled = x.is_doubled = True
    captured = captured_step(model, x, training)
    assert captured.notes == ()
    found = run_step(captured, initial_values(captured), (x,))
    expected = model.a(x * 2)
    assert torch.allclose(found, expected.square().mean() if training else expected)
    assert model.norm.num_batches_tracked == 0


def other_calls(model, x):
    noise = torch.randn_like(x)
    y = model.a(x + nn.functional.dropout(noise))
    return y if isinstance(x, FakeTensor) else (y * 2) / 2


@pytest.mark.parametrize("training", [False, True])
def test_other_calls_with_the_same_numbers_are_told_and_not_refused(training):
    (note,) = captured_step(Sees(other_calls), torch.randn(3, 4), training).notes
    assert "other operators than those captured (aten.mul.Tensor)" in note


def fails_on_real_tensors(model, x):
    if not isinstance(x, FakeTensor):
        raise ValueError("no such table")
    return model.a(x)


def test_what_is_written_over_parameters_is_no_result_that_lacks():
    def clipped(model, x):
        model.a.weight.data.clamp_(-0.1, 0.1)
        return model.a(x * 1 if type(x) is torch.Tensor else x)

    step = capture(Sees(clipped), torch.randn(3, 4), loss=lambda o: o.sum(), train=SGD())
    assert any("calls other operators" in note for note in step.notes)


def test_a_failure_on_fake_tensors_says_what_may_be_why():
    def whole_numbers(model, x):
        return model.a(x.float() if type(x) is torch.Tensor else x)

    with pytest.raises(CaptureError, match=r"instead of type\(x\) use isinstance"):
        capture(Sees(whole_numbers), torch.ones(3, 4, dtype=torch.long))


def test_a_step_that_cannot_be_compared_says_why(monkeypatch):
    x = torch.randn(3, 4)
    (note,) = capture(Sees(fails_on_real_tensors), x).notes
    assert "fails: ValueError: no such table" in note
    monkeypatch.setattr(tracing, "COMPARED", 1)
    monkeypatch.setattr(tracing, "TRACED_TWICE", 1)
    (note,) = capture(Sees(class_of_an_input), x).notes
    assert "as it is too large" in note
