"""Compiles fused calls by Inductor, each distinct one once, and keeps the code on disk.

    parent                         compilers: a process a core
    fused calls ──► keys ─ missing ──► compile ──► FOLDER/compiled/VERSION/KEY.py
                      │                time beside its calls ──► how much faster it is
                      └─ there ──────► (nothing)

    device's process: load_code(KEY) ──► instructions of a runner (`executors.generated`)

A file is the Python source that Inductor writes. It is written whole or not at all, so that several
programs may compile at once. One that is damaged, that another version of torch or another
processor wrote, or that another user can write, counts as missing. A fused call that cannot be
compiled is tried again by the next program: a full disk or a missing header may be why.
"""

import json
import os
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import ProcessDiedError, ProcessError
from dovetail.executors.generated import GeneratedCode, noted
from dovetail.frontends.fused import FusedCall, examples_of
from dovetail.frontends.runners import runner_kind
from dovetail.runtime.files import cache_folder, is_own, write_atomically
from dovetail.runtime.native import has_compiler
from dovetail.runtime.processes import Channel, Worker, launch, ready
from dovetail.runtime.setup import set_up
from dovetail.runtime.timers import clock
from dovetail.runtime.torch_versions import inductor_source

ENTRY = "dovetail.executors.compiling:serve"
PROTOCOL = 5
"""Raised where compiled code is called otherwise, or its gain is measured otherwise."""
_ROUNDS, _ROUND_SECONDS = 7, 2e-3
FASTER = 0.97
"""Compiled code is used where it takes at most this share of the time of its calls."""


@dataclass(frozen=True)
class Compiled:
    """What is known of a fused call on so many threads.

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
    threads: int,
    places: Sequence[tuple[int, ...]],
    *,
    limit_seconds: float,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> dict[str, Compiled]:
    """Compile the distinct ones of these calls, and return key -> what is known of it. Keys that
    were not reached within `limit_seconds` are absent.

    places    cores of each compiler, which also times what it has compiled on them. No more are
              started than there are calls to compile
    progress  is told how many are done, and how many there are

    Without a C++ compiler nothing is compiled, and the result is empty.
    """
    if not has_compiler():
        return {}
    distinct = {call.key: call for call in fused}
    compiled = {key: kept for key in distinct if (kept := _kept(key, threads)) is not None}
    waiting = [call for key, call in distinct.items() if key not in compiled]
    began, count = clock(), len(waiting)
    busy: dict[Worker, FusedCall] = {}
    idle: list[Worker] = []
    cores_of: dict[Worker, tuple[int, ...]] = {}

    def start(cores: tuple[int, ...]) -> None:
        worker = launch(ENTRY, cores=cores, threads=threads, name="compiler")
        idle.append(worker)
        cores_of[worker] = cores
        worker.send(threads)

    try:
        for cores in places[: len(waiting)]:
            start(cores)
        while busy or (waiting and idle):
            while idle and waiting:
                worker = idle.pop()
                busy[worker] = waiting.pop(0)
                worker.send(busy[worker])
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


def serve(channel: Channel) -> None:
    """Compile each fused call that arrives. The first message is the number of threads."""
    threads: int = channel.receive()
    set_up(threads)
    use_own_cache()
    while True:
        call: FusedCall = channel.receive()
        channel.send(_compile(call, threads))


def has_code(key: str, threads: int) -> bool:
    """True if compiled code of a fused call is kept here."""
    return all(is_own(_path(key, threads, kind)) for kind in ("py", "json"))


def load_code(key: str, threads: int) -> GeneratedCode | None:
    """The compiled code of a fused call; None if there is none that can be used."""
    if not has_code(key, threads):
        return None
    use_own_cache()
    try:
        facts = json.loads(_path(key, threads, "json").read_text())
        code = _loaded(_path(key, threads, "py"), examples_of(facts["metas"]))
    except Exception:  # whatever a damaged file leads to
        return None
    return code if facts.get("by_runner") else replace(code, instructions=None)


def _loaded(path: Path, examples: Sequence[Tensor]) -> GeneratedCode:
    spec = spec_from_file_location(f"dovetail_compiled_{path.stem.replace('-', '_')}", path)
    assert spec is not None and spec.loader is not None, "it ends with .py"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return noted(module, examples)


def use_own_cache() -> None:
    """Have Inductor keep its files beside ours, unless the user has named a folder for them."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_folder() / "inductor"))


def _compile(call: FusedCall, threads: int) -> Compiled:
    """Compile a fused call, keep its code, and time it beside its calls."""
    try:
        examples = call.examples()
        if call.is_update:
            fused = call.with_fused_updates().bound(examples)
            compiled = Compiled(_share(fused, call.bound(examples)))
            facts: dict[str, Any] = {"share": compiled.share, "is_update": True}
            _write(_path(call.key, threads, "json"), json.dumps(facts))
            return compiled
        path = _path(call.key, threads, "py")
        _write(path, inductor_source(call.module(), examples))
        code = _loaded(path, examples)
        by_runner = code.instructions is not None and _is_same_by_runner(code, call)
        if not by_runner:
            code = replace(code, instructions=None)
        compiled = Compiled(_share(code.bound(examples)[1], call.bound(examples)))
        facts = {"share": compiled.share, "metas": call.metas, "by_runner": by_runner}
        _write(_path(call.key, threads, "json"), json.dumps(facts))
    except Exception:  # whatever Inductor raises, and a disk that is full
        lines = traceback.format_exc().strip().splitlines()
        return Compiled(float("inf"), lines[-1])
    return compiled


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
        counts = {
            run: max(1, round(_ROUND_SECONDS / _seconds(run, 2))) for run in (run_code, run_calls)
        }
        ratios = [
            _seconds(run_code, counts[run_code]) / _seconds(run_calls, counts[run_calls])
            for _ in range(_ROUNDS)
        ]
    return statistics.median(ratios)


def _seconds(run: Callable[[], Any], times: int) -> float:
    began = clock()
    for _ in range(times):
        run()
    return (clock() - began) / times


def _kept(key: str, threads: int) -> Compiled | None:
    """What is kept of a fused call; None if nothing is, or if its code is gone."""
    path = _path(key, threads, "json")
    if not is_own(path):
        return None
    try:
        facts = json.loads(path.read_text())
        if not facts.get("is_update") and not has_code(key, threads):
            return None
        return Compiled(float(facts["share"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _write(path: Path, text: str) -> None:
    """Write a file that this user alone can write."""
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, text)
    path.chmod(0o600)


def _path(key: str, threads: int, kind: str) -> Path:
    return _folder() / _version() / f"{key}-{threads}.{kind}"


def _folder() -> Path:
    return cache_folder() / "compiled"


def _version() -> str:
    """What compiled code and its gain depend on beside its calls: torch, the processor, and the
    runner."""
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    return f"{PROTOCOL}-{torch.__version__}-{capability}-{runner_kind()}"
