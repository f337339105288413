import threading
import time

import numpy as np

from dovetail.runtime import launch
from dovetail.runtime.shared import Block
from dovetail.runtime.waiting import (
    ABORTED,
    SPIN_NS,
    address_of,
    barrier,
    publish,
    publish_copy,
    wait,
)


def test_a_flag_that_is_far_enough_does_not_block():
    flags = np.zeros(16, dtype=np.int64)
    publish(address_of(flags, 0), 7)
    assert flags[0] == 7
    assert wait(address_of(flags, 0), 5, address_of(flags, 8), SPIN_NS) == 7


def test_a_published_copy_is_there_when_its_flag_is():
    flags, data = np.zeros(16, dtype=np.int64), np.arange(40, dtype=np.int64)
    target = np.zeros_like(data)
    publish_copy(address_of(flags, 0), 7, address_of(target, 3), address_of(data, 1), 8 * 20)
    assert flags.tolist() == [7] + [0] * 15
    assert target.tolist() == [0] * 3 + list(range(1, 21)) + [0] * 17
    publish_copy(address_of(flags, 0), 8, address_of(target), address_of(data), 0)
    assert (flags[0], target[0]) == (8, 0)


def test_a_wait_ends_when_the_flag_is_published():
    flags = np.zeros(16, dtype=np.int64)
    found = []
    waiter = threading.Thread(
        target=lambda: found.append(wait(address_of(flags, 0), 3, address_of(flags, 8), SPIN_NS))
    )
    waiter.start()
    publish(address_of(flags, 0), 2)
    assert not found
    publish(address_of(flags, 0), 3)
    waiter.join(timeout=30)
    assert found == [3]


def test_a_wait_that_sleeps_is_woken_by_whoever_publishes():
    flags, data = np.zeros(24, dtype=np.int64), np.ones(1, dtype=np.int64)
    found = []

    def wait_for_all():
        for value in (1, 2, 3):
            found.append(wait(address_of(flags, 0), value, address_of(flags, 8), 0))

    waiter = threading.Thread(target=wait_for_all)
    waiter.start()
    for value in (1, 2, 3):
        while flags[1] == 0:  # until it says that it sleeps
            time.sleep(0)
        assert len(found) == value - 1
        if value < 3:
            publish(address_of(flags, 0), value)
        else:
            publish_copy(address_of(flags, 0), value, address_of(flags, 16), address_of(data), 8)
    waiter.join(timeout=30)
    assert found == [1, 2, 3]
    assert (flags[1], flags[16]) == (0, 1)


def test_a_wait_that_sleeps_sees_the_abort_flag():
    flags, found = np.zeros(16, dtype=np.int64), []
    waiter = threading.Thread(
        target=lambda: found.append(wait(address_of(flags, 0), 1, address_of(flags, 8), 0))
    )
    waiter.start()
    while flags[1] == 0:
        time.sleep(0)
    publish(address_of(flags, 8), 1)
    waiter.join(timeout=30)
    assert found == [ABORTED]


def test_the_abort_flag_releases_a_waiting_process():
    block = Block.create(1024)
    flags = block.view(0, (128,), np.int64)
    with launch("tests.support.runtime_entries:spin") as worker:
        worker.send_descriptor(block.descriptor)
        assert worker.receive() == "spinning"
        publish(address_of(flags, 16), 1)
        assert worker.receive() == ABORTED
    block.close()


def test_a_barrier_of_one_does_not_block():
    flags = np.zeros(16, dtype=np.int64)
    assert barrier(address_of(flags), 1, 0, 4, address_of(flags, 8), SPIN_NS) == 4


def test_an_aborted_barrier_says_so():
    flags = np.zeros(32, dtype=np.int64)
    publish(address_of(flags, 24), 1)
    assert barrier(address_of(flags), 2, 0, 1, address_of(flags, 24), SPIN_NS) == ABORTED


def test_nobody_passes_a_barrier_before_all_have_written():
    rounds = 300
    block = Block.create(2048)
    with (
        launch("tests.support.runtime_entries:race") as a,
        launch("tests.support.runtime_entries:race") as b,
    ):
        for own, worker in enumerate((a, b)):
            worker.send_descriptor(block.descriptor)
            worker.send((own, rounds))
        expected = [2 * value for value in range(1, 2 * rounds, 2)]
        assert a.receive() == expected
        assert b.receive() == expected
    block.close()
