"""What a model checks of data and only raises for is an op of the graph, which raises the model's
own error."""

import copy
import functools

import pytest
import torch
from torch import distributions
from torch.utils.checkpoint import checkpoint

from dovetail.errors import CaptureError
from dovetail.frontends import SGD, capture, initial_values, run_step
from dovetail.frontends.interpret import seed_for
from dovetail.frontends.recording import is_fake
from tests.support.checked_models import (
    CHECKED,
    LIMITED,
    NOT_LIMITED,
    Wrapped,
    asserted_without_a_text,
    caught,
    checked_in_a_loop,
    looped,
    raised_with_numbers,
    wrong_elsewhere,
)


@pytest.fixture(autouse=True)
def validated(monkeypatch):
    """Distributions are validated, as by default. torch switches that off when its compiler is
    imported."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


def checks_of(captured):
    return [call for call in captured.program.calls if call and "check" in str(call.target)]


def assert_equals_plain(captured, module, *inputs, train):
    """Three steps are those of plain PyTorch, also where a step draws numbers. The module and its
    inputs are of float64, as a loss near zero differs by more in float32."""
    plain, values = copy.deepcopy(module), initial_values(captured)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01, foreach=False)
    random = [op for op, call in enumerate(captured.program.calls) if call and call.random]
    for step in range(3):
        torch.manual_seed(seed_for(0, step, random[0] if random else 0))
        expected = plain(*inputs)
        if train:
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        found = run_step(captured, values, inputs, step=step)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("train", [None, SGD(0.01)])
@pytest.mark.parametrize("function", CHECKED)
def test_a_model_that_checks_data_computes_what_plain_pytorch_does(function, train):
    module, x = Wrapped(function).double(), torch.randn(2, 3, dtype=torch.double)
    captured = capture(module, x, train=train)
    assert checks_of(captured)
    assert_equals_plain(captured, module, x, train=train)


@pytest.mark.parametrize("function", CHECKED)
def test_a_check_that_fails_raises_the_models_own_error(function):
    module, x = Wrapped(function), torch.randn(2, 3)
    captured, bad = capture(module, x), torch.full((2, 3), float("nan"))
    if function in (checked_in_a_loop, raised_with_numbers):
        bad = torch.full((2, 3), 1e9)
    with pytest.raises((ValueError, AssertionError, RuntimeError)) as expected:
        module(bad)
    with pytest.raises(type(expected.value)) as raised:
        run_step(captured, initial_values(captured), [bad])
    # Numbers in a text are not known when the step is captured.
    text = str(expected.value).partition("tensor")[0].partition("nan")[0].partition("up to")[0]
    assert not text or str(raised.value).startswith(text)
    assert str(raised.value)


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.cholesky,
        torch.linalg.inv,
        torch.inverse,
        lambda m: torch.linalg.solve(m, torch.ones_like(m)),
        lambda m: torch.linalg.lu_factor(m).LU,
    ],
)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2, 2)])
def test_a_factorisation_that_fails_raises(function, shape):
    class Factorised(torch.nn.Module):
        def forward(self, m):
            return function(m)

    captured = capture(Factorised(), torch.eye(2).expand(shape).clone())
    good, bad = torch.tensor([[2.0, 1.0], [1.0, 3.0]]).expand(shape).clone(), torch.zeros(shape)
    values = initial_values(captured)
    torch.testing.assert_close(run_step(captured, values, [good]), function(good))
    with pytest.raises(RuntimeError, match="it could not be completed"):
        run_step(captured, values, [bad])
    with pytest.raises(RuntimeError):
        function(bad)


def test_an_assertion_without_a_text_shows_its_line():
    captured = capture(Wrapped(asserted_without_a_text), torch.randn(2, 3))
    with pytest.raises(AssertionError, match=r"checked_models.py:\d+: assert bool\(\(h \* h"):
        run_step(captured, initial_values(captured), [torch.full((2, 3), float("nan"))])


def test_the_parameter_of_a_distribution_that_is_wrong_is_named():
    captured = capture(Wrapped(lambda h: distributions.Normal(h, h * 0 - 1).mean), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"Expected parameter scale .* GreaterThan"):
        run_step(captured, initial_values(captured), captured.inputs)


class OwnError(ValueError):
    def __init__(self, values, limit):
        super().__init__(f"above {limit}")


def test_an_error_of_the_models_own_class_is_told_as_its_builtin_base():
    def checked(h):
        if (h > 5).any():
            raise OwnError(h, 5)
        return h

    captured = capture(Wrapped(checked), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="OwnError: above 5"):
        run_step(captured, initial_values(captured), [torch.tensor([[1e3, 0, 0], [-1e3, 0, 0]])])


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda h: h.sum() if h.sum() > 0 else -h.sum(), id="both go on"),
        pytest.param(lambda h: h * int((h > 0).any()), id="a number"),
        pytest.param(lambda h: h if h.max().item() < 1 else h / 2, id="a number of data"),
    ],
)
def test_a_branch_that_changes_values_is_refused(function):
    with pytest.raises(CaptureError, match=r"turns a tensor into a number .* torch.where"):
        capture(Wrapped(function), torch.randn(2, 3))


def test_an_error_that_the_model_catches_is_a_branch():
    with pytest.raises(CaptureError, match="turns a tensor into a number"):
        capture(Wrapped(caught), torch.randn(2, 3))


def test_a_model_that_catches_the_refusal_too_is_refused():
    def catches_all(h):
        try:
            large = bool((h > 1).any())
        except Exception:
            large = True
        return h / 2 if large else h

    with pytest.raises(CaptureError, match=r"catches the error .* torch.where"):
        capture(Wrapped(catches_all), torch.randn(2, 3))


def test_a_truth_of_several_dimensions_leaves_a_results_shape():
    def limited(h):
        h = h.flatten()
        if h[None].isinf().any(1, keepdim=True):
            h = torch.clamp(h, max=1e3)
        return h

    captured, x = capture(Wrapped(limited), torch.randn(2, 3)), torch.randn(2, 3)
    assert run_step(captured, initial_values(captured), [x]).shape == (8,)


def test_an_error_that_has_nothing_to_do_with_a_check_is_told():
    with pytest.raises(CaptureError, match="TypeError: four columns"):
        capture(Wrapped(wrong_elsewhere), torch.randn(2, 3))


def test_a_line_in_a_loop_is_tried_once():
    runs = []
    for count in (2, 40):
        captured = capture(Wrapped(functools.partial(looped, runs, count)), torch.randn(2, 3))
        assert len(checks_of(captured)) == count
    assert runs.count(40) == runs.count(2)


@pytest.mark.parametrize("train", [None, SGD(0.01)])
@pytest.mark.parametrize("function", LIMITED)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_branch_that_limits_values_is_part_of_the_graph(function, checkpointed, train):
    def limited(h):
        return (function(h) * 1e-9).tanh()

    def forward(h, added):
        if checkpointed:
            return checkpoint(limited, h + added, use_reentrant=False).square().sum()
        return limited(h + added).square().sum()

    module = Wrapped(forward).double()
    x, added = torch.randn(2, 3, dtype=torch.double), torch.zeros(2, 4, dtype=torch.double)
    captured = capture(module, x, added, train=train)
    for number in (0.0, 3e9, float("inf")):
        added[0, 1] = number
        assert_equals_plain(captured, module, x, added, train=train)


@pytest.mark.parametrize("function", NOT_LIMITED)
def test_a_branch_that_does_more_than_limit_values_is_refused(function):
    with pytest.raises(CaptureError, match="turns a tensor into a number"):
        capture(Wrapped(lambda h: function(h * 1)), torch.randn(2, 3))


def test_what_a_model_caches_while_answers_are_tried_is_no_part_of_the_step():
    @functools.lru_cache
    def table(width):
        return torch.arange(float(width)).sin()

    class Remembers(Wrapped):
        def forward(self, x):
            h = self.layer(x) + table(4)
            self.last = h.detach()
            if (h > 1e6).sum() > 0 or (h < -1e6).any():
                raise ValueError("out of range")
            return (h * table(4)).sum()

    module, x = Remembers(None).double(), torch.randn(2, 3, dtype=torch.double)
    captured = capture(module, x)
    assert not hasattr(module, "last")
    assert not is_fake(table(4))
    assert_equals_plain(captured, module, x, train=None)


def test_numbers_in_the_text_of_an_error_stand_as_data():
    captured = capture(Wrapped(raised_with_numbers), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"up to \(data\), mean \(data\), at \(data\)"):
        run_step(captured, initial_values(captured), [torch.full((2, 3), 1e9)])


def test_a_loop_until_data_are_right_is_refused():
    def redrawn(h):
        done = torch.zeros_like(h, dtype=torch.bool)
        while not done.all():
            accepted = torch.rand_like(h) < 0.5
            if accepted.any():
                h = torch.where(accepted, h, h * 2)
                done = done | accepted
        return h

    with pytest.raises(CaptureError, match="turns a tensor into a number"):
        capture(Wrapped(redrawn), torch.randn(2, 3))
