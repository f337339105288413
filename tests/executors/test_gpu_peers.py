"""Tensors that go straight between GPUs of two ranks, which the CPU plays. Ranks are threads here;
tests/executors/test_hosts.py has them as processes."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from dovetail.executors.gpus.peers import Peer, PeerError, PeerPair
from dovetail.executors.gpus.steps import steps_of
from dovetail.executors.shares import share_out
from dovetail.frontends import Adam, resolve
from dovetail.frontends.instructions import BlockSlot, Issue, ReceiveTensor, SendTensor
from dovetail.runtime.ranks import RankPlace
from tests.support.hosts import LSTM, drawn_plan, machine_of
from tests.support.played_cuda import PlayedCuda, StreamRaceError
from tests.support.played_gpus import cpu, gpu


class End:
    """A connected end of a pair, and the CUDA of its rank."""

    def __init__(self, store, rank):
        self.cuda = PlayedCuda()
        self.stream = self.cuda.Stream()
        pair = PeerPair("pair", 0, 1, rank == 0, 1 - rank)
        self.peer = Peer(pair, store, RankPlace(rank, 2, "here", ("127.0.0.1", 1)), self.cuda)

    def move(self, tensor, slot):
        with self.cuda.stream(self.stream):
            (self.peer.send if self.peer._pair.sends else self.peer.receive)(tensor, slot)


@pytest.fixture
def ends():
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(lambda rank: End(store, rank), range(2)))


def slot_of(tensor):
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    size = last * tensor.element_size() if tensor.numel() else 0
    return BlockSlot(0, size, shape, strides, str(tensor.dtype).removeprefix("torch."))


def moved(ends, value):
    """The tensor as it arrives in memory that is laid out alike."""
    slot = slot_of(value)
    into = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda end, tensor: end.move(tensor, slot), ends, (value, into)))
    return into


GRID = torch.arange(120.0).reshape(2, 3, 4, 5)
VALUES = {
    "contiguous": GRID,
    "transposed": GRID.transpose(1, 3),
    "channels last": GRID.to(memory_format=torch.channels_last),
    "gaps": GRID[:, :, ::2, 1:4],
    "expanded": torch.arange(4.0)[:, None].expand(4, 6),
    "an expanded number": torch.tensor(3.5).expand(4),
    "a number": torch.tensor(3.5),
    "nothing": torch.empty(0, 3),
    "one row": GRID[:1, :, :1],
    "bool": GRID > 50,
    "int64": GRID.long(),
    "bfloat16": GRID.bfloat16(),
    "complex": torch.complex(GRID, -GRID),
    "conjugate": torch.complex(GRID, -GRID).conj(),
    "negated": torch.complex(GRID, -GRID).conj().imag,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_tensor_arrives_whatever_its_layout(name, ends):
    value = VALUES[name]
    arrived = moved(ends, value)
    assert arrived.equal(value)
    assert arrived.stride() == value.stride()


def test_what_is_received_is_read_behind_an_event_alone(ends):
    into = torch.zeros(3)
    with ThreadPoolExecutor(2) as threads:
        slot = slot_of(into)
        list(threads.map(lambda end, t: end.move(t, slot), ends, (torch.ones(3), into)))
    cuda, other = ends[1].cuda, ends[1].cuda.Stream()
    with cuda.stream(other), pytest.raises(StreamRaceError, match="receive"):
        into.sum()
    event = cuda.Event()
    event.record(ends[1].stream)
    other.wait_event(event)
    with cuda.stream(other):
        assert float(into.sum()) == 3


def test_what_is_sent_is_written_over_behind_an_event_alone(ends):
    value = torch.ones(3)
    with ThreadPoolExecutor(2) as threads:
        slot = slot_of(value)
        list(threads.map(lambda end, t: end.move(t, slot), ends, (value, torch.zeros(3))))
    cuda = ends[0].cuda
    with cuda.stream(cuda.Stream()), pytest.raises(StreamRaceError, match="may still use"):
        value.add_(1)


def test_an_end_whose_other_is_gone_says_which_rank(ends):
    other = ends.pop()
    del other
    with pytest.raises(PeerError) as failed:
        ends[0].move(torch.ones(1 << 20), slot_of(torch.ones(1 << 20)))
    assert failed.value.rank == 1


@pytest.mark.parametrize("seed", range(8))
def test_sends_and_receives_of_all_ranks_are_in_one_order(seed):
    """Each rank does one thing after another, and a send takes until it is received."""
    captured = resolve(LSTM, train=Adam(lr=1e-3))
    devices = [cpu(0), gpu(0), gpu(1), gpu(2), gpu(3)]
    machine = machine_of(*devices)
    ranks = (0, 0, 0, 1, 2)
    plan = drawn_plan(captured, machine, seed)
    shares = share_out(plan, captured.graph, captured.program, ranks).shares
    pairs = {(a, b) for a in range(1, 5) for b in range(1, 5) if ranks[a] != ranks[b]}
    issued = []
    for rank in range(3):
        own = [device for device in range(5) if ranks[device] == rank]
        steps = steps_of(plan, captured.graph, shares, (), own, pairs)
        issued.append(deque(message for step in steps if (message := message_of(step, pairs))))
    sent = [message for of_rank in issued for message in of_rank]
    assert len(sent) >= 20
    assert all(sent.count(message) == 2 for message in sent)
    while any(issued):
        heads = [of_rank[0] for of_rank in issued if of_rank]
        met = [message for message in heads if heads.count(message) == 2]
        assert met, f"ranks wait for each other: {heads}"
        for of_rank in issued:
            if of_rank and of_rank[0] == met[0]:
                of_rank.popleft()


def message_of(step, pairs):
    """(source, destination, flag) of what a step sends to, or receives from, a GPU elsewhere."""
    match step:
        case Issue(source, (SendTensor(slot=BlockSlot()) as send,)):
            pair = source, send.destination
            return (*pair, send.flag) if pair in pairs else None
        case Issue(to, (ReceiveTensor(source=source, flag=flag),)):
            return source, to, flag
    return None
