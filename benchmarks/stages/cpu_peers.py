"""What else runs an inference step on CPU cores.

Every peer computes the very module, with the weights that our own step has, on as many threads, by
its own defaults: thread pools spin where a peer lets them.
"""

import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from dovetail.frontends.program import Captured
from dovetail.frontends.recording import is_fake

TOLERANCE = 1e-3
"""Of the largest value of an output."""
Run = Callable[[], Any]


@dataclass
class Given:
    """folder: for files."""

    module: torch.nn.Module
    inputs: tuple[Tensor, ...]
    threads: int
    folder: Path

    @cached_property
    def onnx(self) -> str:
        """The module's ONNX file."""
        path = self.folder / "module.onnx"
        torch.onnx.export(self.module, self.inputs, path, dynamo=True, verbose=False)
        return str(path)

    def arrays(self) -> list[Any]:
        return [value.numpy() for value in self.inputs]


def module_of(captured: Captured, seed: int = 0) -> torch.nn.Module:
    """The captured module with real weights: those that `prepare` draws, where it has fake ones."""
    module = captured.module
    if any(map(is_fake, (*module.parameters(), *module.buffers()))):
        assert captured.make is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = captured.make()
    return module.eval()


def eager(given: Given) -> Run:
    """The module as it is."""

    def run() -> Any:
        with torch.inference_mode():
            return given.module(*given.inputs)

    return run


def compiled(given: Given) -> Run:
    """Inductor, with parameters as constants: what it folds and lays out itself."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.freezing = True
    fast = torch.compile(given.module, dynamic=False)

    def run() -> Any:
        with torch.no_grad():
            return fast(*given.inputs)

    return run


def onnxruntime(given: Given, *, parallel: bool = False) -> Run:
    """Ops one after another on all threads; parallel: ops side by side on one thread each."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1 if parallel else given.threads
    if parallel:
        options.execution_mode = runtime.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = given.threads
    session = runtime.InferenceSession(given.onnx, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = dict(zip(names, given.arrays(), strict=True))
    return lambda: session.run(None, feed)


def openvino(given: Given) -> Run:
    """Its hint for latency; in float32, as the others compute."""
    runtime = importlib.import_module("openvino")
    core = runtime.Core()
    hints = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": given.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = core.compile_model(core.read_model(given.onnx), "CPU", hints).create_infer_request()
    feed = given.arrays()
    return lambda: list(request.infer(feed).values())


PEERS: dict[str, Callable[[Given], Run]] = {
    "eager": eager,
    "torch.compile": compiled,
    "onnxruntime": onnxruntime,
    "onnxruntime, parallel": partial(onnxruntime, parallel=True),
    "openvino": openvino,
}


@dataclass(frozen=True)
class Peer:
    """Ready to run, or the reason why not; seconds until it was."""

    run: Run | None
    seconds: float
    difference: float = 0.0
    reason: str = ""


def prepared(name: str, given: Given, wanted: Any, limit_seconds: float) -> Peer:
    """A peer after its first call; absent if it fails, takes longer than that, or computes
    something else than `wanted`, our own outputs."""
    began = time.perf_counter()
    torch.set_num_threads(given.threads)  # it is compiled for as many
    try:
        with _time_limit(limit_seconds):
            run = PEERS[name](given)
            found = difference(run(), wanted)
    except (Exception, OutOfTimeError) as error:
        return Peer(None, time.perf_counter() - began, reason=_reason(error))
    finally:
        _stop_compiling()
    seconds = time.perf_counter() - began
    if not found <= TOLERANCE:
        return Peer(None, seconds, found, f"its outputs differ by {found:.2g} of the largest value")
    return Peer(run, seconds, found)


class OutOfTimeError(BaseException):
    """No `Exception`: compilers catch those and go on."""


def difference(found: Any, wanted: Any) -> float:
    """The largest, as a share of the largest value of its output; inf for other shapes, and for
    what is no number."""
    largest = 0.0
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    for a, b in ((torch.as_tensor(a).double(), torch.as_tensor(b).double()) for a, b in pairs):
        if a.shape != b.shape or not bool(torch.isfinite(a).all()):
            return float("inf")
        if b.numel():
            least = torch.finfo(torch.float32).tiny
            largest = max(largest, float((a - b).abs().max() / b.abs().max().clamp_min(least)))
    return largest


def _reason(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".removeprefix("OutOfTimeError: ")


def _stop_compiling() -> None:
    """End processes that wait for more to compile, or go on with what was given up: they would
    disturb what is measured."""
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        compiling.shutdown_compile_workers()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in this, the main thread, once Python runs after so many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError(f"not ready after {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
