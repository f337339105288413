"""The center in blocks and shards: the same bits as in one piece."""

import threading

import numpy as np
import pytest

from dovetail.training.center import Center
from dovetail.training.rules import make_rule
from dovetail.training.steps import Apply, Combine, Forget, Read

SIZE = 1001


def arrival(worker, staleness=1):
    return Apply(worker, staleness, 8, 2, 0.1, 3)


def vector(seed):
    return (0.01 * np.random.default_rng(seed).standard_normal(SIZE)).astype(np.float32)


def driven(name, shards):
    """A center after a few rounds of three workers, and the outboxes they pulled to."""
    rule = make_rule(name)
    center = Center(vector(99), rule, shards)
    outboxes = [np.zeros(SIZE, np.float32) for _ in range(3)]
    for worker, outbox in enumerate(outboxes):
        center.attach(worker, None, outbox)
        center.execute(Read(worker))
    for time in range(5):
        for worker in range(3):
            center.stage(worker, vector((time, worker)))
            if not rule.gathers:
                center.execute(arrival(worker, time), Read(worker))
        if rule.gathers:
            center.execute(Combine(tuple(map(arrival, range(3)))), *map(Read, range(3)))
    return center, outboxes


@pytest.mark.parametrize("name", ["downpour", "adag", "dc-asgd-adaptive", "async-diloco", "diloco"])
def test_blocks_and_shards_change_no_bit(name, monkeypatch):
    whole, pulled = driven(name, 1)
    monkeypatch.setattr("dovetail.training.center.BLOCK_BYTES", 4 * 48)
    for shards in (1, 3, 50):
        with driven(name, shards)[0] as center:
            found, expected = center.vectors(), whole.vectors()
            assert found.keys() == expected.keys()
            assert all(found[key].tobytes() == expected[key].tobytes() for key in expected)
            assert center.counts() == whole.counts()
    np.testing.assert_array_equal(pulled[2], whole.theta)


@pytest.mark.parametrize("name", ["adag", "async-diloco", "sync"])
def test_a_restored_center_goes_on_as_the_old_one(name):
    old, _ = driven(name, 1)
    old.stage(1, vector(5))
    new = Center(np.zeros(SIZE, np.float32), make_rule(name))
    new.restore({key: v.copy() for key, v in old.vectors().items()}, old.counts())
    for center in (old, new):
        step = arrival(1)
        center.execute(Combine((step,)) if name == "sync" else step)
    assert new.theta.tobytes() == old.theta.tobytes()
    assert new.counts() == old.counts()


def test_what_is_forgotten_is_no_longer_kept():
    center, _ = driven("adag", 1)
    center.stage(1, vector(1))
    assert {"base 1", "staged 1"} <= center.vectors().keys()
    center.execute(Forget(1))
    assert not {"base 1", "staged 1"} & center.vectors().keys()


def test_watched_coordinates_are_copied_at_their_version(monkeypatch):
    monkeypatch.setattr("dovetail.training.center.BLOCK_BYTES", 4 * 48)
    watched = np.array([0, 47, 48, 500, 1000])
    with Center(np.zeros(SIZE, np.float32), make_rule("downpour"), 3, watched) as center:
        values = np.zeros((4, 5), np.float32)
        for time in range(4):
            center.stage(0, np.arange(SIZE, dtype=np.float32))
            center.execute(arrival(0), values=values[time])
        center.flush()
    np.testing.assert_array_equal(values, np.outer(np.arange(1, 5), watched))


def test_a_center_ends_its_threads():
    before = threading.active_count()
    center, _ = driven("downpour", 3)
    center.close()
    center.close()
    assert threading.active_count() == before


def test_only_vectors_of_its_size_and_type_fit():
    center = Center(np.zeros(4, np.float32), make_rule("downpour"))
    assert center.fits(np.zeros(4, np.float32))
    for other in (np.zeros(5, "f4"), np.zeros((4, 1), "f4"), np.zeros(4), np.zeros(8, "f4")[::2]):
        assert not center.fits(other)
