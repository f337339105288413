"""Orders of tasks, and what a step of them takes by the papers' formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.placers.pipeline_schedules import (
    SCHEDULES,
    B,
    F,
    I,
    PipelineTimes,
    Task,
    W,
    orders_of,
    other_held,
    step_seconds,
)

STAGES, MICRO = 4, 8


def valid(orders, stages, micro_batches):
    """True if every task is there once, a B or an I and a W for each F."""
    tasks = [task for of_device in orders for task in of_device]
    kinds = (F, I, W) if {task.kind for task in tasks} & {I, W} else (F, B)
    every = {Task(k, s, m) for k in kinds for s in range(stages) for m in range(micro_batches)}
    return len(tasks) == len(every) and set(tasks) == every


def times_of(forward, inputs, weights, send=0.0, devices=None, updates=0.0):
    """Stages in a chain, each on a device of its own or on `devices`."""
    count = len(forward)
    devices = np.arange(count) if devices is None else np.array(devices)
    sends, returns = np.full((2, count, count), np.nan)
    for stage in range(count - 1):
        sends[stage, stage + 1] = returns[stage + 1, stage] = send
    channels = devices[:, None] * count + devices
    channels[devices[:, None] == devices] = -1
    return PipelineTimes(
        np.array(forward, float), np.array(inputs, float), np.array(weights, float),
        np.full(int(devices.max()) + 1, updates), sends, returns, channels, devices,
    )  # fmt: skip


EQUAL = times_of([1.0] * STAGES, [1.0] * STAGES, [1.0] * STAGES)


def seconds_of(schedule, times=EQUAL, micro_batches=MICRO):
    return step_seconds(orders_of(schedule, times, micro_batches), times, micro_batches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_wait_for_one_micro_batch_a_stage(schedule):
    assert seconds_of(schedule) == (MICRO + STAGES - 1) * 3


def test_a_device_of_several_stages_waits_for_a_part_of_one():
    times = times_of([0.5] * 8, [0.5] * 8, [0.5] * 8, devices=[0, 1, 2, 3] * 2)
    # (p - 1) (t_F + t_B) / v, Megatron-LM's section 2.2.2
    assert seconds_of("interleaved", times) == MICRO * 3 + (STAGES - 1) * 3 / 2


def test_zero_bubble_leaves_a_third_of_the_gap():
    # (p - 1) (t_F + t_I - t_W), table 1 of Qi et al.
    assert seconds_of("zero-bubble") == MICRO * 3 + (STAGES - 1)


def test_one_forward_one_backward_holds_fewer_micro_batches_than_gpipe():
    for schedule, most in (("1f1b", [4, 3, 2, 1]), ("gpipe", [8] * 4), ("zero-bubble", [4] * 4)):
        for stage, tasks in enumerate(orders_of(schedule, EQUAL, MICRO)):
            assert held_by(tasks) <= most[stage], (schedule, stage)


def held_by(tasks):
    """The most micro-batches between their F and their last backward task."""
    last = max(kind for kind, _, _ in tasks)
    changes = [1 if task.kind == F else -1 if task.kind == last else 0 for task in tasks]
    return np.cumsum(changes).max()


@pytest.mark.parametrize("held", [(6, 6, 6, 6), (7, 6, 2, 1), (1, 1, 1, 1)])
def test_zero_bubble_holds_as_many_micro_batches_as_it_may(held):
    orders = orders_of("zero-bubble", EQUAL, MICRO, held)
    assert np.isfinite(step_seconds(orders, EQUAL, MICRO))
    counts = [held_by(tasks) for tasks in orders]
    assert all(count <= most for count, most in zip(counts, held, strict=True))
    assert max(counts) == max(held)


def test_zero_bubble_with_more_micro_batches_waits_for_the_longest_stage_alone():
    times = times_of([1.0] * 4, [0.2, 1.0, 1.4, 1.0], [1.8, 1.0, 0.6, 1.0])
    seconds = {
        held: step_seconds(orders_of("zero-bubble", times, MICRO, held), times, MICRO)
        for held in ((), *other_held(np.full(4, 100.0), MICRO))
    }
    # The last stage begins after the three before it.
    assert min(seconds.values()) == pytest.approx(3 + 3 * MICRO)
    assert seconds[()] > min(seconds.values()) + 1


def test_gradients_are_made_in_the_order_of_the_micro_batches():
    for schedule in SCHEDULES:
        for tasks in orders_of(schedule, EQUAL, MICRO):
            late = [task.micro for task in tasks if task.kind not in (F,)]
            of_kind = {k: [t.micro for t in tasks if t.kind == k] for k in {t.kind for t in tasks}}
            assert late
            assert all(list(dict.fromkeys(m)) == sorted(set(m)) for m in of_kind.values())


def test_sends_lie_between_stages_and_share_a_channel():
    times = times_of([1.0, 1.0], [1.0, 1.0], [0.0, 0.0], send=0.25, updates=0.5)
    # F, send, F, B, send, B; then the update.
    assert seconds_of("gpipe", times, 1) == 4 + 2 * 0.25 + 0.5
    crowded = times_of([0.1, 0.1], [0.1, 0.1], [0.0, 0.0], send=1.0)
    # Four activations go one after another over the channel, and then four gradients.
    assert seconds_of("gpipe", crowded, 4) == pytest.approx(0.1 + 4 + 2 * 0.1 + 4 + 0.1)


def test_orders_that_cannot_complete_take_for_ever():
    orders = orders_of("1f1b", EQUAL, 2)
    orders[0].reverse()
    assert step_seconds(orders, EQUAL, 2) == np.inf


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(0.0, 3.0)] * 3), min_size=1, max_size=6),
    st.integers(2, 9),
    st.floats(0.0, 1.0),
)
def test_every_schedule_has_every_task_and_completes(stages, micro_batches, send):
    forward, inputs, weights = (list(column) for column in zip(*stages, strict=True))
    times = times_of(forward, inputs, weights, send)
    work = np.array(forward) + inputs + weights
    for schedule in SCHEDULES:
        orders = orders_of(schedule, times, micro_batches)
        assert valid(orders, len(stages), micro_batches)
        seconds = step_seconds(orders, times, micro_batches)
        assert micro_batches * work.max() <= seconds * (1 + 1e-9) < np.inf


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.integers(2, 13), st.floats(0.0, 1.0))
def test_interleaved_stages_complete_with_any_number_of_micro_batches(devices, each, micro, send):
    count = devices * each
    times = times_of([1.0] * count, [1.0] * count, [1.0] * count, send, list(range(devices)) * each)
    orders = orders_of("interleaved", times, micro)
    assert valid(orders, count, micro)
    assert step_seconds(orders, times, micro) < np.inf


def test_backward_tasks_are_whole_or_cut_in_two():
    kinds = {
        name: {task.kind for tasks in orders_of(name, EQUAL, 2) for task in tasks}
        for name in SCHEDULES
    }
    assert kinds["1f1b"] == kinds["gpipe"] == kinds["interleaved"] == {F, B}
    assert B not in kinds["zero-bubble"]
