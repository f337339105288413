"""Runners of calls, in C++ and in Python: both do the same, bit for bit."""

import threading

import numpy as np
import pytest
import torch

from dovetail.frontends.instructions import (
    LAID,
    NEXT,
    AwaitFlag,
    BlockSlot,
    RunFunction,
    RunLanes,
    RunOp,
    SendTensor,
)
from dovetail.frontends.program import Call, Ref
from dovetail.frontends.runners import NativeRunner, PythonRunner
from dovetail.runtime import native
from dovetail.runtime.forking import environment_of
from dovetail.runtime.native import build_native, has_compiler, native_runner
from dovetail.runtime.waiting import publish

aten = torch.ops.aten


@pytest.fixture(
    params=[
        "python",
        pytest.param(
            "native", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
        ),
    ]
)
def make(request):
    if request.param == "python":
        return PythonRunner
    assert build_native() == ""
    return lambda slots: NativeRunner(native_runner(), slots)


def flags(count):
    """Memory for flags, a cache line each, and their addresses."""
    memory = np.zeros(8 * count, dtype=np.int64)
    return memory, [int(memory.ctypes.data) + 64 * place for place in range(count)]


def ran(make, call, *values, slots=8, seeds=()):
    """The values of the table after one call on the first entries."""
    runner = make(slots)
    runner.seeds = list(seeds)
    for slot, value in enumerate(values):
        runner.set(slot, value)
    assert runner.run(runner.stream([RunOp(7, (), call, 0 if seeds else -1)]))
    return [runner.get(slot) for slot in range(slots)]


A, B = torch.arange(6.0).reshape(2, 3), torch.linspace(-1, 1, 6).reshape(2, 3)
CALLS = {
    "two tensors": (Call(aten.add.Tensor, (Ref(0), Ref(1)), {"alpha": 2}, (2,)), (A, B)),
    "a number for a tensor": (Call(aten.add.Tensor, (Ref(0), 1e-5), {}, (2,)), (A,)),
    "a number keeps integers": (Call(aten.mul.Tensor, (Ref(0), 3), {}, (2,)), (A.int(),)),
    "a list of tensors": (Call(aten.cat.default, ([Ref(0), Ref(1)], 1), {}, (2,)), (A, B)),
    "one tensor twice": (Call(aten.mul.Tensor, (Ref(0), Ref(0)), {}, (2,)), (A,)),
    "a list is returned": (Call(aten.unbind.int, (Ref(0), 1), {}, (2, -1, 4)), (A,)),
    "several are returned": (Call(aten.max.dim, (Ref(0), 1), {}, (2, 3)), (A,)),
    "none is wanted": (Call(aten.max.dim, (Ref(0), 1), {}, (-1, 3)), (A,)),
    "optional tensors": (Call(aten.index.Tensor, (Ref(0), [None, Ref(1)]), {}, (2,)),
                         (A, torch.tensor([2, 0]))),
    "a dtype and a layout": (Call(aten._to_copy.default, (Ref(0),), {"dtype": torch.float64}, (2,)),
                             (A,)),
    "a memory format": (Call(aten.clone.default, (Ref(0),),
                             {"memory_format": torch.contiguous_format}, (2,)), (A.t(),)),
    "no tensor": (Call(aten.full.default, ([2, 2], 1.5), {}, (2,)), ()),
    "in place": (Call(aten.add_.Tensor, (Ref(0), Ref(1)), {}, (2,), in_place=True), (A, B)),
    "a function of Python": (Call(lambda x, *, y: (x + y, x - y), (Ref(0),), {"y": Ref(1)},
                                  (2, 3)), (A, B)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_torch_gives(make, name):
    call, values = CALLS[name]

    def filled(tree, own):
        if isinstance(tree, Ref):
            return own[tree.tensor]
        if isinstance(tree, (list, tuple)):
            return type(tree)(filled(leaf, own) for leaf in tree)
        return (
            {key: filled(leaf, own) for key, leaf in tree.items()} if type(tree) is dict else tree
        )

    own = [value.clone() for value in values]
    wanted = call.target(*filled(call.args, own), **filled(call.kwargs, own))
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
    table = ran(make, call, *(value.clone() for value in values))
    for slot, value in zip(call.results, wanted, strict=True):
        if slot >= 0:
            assert table[slot].dtype == value.dtype
            assert table[slot].stride() == value.stride()
            assert torch.equal(table[slot], value)
    assert call.results[0] >= 0 or table[2] is None


@pytest.mark.parametrize(
    "target", [aten.rand_like.default, lambda x: torch.rand_like(x)], ids=["aten", "python"]
)
def test_a_call_that_draws_draws_by_its_seed(make, target):
    call = Call(target, (Ref(0),), {}, (1,), random=True)
    torch.manual_seed(2**40 + 5)
    wanted = torch.rand_like(A)
    assert torch.equal(ran(make, call, A, seeds=[2**40 + 5])[1], wanted)
    assert not torch.equal(ran(make, call, A, seeds=[6])[1], wanted)


def test_an_entry_is_empty_after_its_last_use_and_reads_as_none(make):
    runner = make(3)
    runner.set(0, A.clone())
    given = []
    instructions = [
        RunOp(0, (0,), Call(aten.neg.default, (Ref(0),), {}, (1,))),
        RunFunction(1, lambda *values: given.extend(values), (0, 1), frees=(1,)),
    ]
    runner.run(runner.stream(instructions))
    assert given[0] is None and torch.equal(given[1], -A)
    assert runner.get(0) is None and runner.get(1) is None
    runner.set(2, A)
    runner.clear([2])
    assert runner.get(2) is None


def test_lists_are_filled_anew_by_each_run(make):
    runner = make(3)
    stream = runner.stream([RunOp(0, (), Call(aten.cat.default, ([Ref(0), Ref(1)],), {}, (2,)))])
    for first in (A, B):
        runner.set(0, first)
        runner.set(1, A)
        runner.run(stream)
        assert torch.equal(runner.get(2), torch.cat([first, A]))


def test_an_error_is_told_with_the_tag_of_its_instruction(make):
    runner = make(4)
    stream = runner.stream()
    runner.set(0, A)
    runner.set(1, torch.ones(4, 4))
    stream.add(RunOp(4, (), Call(aten.neg.default, (Ref(0),), {}, (2,))))
    stream.add(RunOp(5, (), Call(aten.mm.default, (Ref(0), Ref(1)), {}, (3,))))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        runner.run(stream)
    assert runner.failed == 5
    runner.set(1, torch.ones(3, 4))
    assert runner.run(stream)
    assert runner.failed == -1


def test_an_error_of_a_python_function_arrives_as_it_was_raised(make):
    def fail():
        raise KeyError("mine")

    runner = make(1)
    outer = runner.stream([RunLanes(((RunFunction(8, fail),),))])
    with pytest.raises(KeyError, match="mine"):
        runner.run(outer)
    assert runner.failed == 8


@pytest.mark.parametrize("skew", [0, 16, 60])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((6,), (1,)), ((2, 3), (1, 2)), ((0, 3), (3, 1)), ((4, 3), (0, 1)), ((2, 40000), (40000, 1))],
)
def test_a_tensor_that_is_sent_arrives_with_its_address_in_a_cache_line(make, shape, strides, skew):
    memory, (flag, abort) = flags(2)
    spans = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    elements = 0 if 0 in shape else 1 + spans
    block = np.zeros(4 * elements + 256, dtype=np.uint8)
    start = -int(block.ctypes.data) % 64
    place = BlockSlot(int(block.ctypes.data) + start, 4 * elements, shape, strides, "float32")
    given = np.zeros(4 * elements + 256, dtype=np.uint8)
    offset = -int(given.ctypes.data) % 64 + skew
    flat = torch.from_numpy(given[offset : offset + 4 * elements]).view(torch.float32)
    value = flat.copy_(torch.arange(elements)).as_strided(shape, strides)
    sender, receiver = make(1), make(1)
    sending = sender.stream([SendTensor(0, 0, 1, flag, place, (0,))])
    receiving = receiver.stream([AwaitFlag(0, 0, flag, place)])
    for step in (1, 2):
        sender.set(0, value)
        assert sender.run(sending, now=NEXT * step, abort=abort)
        assert receiver.run(receiving, now=NEXT * step, abort=abort)
        got = receiver.get(0)
        assert got.shape == shape and torch.equal(got, value)
        assert sender.get(0) is None
        if elements:
            assert got.data_ptr() % 64 == value.data_ptr() % 64
            assert memory[0] == NEXT * step + value.data_ptr() % 64


@pytest.mark.parametrize(
    ("value", "strides"),
    [
        (torch.arange(12.0).reshape(3, 1, 4).as_strided((3, 1, 4), (4, 4, 1)), (4, 1, 1)),
        (torch.arange(24.0).reshape(1, 2, 3, 4), (24, 1, 8, 2)),
        (torch.arange(24.0).reshape(1, 3, 4, 2).permute(0, 3, 1, 2), (24, 12, 4, 1)),
        (torch.arange(4.0).expand(3, 4), (0, 1)),
    ],
    ids=["a single element", "row by row", "channels last", "repeated"],
)
@pytest.mark.parametrize("other", [False, True])
def test_a_tensor_that_is_sent_arrives_as_it_lies(make, value, strides, other):
    """Kernels round by their inputs' strides, also where a dimension has one element."""
    memory, (flag, abort) = flags(2)
    block = np.zeros(512, dtype=np.uint8)
    start = -int(block.ctypes.data) % 64
    shape, size = tuple(value.shape), 4 * (16 if strides == (0, 1) else value.numel())
    place = BlockSlot(int(block.ctypes.data) + start, size, shape, strides, "float32")
    sender, receiver = make(1), make(1)
    sending = sender.stream([SendTensor(0, 0, 1, flag, place)])
    receiving = receiver.stream([AwaitFlag(0, 0, flag, place)])
    expected = torch.empty_strided(shape, strides).copy_(value) if 0 not in strides else value
    for step, given in enumerate((value, expected, value) if other else (value, value), start=1):
        sender.set(0, given)
        assert sender.run(sending, now=NEXT * step, abort=abort)
        assert receiver.run(receiving, now=NEXT * step, abort=abort)
        got = receiver.get(0)
        assert torch.equal(got, value)
        assert got.stride() == given.stride()
        assert bool(memory[0] & LAID) == (given.stride() != strides)


def test_a_tensor_that_needs_more_bytes_than_its_place_is_laid_out_by_that(make):
    _, (flag, abort) = flags(2)
    block = np.zeros(512, dtype=np.uint8)
    place = BlockSlot(int(block.ctypes.data) + 64, 24, (2, 3), (3, 1), "float32")
    runner = make(2)
    stream = runner.stream([SendTensor(0, 0, 1, flag, place), AwaitFlag(1, 1, flag, place)])
    runner.set(0, torch.arange(20.0).reshape(2, 10)[:, :3])
    assert runner.run(stream, now=NEXT, abort=abort)
    assert torch.equal(runner.get(1), runner.get(0))
    assert runner.get(1).stride() == (3, 1)


def test_a_negated_view_is_sent_by_its_values(make):
    _, (flag, abort) = flags(2)
    block = np.zeros(256, dtype=np.uint8)
    place = BlockSlot(int(block.ctypes.data) + 64, 24, (2, 3), (3, 1), "float32")
    runner = make(1)
    stream = runner.stream([SendTensor(0, 0, 1, flag, place)])
    runner.set(0, torch._neg_view(A))
    assert runner.run(stream, now=NEXT, abort=abort)
    assert torch.equal(place.tensor((runner.get(0).data_ptr()) % 64), -A)


def test_a_value_of_another_dtype_is_converted_when_it_is_sent(make):
    _, (flag, abort) = flags(2)
    block = np.zeros(256, dtype=np.uint8)
    place = BlockSlot(int(block.ctypes.data) + 64, 24, (2, 3), (3, 1), "float32")
    runner = make(1)
    stream = runner.stream([SendTensor(0, 0, 1, flag, place)])
    runner.set(0, A.double())
    assert runner.run(stream, now=NEXT, abort=abort)
    assert torch.equal(place.tensor(runner.get(0).data_ptr() % 64), A)


def test_a_wait_ends_when_its_flag_is_set_or_the_abort_flag_is(make):
    memory, (flag, abort) = flags(2)
    runner = make(1)
    stream = runner.stream([AwaitFlag(3, flag=flag)])
    timer = threading.Timer(0.05, publish, (flag, 5))
    timer.start()
    assert runner.run(stream, now=5, abort=abort)
    assert memory[0] == 5
    timer = threading.Timer(0.05, publish, (abort, 1))
    timer.start()
    assert not runner.run(stream, now=6, abort=abort)


def test_stamps_and_progress_say_what_ran_when(make):
    runner = make(2)
    stream = runner.stream()
    runner.set(0, A)
    for tag in range(3):
        stream.add(RunOp(tag, (), Call(aten.neg.default, (Ref(0),), {}, (1,))))
    stamps, progress = np.zeros((3, 2), dtype=np.int64), np.array([5])
    runner.run(stream, stamps=int(stamps.ctypes.data), progress=int(progress.ctypes.data))
    assert progress[0] == -1
    assert (np.diff(stamps.reshape(-1)) >= 0).all() and stamps[0, 0] > 0


def test_streams_hand_values_over_by_flags_in_every_pass(make):
    """Stream 0 doubles, stream 1 adds one to what it got, and so on in turns."""
    _, (there, back) = flags(2)
    runner = make(3)
    doubled = RunOp(0, (), Call(aten.mul.Tensor, (Ref(0), 2), {}, (1,)))
    added = RunOp(3, (), Call(aten.add.Tensor, (Ref(1), 1), {}, (0,)))
    first = runner.stream([doubled, SendTensor(flag=there), AwaitFlag(flag=back)])
    second = runner.stream([AwaitFlag(flag=there), added, SendTensor(flag=back)])
    runner.set(0, torch.zeros(3, dtype=torch.float64))
    runner.run_streams([first, second], first=1, passes=10)
    runner.run_streams([first, second], first=11, passes=4)
    assert runner.get(0).tolist() == [2.0**14 - 1] * 3


def test_a_stream_that_fails_ends_those_that_wait_for_it(make):
    _, (never,) = flags(1)
    runner = make(2)
    wrong = RunOp(11, (), Call(aten.mm.default, (Ref(0), Ref(0)), {}, (1,)))
    failing = runner.stream([wrong, SendTensor(11, flag=never)])
    waiting = runner.stream([AwaitFlag(12, flag=never)])
    runner.set(0, A)
    for streams in ([failing, waiting], [waiting, failing]):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            runner.run_streams(streams)
        assert runner.failed == 11


def test_ops_of_streams_run_on_one_thread_and_the_caller_keeps_its_own(make):
    seen = []
    runner = make(1)
    looks = RunFunction(0, lambda: seen.append(torch.get_num_threads()))
    streams = [runner.stream([looks]) for _ in range(3)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner.run_streams(streams)
        assert (seen, torch.get_num_threads()) == ([1, 1, 1], 2)
        runner.run(runner.stream([RunLanes(((looks,), (looks,)))]))
        assert (seen[3:], torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(before)


def test_nothing_is_recorded_for_autograd(make):
    weight = torch.ones(2, requires_grad=True)
    (value,) = ran(make, Call(aten.mul.Tensor, (Ref(0), 2), {}, (1,)), weight)[1:2]
    assert not value.requires_grad and value.is_inference()


def test_a_call_with_wrong_arguments_fails_when_it_runs(make):
    runner = make(2)
    runner.set(0, A)
    stream = runner.stream()
    stream.add(RunOp(6, (), Call(aten.mm.default, (Ref(0), "x"), {}, (1,))))
    with pytest.raises((RuntimeError, TypeError), match="mm"):
        runner.run(stream)
    assert runner.failed == 6


def test_the_runner_is_left_out_if_asked_or_damaged_and_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_reason", "")
    monkeypatch.setenv(native.SWITCH, "python")
    assert native_runner() is None and "DOVETAIL_RUNNER" in build_native()
    monkeypatch.setenv(native.SWITCH, str(tmp_path))
    monkeypatch.setattr(native, "cxx_compiler", lambda: None)
    assert "no C++ compiler" in build_native() and native_runner() is None
    path = native._path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no library")
    assert native_runner() is None
    path.chmod(0o666)
    assert native_runner() is None


def test_a_build_beside_is_for_the_next_process(monkeypatch, tmp_path):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\ntouch {}\nexit 1\n".format(tmp_path / "called"))
    compiler.chmod(0o700)
    monkeypatch.setattr(native, "_reason", "")
    monkeypatch.setattr(native, "_beside", None)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(native.SWITCH, "python")
    native.build_beside()
    assert native._beside is None
    monkeypatch.setenv(native.SWITCH, str(tmp_path / "folder"))
    native.build_beside()
    assert native_runner() is None and "for the next process" in build_native()
    assert native._beside.wait(60) == 0 and (tmp_path / "called").exists()
    assert environment_of(1)[native.SWITCH] == "python"
    # A plan with time has what was built, or builds it.
    assert "could not build" in build_native(anew=True)
    assert native._beside is None and environment_of(1)[native.SWITCH] != "python"
    # Where the runner is there, nothing is started.
    monkeypatch.setattr(native, "_reason", "")
    monkeypatch.setattr(native, "_beside", None)
    monkeypatch.setattr(native, "native_runner", lambda: native)
    native.build_beside()
    assert native._beside is None


def test_a_compiler_that_fails_is_told_with_its_first_error(monkeypatch, tmp_path):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'runner.cpp:1: error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(native, "_reason", "")
    monkeypatch.setenv(native.SWITCH, str(tmp_path / "folder"))
    monkeypatch.setattr(native, "cxx_compiler", lambda: str(compiler))
    told = []
    assert "no such header" in build_native(told.append)
    assert len(told) == 1
    # It is not tried again by this process.
    compiler.unlink()
    assert "no such header" in build_native(told.append)
    assert not [path for path in (tmp_path / "folder").rglob("*") if path.is_file()]
