"""Each rule's two sides do what its formula says, written out again here."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.training.optimizers import make_optimizer
from dovetail.training.rules import RULES, make_rule
from dovetail.training.rules.contract import Local
from tests.support.rule_cases import (
    arrival,
    commit,
    cut,
    cut_arrival,
    new_local,
    new_slice,
    vectors,
    window,
)

TYPES = [(np.float64, 1e-12), (np.float32, 2e-5)]
RATE, STEPS = 0.1, 3

WALKS = ("downpour", "dynsgd", "ssp", "adag", "agn", "adag-agn")
PUSHES = (*WALKS, "downpour-adagrad", "dc-asgd", "dc-asgd-adaptive", "sync")


def close(found, expected, bound):
    error = np.linalg.norm(found.astype(np.float64) - expected)
    return error <= bound * max(1e-30, np.linalg.norm(expected))


def quadratic(dtype, steps=STEPS):
    """Gradients of different minibatches, each depends on where it is taken."""
    curvature, *targets = vectors(steps + 1, dtype=dtype, seed=7)
    curvature = np.abs(curvature)
    return [lambda x, b=target: curvature * (x - b) for target in targets]


def plain(theta, gradient):
    """U of SGD with weight decay, so that it depends on theta too."""
    return (-RATE * (gradient + 0.01 * theta)).astype(theta.dtype)


def walked(theta, gradients):
    """theta_k after the steps, and the updates on the way, in float64."""
    theta, updates = theta.astype(np.float64), []
    for gradient in gradients:
        updates.append(plain(theta, gradient(theta)))
        theta = theta + updates[-1]
    return theta, updates


# ---- the worker's side


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("name", WALKS)
def test_workers_that_push_updates_commit_their_sum_or_mean(name, dtype, bound):
    theta = vectors(1, dtype=dtype)[0]
    gradients = quadratic(dtype)
    local = new_local(make_rule(name), theta)
    found = window(make_rule(name), local, gradients, plain)
    end, updates = walked(theta, gradients)
    divisor = STEPS if name in ("agn", "adag-agn") else 1
    assert found.dtype == dtype
    assert close(found, sum(updates) / divisor, bound)
    assert close(local.theta, end, bound)


@pytest.mark.parametrize("name", ["agn", "adag-agn"])
def test_normalization_divides_by_the_steps_really_made_and_starts_anew_each_window(name):
    theta, one, two, three = vectors(4)
    rule, update = make_rule(name), lambda _theta, gradient: -gradient
    local = new_local(rule, theta)
    window(rule, local, [one, two, three], update)
    assert close(window(rule, local, [one, two], update), -(one + two) / 2, 1e-12)
    assert np.array_equal(window(rule, local, [three], update), -three)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_the_paper_s_downpour_walks_by_updates_and_commits_the_sum_of_gradients(dtype, bound):
    theta = vectors(1, dtype=dtype)[0]
    gradients, rule = quadratic(dtype), make_rule("downpour-adagrad")
    local = new_local(rule, theta)
    found = window(rule, local, gradients, plain)
    at, total = theta.astype(np.float64), 0.0
    for gradient in gradients:
        total = total + gradient(at)
        at = at + plain(at, gradient(at))
    assert close(found, total, bound)
    assert close(local.theta, at, bound)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("name", ["sync", "dc-asgd", "dc-asgd-adaptive"])
def test_workers_that_push_gradients_stay_at_their_base(name, dtype, bound):
    theta = vectors(1, dtype=dtype)[0]
    gradients, rule = quadratic(dtype), make_rule(name)
    local = new_local(rule, theta)

    def update(_theta, _gradient):
        raise AssertionError("the optimizer is the server's")

    found = window(rule, local, gradients, update)
    exact = theta.astype(np.float64)
    assert close(found, sum(g(exact) for g in gradients) / STEPS, bound)
    assert np.array_equal(local.theta, theta)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("name", ["averaging", "one-shot", "diloco", "async-diloco"])
def test_workers_that_walk_alone_commit_where_they_are_or_how_far_they_went(name, dtype, bound):
    theta = vectors(1, dtype=dtype)[0]
    gradients, rule = quadratic(dtype), make_rule(name)
    found = window(rule, new_local(rule, theta), gradients, plain)
    end, _ = walked(theta, gradients)
    assert close(found, end if "diloco" not in name else theta - end, bound)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_easgd_takes_gradient_and_spring_at_the_same_point(dtype, bound):
    theta, center = vectors(2, dtype=dtype)
    gradients, rule = quadratic(dtype), make_rule("easgd", alpha=0.3)
    local = new_local(rule, theta, center)
    found = window(rule, local, gradients, plain)
    x, force = theta.astype(np.float64), 0.3 * (theta.astype(np.float64) - center)
    x = x + plain(x, gradients[0](x)) - force
    for gradient in gradients[1:]:
        x = x + plain(x, gradient(x))
    assert close(found, force, bound)
    assert close(local.theta, x, bound)
    assert rule.gathers
    assert rule.keeps_theta


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize(("options", "alpha"), [({"alpha": 0.3}, 0.3), ({"rho": 2.0}, 2.0 * RATE)])
def test_aeasgd_takes_gradient_and_elastic_step_at_the_same_point(options, alpha, dtype, bound):
    theta, fresh = vectors(2, dtype=dtype)
    gradients, rule = quadratic(dtype), make_rule("aeasgd", **options)
    local = new_local(rule, theta)
    local.center = fresh
    # Algorithm 1 as the paper prints it: x is theta_k before the elastic step.
    theta_k, force = theta.astype(np.float64), 0.0
    for _ in range(3):
        message = window(rule, local, gradients, plain, RATE)
        for step, gradient in enumerate(gradients):
            x = theta_k
            if step == 0:
                theta_k = theta_k - force
            theta_k = theta_k + plain(x, gradient(x))
        force = alpha * (theta_k - fresh)
        assert close(message, force, bound)
        assert close(local.theta, theta_k, bound)
    assert rule.pulls_first
    assert rule.keeps_theta


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_eamsgd_looks_ahead_and_keeps_its_velocity_over_windows(dtype, bound):
    theta, fresh = vectors(2, dtype=dtype)
    gradients, rule = quadratic(dtype), make_rule("eamsgd", alpha=0.3, delta=0.8)
    local = new_local(rule, theta)
    local.center = fresh

    def update(_theta, gradient):
        return (-RATE * gradient).astype(gradient.dtype)

    # Algorithm 2: as in algorithm 1, x is theta_k before the elastic step.
    theta_k, v, force = theta.astype(np.float64), 0.0, 0.0
    for _ in range(3):
        message = window(rule, local, gradients, update)
        for step, gradient in enumerate(gradients):
            x = theta_k
            if step == 0:
                theta_k = theta_k - force
            v = 0.8 * v - RATE * gradient(x + 0.8 * v)
            theta_k = theta_k + v
        force = 0.3 * (theta_k - fresh)
        assert close(message, force, bound)
        assert close(local.theta, theta_k, bound)


def test_hogwild_adds_to_the_shared_center_where_there_is_something_to_add():
    theta, update, other = vectors(3)
    update[::2] = 0
    rule = make_rule("hogwild")
    local = new_local(rule, theta)
    shared = local.theta

    def while_another_writes(_theta, _gradient):
        shared[::2] = other[::2]
        return update

    message = window(rule, local, [theta], while_another_writes)
    assert np.array_equal(shared[::2], other[::2])
    assert np.array_equal(shared[1::2], (theta + update)[1::2])
    assert message.size == 0
    assert rule.lock_free


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hogwild_workers_on_different_coordinates_lose_nothing(dtype):
    rule, shared, rounds = make_rule("hogwild"), np.zeros(50_001, dtype), 300
    rule.step(new_local(rule, shared), shared, lambda theta, _gradient: theta)  # compiles

    def live(worker):
        touched = np.zeros_like(shared)
        touched[worker::2] = 1
        local = Local(shared, shared)
        for _ in range(rounds):
            rule.step(local, touched, lambda _theta, gradient: gradient)

    workers = [threading.Thread(target=live, args=(worker,)) for worker in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (shared == rounds).all()


# ---- the server's side: one commit after the other, and what the formula makes of them


def arrivals(dtype, count=5):
    base, *pushed = vectors(2 * count + 1, dtype=dtype, seed=3)
    pairs = zip(pushed[::2], pushed[1::2], strict=True)
    return base, [
        arrival(v, k, staleness=k, samples=8 + k, base=b.copy(), rate=RATE, workers=count)
        for k, (v, b) in enumerate(pairs)
    ]


def as_one(formula):
    """A formula for one commit, for all of them in a row."""

    def run(theta, state, received):
        for one in received:
            theta = formula(theta, state, one)
        return theta

    return run


def adagrad(theta, state, one):
    state["s"] = state.get("s", 0.0) + one.vector**2
    return theta - RATE * one.vector / (np.sqrt(state["s"]) + 1e-10)


def damped(theta, _state, one):
    return theta + one.vector / (1 + (theta - one.base) ** 2 / 1e-4)


def compensated(theta, _state, one):
    g = one.vector
    return theta - RATE * (g + 0.04 * g * g * (theta - one.base))


def compensated_adaptive(theta, state, one):
    g = one.vector
    state["ms"] = 0.95 * state.get("ms", 0.0) + 0.05 * g * g
    strength = 2 / np.sqrt(state["ms"] + 1e-7)
    return theta - RATE * (g + strength * g * g * (theta - one.base))


def delayed_nesterov(theta, state, one, lr=0.7, beta=0.9, n=2, c=0.25):
    state["t"] = state.get("t", 0) + 1
    g, m = one.vector, state.get("m", 0.0)
    state["delta"] = state.get("delta", 0.0) + g
    if state["t"] % n == 0:
        state["m"] = m = beta * m + state["delta"] / n
        state["delta"] = 0.0
        return theta - lr * ((1 - c * n + c) * beta * m + g / n)
    return theta - lr * (c * beta * m + g / n)


def large_batch(theta, _state, received):
    samples = sum(one.samples for one in received)
    return theta - RATE * sum(one.samples * one.vector for one in received) / samples


def mean(_theta, _state, received):
    return sum(one.vector for one in received) / len(received)


def elastic(theta, _state, received):
    return theta + sum(one.vector for one in received)


def outer_nesterov(theta, state, received):
    delta = sum(one.vector for one in received) / len(received)
    state["b"] = 0.9 * state.get("b", 0.0) + delta
    return theta - 0.7 * (delta + 0.9 * state["b"])


add = as_one(lambda theta, _state, one: theta + one.vector)
SERVERS = {
    "downpour": ({}, add),
    "ssp": ({}, add),
    "agn": ({}, add),
    "aeasgd": ({}, add),
    "eamsgd": ({}, add),
    "dynsgd": ({}, as_one(lambda theta, _s, one: theta + one.vector / (one.staleness + 1))),
    "downpour-adagrad": ({}, as_one(adagrad)),
    "adag": ({}, as_one(damped)),
    "adag-agn": ({}, as_one(damped)),
    "dc-asgd": ({}, as_one(compensated)),
    "dc-asgd-adaptive": ({}, as_one(compensated_adaptive)),
    "async-diloco": ({"delay": 2, "spread": 0.25}, as_one(delayed_nesterov)),
    "sync": ({}, large_batch),
    "averaging": ({}, mean),
    "one-shot": ({}, mean),
    "easgd": ({}, elastic),
    "diloco": ({}, outer_nesterov),
}


def exact(one):
    """An arrival in float64."""
    wide = cut_arrival(one, 0, None)
    return type(one)(
        wide.vector.astype(np.float64),
        one.worker,
        one.staleness,
        one.samples,
        one.steps,
        one.rate,
        one.workers,
        wide.base.astype(np.float64),
    )


def test_every_rule_with_a_server_has_its_formula_here():
    assert SERVERS.keys() == RULES.keys() - {"hogwild"}


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("name", SERVERS)
def test_the_server_does_what_the_formula_says(name, dtype, bound):
    options, formula = SERVERS[name]
    rule = make_rule(name, **options)
    theta, received = arrivals(dtype)
    part, state, expected = new_slice(rule, theta), {}, theta.astype(np.float64)
    before = [one.vector.copy() for one in received]
    for _ in range(3):
        commit(rule, part, received)
        expected = formula(expected, state, [exact(one) for one in received])
        assert part.theta.dtype == dtype
        assert close(part.theta, expected, bound)
    assert all(np.array_equal(one.vector, v) for one, v in zip(received, before, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SERVERS)
@settings(max_examples=5, deadline=None)
@given(bounds=st.lists(st.integers(1, 256), max_size=4, unique=True))
def test_shards_of_any_cut_have_the_whole_vector_s_bits(name, dtype, bounds):
    rule = make_rule(name)
    theta, received = arrivals(dtype)
    whole, sharded = new_slice(rule, theta), new_slice(rule, theta)
    limits = [0, *sorted(bounds), theta.size]
    shards = cut(sharded, limits)
    for _ in range(2):
        commit(rule, whole, received)
        for shard, (start, stop) in zip(shards, itertools.pairwise(limits), strict=True):
            commit(rule, shard, [cut_arrival(one, start, stop) for one in received])
    assert sharded.theta.tobytes() == whole.theta.tobytes()
    for slot, vector in whole.slots.items():
        assert sharded.slots[slot].tobytes() == vector.tobytes()
    assert all(shard.counts == whole.counts for shard in shards)


def test_a_commit_that_may_not_be_written_to_is_applied_all_the_same():
    theta, received = arrivals(np.float32)
    rule = make_rule("adag")
    expected, part = new_slice(rule, theta), new_slice(rule, theta)
    commit(rule, expected, received)
    for one in received:
        one.vector.flags.writeable = one.base.flags.writeable = False
    commit(rule, part, received)
    assert part.theta.tobytes() == expected.theta.tobytes()


# ---- both sides: one worker, a commit after each step


def one_worker(rule, theta, gradients, update):
    part = new_slice(rule, theta)
    local = new_local(rule, theta)
    for gradient in gradients:
        base = part.theta.copy()
        local.theta[:], local.center = base, base
        message = window(rule, local, [gradient], update, RATE)
        commit(rule, part, [arrival(message, base=base, rate=RATE)])
    return part.theta


def one_process(theta, gradients, optimizer):
    """theta += U(g), with what the optimizer keeps."""
    theta = theta.copy()
    slots, counts = {name: np.zeros_like(theta) for name in optimizer.slots}, {}
    for gradient in gradients:
        theta += optimizer.update(theta, gradient, slots, counts, RATE)
    return theta


def bound_update(optimizer, like):
    slots, counts = {name: np.zeros_like(like) for name in optimizer.slots}, {}
    return lambda theta, gradient: optimizer.update(theta, gradient, slots, counts, RATE)


def torch_process(theta, gradients, make):
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("name", WALKS)
def test_one_worker_that_commits_each_step_is_one_process_bit_for_bit(name, optimizer, dtype):
    theta, *gradients = vectors(9, dtype=dtype)
    gradients[3][::5] = -0.0
    update = bound_update(make_optimizer(optimizer), theta)
    found = one_worker(make_rule(name), theta, gradients, update)
    expected = one_process(theta, gradients, make_optimizer(optimizer))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "options", "server", "settings", "reference"),
    [
        ("downpour-adagrad", {}, "adagrad", {}, torch.optim.Adagrad),
        ("dc-asgd", {}, "sgd", {}, torch.optim.SGD),
        ("dc-asgd-adaptive", {}, "sgd", {}, torch.optim.SGD),
        ("sync", {}, "sgd", {}, torch.optim.SGD),
        ("sync", {"optimizer": "sgd"}, "sgd", {"momentum": 0.9}, torch.optim.SGD),
        ("sync", {"optimizer": "adam"}, "adam", {"betas": [0.8, 0.9]}, torch.optim.Adam),
        ("sync", {"optimizer": "adamw"}, "adamw", {"weight_decay": 0.1}, torch.optim.AdamW),
        ("sync", {"optimizer": "adagrad"}, "adagrad", {}, torch.optim.Adagrad),
        ("sync", {"optimizer": "rmsprop"}, "rmsprop", {}, torch.optim.RMSprop),
    ],
)
def test_one_worker_with_the_server_s_optimizer_is_one_process_bit_for_bit(
    name, options, server, settings, reference, dtype
):
    theta, *gradients = vectors(9, dtype=dtype)
    found = one_worker(make_rule(name, **options, **settings), theta, gradients, plain)
    expected = one_process(theta, gradients, make_optimizer(server, **settings))
    assert found.tobytes() == expected.tobytes()
    theirs = torch_process(theta, gradients, lambda p: reference(p, lr=RATE, **settings))
    assert close(found, theirs, 1e-6)


@pytest.mark.parametrize("name", WALKS)
def test_one_worker_whose_optimizer_is_torchs_goes_where_torch_goes(name):
    """U(g) is the difference that torch's step made, as a learner hands it over."""
    theta, *gradients = vectors(9, dtype=np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = torch.optim.Adam([parameter], lr=RATE)

    def update(at, gradient):
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(at))
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        return parameter.detach().numpy() - at

    found = one_worker(make_rule(name), theta, gradients, update)
    theirs = torch_process(theta, gradients, lambda p: torch.optim.Adam(p, lr=RATE))
    assert close(found, theirs, 1e-6)
