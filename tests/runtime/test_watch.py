"""Who watches others counts for how long they show no change."""

import threading

import pytest

from dovetail.runtime.watch import MOST_LATE, Watch


class Looks:
    """A watch that looks each second of a played clock."""

    def __init__(self):
        self.now = 0.0
        self.watch = Watch(1.0, lambda: self.now)

    def after(self, seconds, thing="a thing", sign="beat"):
        self.now += seconds
        self.watch.tick()
        return self.watch.still_seconds(thing, sign)


def test_a_thing_that_shows_a_change_begins_anew():
    looks = Looks()
    assert [looks.after(1, sign=sign) for sign in "aaabbc"] == [0, 1, 2, 0, 1, 0]


def test_things_are_counted_apart_and_can_be_forgotten():
    looks = Looks()
    assert [looks.after(1, thing) for thing in "abba"] == [0, 0, 1, 3]
    looks.watch.forget("a")
    assert [looks.after(1, thing) for thing in "ab"] == [0, 4]


@pytest.mark.parametrize(("passed", "counted"), [(1.25, 1.25), (3600, MOST_LATE), (0.5, 1)])
def test_a_stop_of_ones_own_is_not_counted_and_a_late_look_is(passed, counted):
    looks = Looks()
    assert looks.after(1) == 0
    assert looks.after(passed) == counted


def test_a_watch_looks_until_nothing_is_left():
    left = [True, True, False]
    watch = Watch(0.001)
    watch.run("test", lambda: left.pop(0))
    watch.thread.join(60)
    assert left == [] and not watch.thread.is_alive()


def test_a_closed_watch_looks_no_more():
    looked = threading.Event()
    watch = Watch(0.001)
    watch.run("test", lambda: not looked.set())
    assert looked.wait(60) and watch.thread.is_alive()
    watch.closing.set()
    watch.thread.join(60)
    assert not watch.thread.is_alive()
