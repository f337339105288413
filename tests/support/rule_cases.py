"""What the tests of rules share: random vectors, and a run without any server."""

import itertools

import numpy as np

from dovetail.training.rules.contract import Arrival, Local, Slice, new_slots


def vectors(count, size=257, dtype=np.float64, seed=0):
    """[size] each, of different scales."""
    rng = np.random.default_rng((seed, count, size))
    return [
        (rng.normal(size=size) * 10.0 ** rng.integers(-2, 1)).astype(dtype) for _ in range(count)
    ]


def new_local(rule, theta, center=None):
    center = theta if center is None else center
    return Local(theta.copy(), center.copy(), new_slots(rule.worker_slots, theta))


def new_slice(rule, theta):
    counts = dict.fromkeys(rule.server_counts, 0)
    return Slice(theta.copy(), new_slots(rule.server_slots, theta), counts)


def arrival(vector, worker=0, **fields):
    known = {"staleness": 0, "samples": 16, "steps": 1, "rate": 0.1, "workers": 1} | fields
    return Arrival(vector, worker, **known)


def commit(rule, part, arrivals):
    """What the server does when these have arrived."""
    if rule.combine is not None:
        rule.combine(part, arrivals)
    else:
        for one in arrivals:
            rule.apply(part, one)


def cut(part, bounds):
    """Shards of a slice, views of its vectors; each has its own numbers."""
    return [
        Slice(
            part.theta[start:stop],
            {name: slot[start:stop] for name, slot in part.slots.items()},
            dict(part.counts),
        )
        for start, stop in itertools.pairwise(bounds)
    ]


def cut_arrival(one, start, stop):
    base = None if one.base is None else one.base[start:stop]
    return Arrival(
        one.vector[start:stop],
        one.worker,
        one.staleness,
        one.samples,
        one.steps,
        one.rate,
        one.workers,
        base,
    )


def window(rule, local, gradients, update, rate=0.1):
    """A worker's window from a pull on; its message."""
    local.steps = 0
    rule.begin(local)
    for gradient in gradients:
        at = rule.look(local)
        found = gradient(at.copy()) if callable(gradient) else gradient
        local.rate = rate
        rule.step(local, found, update)
        local.steps += 1
    return rule.message(local)
