"""Random modules: their captured steps, in this process and placed, are plain PyTorch's.

`benchmarks/random_modules` draws a thousand of them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.random_modules.cases import REFUSABLE, draw, parse, smaller
from benchmarks.random_modules.outcomes import (
    FAULTS,
    Outcome,
    Replay,
    Wrong,
    captured_steps,
    compare,
    minimised,
    outcome_of,
    placing,
    plain_steps,
)
from benchmarks.random_modules.parts import LEAVES
from benchmarks.random_modules.wrappers import WRAPPERS
from dovetail.frontends import SGD, capture, initial_values, run_step
from tests.support.placing import plan_for, random_order, random_placement

SEED, CASES, PLACED_EVERY = 15, 36, 10


def placed(seed, workers):
    def plan(captured):
        placement = random_placement(captured.graph, seed)
        return plan_for(captured, placement, random_order(captured.graph, placement, seed))

    return placing(plan, workers)


@pytest.mark.parametrize("index", range(CASES))
def test_a_random_module_is_right_or_refused(index, workers):
    place = placed(index, workers) if index % PLACED_EVERY == 0 else None
    kind, attempt = "impossible", 0
    while kind == "impossible":  # draw again what plain PyTorch cannot run
        case = draw(SEED, index, attempt)
        outcome = outcome_of(case, place)
        kind, attempt = outcome.kind, attempt + 1
    assert kind not in FAULTS, f"{case}: {outcome.detail}"


def test_checkpointing_between_two_layers_trains_both():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(checkpoint(lambda z: self.a(z).sin(), x, use_reentrant=False))

    torch.manual_seed(0)
    module = Two().double()
    plain, x = copy.deepcopy(module), torch.randn(5, 3, dtype=torch.float64)
    captured = capture(module, x, loss=lambda out: (out**2).mean(), train=SGD(1.0))
    values, optimizer = initial_values(captured), torch.optim.SGD(plain.parameters(), 1.0)
    for step in range(3):
        optimizer.zero_grad()
        expected = (plain(x + step) ** 2).mean()
        expected.backward()
        optimizer.step()
        found = run_step(captured, values, (x + step,), step=step)
        assert torch.allclose(found, expected, rtol=1e-12, atol=0)
        for name, parameter in plain.named_parameters():
            value = values[captured.graph.outputs_of(captured.graph.index[name])[0]]
            assert torch.allclose(value, parameter, rtol=1e-12, atol=1e-14), (step, name)


# One for each kind of fault that the search has found.
RIGHT = (
    "sgd float64 train 1: seq(product, checkpoint(orthogonal))",
    "adam float64 train 1: seq(product, checkpoint(weight-norm, spectral-norm))",
    "momentum float64 train 1: seq(product, checkpoint(weight-norm-old, symmetric-weight))",
    "adam float64 train 1: all-orthogonal(linear-module, checkpoint-loop(linear-module))",
    "sgd float64 train 1: seq(product, checkpoint-reentrant(linear, checkpoint(product)))",
    "rmsprop float64 train 1: seq(product, checkpoint-closure(mha), tanh)",
    "nesterov float64 train 1: seq(product, checkpoint-closure-reentrant(dropout), tanh)",
    "adamw float64 train 1: seq(checkpoint-nested(lstm), checkpoint-sequence(linear, tanh))",
    "sgd float64 train 1: seq(product, checkpoint-selective(linear), checkpoint-arguments(tanh))",
    "sgd float64 train 1: seq(product, checkpoint(mha-dropout), checkpoint-fresh-draws(dropout))",
    "sgd float64 train 1: seq(product, checkpoint(batch-norm, counted-by-add))",
    "sgd float64 train 1: seq(product, checkpoint-buffer(linear), checkpoint-of-input(tanh))",
    "adam float64 train 1: seq(product, column-written, columns-added, rows-written, index-put)",
    "adam float64 train 1: seq(product, addcmul, masked-filled, filled-up, swapped-columns)",
    "sgd float64 train 1: seq(product, checkpoint(rows-written, addcmul, view-of-view))",
    "adam float64 train 1: two-names(mha, linear-module)",
    "adam float64 train 1: seq(product, around(mha-twice, tied(mha, encoder-layer)))",
    "sgd float64 train 1: seq(parameters-in-list, parameter-in-closure, bound-argument)",
    "sgd float64 train 1: seq(parameter-hook, parameter-mask-hook, parameters-hooked(linear))",
    "sgd float64 train 1: seq(product, reading-module, backward-hook-reading)",
    "sgd float64 train 1: seq(product, backward-counting, buffer-in-closure)",
    "sgd float64 train 1: seq(product, recomputed-module, recomputed-by-hand)",
    "sgd float64 train 1: seq(product, cache-filled, stored-output)",
    "adam float32 forward 1: seq(batch-norm, dropout, memory-rolled, late-buffer)",
    "sgd float64 train 1: seq(unbound, checkpoint-closure-reentrant(buffer-in-closure))",
    "sgd float64 train 1: seq(checkpoint-arguments(bound-argument), backward-hook-reading)",
    "sgd float64 train 1: checkpoint-whole(gradient-inside, bound-argument)",
    "sgd float64 train 1: seq(windows, checkpoint-loop-reentrant(checkpoint-loop(mha)))",
    "sgd float64 train 1: seq(product, checkpoint-reentrant(checkpoint(parameter-in-closure)))",
    "adam float64 train 131908: checkpoint-closure(running-mean-in-place, drawn-mask)",
    "sgd float64 train 649733: seq(encoder-dropout, view-of-view)",
)


@pytest.mark.parametrize("text", RIGHT)
def test_what_once_was_wrong_is_right(text):
    outcome = outcome_of(parse(text))
    assert outcome.kind == "right", outcome.detail


# A cache of the module's file is older than its test.
OLDER = pytest.param("cached-function", marks=pytest.mark.searches_all_objects)


@pytest.mark.parametrize("name", [*sorted(REFUSABLE.keys() - {"cached-function"}), OLDER])
def test_what_cannot_be_traced_is_right_or_refused(name):
    outcome = outcome_of(parse(f"sgd float64 train 1: seq(product, {name}, product)"))
    assert outcome.kind in ("right", "refused"), outcome.detail


@pytest.mark.parametrize("name", ["solved", "cache-filled"])
def test_a_module_with_its_own_default_dtype_is_right_where_it_is_placed(name, workers):
    case = parse(f"sgd float64 train 1: seq(product, {name})")
    outcome = outcome_of(case, placed(1, workers))
    assert outcome.kind == "right", outcome.detail


# The search itself -------------------------------------------------------------------------------


def test_a_text_says_all_of_a_case():
    cases = [draw(seed, index) for seed in range(2) for index in range(200)]
    assert [parse(str(case)) for case in cases] == cases
    drawn = {name for case in cases for name in case.root.names()}
    assert len(drawn) > 0.9 * (len(LEAVES) + len(WRAPPERS))


def test_no_leaf_has_the_name_of_a_wrapper_and_none_may_be_refused_that_is_not_there():
    assert not LEAVES.keys() & WRAPPERS.keys()
    assert REFUSABLE.keys() <= LEAVES.keys()


def test_a_fault_is_cut_out_of_a_case():
    case = parse("adam float32 infer 3: seq(gelu, twice(linear, residual(tanh, mha)), rnn)")

    def judge(less):
        wrong = {"twice", "tanh"} <= set(less.root.names())
        return Outcome("wrong" if wrong else "right")

    assert str(minimised(case, "wrong", judge)) == "sgd float64 train 3: twice(tanh)"
    assert all(len(less.root.names()) <= len(case.root.names()) for less in smaller(case))


@pytest.mark.parametrize("what", ["loss", "value", "lacking"])
def test_a_step_that_differs_at_last_is_noticed(what):
    case = parse("adam float64 train 3: seq(linear, batch-norm)")
    steps, other = plain_steps(case, None), plain_steps(case, None)
    compare(case, steps, other, "")
    if what == "loss":
        other[2].result.mul_(1 + 1e-6)
    elif what == "value":
        other[2].values["0.b/exp_avg"].add_(1e-6)
    else:
        del steps[2].values["0.b/exp_avg"]
    with pytest.raises(Wrong, match="step 2"):
        compare(case, steps, other, "")


def test_random_ops_draw_in_plain_pytorch_what_they_drew_in_the_captured_step():
    case = parse("sgd float32 train 3: seq(linear, dropout, mha-dropout, noise)")
    captured = capture(case.build(), case.inputs(0)[0], loss=lambda o: o.sum(), train=SGD(0.0))
    forward, backward = captured_steps(case, captured)[1][0]
    assert [base for base, _ in forward] == ["aten.bernoulli", "aten.bernoulli", "aten.randn"]
    assert not backward
    with Replay(forward, backward):
        drawn = [torch.bernoulli(torch.full((4, 6), 0.5)), torch.rand(3)]
    assert torch.equal(drawn[0], forward[0][1])
    assert drawn[1].shape == (3,)  # none like it was noted: drawn as ever


def test_what_is_drawn_again_from_a_restored_generator_is_the_same():
    with Replay([("aten.rand", torch.zeros(2)), ("aten.rand", torch.ones(2))], []):
        state = torch.get_rng_state()
        first, second = torch.rand(2), torch.rand(2)
        torch.set_rng_state(state)
        again = torch.rand(2)
    assert (first.tolist(), second.tolist(), again.tolist()) == ([0, 0], [1, 1], [0, 0])


@pytest.mark.parametrize("text", ["seq(tanh", "seq(tanh))", "seq tanh"])
def test_a_text_that_does_not_close_is_no_case(text):
    with pytest.raises(ValueError, match="no case"):
        parse(f"sgd float64 train 1: {text}")
