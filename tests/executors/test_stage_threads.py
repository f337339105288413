import gc
import threading
import weakref
from collections import namedtuple

import pytest
import torch
from torch import nn

from dovetail.errors import UsageError
from dovetail.executors.stages.cpu import SegmentStreams
from dovetail.executors.stages.issuing import segments_of
from dovetail.executors.stages.phases import SchedulePhase, whole
from dovetail.frontends.instructions import RunKernels
from dovetail.frontends.interpret import initial_values, run_step
from dovetail.frontends.program import distinct_refs
from dovetail.frontends.recorded_calls import CallRecorder
from dovetail.frontends.runners import make_runner
from dovetail.schedulers.dataflow import Streams, with_waits
from tests.support.cpu_steps import Branches, Lookups, Ready
from tests.support.stages_by_hand import assert_equal_values


@pytest.fixture(scope="module")
def branches():
    return Ready(Branches(), [torch.randn(2, 4)])


@pytest.fixture(scope="module")
def lookups():
    return Ready(Lookups(), [torch.tensor([1, 2]), torch.tensor([3, 4])])


@pytest.fixture(params=[1, 3])
def threads(request):
    """What the caller's thread is set to."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def held(step):
    """The entries of a step's table that hold a tensor, but for constants."""
    return [
        entry
        for entry in range(step._entries)
        if entry not in step._held and step._runner.get(entry) is not None
    ]


def rows():
    return torch.randn(2, 4)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_streams_compute_what_the_module_does_step_after_step(branches, count, threads):
    step = branches.streamed(count)
    for _ in range(4):
        given = rows()
        assert_equal_values(step(given), branches.plain(given), 1e-6)
        assert torch.get_num_threads() == threads


def test_phases_of_both_kinds_hand_over(branches):
    block = branches.block
    count = len(block)
    middle = tuple(range(1, count - 1))
    orders = with_waits(block, [range(0, count, 2), range(1, count, 2)]).orders
    inner = [[k for k in order if k in middle] for order in orders]
    stream_of = {k: s for s, order in enumerate(inner) for k in order}
    waits = tuple(
        (k, then)
        for k in middle
        for then in middle
        if block.predecessors[then] >> k & 1 and stream_of[k] != stream_of[then]
    )
    phases = [
        SchedulePhase((0,)),
        SchedulePhase(middle, Streams(tuple(map(tuple, inner)), waits)),
        SchedulePhase((count - 1,)),
    ]
    step = branches.step(*phases)
    for _ in range(3):
        given = rows()
        assert_equal_values(step(given), branches.plain(given), 1e-6)


def test_outputs_of_one_step_outlive_the_next(branches):
    step = branches.streamed(2)
    given = rows()
    first = step(given)
    step(rows())
    assert_equal_values(first, branches.plain(given), 1e-6)


@pytest.mark.parametrize("make", [lambda r: r.streamed(2), lambda r: r.step(*whole(len(r.block)))])
def test_nothing_of_a_step_is_kept_but_what_it_returned(branches, make):
    step = make(branches)
    given = rows()
    values = weakref.ref(given)
    found = weakref.ref(step(given)["sum"])
    assert held(step) == []
    del given
    gc.collect()
    assert values() is None
    assert found() is None


class Odd(nn.Module):
    """Inputs that nobody reads or that are returned as they are; one output twice; a constant."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, unused, same, number):
        made = torch.arange(4) * self.weight
        return Pair(same, [made, made, number.argmax(), number > 0]), self.weight, same[1:]


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("count", [1, 2])
def test_rare_outputs_are_those_of_the_module(count):
    given = [torch.randn(3), torch.randn(3), torch.randn(5, dtype=torch.float64)]
    ready = Ready(Odd(), given)
    step = ready.streamed(count)
    for _ in range(2):
        found = step(*given)
        assert isinstance(found[0], Pair)
        assert_equal_values(found, ready.plain(*given), 1e-6)
    assert held(step) == []


class Writing(nn.Module):
    """Writes over what it has made."""

    def forward(self, given):
        made = given * 2
        kept = made.clone()
        made[:, 0] = 0
        made.view(-1).mul_(3)
        return made, kept.sin() + made.sum()


def test_tensors_that_are_written_over_are_so_in_order():
    ready = Ready(Writing(), [rows()])
    step = ready.streamed(2)
    for _ in range(3):
        given = rows()
        assert_equal_values(step(given), ready.plain(given), 1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "1 are needed, not 0"),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), "1 are needed, not 2"),
        ((torch.zeros(3, 4),), r"input 0 must be torch.float32 \[2, 4\]"),
        ((torch.zeros(2, 4, dtype=torch.float64),), r"not torch.float64 \[2, 4\]"),
        ((torch.zeros(2, 4, device="meta"),), "on meta"),
        (([[0.0] * 4] * 2,), "must be a tensor"),
    ],
)
def test_inputs_unlike_the_captured_are_refused(branches, given, said):
    with pytest.raises(UsageError, match=said):
        branches.streamed(2)(*given)


GOOD, BAD = torch.tensor([1, 2]), torch.tensor([1, 9])


@pytest.mark.parametrize("bad", [(BAD, GOOD), (GOOD, BAD), (BAD, BAD)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_kernel_that_fails_says_so_and_the_step_runs_again(lookups, bad, count):
    step = lookups.streamed(count)
    before = torch.get_num_threads()
    for _ in range(2):
        with pytest.raises((RuntimeError, IndexError), match="index out of range"):
            step(*bad)
        assert held(step) == []
        assert torch.get_num_threads() == before
        assert_equal_values(step(GOOD, GOOD), lookups.plain(GOOD, GOOD), 1e-6)


def streams_of_example(ready, count):
    return SegmentStreams(segments_of(ready.block, ready.streams(count), {}), ready.functions)


def assert_made(ready, streams):
    for tensor in ready.prepared.returned:
        assert torch.equal(streams.value(tensor), ready.functions.example[tensor])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_many_passes_end_as_one_does(branches, count):
    streams = streams_of_example(branches, count)
    for passes in (1, 20, 3):
        streams.run(passes)
        assert_made(branches, streams)


def test_steps_take_turns_and_come_from_any_thread(branches, lookups, threads):
    steps = [
        (branches.streamed(2), [torch.ones(2, 4)], branches),
        (lookups.streamed(2), [GOOD, GOOD], lookups),
        (branches.streamed(3), [torch.zeros(2, 4)], branches),
    ]
    expected = [ready.plain(*given) for _, given, ready in steps]
    failed = []

    def work(turn):
        try:
            for i in range(9):
                place = (turn + i) % 3
                step, given, _ = steps[place]
                assert_equal_values(step(*given), expected[place], 1e-6)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(turn,)) for turn in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    work(2)
    assert not failed
    assert torch.get_num_threads() == threads


def test_steps_that_end_take_their_weights_with_them():
    class Heavy(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(1000, 1000), nn.Linear(1000, 1000)

        def forward(self, given):
            return self.one(given) + self.two(given)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def once():
        ready = Ready(Heavy(), [torch.ones(1, 1000)])
        ready.streamed(2)(torch.ones(1, 1000))

    sizes = []
    for _ in range(12):
        once()
        gc.collect()
        sizes.append(resident())
    assert sizes[-1] - sizes[3] < 4 * 8e6  # 8 more such networks are 64 MB


def test_a_function_that_takes_nothing_is_run_in_every_step():
    class Made(nn.Module):
        def forward(self, given):
            return torch.arange(4).float().cos(), given.sin()

    ready = Ready(Made(), [torch.ones(3)])
    step = ready.streamed(2)
    for _ in range(3):
        assert_equal_values(step(torch.ones(3)), ready.plain(torch.ones(3)), 1e-6)


class Summed(nn.Module):
    """A sum of products of different sizes, as of a recurrent cell's two inputs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, left, right):
        product = torch.addmm(self.one.bias, left, self.one.weight.t())
        return torch.addmm(product, right, self.two.weight.t()).sigmoid()


def test_sums_of_products_are_not_rewritten():
    given = [torch.randn(2, 4), torch.randn(2, 3)]
    ready = Ready(Summed(), given)
    for step in (ready.streamed(1), ready.step(*whole(len(ready.block)))):
        for _ in range(4):
            assert_equal_values(step(*given), ready.plain(*given), 1e-6)


def test_one_stream_needs_no_thread_but_the_callers(branches):
    order = tuple(range(len(branches.block)))
    streams = SegmentStreams([[RunKernels(order)]], branches.functions)
    streams.run()
    assert_made(branches, streams)


class Drawing(nn.Module):
    """Draws numbers in two branches, and in what is read of both."""

    def forward(self, given):
        one, two = torch.rand_like(given), torch.randn(2, 4)
        return one + torch.rand_like(two), two.sin() * given


@pytest.mark.parametrize("count", [1, 2])
def test_streams_draw_the_numbers_of_their_calls_seeds(count):
    ready = Ready(Drawing(), [torch.ones(2, 4)])
    alone = ready.by_hand.captured
    wanted = run_step(alone, initial_values(alone), [torch.ones(2, 4)], seed=0, step=0)
    step = ready.streamed(count)
    for _ in range(3):
        assert_equal_values(step(torch.ones(2, 4)), wanted, 0.0)


def test_a_call_that_returns_a_number_is_refused_by_its_name():
    with (
        pytest.raises(UsageError, match=r"_local_scalar_dense.* returns no tensor"),
        CallRecorder({}, {}, 0),
    ):
        torch.ones(1).item()


class Twice(nn.Module):
    """Reads two inputs, in calls of their own and together."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, left, right):
        return self.one(left * right).tanh() + self.two(left - right)


@pytest.mark.parametrize("count", [1, 2])
def test_one_tensor_for_two_inputs_of_the_capture_is_two_in_a_step(count):
    same, other = rows(), rows()
    ready = Ready(Twice(), [same, same])
    step = ready.streamed(count)
    assert_equal_values(step(same, other), ready.plain(same, other), 1e-6)
    assert_equal_values(step(other, same), ready.plain(other, same), 1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_is_dropped_frees_its_weights(count):
    ready = Ready(Branches(), [torch.randn(2, 4)])
    step = ready.streamed(count)
    step(rows())
    weights = [weakref.ref(value) for value in ready.prepared.constants.values()]
    gone = weakref.ref(step)
    del step, ready
    gc.collect()
    assert gone() is None and all(weight() is None for weight in weights)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, given):
        self.count.add_(1)
        return given * self.count, given.sin()


def test_a_constant_that_a_step_writes_stays_for_the_next():
    ready = Ready(Counting(), [torch.ones(2, 4)])
    written = [f for k in range(len(ready.block)) for f in [ready.functions.of([k])] if f.calls]
    for function in written:
        runner = make_runner(ready.functions.entries)
        ready.functions.fill_constants(runner, [function])
        for tensor in function.takes:
            runner.set(tensor, ready.functions.example[tensor])
        stream = runner.stream(function.instructions(runner))
        for _ in range(2):
            assert runner.run(stream)
        read = {entry for call in function.calls for entry in distinct_refs(call.args)}
        assert all(runner.get(entry) is not None for entry in read & function.constants)


@pytest.mark.parametrize("flushes", [False, True])
def test_streams_treat_denormals_as_the_caller_does(flushes):
    class Halving(nn.Module):
        def forward(self, given):
            return given * 0.5, given * 0.25

    tiny = torch.full((2, 4), 2e-38)
    ready = Ready(Halving(), [torch.ones(2, 4)])
    step = ready.streamed(2)
    torch.set_flush_denormal(flushes)
    try:
        half, quarter = step(tiny)
        assert bool((half == 0).all()) == bool((quarter == 0).all()) == flushes
    finally:
        torch.set_flush_denormal(False)


def test_the_callers_autocast_does_not_reach_a_step(branches):
    step = branches.streamed(2)
    with torch.autocast("cpu", torch.bfloat16):
        made = step(rows())
    assert {value.dtype for value in (made["sum"], *made["ends"])} == {torch.float32}
