import os
from pathlib import Path

import numpy as np
import pytest

from dovetail.runtime import launch
from dovetail.runtime.shared import ALIGNMENT_BYTES, Block, Layout
from dovetail.runtime.waiting import SPIN_NS, address_of, publish, wait
from tests.support.named_memory import named_memory


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:dovetail")


def test_slots_are_aligned_and_disjoint():
    layout = Layout()
    offsets = [layout.reserve(size) for size in (1, 64, 65, 0, 8)]
    assert offsets == [0, 64, 128, 256, 320]
    assert layout.size_bytes == 384
    block = Block.create(layout.size_bytes)
    assert block.bytes.ctypes.data % ALIGNMENT_BYTES == 0
    block.close()


def test_two_views_of_one_slot_see_the_same_bytes():
    block = Block.create(256)
    block.view(64, (2, 3), np.float32)[:] = np.arange(6).reshape(2, 3)
    assert block.view(64, (6,), np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert not block.bytes[:64].any()
    block.close()


def test_a_view_beyond_the_block_is_refused():
    block = Block.create(64)
    with pytest.raises(TypeError):
        block.view(32, (9,), np.float64)
    block.close()


def test_nothing_is_left_of_a_closed_block():
    before, open_before = mappings(), len(os.listdir("/proc/self/fd"))
    block = Block.create(1 << 20)
    values = block.view(0, (8,), np.float64)
    block.close()
    block.close()
    assert mappings() == before + 1
    values[:] = 1  # views outlive the descriptor
    del values, block
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_nothing_is_left_of_a_block_that_nobody_closed():
    before, open_before = mappings(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArithmeticError):
        fail_with(Block.create(1 << 20))
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == open_before


def fail_with(block):
    raise ArithmeticError


def test_a_block_that_cannot_be_made_leaves_nothing():
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        Block.create(1 << 64)
    with pytest.raises((OSError, OverflowError)):
        Block.create((1 << 63) - 1)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_shared_memory_has_no_name():
    before = named_memory()
    block = Block.create(1 << 16)
    assert named_memory() == before
    assert os.fstat(block.descriptor).st_nlink == 0
    block.close()


def test_a_worker_sees_and_changes_the_block():
    block = Block.create(1024 + 8 * 100)
    flags, values = block.view(0, (128,), np.int64), block.view(1024, (100,), np.float64)
    with launch("tests.support.runtime_entries:add_one") as worker:
        worker.send_descriptor(block.descriptor)
        worker.send(100)
        values[:] = np.arange(100)
        publish(address_of(flags, 0), 1)
        assert wait(address_of(flags, 8), 1, address_of(flags, 16), SPIN_NS) == 1
        assert values.tolist() == list(range(1, 101))
    block.close()
