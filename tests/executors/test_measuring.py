import numpy as np
import pytest

from dovetail.errors import UsageError
from dovetail.executors.loaded import measure_steps
from dovetail.executors.shares import share_out
from dovetail.executors.timelines import timeline_of
from dovetail.runtime.shared import Block
from dovetail.timeline import Timeline
from tests.executors.test_shares import plan_for, small_graph


class FakePlan:
    """Steps of given seconds; its timeline tells the last one's."""

    def __init__(self, seconds):
        self.seconds, self.steps = seconds, []

    def step_seconds(self):
        self.steps.append("plain")
        return self.seconds[len(self.steps) - 1]

    def timeline(self):
        self.steps.append("timed")
        none, nowhere = np.empty(0), np.empty(0, dtype=np.int32)
        spans = (nowhere, nowhere, none, none)
        transfers = (nowhere,) * 5 + (none, none)
        return Timeline((), (), *spans, *transfers, (), (), self.seconds[len(self.steps) - 1])


def test_the_protocol_warms_up_drops_the_first_and_stamps_the_last():
    fake = FakePlan([90, 80, 70, 1, 2, 6, 30, 10, 20])
    found = measure_steps(fake.step_seconds, fake.timeline, steps=4, warmup=2)
    assert fake.steps == ["plain"] * 6 + ["timed"] * 3
    assert found.step_seconds.tolist() == [1, 2, 6]
    assert (found.median_seconds, found.mean_seconds, found.minimum_seconds) == (2, 3, 1)
    assert found.timeline.step_seconds == 20


def test_one_step_cannot_be_measured():
    fake = FakePlan([])
    with pytest.raises(UsageError, match="must be at least 2"):
        measure_steps(fake.step_seconds, fake.timeline, steps=1, warmup=0)


def test_stamps_become_a_timeline():
    #  ns      100   200   300   400   500   600   700
    #  cpu0     │     └─ A ─┘└x►┘└┄►│ (ends)
    #  cpu1     └─weight►┘         └──── B, C, update ────┘
    graph = small_graph()
    plan = plan_for(graph, [0, 1, 0, 1, 1, 1])
    shares = share_out(plan, graph)
    block = Block.create(shares.size_bytes)
    first, second = shares.shares
    stamps = {
        first: ((110, 200), (200, 300), (300, 340), (340, 345)),
        second: ((100, 180), (180, 400), (400, 500), (500, 600), (600, 601), (601, 700)),
    }
    for share, rows in stamps.items():
        block.view(share.stamps, (len(rows), 2), np.int64)[:] = rows
        block.view(share.progress, (3,), np.int64)[:] = (-1, rows[0][0], rows[-1][1])
    found = timeline_of(plan.machine, shares.shares, block)
    block.close()
    assert found.ops.tolist() == [2, 3, 4, 5]
    assert found.op_devices.tolist() == [0, 1, 1, 1]
    assert found.op_starts == pytest.approx([100e-9, 300e-9, 400e-9, 501e-9])
    assert found.op_ends == pytest.approx([200e-9, 400e-9, 500e-9, 600e-9])
    assert found.transfer_tensors.tolist() == [1, 2, -1]
    assert found.transfer_ops.tolist() == [1, 2, 2]
    assert found.transfer_sources.tolist() == [1, 0, 0]
    assert found.transfer_destinations.tolist() == [0, 1, 1]
    assert [found.channels[c] for c in found.transfer_channels] == [
        "cpu1->cpu0", "cpu0->cpu1", "cpu0->cpu1"
    ]  # fmt: skip
    assert found.transfer_starts == pytest.approx([0, 200e-9, 240e-9])
    assert found.transfer_ends == pytest.approx([80e-9, 240e-9, 245e-9])
    assert found.step_seconds == pytest.approx(600e-9)
    assert found.peak_memory_bytes.tolist() == [0, 0]
