"""Compiled code: what is kept, what is rebuilt, and what falls back."""

import os
import threading

import pytest
import torch
from torch import nn

from dovetail.executors import compiling
from dovetail.executors.compiling import Compiled, CompileTarget, compile_all, load_code
from dovetail.frontends import capture
from dovetail.frontends.fused import FusedCall, may_be_fused
from dovetail.runtime import native
from dovetail.runtime.native import has_compiler

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler"),
    pytest.mark.usefixtures("forked_compilers"),
]
PLACES = [()]
UNFIT = ("float32", (7, 7), (7, 1))


class Chain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return (self.layer(x).tanh() * 2 + x).relu()


def fused_of(width):
    torch.manual_seed(0)
    step = capture(Chain(width), torch.randn(3, width))
    ops = [op for op, call in enumerate(step.program.calls) if call is not None]
    assert all(may_be_fused(step.graph, step.program, op) for op in ops)
    return FusedCall.of(step.graph, step.program, ops)[0]


def unfit():
    """A call that no compiler can make: its arguments do not fit."""
    fused = fused_of(5)
    return FusedCall(fused.calls, (UNFIT, *fused.metas[1:]), fused.outputs)


@pytest.fixture(scope="module")
def call():
    return fused_of(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, call):
    """A cache in which `call` and `unfit()` were compiled; its path, and what was found."""
    path = tmp_path_factory.mktemp("code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOVETAIL_CACHE", str(path))
        told = []
        found = compile_all(
            [call, unfit(), call], CompileTarget(1), PLACES, limit_seconds=300,
            progress=lambda done, count: told.append((done, count)),
        )  # fmt: skip
        assert told[-1] == (2, 2)
    return path, found


@pytest.fixture
def cache(folder, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(folder[0]))
    return folder


def test_compiled_code_computes_what_its_calls_do_but_for_rounding(cache, call):
    code = load_code(call.key, CompileTarget(1))
    inputs = [torch.randn_like(example) for example in call.examples()]
    for got, wanted in zip(code(*inputs), call(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.stride() == wanted.stride()
    assert all(map(torch.equal, code(*inputs), code(*inputs)))
    assert 0 < cache[1][call.key].share < float("inf")


def test_what_is_compiled_is_not_compiled_again(cache, call, monkeypatch):
    monkeypatch.setattr(compiling, "launch", None)
    assert compile_all([call], CompileTarget(1), PLACES, limit_seconds=1) == {
        call.key: cache[1][call.key]
    }


def test_what_cannot_be_compiled_has_a_reason_and_is_tried_again(cache):
    failed = cache[1][unfit().key]
    assert failed.reason and not failed.is_faster
    assert load_code(unfit().key, CompileTarget(1)) is None
    assert not list(cache[0].rglob(f"{unfit().key}-1.json"))


def test_a_compiler_that_dies_is_replaced_and_costs_only_its_call(tmp_path, call, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "ENTRY", "tests.executors.test_compiling:DiesOfTheFirst")
    compiled = compile_all([unfit(), call], CompileTarget(1), PLACES, limit_seconds=300)
    assert "status" in compiled[unfit().key].reason or compiled[unfit().key].reason
    assert compiled[call.key] == Compiled(0.5)


class DiesOfTheFirst:
    def __init__(self, target, make_cuda):
        pass

    def compile(self, call):
        if call.metas[0] == UNFIT:
            os._exit(9)
        return Compiled(0.5)


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path, call, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    (tmp_path / "compiled").write_text("no folder")
    assert compile_all([call], CompileTarget(1), PLACES, limit_seconds=300)[call.key].reason


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no owners of files")
def test_code_that_another_user_can_write_is_not_run(cache, call):
    (path,) = cache[0].rglob(f"{call.key}-1.py")
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o666)
    try:
        assert load_code(call.key, CompileTarget(1)) is None
    finally:
        path.chmod(0o600)


def test_calls_that_are_bound_compute_and_drop_what_nobody_reads(call):
    inputs = call.examples()
    run = call.bound(inputs)
    assert run() and run()  # a result that was dropped too early would be missing


@pytest.mark.parametrize(
    ("variable", "there", "has"),
    [(None, "g++", True), (None, "c++", False), ("nowhere", "g++", False), ("cc", "cc", True)],
)
def test_the_compiler_is_the_one_that_torch_takes(monkeypatch, variable, there, has):
    monkeypatch.setattr(native.sys, "platform", "linux")
    monkeypatch.setattr(native.shutil, "which", lambda name: name if name == there else None)
    monkeypatch.delenv("CXX", raising=False)
    if variable:
        monkeypatch.setenv("CXX", variable)
    assert has_compiler() == has


def test_code_is_for_one_number_of_threads_and_one_version(cache, call, monkeypatch):
    assert load_code(call.key, CompileTarget(2)) is None
    monkeypatch.setattr(torch, "__version__", "another")
    assert load_code(call.key, CompileTarget(1)) is None


@pytest.mark.parametrize("content", ["", "call = None", "import (", "raise SystemError"])
def test_a_damaged_file_counts_as_missing(cache, call, content):
    (path,) = cache[0].rglob(f"{call.key}-1.py")
    whole = path.read_text()
    path.write_text(content)
    try:
        code = load_code(call.key, CompileTarget(1))
        assert code is None
    finally:
        path.write_text(whole)


def test_a_missing_or_unreadable_record_is_compiled_again(cache, call):
    (path,) = cache[0].rglob(f"{call.key}-1.json")
    (code,) = cache[0].rglob(f"{call.key}-1.py")
    whole = path.read_text()

    def is_known():
        """Without time to compile, only what is kept is known."""
        return bool(compile_all([call], CompileTarget(1), PLACES, limit_seconds=0.0))

    assert is_known()
    for content in ("[" * 100_000, "{"):
        path.write_text(content)
        assert load_code(call.key, CompileTarget(1)) is None
        assert not is_known()
    path.write_text(whole)
    code.unlink()
    assert not is_known()
    path.write_text("[" * 100_000)
    assert not compile_all([call], CompileTarget(1), PLACES, limit_seconds=300)[call.key].reason
    assert code.exists() and is_known()


def test_what_is_not_reached_in_time_is_absent(cache):
    assert compile_all([fused_of(9)], CompileTarget(1), PLACES, limit_seconds=0.0) == {}


def test_two_programs_that_compile_at_once_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    call, found = fused_of(6), []

    def work():
        found.append(compile_all([call], CompileTarget(1), PLACES, limit_seconds=300))

    # The kernel ends a compiler with the thread that started it, so both threads stay to the end.
    both = [threading.Thread(target=work) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert [set(known) for known in found] == [{call.key}] * 2
    assert load_code(call.key, CompileTarget(1)) is not None
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_a_compiler_nothing_is_compiled(monkeypatch, call):
    monkeypatch.setattr(compiling, "has_compiler", lambda: False)
    assert compile_all([call], CompileTarget(1), PLACES, limit_seconds=10) == {}


def test_code_is_used_where_it_is_clearly_faster():
    assert Compiled(0.9).is_faster and not Compiled(0.99).is_faster
    assert not Compiled(float("inf"), "why").is_faster
