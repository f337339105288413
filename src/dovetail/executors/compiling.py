"""Compiles fused calls by Inductor, each distinct one once, and keeps the code on disk.

    parent                         compilers: a process a core
    fused calls ──► keys ─ missing ──► compile ──► FOLDER/compiled/VERSION/KEY.py
                      │                time beside its calls ──► how much faster it is
                      └─ there ──────► (nothing)

    device's process: load_code(KEY) ──► instructions of a runner (`executors.generated`)

Code for a GPU is compiled and timed on it, as CUDA graphs, which is how plans run it, and is called
from Python in the steps before it is captured.

A file is the Python source that Inductor writes. It is written whole or not at all, so that several
programs may compile at once. One that is damaged, that another version of torch or another
processor wrote, or that another user can write, counts as missing. A fused call that cannot be
compiled is tried again by the next program: a full disk or a missing header may be why.
"""

import json
import re
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import FileFormatError, ProcessDiedError, ProcessError
from dovetail.executors.generated import GeneratedCode, noted
from dovetail.executors.gpus.streams import capture
from dovetail.frontends.fused import FusedCall, examples_of
from dovetail.frontends.runners import runner_kind
from dovetail.machine import Device
from dovetail.machine.gpu_rates import GpuTimer
from dovetail.runtime.cuda import MakeCuda, cuda_here, cuda_maker, reach_gpus_by
from dovetail.runtime.files import compiled_folder, is_own, own_cache, read_json, write_atomically
from dovetail.runtime.native import has_compiler
from dovetail.runtime.processes import Worker, launch, ready
from dovetail.runtime.setup import set_up
from dovetail.runtime.timers import (
    Repeats,
    clock,
    in_turns,
    ratios_of,
    seconds_of,
    time_rounds,
    times_within,
)
from dovetail.runtime.torch_versions import inductor_source

ENTRY = "dovetail.executors.compiling:Compiler"
"""What lives in a compiler's process, as `launch` takes it."""
PROTOCOL = 6
"""Raised where compiled code is called otherwise, or its gain is measured otherwise."""
_ROUNDS, _ROUND_SECONDS = 7, 2e-3
_WARM_UPS, _REPEATS = 3, 10
"""On a GPU a call runs so often before it is captured, and so often in its graph."""
FASTER = 0.97
"""Compiled code is used where it takes at most this share of the time of its calls."""


@dataclass(frozen=True)
class CompileTarget:
    """What code is compiled for: so many threads of the CPU, or a GPU by what torch calls it."""

    threads: int = 1
    gpu: str = ""

    @staticmethod
    def of(device: Device) -> "CompileTarget":
        if device.torch_device:
            return CompileTarget(gpu=device.torch_device)
        return CompileTarget(device.op_threads)

    @property
    def torch_device(self) -> torch.device:
        if not self.gpu:
            return torch.device("cpu")
        device: torch.device = cuda_here().device(self.gpu)
        return device

    @property
    def label(self) -> str:
        """A name for the target that no other one has; it is a part of a file's name."""
        if not self.gpu:
            return str(self.threads)
        card = cuda_here().get_device_name(self.torch_device)
        return re.sub("[^A-Za-z0-9]+", "-", f"{self.gpu} {card}").strip("-")


@dataclass(frozen=True)
class Compiled:
    """The gain of a fused call's compiled code on a target.

    share    seconds of the compiled code over those of its calls, bound as a device binds them and
             both repeated alone; inf where it could not be compiled
    reason   why it could not be compiled; "": it was
    """

    share: float
    reason: str = ""

    @property
    def is_faster(self) -> bool:
        return self.share <= FASTER


def compile_all(
    fused: Sequence[FusedCall],
    target: CompileTarget,
    places: Sequence[tuple[int, ...]],
    *,
    limit_seconds: float,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> dict[str, Compiled]:
    """Compile the distinct ones of these calls, and return key -> what is known of it. Keys that
    were not reached within `limit_seconds` are absent.

    places    cores of each compiler, which also times what it has compiled on them; () stands for
              all. No more are started than there are calls to compile
    progress  is told how many are done, and how many there are

    Without a C++ compiler nothing is compiled for a CPU, and the result is empty.
    """
    if not (has_compiler() or target.torch_device.type == "cuda"):
        return {}
    distinct = {call.key: call for call in fused}
    compiled = {key: kept for key in distinct if (kept := _kept(key, target)) is not None}
    waiting = [call for key, call in distinct.items() if key not in compiled]
    began, count = clock(), len(waiting)
    busy: dict[Worker, FusedCall] = {}
    idle: list[Worker] = []
    cores_of: dict[Worker, tuple[int, ...]] = {}

    def start(cores: tuple[int, ...]) -> None:
        worker = launch(ENTRY, cores=cores, threads=target.threads, name="compiler")
        idle.append(worker)
        cores_of[worker] = cores
        worker.post("make", target, cuda_maker())

    try:
        for cores in places[: len(waiting)]:
            start(cores)
        while busy or (waiting and idle):
            while idle and waiting:
                worker = idle.pop()
                busy[worker] = waiting.pop(0)
                worker.begin("compile", busy[worker])
            left = limit_seconds - (clock() - began)
            if left <= 0:
                break
            for worker in ready(busy, left):
                call = busy.pop(worker)
                try:
                    compiled[call.key] = worker.receive()
                    idle.append(worker)
                except (ProcessDiedError, ProcessError) as error:
                    # The call took its compiler with it.
                    compiled[call.key] = Compiled(float("inf"), str(error))
                    worker.close(kill=True)
                    start(cores_of[worker])
                progress(count - len(waiting) - len(busy), count)
    finally:
        for worker in (*idle, *busy):
            worker.close(kill=True)
    return compiled


class Compiler:
    """What lives in a compiler's process.

    make_cuda   makes the CUDA by which a GPU is reached
    """

    def __init__(self, target: CompileTarget, make_cuda: MakeCuda) -> None:
        reach_gpus_by(make_cuda)
        set_up(target.threads)
        self._target = target

    @own_cache()
    def compile(self, call: FusedCall) -> Compiled:
        """Compile a fused call, keep its code, and time it beside its calls."""
        target = self._target
        try:
            device = target.torch_device
            examples = call.examples(device)
            share = _share
            if device.type == "cuda":
                share = partial(_share_as_graphs, GpuTimer(cuda_here(), device))
            calls = partial(call.on(device).bound, examples)
            if call.is_update:
                fused = call.with_fused_updates().bound(examples)
                compiled = Compiled(share(fused, calls()))
                facts: dict[str, Any] = {"share": compiled.share, "is_update": True}
                _write(_path(call.key, target, "json"), json.dumps(facts))
                return compiled
            path = _path(call.key, target, "py")
            _write(path, inductor_source(call.on(device).module(), examples))
            code = _loaded(path, examples)
            _check_laid(code, call.on(device), examples)
            # A GPU gets the code as one work.
            by_runner = (
                not target.gpu and code.instructions is not None and _is_same_by_runner(code, call)
            )
            if not by_runner:
                code = replace(code, instructions=None)
            compiled = Compiled(share(code.bound(examples)[1], calls()))
            facts = {"share": compiled.share, "metas": call.metas, "by_runner": by_runner}
            _write(_path(call.key, target, "json"), json.dumps(facts))
        except Exception:  # whatever Inductor raises, and a disk that is full
            lines = traceback.format_exc().strip().splitlines()
            return Compiled(float("inf"), lines[-1])
        return compiled


def has_code(key: str, target: CompileTarget) -> bool:
    """True if compiled code of a fused call is kept here."""
    return all(is_own(_path(key, target, kind)) for kind in ("py", "json"))


def load_code(key: str, target: CompileTarget) -> GeneratedCode | None:
    """The compiled code of a fused call; None if there is none that can be used."""
    if not has_code(key, target):
        return None
    try:
        facts: Any = read_json(_path(key, target, "json"))
        examples = examples_of(facts["metas"], target.torch_device)
        with own_cache():
            code = _loaded(_path(key, target, "py"), examples)
    except Exception:  # whatever a damaged file leads to
        return None
    return code if facts.get("by_runner") else replace(code, instructions=None)


def _loaded(path: Path, examples: Sequence[Tensor]) -> GeneratedCode:
    spec = spec_from_file_location(f"dovetail_compiled_{path.stem.replace('-', '_')}", path)
    assert spec is not None and spec.loader is not None, "it ends with .py"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return noted(module, examples)


def _check_laid(code: GeneratedCode, call: FusedCall, examples: Sequence[Tensor]) -> None:
    """Raise ValueError if the code lays a result otherwise than the calls, for whose strides the
    views of the step were made. Inductor goes by what fake tensors say."""
    with torch.inference_mode():
        for own, wanted in zip(code(*examples), call(*examples), strict=True):
            pairs = zip(own.shape, own.stride(), wanted.stride(), strict=True)
            if any(size > 1 and stride != other for size, stride, other in pairs):
                raise ValueError(
                    f"its code lays a result of {list(own.shape)} by strides of "
                    f"{list(own.stride())}, torch by {list(wanted.stride())}"
                )


def _is_same_by_runner(code: GeneratedCode, call: FusedCall) -> bool:
    """True if the code computes the same bits by a runner as it does from Python."""
    generator = torch.Generator().manual_seed(0)
    given = [
        example.uniform_(-1, 1, generator=generator) if example.is_floating_point() else example
        for example in call.examples()
    ]
    with torch.inference_mode():
        wanted = code(*given)
        runner, run = code.bound(given)
        run()
        made = [runner.get(len(given) + number) for number in range(len(wanted))]
    return all(
        own is not None
        and torch.equal(own.isnan(), other.isnan())
        and torch.equal(own.nan_to_num(), other.nan_to_num())
        for own, other in zip(made, wanted, strict=True)
    )


def _share(run_code: Callable[[], object], run_calls: Callable[[], object]) -> float:
    """The median, over rounds, of the seconds of the compiled code over those of its calls."""
    with torch.inference_mode():
        run_code()  # a kernel of numba is compiled when it is called first
        timers = {
            name: partial(seconds_of, run, times_within(_ROUND_SECONDS, seconds_of(run, 2)))
            for name, run in (("code", run_code), ("calls", run_calls))
        }
        seconds = in_turns(timers, Repeats(_ROUNDS), calls=1, warm_ups=0)
    return statistics.median(ratios_of(seconds["code"], seconds["calls"]))


def _share_as_graphs(
    timer: GpuTimer, run_code: Callable[[], object], run_calls: Callable[[], object]
) -> float:
    """As `_share` on a GPU, where plans replay graphs: each is captured as one, several times in a
    row, so that the launch of the graph hardly counts."""
    cuda, graphs = timer.cuda, []
    with torch.inference_mode():
        for run in (run_code, run_calls):
            with cuda.stream(timer.stream):
                for _ in range(_WARM_UPS):
                    run()
            cuda.synchronize(timer.device)

            def repeated(run: Callable[[], object] = run) -> None:
                for _ in range(_REPEATS):
                    run()

            graphs.append(capture(cuda, timer.stream, repeated))
        rounds = time_rounds(
            lambda _turn: timer.seconds_between(lambda graph: graph.replay(), graphs),
            Repeats(_ROUNDS),
        )
    return statistics.median(ratios_of(*rounds.seconds))


def _kept(key: str, target: CompileTarget) -> Compiled | None:
    """The kept gain of a fused call; None if none is kept, or if its code is gone."""
    path = _path(key, target, "json")
    if not is_own(path):
        return None
    try:
        facts: Any = read_json(path)
        if not facts.get("is_update") and not has_code(key, target):
            return None
        return Compiled(float(facts["share"]))
    except (FileFormatError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _write(path: Path, text: str) -> None:
    """Write a file that this user alone can write."""
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, text)
    path.chmod(0o600)


def _path(key: str, target: CompileTarget, kind: str) -> Path:
    # Compiled code and its gain depend on torch, the processor and the runner, beside its calls.
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    version = f"{PROTOCOL}-{torch.__version__}-{capability}-{runner_kind()}"
    return compiled_folder() / version / f"{key}-{target.label}.{kind}"
