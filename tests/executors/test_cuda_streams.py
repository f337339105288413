import random
from dataclasses import replace

import pytest
import torch

import dovetail.executors.stages.cuda as cuda_module
from dovetail.errors import RaceError, UsageError
from dovetail.executors.stages.cuda import CudaNetwork, StageClock, event_seconds
from dovetail.executors.stages.issuing import (
    as_one,
    issue,
    steps_of,
    streams_of_stages,
    together,
)
from dovetail.executors.stages.memory import plan_memory
from dovetail.executors.stages.preparing import place, prepare
from dovetail.frontends.instructions import (
    AwaitFlag,
    FreeTensors,
    Issue,
    RunKernels,
    SendTensor,
)
from dovetail.frontends.interpret import example_values, initial_values, run_step
from dovetail.graph.kernels import fuse
from dovetail.networks import NETWORKS
from dovetail.pipeline import resolve_model
from dovetail.schedulers.dataflow import Streams, dataflow
from dovetail.schedulers.races import Buffer, check_races
from dovetail.schedulers.records import KernelBlock
from dovetail.schedulers.timing import block_of
from tests.support.fake_cuda import FakeCuda

#      0
#    / | \
#   1  2  3      streams: 0 1 4 6 | 2 5 | 3
#   |  |  |
#   4  5  |      waits: 0 -> 2, 0 -> 3, 5 -> 6, 3 -> 6
#    \ | /
#      6
FORK = KernelBlock((0, 0b1, 0b1, 0b1, 0b10, 0b100, 0b111000))
STREAMS = Streams(((0, 1, 4, 6), (2, 5), (3,)), ((0, 2), (0, 3), (3, 6), (5, 6)))


def test_what_is_issued_of_the_fork():
    w02, w03, w36, w56 = range(4)

    def record(event):
        return SendTensor(flag=event)

    def wait(event):
        return AwaitFlag(flag=event)

    assert steps_of(FORK, STREAMS, (), 1 << 6) == (
        Issue(0, (RunKernels((0,)), record(w02), record(w03))),
        Issue(1, (wait(w02), RunKernels((2,)))),
        Issue(2, (wait(w03), RunKernels((3,)), record(w36))),
        Issue(0, (RunKernels((1,)),)),
        Issue(1, (RunKernels((5,)), record(w56))),
        Issue(0, (RunKernels((4,)),)),
        Issue(0, (wait(w36), wait(w56), FreeTensors((0, 1)), RunKernels((6,)))),
    )  # fmt: skip


def random_case(seed):
    rng = random.Random(seed)
    ops = rng.randrange(1, 30)
    block = KernelBlock(
        tuple(sum(1 << j for j in range(i) if rng.random() < 0.15) for i in range(ops))
    )
    return block, dataflow(block, [rng.random() for _ in range(ops)], rng.randrange(1, 6))[0]


@pytest.mark.parametrize("seed", range(20))
def test_one_event_a_wait_recorded_before_it_is_awaited_and_every_fork_joined(seed):
    block, streams = random_case(seed)
    cuda, ran = FakeCuda(), []
    lanes = [cuda.Stream() for _ in streams.orders]
    pairs = zip(lanes, streams.orders, strict=True)
    lane_of = {kernel: lane for lane, order in pairs for kernel in order}

    def run(kernels):
        assert cuda.current is lane_of[kernels[0]]
        cuda.log.append(("run", cuda.current.number, kernels[0]))
        ran.append(kernels[0])

    issue(steps_of(block, streams), lanes, cuda, run)  # the fake refuses events not yet recorded
    done = 0
    for kernel in ran:
        assert not block.predecessors[kernel] & ~done
        done |= 1 << kernel
    assert done == block.everything
    recorded = {event: i for i, (kind, _, event) in enumerate(cuda.log) if kind == "record"}
    at = {(kind, what): i for i, (kind, _, what) in enumerate(cuda.log) if kind == "run"}
    lane = {kernel: number for kind, number, kernel in cuda.log if kind == "run"}
    awaited = [(i, n, e) for i, (kind, n, e) in enumerate(cuda.log) if kind == "wait"]
    sides = len(streams.orders) - 1
    # One for all forks, one per wait, one per join; forks come first and joins last.
    assert len(recorded) == (1 if sides else 0) + len(streams.waits) + sides
    assert len(awaited) == sides + len(streams.waits) + sides
    forks, joins = cuda.log[: sides + 1 if sides else 0], cuda.log[len(cuda.log) - 2 * sides :]
    assert [kind for kind, *_ in forks] == ["record", "wait", "wait", "wait", "wait"][: len(forks)]
    assert [kind for kind, *_ in joins] == ["record"] * sides + ["wait"] * sides
    assert all(number == lanes[0].number for kind, number, _ in joins if kind == "wait")
    for producer, consumer in streams.waits:
        assert any(
            number == lane[consumer]
            and cuda.log[recorded[event]][1] == lane[producer]
            and at["run", producer] < recorded[event] < i < at["run", consumer]
            for i, number, event in awaited
        )


def test_merged_kernels_wait_and_are_awaited_as_one():
    block = KernelBlock((0, 0b1, 0b1, 0b1, 0b10, 0b100))
    streams = Streams(((0, 1, 2, 4), (3, 5)), ((0, 3), (2, 5)))
    assert together(streams, [(2, 1)]).waits == ((0, 3), (2, 5))
    assert together(replace(streams, waits=((0, 3), (1, 5))), [(1, 2)]).waits == ((0, 3), (2, 5))
    issued = [
        (step.lane, each)
        for step in steps_of(block, streams, [(2, 1)])
        for each in step.instructions
    ]
    runs = [each.kernels for lane, each in issued if lane == 0 and isinstance(each, RunKernels)]
    assert runs == [(0,), (1, 2), (4,)]


@pytest.mark.parametrize("group", [(1, 4), (1, 3), (1, 9), (0, 2)])
def test_merged_kernels_stand_side_by_side(group):
    with pytest.raises(ValueError, match="side by side"):
        together(Streams(((0, 1, 2, 4), (3, 5)), ()), [group])


def test_merged_kernels_that_wait_for_themselves_are_refused():
    # 3 waits for 2, which waits for 1: as one, 1 and 3 would wait for what waits for them.
    block = KernelBlock((0, 0b1, 0b10, 0b100))
    streams = Streams(((0, 1, 3), (2,)), ((1, 2), (2, 3)))
    with pytest.raises(RaceError) as raised:
        steps_of(block, streams, [(1, 3)])
    assert raised.value.rule == 2


@pytest.mark.parametrize("seed", range(10))
def test_what_merged_kernels_write_is_checked_as_one(seed):
    #   0 -> 1, 2 -> 3, 4: 1 and 2 are merged; 3 reads 1, and 4 reads 2, in another stream
    block = KernelBlock((0, 0b1, 0b1, 0b10, 0b100, 0b11000))
    streams = together(Streams(((0, 1, 2, 3, 5), (4,)), ((2, 4), (4, 5))), [(1, 2)])
    buffers = [[Buffer(0, 8)], [Buffer(8, 22)], [Buffer(10, 24)], [Buffer(24, 32)], [], []]
    whole, owned, outputs = as_one(block, buffers, 1 << 5, [(1, 2)])
    check_races(whole, streams, owned, outputs)
    with pytest.raises(RaceError):
        check_races(block, streams, buffers, 1 << 5)
    # 4 may still read what 2 wrote when 3 runs.
    owned[3] = [Buffer(random.Random(seed).randrange(8, 24), 32)]
    with pytest.raises(RaceError) as raised:
        check_races(whole, streams, owned, outputs)
    assert {raised.value.first, raised.value.second} == {1, 3}


def test_stages_become_streams():
    stages = [[(0,)], [(1, 4), (2, 5), (3,)], [(6,)]]
    assert streams_of_stages(FORK, stages, 3) == STREAMS
    assert streams_of_stages(FORK, stages, 1).orders == ((0, 1, 4, 2, 5, 3, 6),)
    assert streams_of_stages(FORK, stages, 2).orders == ((0, 1, 4, 3, 6), (2, 5))


@pytest.fixture(scope="module")
def squeezenet():
    return opened("zoo:squeezenet_1_1?size=64&batch=1")


@pytest.fixture(scope="module")
def randwire():
    return opened("zoo:randwire?size=64&batch=1&nodes=8&channels=8&classes=10")


def opened(model):
    """(captured, the kernels prepared, their block, inputs)"""
    captured = resolve_model(model, "")
    kernels = fuse(captured.graph)
    inputs, _ = example_values(captured)
    prepared = prepare(captured, kernels, channels_last=True)
    return captured, prepared, block_of(captured.graph, kernels), inputs


def plain(captured, inputs):
    return run_step(captured, initial_values(captured), inputs)


def in_order(prepared, inputs):
    """All kernels one after another, without streams or graphs: the same bits."""
    function, _, returns = prepared.function(range(len(prepared.kernels)))
    with torch.no_grad():
        tensors = dict(zip(returns, function(*(moved(value) for value in inputs)), strict=True))
    return tensors[prepared.outputs.tensor]


def moved(value):
    return value.contiguous(memory_format=torch.channels_last)


def seconds_of(block, seed):
    rng = random.Random(seed)
    return [rng.random() for _ in range(len(block))]


@pytest.mark.parametrize("arena", [False, True], ids=["allocator", "arena"])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_replay_gives_the_plain_models_numbers(squeezenet, streams, arena):
    captured, prepared, block, inputs = squeezenet
    placed = place(prepared, inputs, "cpu")
    assert placed.block == block
    found, _ = dataflow(block, seconds_of(block, 1), streams)
    network = CudaNetwork(placed, found, arena=arena, cuda=FakeCuda())
    torch.manual_seed(0)
    for _ in range(3):
        fresh = tuple(torch.randn_like(value) for value in inputs)
        result = network(*fresh)
        torch.testing.assert_close(result, plain(captured, fresh), rtol=1e-4, atol=1e-5)
        assert torch.equal(result, in_order(prepared, fresh))
    kept = result.clone()
    network(*inputs)
    torch.testing.assert_close(result, kept, rtol=0, atol=0)  # in memory of its own
    assert network.memory_bytes > 0


def test_an_arena_takes_less_than_memory_of_their_own(squeezenet):
    _, prepared, block, inputs = squeezenet
    placed = place(prepared, inputs, "cpu")
    found, _ = dataflow(block, seconds_of(block, 1), 1)
    arena = CudaNetwork(placed, found, arena=True, cuda=FakeCuda())
    # The fake's graph holds all that was captured.
    held = CudaNetwork(placed, found, cuda=FakeCuda())
    assert arena.memory_bytes < held.memory_bytes / 2


def test_streams_with_a_race_never_run(squeezenet):
    _, prepared, block, inputs = squeezenet
    placed = place(prepared, inputs, "cpu")
    found, _ = dataflow(block, seconds_of(block, 1), 3)
    cuda = FakeCuda()
    before = cuda.made
    with pytest.raises(RaceError) as raised:
        CudaNetwork(placed, replace(found, waits=found.waits[1:]), cuda=cuda)
    assert raised.value.rule == 3
    assert (cuda.log, cuda.made) == ([], before)


def differs(prepared, network, inputs):
    """Does any of some replays, each on new inputs, give other bits than one kernel at a time?"""
    for _ in range(5):
        fresh = tuple(torch.randn_like(value) for value in inputs)
        if not torch.equal(network(*fresh), in_order(prepared, fresh)):
            return True
    return False


@pytest.mark.parametrize("arena", [False, True], ids=["allocator", "arena"])
def test_random_wiring_on_four_streams_gives_the_same_bits(randwire, arena):
    _, prepared, block, inputs = randwire
    found, _ = dataflow(block, seconds_of(block, 3), 4)
    network = CudaNetwork(place(prepared, inputs, "cpu"), found, arena=arena, cuda=FakeCuda())
    assert not differs(prepared, network, inputs)


@pytest.mark.parametrize("lost", range(4))
def test_a_wait_that_is_not_issued_gives_wrong_numbers(randwire, lost, monkeypatch):
    _, prepared, block, inputs = randwire
    found, _ = dataflow(block, seconds_of(block, 3), 4)
    wait = AwaitFlag(flag=lost * (len(found.waits) - 1) // 3)

    def but_one(*arguments):
        return tuple(
            replace(step, instructions=tuple(i for i in step.instructions if i != wait))
            for step in steps_of(*arguments)
        )

    monkeypatch.setattr(cuda_module, "steps_of", but_one)
    network = CudaNetwork(place(prepared, inputs, "cpu"), found, cuda=FakeCuda())
    assert differs(prepared, network, inputs)


def test_memory_planned_for_one_stream_gives_wrong_numbers_on_four_and_is_caught(
    randwire, monkeypatch
):
    _, prepared, block, inputs = randwire
    placed = place(prepared, inputs, "cpu")
    found, _ = dataflow(block, seconds_of(block, 3), 4)
    alone = Streams((tuple(range(len(block))),), ())
    monkeypatch.setattr(
        cuda_module, "plan_memory", lambda block, _, *rest: plan_memory(block, alone, *rest)
    )
    with pytest.raises(RaceError) as raised:
        CudaNetwork(placed, found, arena=True, cuda=FakeCuda())
    assert raised.value.rule == 4
    monkeypatch.setattr(cuda_module, "check_races", lambda *_: None)
    network = CudaNetwork(placed, found, arena=True, cuda=FakeCuda())
    assert differs(prepared, network, inputs)


@pytest.mark.parametrize("arena", [False, True], ids=["allocator", "arena"])
def test_a_merged_function_may_return_views_of_one_tensor(squeezenet, arena):
    _, prepared, block, inputs = squeezenet
    placed = place(prepared, inputs, "cpu")
    pair = next(
        (a, b)
        for a in range(len(block))
        for b in range(a + 1, len(block))
        if block.predecessors[a] and block.predecessors[a] == block.predecessors[b]
    )
    function, _, _ = placed.prepared.function(pair)
    calls = []

    def merged(*given):
        calls.append(len(given))
        both = function(*given)
        whole = torch.cat(both, dim=1)  # channels last: the bytes of the two are interleaved
        return whole.split([each.shape[1] for each in both], dim=1)

    order = [k for k in range(len(block)) if k not in pair]
    at = next(i for i, k in enumerate(order) if k > pair[0])
    order[at:at] = pair
    alone = Streams((tuple(order),), ())
    network = CudaNetwork(placed, alone, merged={pair: merged}, arena=arena, cuda=FakeCuda())
    assert set(calls) == {1}
    assert not differs(prepared, network, inputs)


def test_half_precision_moves_weights_and_inputs(squeezenet):
    _, prepared, _, inputs = squeezenet
    placed = place(prepared, inputs, "cpu", torch.bfloat16)
    assert {value.dtype for value in placed.inputs.values()} == {torch.bfloat16}
    assert torch.float32 not in {value.dtype for value in placed.prepared.constants.values()}
    assert torch.float32 in {value.dtype for value in prepared.constants.values()}


def test_seconds_are_of_the_device(squeezenet):
    _, prepared, block, inputs = squeezenet
    cuda = FakeCuda()  # its clock goes on by a second a replay
    network = CudaNetwork(
        place(prepared, inputs, "cpu"), dataflow(block, seconds_of(block, 2), 2)[0], cuda=cuda
    )
    assert network.time(samples=3, warm_up=1) == (1.0, 1.0, 1.0)
    assert event_seconds(lambda: None, 2, 0, cuda) == (0.0, 0.0)


def test_a_stage_is_timed_as_a_graph_of_its_own(squeezenet):
    _, prepared, block, inputs = squeezenet
    cuda = FakeCuda()
    clock = StageClock(place(prepared, inputs, "cpu"), streams=2, repeats=4, cuda=cuda)
    siblings = [k for k in range(len(block)) if block.predecessors[k] == 1 << 1][:2] or [2, 3]
    timing = clock.time([(k,) for k in siblings], samples=3)
    assert (timing.median_seconds, timing.spread, timing.samples) == (0.25, 0.0, 3)
    function, _, _ = prepared.function((5, 6))
    assert clock.time([(5, 6)], merged=function).median_seconds == 0.25
    with pytest.raises(ValueError, match="one group"):
        clock.time([(1,), (2,)], merged=function)


def test_a_kernel_that_fails_is_named(squeezenet):
    _, prepared, block, inputs = squeezenet

    def fail(*_):
        raise RuntimeError("out of order")

    broken = list(prepared.kernels)
    broken[4] = replace(broken[4], calls=(replace(broken[4].calls[0], target=fail),))
    placed = place(replace(prepared, kernels=tuple(broken)), inputs, "cpu")
    with pytest.raises(RuntimeError, match="out of order") as raised:
        CudaNetwork(placed, Streams((tuple(range(len(block))),), ()), cuda=FakeCuda())
    assert "kernels 4" in raised.value.__notes__[0]


def test_without_a_gpu_the_error_says_so(squeezenet):
    _, prepared, block, inputs = squeezenet
    placed = place(prepared, inputs, "cpu")
    alone = Streams((tuple(range(len(block))),), ())
    for attempt in (
        lambda: CudaNetwork(placed, alone, cuda=FakeCuda(available=False)),
        lambda: StageClock(placed, cuda=FakeCuda(available=False)),
    ):
        with pytest.raises(UsageError, match="no CUDA device") as raised:
            attempt()
        assert raised.value.option == "device"


def test_a_step_that_draws_random_numbers_is_refused(squeezenet):
    _, prepared, _, inputs = squeezenet
    kernels = list(prepared.kernels)
    kernels[0] = replace(kernels[0], calls=(replace(kernels[0].calls[0], random=True),))
    with pytest.raises(UsageError, match="random"):
        place(replace(prepared, kernels=tuple(kernels)), inputs, "cpu")


@pytest.mark.parametrize("network", ["nasnet_a_mobile", "vit", "gpt2"])
def test_no_kernel_writes_a_view_of_what_another_wrote(network):
    options = "&".join(f"{name}={value}" for name, value in NETWORKS[network].small.items())
    captured = resolve_model(f"zoo:{network}?{options}", "")
    graph, kernels = captured.graph, fuse(captured.graph)
    writers = {}
    for tensor in range(graph.tensors):
        kernel = int(kernels.of_op[graph.producers[tensor]])
        if kernel >= 0:
            assert writers.setdefault(int(graph.storages[tensor]), kernel) == kernel
