import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from dovetail.errors import OrderError
from dovetail.executors.shares import extent_of, share_out
from dovetail.frontends.instructions import AwaitFlag, RunLanes, RunOp, SendTensor
from dovetail.graph import Graph, Phase
from dovetail.plans import check_completes
from tests.support.builders import plan_by_hand
from tests.support.placing import random_placement, two_devices

INPUT, WEIGHT, A, B, C, UPDATE = range(6)


def small_graph():
    """One tensor an op, of the op's number; the update overwrites the weight.

       input ──► A ──► B ──► C ──► update        control: A ┄┄► update
                 ▲     ▲           ▲
    weight ──────┴─────┴───────────┘
    """
    names = ("input", "weight", "A", "B", "C", "update")
    reads = ((), (), (INPUT, WEIGHT), (A, WEIGHT), (B,), (C, WEIGHT))
    count = len(names)
    return Graph(
        names=names,
        kinds=("input", "parameter", "a", "b", "c", "u"),
        signatures=names,
        modules=("",) * count,
        phases=np.array([Phase.SOURCE] * 2 + [Phase.FORWARD] * 3 + [Phase.UPDATE]),
        flops=np.zeros(count),
        accessed_bytes=np.zeros(count),
        colocation=np.array([-1, 0, -1, -1, -1, 0]),
        gradient_of=np.full(count, -1),
        device_kinds=((),) * count,
        producers=np.arange(count),
        shapes=((2, 3),) * count,
        strides=((3, 1),) * count,
        dtypes=("float32",) * count,
        tensor_bytes=np.full(count, 24),
        storages=np.array([0, 1, 2, 3, 4, 1]),
        overwrites=np.array([False] * 5 + [True]),
        input_offsets=np.cumsum([0, *map(len, reads)]),
        input_tensors=np.array([t for read in reads for t in read]),
        outputs=np.array([C]),
        control=np.array([[A, UPDATE]]),
    )


def plan_for(graph, placement, orders=None):
    return plan_by_hand(graph, two_devices(), placement, orders=orders)


def words(share):
    """A share's instructions as text: `run B -1` forgets tensor 1 afterwards."""
    text = []
    for i in share.instructions:
        match i:
            case RunOp():
                said = f"run {i.op}"
            case RunLanes():
                said = "together " + " | ".join(
                    " ".join(str(each.op) for each in lane) for lane in i.lanes
                )
            case SendTensor():
                said = f"send {i.tensor if i.tensor >= 0 else f'end of {i.op}'} to {i.destination}"
            case AwaitFlag():
                said = f"wait {i.tensor if i.tensor >= 0 else 'end'} for {i.op}"
        text.append(said + "".join(f" -{tensor}" for tensor in getattr(i, "frees", ())))
    return text


def test_one_device_runs_its_order_and_forgets_what_is_done():
    graph = small_graph()
    shares = share_out(plan_for(graph, [0] * 6), graph).shares
    assert [words(share) for share in shares] == [["run 2", "run 3 -2", "run 4 -3", "run 5 -5"]]
    assert [tensor for tensor, _ in shares[0].sources] == [INPUT, WEIGHT]
    assert [tensor for tensor, _ in shares[0].outputs] == [C]


def test_two_devices_send_sources_first_and_each_tensor_once():
    #  cpu0   input ─┐  A ──────────────────┐┄┄┄┄┄┄┄┄┄┄┄┄┐
    #                └─►│                   └─► B ── C ───► update
    #  cpu1  weight ────┘                      weight
    graph = small_graph()
    first, second = share_out(plan_for(graph, [0, 1, 0, 1, 1, 1]), graph).shares
    assert words(first) == ["wait 1 for 2", "run 2", "send 2 to 1 -2", "send end of 2 to 1"]
    assert words(second) == [
        "send 1 to 0", "wait 2 for 3", "run 3", "run 4 -3", "wait end for 5", "run 5 -5"
    ]  # fmt: skip
    assert [tensor for tensor, _ in second.sources] == [WEIGHT]
    # Both ends of a transfer agree on its flag and its slot.
    sends = {
        (i.flag, i.slot)
        for s in (first, second)
        for i in s.instructions
        if isinstance(i, SendTensor)
    }
    waits = {
        (i.flag, i.slot)
        for s in (first, second)
        for i in s.instructions
        if isinstance(i, AwaitFlag)
    }
    assert sends == waits
    assert len(sends) == 3


def test_a_device_without_work_takes_no_part():
    graph = small_graph()
    shares = share_out(plan_for(graph, [0, 0, 0, 0, 0, 0]), graph).shares
    assert [(share.device, share.seat, share.seats) for share in shares] == [(0, 0, 1)]


def test_the_host_sends_inputs_even_if_it_runs_nothing():
    graph = small_graph()
    host, other = share_out(plan_for(graph, [0, 1, 1, 1, 1, 1]), graph).shares
    assert words(host) == ["send 0 to 1"]
    assert words(other)[0] == "wait 0 for 2"


def test_slots_do_not_overlap():
    graph = small_graph()
    shares = share_out(plan_for(graph, [0, 1, 0, 1, 0, 1]), graph)
    slots = [*shares.sources.values(), *shares.outputs.values()]
    spans = [(slot.offset, slot.offset + slot.bytes) for slot in slots]
    for share in shares.shares:
        sends = [i for i in share.instructions if isinstance(i, SendTensor)]
        spans += [(i.slot.offset, i.slot.offset + i.slot.bytes + 63) for i in sends if i.slot]
        spans += [(i.flag, i.flag + 8) for i in sends]
        spans.append((share.progress, share.progress + 24))
        spans.append((share.stamps, share.stamps + 16 * len(share.instructions)))
    spans.append((shares.abort, shares.abort + 8))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= shares.size_bytes


def test_orders_that_wait_for_each_other_name_a_device_and_an_op():
    graph = small_graph()
    placement = [0, 1, 0, 1, 0, 1]
    with pytest.raises(OrderError, match="op 'C' would wait for ever") as raised:
        check_completes(plan_for(graph, placement, ((4, 2), (3, 5))), graph)
    assert raised.value.device == "cpu0"


def test_an_order_against_a_control_edge_is_refused():
    graph = small_graph()
    reads = graph.input_tensors.copy()
    reads[-2] = B  # the update no longer reads C: only the control edge puts it last
    graph = dataclasses.replace(graph, input_tensors=reads, control=np.array([[C, UPDATE]]))
    check_completes(plan_for(graph, [0] * 6, ((A, B, C, UPDATE), ())), graph)
    with pytest.raises(OrderError, match="'update' would wait"):
        check_completes(plan_for(graph, [0] * 6, ((A, B, UPDATE, C), ())), graph)


@pytest.mark.parametrize("seed", range(20))
def test_every_wait_has_its_send_and_every_op_its_run(seed):
    graph = small_graph()
    placement = random_placement(graph, seed)
    shares = share_out(plan_for(graph, placement), graph).shares
    sent = [(i.flag, s.device) for s in shares for i in s.instructions if isinstance(i, SendTensor)]
    awaited = [i.flag for s in shares for i in s.instructions if isinstance(i, AwaitFlag)]
    assert sorted(flag for flag, _ in sent) == sorted(awaited)
    assert sorted(op for share in shares for op in share.ops) == [A, B, C, UPDATE]
    for share in shares:
        for index, instruction in enumerate(share.instructions):
            later = share.instructions[index + 1 :]
            used = {int(t) for i in later if isinstance(i, RunOp) for t in graph.inputs_of(i.op)}
            used |= {i.tensor for i in later if isinstance(i, SendTensor)}
            assert not used & set(getattr(instruction, "frees", ()))


def test_the_extent_counts_gaps_but_not_expanded_dimensions():
    assert extent_of((2, 3), (3, 1)) == 6
    assert extent_of((2, 3), (10, 1)) == 13
    assert extent_of((2, 3), (0, 1)) == 3
    assert extent_of((), ()) == 1
    assert extent_of((0, 3), (3, 1)) == 0
