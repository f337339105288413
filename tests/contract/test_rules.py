"""Every update rule is its hand loop: `dt.Trainer` in virtual time, replayed from its history.

All samples are alike, so that a gradient depends on the parameters alone. The history says which
worker committed when, and how stale the commit was. From that each loop below computes the center
as the rule's paper has it.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import dovetail as dt

SAMPLES, BATCH, WINDOW, EPOCHS, WORKERS, LR = 96, 4, 2, 2, 3, 0.05
WORLD = {"slow": {0: 2.7}, "latency_seconds": 0.6}
X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
Y = torch.tensor([1.0, -0.5], dtype=torch.float64)


def model_at_start():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


@functools.cache
def _scratch():
    return model_at_start()


def gradient(theta):
    """[size] of the mean squared error at `theta` [size]; of any batch, since samples are alike."""
    model = _scratch()
    nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), model.parameters())
    model.zero_grad()
    nn.functional.mse_loss(model(X[None]), Y[None]).backward()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])


def walk(theta, steps, lr=LR):
    """Plain descent from `theta`: where it ends, and the sum of the gradients on the way."""
    theta, total = theta.copy(), np.zeros_like(theta)
    for _ in range(steps):
        found = gradient(theta)
        theta -= lr * found
        total += found
    return theta, total


def train(rule, workers=WORKERS, window=WINDOW):
    """The trained center [size], and the rows of its history."""
    model = model_at_start()
    trainer = dt.Trainer(
        model, nn.functional.mse_loss, functools.partial(torch.optim.SGD, lr=LR), rule, workers,
        "simulated", epochs=EPOCHS, batch=BATCH, window=window, backend_options=WORLD,
    )  # fmt: skip
    history = trainer.fit((X.expand(SAMPLES, -1).clone(), Y.expand(SAMPLES, -1).clone()))
    return vector(model), history.outcome.rows


# --- rules whose server applies each commit by itself -------------------------------------------
#
# A loop is a function (center, base, row, state) -> the next center. `base` is the center that the
# worker had pulled, and `state` the rule's own, kept over commits.


def downpour(center, base, row, state):
    return center - LR * walk(base, row.steps)[1]


def downpour_adagrad(center, base, row, state):
    total = walk(base, row.steps)[1]
    state["s"] = state.get("s", 0.0) + total**2
    return center - LR * total / (np.sqrt(state["s"]) + 1e-10)


def dynsgd(center, base, row, state):
    return center - LR * walk(base, row.steps)[1] / (row.staleness + 1)


def agn(center, base, row, state):
    return center - LR * walk(base, row.steps)[1] / row.steps


def adag(center, base, row, state):
    return center - LR * walk(base, row.steps)[1] / (1 + (center - base) ** 2 / 1e-4)


def adag_agn(center, base, row, state):
    mean = walk(base, row.steps)[1] / row.steps
    return center - LR * mean / (1 + (center - base) ** 2 / 1e-4)


def dc_asgd(center, base, row, state):
    g = gradient(base)
    return center - LR * (g + 0.04 * g * g * (center - base))


def dc_asgd_adaptive(center, base, row, state):
    g = gradient(base)
    state["ms"] = 0.95 * state.get("ms", 0.0) + 0.05 * g * g
    strength = 2.0 / np.sqrt(state["ms"] + 1e-7)
    return center - LR * (g + strength * g * g * (center - base))


def aeasgd(center, base, row, state):
    theta, force = state.get(row.worker, (model_vector(), 0.0))
    for step in range(row.steps):
        theta = theta - LR * gradient(theta) - (force if step == 0 else 0.0)
    force = 0.05 * (theta - base)
    state[row.worker] = theta, force
    return center + force


def eamsgd(center, base, row, state):
    theta, velocity, force = state.get(row.worker, (model_vector(), 0.0, 0.0))
    for step in range(row.steps):
        velocity = 0.9 * velocity - LR * gradient(theta + 0.9 * velocity)
        theta = theta + velocity - (force if step == 0 else 0.0)
    force = 0.05 * (theta - base)
    state[row.worker] = theta, velocity, force
    return center + force


def async_diloco(center, base, row, state):
    """Delayed Nesterov: N = 4, c = 0. Between two updates of m commits step without it."""
    g = base - walk(base, row.steps)[0]
    state["count"] = state.get("count", 0) + 1
    state["sum"] = state.get("sum", 0.0) + g
    momentum = 0.0
    if state["count"] % 4 == 0:
        state["m"] = 0.9 * state.get("m", 0.0) + state.pop("sum") / 4
        momentum = 0.9 * state["m"]
    return center - 0.7 * (momentum + g / 4)


COMMITS = {
    "downpour": downpour, "downpour-adagrad": downpour_adagrad, "dynsgd": dynsgd, "agn": agn,
    "adag": adag, "adag-agn": adag_agn, "ssp": downpour, "dc-asgd": dc_asgd,
    "dc-asgd-adaptive": dc_asgd_adaptive, "aeasgd": aeasgd, "eamsgd": eamsgd,
    "async-diloco": async_diloco,
}  # fmt: skip


def model_vector():
    return vector(model_at_start())


@pytest.mark.parametrize("name", COMMITS)
def test_a_rule_that_applies_each_commit_is_its_hand_loop(name):
    # Windows of equal length, so that every row has the same number of steps.
    rule = dt.make_rule(name, dynamic=False) if name == "async-diloco" else name
    found, rows = train(rule)
    assert len(rows) == SAMPLES * EPOCHS // (BATCH * WINDOW)
    assert {row.worker for row in rows} == set(range(WORKERS))
    assert max(row.staleness for row in rows) > 0
    centers, state = [model_vector()], {}
    for row in rows:
        base = centers[len(centers) - 1 - row.staleness]
        centers.append(COMMITS[name](centers[-1], base, row, state))
    np.testing.assert_allclose(found, centers[-1], rtol=1e-9, atol=1e-12)


# --- rules whose server waits for a round ---------------------------------------------------------
#
# A loop is a function (center, state) -> the next center. With samples alike every worker of a
# round does the same.


def sync(center, state):
    return center - LR * gradient(center)


def averaging(center, state):
    return walk(center, state["steps"])[0]


def easgd(center, state):
    theta = state.get("theta", center)
    force = 0.05 * (theta - center)
    for step in range(state["steps"]):
        theta = theta - LR * gradient(theta) - (force if step == 0 else 0.0)
    state["theta"] = theta
    return center + WORKERS * force


def diloco(center, state):
    delta = center - walk(center, state["steps"])[0]
    state["b"] = 0.9 * state.get("b", 0.0) + delta
    return center - 0.7 * (delta + 0.9 * state["b"])


ROUNDS = {
    "sync": sync, "averaging": averaging, "one-shot": averaging, "easgd": easgd, "diloco": diloco,
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDS)
def test_a_rule_that_waits_for_a_round_is_its_hand_loop(name):
    found, rows = train(name, window=None if name == "one-shot" else WINDOW)
    assert len(rows) % WORKERS == 0
    center, state = model_vector(), {"steps": rows[0].steps}
    assert len({row.steps for row in rows}) == 1
    for _ in range(len(rows) // WORKERS):
        center = ROUNDS[name](center, state)
    np.testing.assert_allclose(found, center, rtol=1e-9, atol=1e-12)


def test_hogwild_of_one_worker_is_plain_descent():
    found, _ = train("hogwild", workers=1)
    expected = walk(model_vector(), SAMPLES * EPOCHS // BATCH)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def largest_lead(rule):
    """The most windows that a worker was ahead of another one, before samples ran short."""
    _, rows = train(rule)
    windows, largest = dict.fromkeys(range(WORKERS), 0), 0
    for row in rows[: len(rows) * 3 // 4]:
        windows[row.worker] += 1
        largest = max(largest, max(windows.values()) - min(windows.values()))
    return largest


def test_under_ssp_no_worker_runs_far_ahead():
    # Whoever is 1 ahead may begin a window, and is 2 ahead when it commits that.
    assert largest_lead(dt.make_rule("ssp", slack=1)) == 2
    assert largest_lead("downpour") > 2


def test_every_rule_has_its_hand_loop_here():
    with pytest.raises(dt.InvalidError) as raised:
        dt.make_rule("no such rule")
    known = str(raised.value).partition("there are ")[2].split(", ")
    assert {*COMMITS, *ROUNDS, "hogwild"} == set(known)
