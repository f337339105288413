import os
import threading

import pytest

from dovetail.runtime import neighbours
from dovetail.runtime.neighbours import (
    BRIEF_SECONDS,
    SPIN_SECONDS,
    Neighbours,
    Spinning,
    busy_seconds,
    hold_back_openmp,
)


@pytest.fixture
def world(monkeypatch):
    """Seconds by name: the clock's, those the cores were busy, those of this process and pid 7."""
    seconds = {"now": 100.0, "busy": 50.0, "own": 3.0, "seven": 1.0}
    monkeypatch.setattr(neighbours, "clock", lambda: seconds["now"])
    monkeypatch.setattr(neighbours, "busy_seconds", lambda _cores: seconds["busy"])
    monkeypatch.setattr(neighbours.time, "process_time", lambda: seconds["own"])
    monkeypatch.setattr(neighbours, "_process_seconds", lambda _pid: seconds["seven"])
    return seconds


def pass_on(seconds, **changes):
    for name, change in changes.items():
        seconds[name] += change


def test_neighbours_are_what_kept_the_cores_busy_beside_ourselves(world):
    found = Neighbours((0, 1), (7,))
    pass_on(world, now=1.0, busy=1.75, own=0.5, seven=0.25)
    assert found.look() == pytest.approx(1.0)
    pass_on(world, now=2.0, busy=1.0, own=1.1)  # the kernel's ticks lag a little
    assert found.look() == 0.0


def test_a_look_too_soon_says_nothing_and_loses_nothing(world):
    found = Neighbours((0,))
    pass_on(world, now=0.1, busy=0.1)
    assert found.look() is None
    pass_on(world, now=0.4, busy=0.4)
    assert found.look() == pytest.approx(1.0)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        pass_on(world, now=seconds, busy=seconds / 2)

    assert found.settled(sleep) == pytest.approx(0.5)
    assert slept == [neighbours.WINDOW_SECONDS]


def test_where_the_system_does_not_say_nobody_is_accused(world, monkeypatch):
    monkeypatch.setattr(neighbours, "busy_seconds", lambda _cores: None)
    found = Neighbours((0,))
    pass_on(world, now=1.0)
    assert found.look() is None


def test_the_kernel_knows_how_long_its_cores_were_busy():
    here = os.sched_getaffinity(0)
    first = busy_seconds(here)
    assert first is not None
    assert busy_seconds(here) >= first >= busy_seconds({min(here)}) >= 0
    assert busy_seconds({4095}) is None


def test_the_time_of_another_process_is_the_one_that_it_sees_itself():
    assert neighbours._process_seconds(os.getpid()) == pytest.approx(
        neighbours.time.process_time(), abs=1.0
    )
    assert neighbours._process_seconds(2**22 + 1) == 0.0


def make_spinning(threads=2):
    """(what it is, what it will see at its looks, how often it held OpenMP back, let it go,
    and left out a pause)"""
    seen, counts = [], {"held": 0, "released": 0, "paused": 0, "resumed": 0}

    class Seen:
        def look(self):
            return seen.pop(0)

        def pause(self):
            counts["paused"] += 1

        def resume(self):
            counts["resumed"] += 1

    def hold_back(team):
        assert team == 3
        counts["held"] += 1
        return lambda: counts.update(released=counts["released"] + 1)

    spinning = Spinning((0, 1), threads, neighbours=Seen(), hold_back=hold_back)
    return spinning, seen, counts


def test_threads_spin_until_others_want_the_cores_and_again_after_two_looks_at_free_ones(
    monkeypatch,
):
    monkeypatch.setattr(neighbours, "BUSY_CORES", 0.25)
    spinning, seen, counts = make_spinning()
    assert (spinning.spin_seconds, counts["held"]) == (SPIN_SECONDS, 0)
    expected = [
        (0.0, SPIN_SECONDS, 0),
        (0.9, BRIEF_SECONDS, 0),
        (0.0, BRIEF_SECONDS, 0),
        (None, BRIEF_SECONDS, 0),
        (0.1, SPIN_SECONDS, 1),
        (0.0, SPIN_SECONDS, 1),
        (0.9, BRIEF_SECONDS, 1),
        (0.0, BRIEF_SECONDS, 1),
        (0.3, BRIEF_SECONDS, 1),
        (0.0, BRIEF_SECONDS, 1),
        (0.0, SPIN_SECONDS, 2),
    ]
    for others, spin_seconds, released in expected:
        seen.append(others)
        spinning.look()
        assert (spinning.spin_seconds, counts["released"]) == (spin_seconds, released)
    assert counts["held"] == 2


def test_what_others_did_during_a_pause_does_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(neighbours, "clock", lambda: now[0])
    spinning, seen, counts = make_spinning()
    seen += [None] * 4
    now[0] += 1  # before the first step
    spinning.look()
    assert counts["resumed"] == 1
    now[0] += 1  # within a step
    spinning.look()
    assert counts["resumed"] == 1
    spinning.pause()
    now[0] += neighbours.GAP_SECONDS / 2
    spinning.look()
    assert counts["resumed"] == 1
    spinning.pause()
    now[0] += 2 * neighbours.GAP_SECONDS
    spinning.look()
    assert (counts["resumed"], counts["paused"]) == (2, 2)


def test_short_steps_between_long_pauses_are_watched_together(monkeypatch):
    """Others keep 1.5 cores busy while the steps run, and 3 in the pauses, of which nothing
    counts."""
    busy, now = [0.0], [0.0]
    monkeypatch.setattr(neighbours, "clock", lambda: now[0])
    monkeypatch.setattr(neighbours, "busy_seconds", lambda _cores: busy[0])
    monkeypatch.setattr(neighbours.time, "process_time", lambda: 0.0)
    found, seen = neighbours.Neighbours((4094,)), []
    for _ in range(4):
        now[0], busy[0] = now[0] + 0.1, busy[0] + 0.15
        found.pause()
        now[0], busy[0] = now[0] + 1.0, busy[0] + 3.0
        found.resume()
        seen.append(found.look())
    assert seen[:2] == [None, None]
    assert seen[2] == pytest.approx(1.5)


def test_a_watch_that_resumes_without_a_pause_forgets_what_others_did(monkeypatch):
    busy, now = [0.0], [0.0]
    monkeypatch.setattr(neighbours, "clock", lambda: now[0])
    monkeypatch.setattr(neighbours, "busy_seconds", lambda _cores: busy[0])
    found = neighbours.Neighbours((4094,))
    busy[0], now[0] = 5.0, 5.0
    found.resume()
    assert found.look() is None
    now[0] += 1
    assert found.look() == 0.0


def test_a_process_of_one_thread_has_no_openmp_to_hold_back(monkeypatch):
    monkeypatch.setattr(neighbours, "BUSY_CORES", 0.25)
    spinning, seen, counts = make_spinning(threads=1)
    seen += [0.9]
    spinning.look()
    assert spinning.spin_seconds == BRIEF_SECONDS
    assert (counts["held"], counts["released"]) == (0, 0)


def test_holding_openmp_back_leaves_the_number_of_threads_as_it_was():
    import torch

    before, running = torch.get_num_threads(), threading.active_count()
    release = hold_back_openmp(before + 1)
    assert threading.active_count() == running + 1
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), found) == (before, [before])
    release()
    assert threading.active_count() == running


def test_pauses_that_follow_closely_are_read_once(world, monkeypatch):
    read = []
    monkeypatch.setattr(neighbours, "busy_seconds", lambda _cores: read.append(1) or world["busy"])
    found = Neighbours((0,))
    for _ in range(100):
        pass_on(world, now=1e-4)
        found.pause()
    assert len(read) < 5
    # What others do between pause and resumption does not count, but for the last milliseconds.
    pass_on(world, now=1.0, busy=1.0)
    found.resume()
    pass_on(world, now=1.0, busy=0.5)
    assert found.look() == pytest.approx(0.5, abs=0.01)
