"""Makes the calls of a module fast where it stands: `optimize`.

    model(*args) ─► key of the call ─► decided ─► the module as it is │ torch.compile │ its plan
                                           │ no
                                           └─► capture ─► plan ─► beside the module's own call ─►
                                               kept in this process, and on disk for the next

The *key* of a call is all of it that a plan holds constant: shapes, strides and dtypes of its
tensors, its other arguments, and the modes of torch and of the module. A plan holds the Python
values of the module's parts constant as well, which are looked at before each of its calls
(`ModuleState`).
"""

import hashlib
import inspect
import json
import logging
import os
import re
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from math import inf
from operator import is_
from pathlib import Path, PurePath
from statistics import median
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from dovetail.errors import (
    CaptureError,
    FileFormatError,
    ModelError,
    UnwritableError,
    UsageError,
)
from dovetail.executors import MODES, LoadedStep, PlainNetwork
from dovetail.executors.workers import is_this_process
from dovetail.frontends import SGD, Captured, Program
from dovetail.frontends.capturing import capture_call, unwrap
from dovetail.frontends.program import PlainStep, Signature
from dovetail.frontends.runners import runner_kind
from dovetail.frontends.structures import Mismatch, flatten, matched
from dovetail.graph import Graph
from dovetail.graph.source import Source
from dovetail.machine import Machine, parse_machine
from dovetail.pipeline.planning import FOUND_BEFORE, NOT_REACHED, plan
from dovetail.pipeline.sources import counted_threads, with_threads
from dovetail.pipeline.using import run
from dovetail.pipeline.ways import timer_of
from dovetail.plans import COMPILED, EAGER, PLACED
from dovetail.request_fields import read_seconds
from dovetail.runtime.files import cache_folder, read_json, use_own_cache, write_atomically
from dovetail.runtime.native import has_compiler, native_runner
from dovetail.runtime.setup import op_threads
from dovetail.runtime.timers import Repeats, Timer, clock, in_turns, ratios_of, seconds_of
from dovetail.runtime.torch_versions import (
    OpOverload,
    backend_of_graphs,
    calls_are_observed,
    compile_errors,
    hook_tables,
    is_compiled_module,
    plain_call,
    pytree,
    replace_call,
    replaced_call,
    without_autocast,
)
from dovetail.runtime.user_code import line_of
from dovetail.training import is_keras
from dovetail.units import HERE, HERE_CPU, format_seconds

_log = logging.getLogger(__name__)
MOST_KEYS = 8
"""Calls of so many keys are decided. Those of further keys run as they are. `torch.compile` stops
compiling a function after eight variants as well."""
DECIDED_AT_CALL = 3
"""The first key is decided at its first call, and others at this one: an epoch's smaller last
batch is not worth a budget that comes once in an epoch."""
MOST_CHANGES = 3
"""After so many plans that ended, since the module changed or they failed, no more are made: a
module whose values change at each call would be decided again and again."""
QUICK_SECONDS = 10.0
"""The longest budget of a quick decision, which compiles nothing."""
GAIN = 0.02
"""What takes the place of the module's own call must be faster by this share."""
BESIDE = Repeats(15, 3, 2.0)
"""How often the module's own call and what may take its place run in turns."""
CLOSE = 1.3
"""What was measured to take up to so many times as long as a plan is measured again in this
process: a plan of a U-Net took 4.96 ms before and 6.0 here, `torch.compile` 5.25 and 4.8."""
LONG_CALL_SECONDS = 0.1
"""Calls that take longer run once in a turn, and the first in a turn counts."""
LEAST_SECONDS = 5.0
"""With less left of a budget, nothing is compiled: the processes take about this long to begin."""
_LOOK_SECONDS = 0.25
"""While something compiles, it is asked this often whether it is done."""
PLANNING_SHARE, LEAST_BESIDE_SECONDS = 0.85, 4.0
"""The share of a budget that planning has. Capturing, the comparison here, and what planning takes
beyond the end of its budget have the rest, at least `LEAST_BESIDE_SECONDS`."""
_AGREES, _AGREES_IN_HALF = 1e-3, 3e-2
"""The results of a plan may differ from the module's by this share of the largest number; in
float16, bfloat16 and under autocast by the second one."""
_MOST_TABLES, _MOST_IN_PYTHON = 20_000, 4000
"""A module whose parts hold more tables of Python values has no plan: looking at them before each
call would take longer than a plan can win."""


def optimize(
    model: nn.Module,
    machine: str | Machine = HERE,
    budget: str | float = "60s",
    quick: bool = False,
    again: bool = False,
) -> nn.Module:
    """Return the same module, whose calls from now on go the fastest way that is found.

    machine   on which calls are planned: the cores of this process
    budget    limit of deciding about a call, in seconds ("60s", "2m")
    quick     decide within 10 s, and compile nothing
    again     search on from what was decided before, in this process or another, and measure anew

    A call is decided when its shapes, dtypes, other arguments and modes are new. Its plan on this
    machine, `torch.compile` and the module as it is are measured, and the fastest runs from then
    on. Calls that need gradients have the last two of these. Parameters, buffers, `state_dict`,
    modes, hooks and pickles are the module's own as before; copies of the module are plain ones.
    Where nothing else is faster, or can be done, the module runs as it is, and the log says why.
    The module as it is, and `torch.compile`, run on fewer threads than are set where that is
    faster. Random numbers that `torch.compile` draws, as for dropout, are others than those of the
    module as it is.

    Raises `ModelError` for what is no module, compiled already, lazy or on a GPU, and `UsageError`.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ModelError(name, "is no torch.nn.Module; wrap the function in one")
    call = replaced_call(model)
    if is_compiled_module(model) or not isinstance(call, OptimizedCalls | None):
        raise ModelError(name, "is compiled already; optimize the module instead of compiling it")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(name, "is TorchScript; give the module that it was made from")
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise ModelError(name, f"{key} has no shape yet; run the lazy module once before")
        # `nn.DataParallel` would give its replicas the calls of the module itself.
        if value.is_cuda:
            raise ModelError(name, f"{key} is on a GPU; modules on the CPU can be optimized")
    if machine == HERE:
        machine = HERE_CPU
    resolved = parse_machine(machine) if isinstance(machine, str) else machine
    if not is_this_process(resolved):
        says = f"is {resolved.name}; a module's calls run in this process, on all its cores: use "
        raise UsageError("machine", says + HERE)
    seconds = read_seconds("budget", str(budget))
    settings = machine, min(seconds, QUICK_SECONDS) if quick else seconds, quick
    if call is None or again or call.settings != settings:
        replace_call(model, OptimizedCalls(model, *settings, again=again))
    return model


def compile_graph(
    graph: nn.Module, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend "dovetail" of `torch.compile`, whose options are those of `optimize`.

    torch makes a graph of each forward and backward pass, and looks whether one fits a call. Each
    graph is a module that is optimized: its first call is decided.
    """
    given = dict(options or {})
    backend = backend_of_graphs(lambda module, _examples: optimize(module, **given))
    compiled: Callable[..., Any] = backend(graph, examples)
    return compiled


@dataclass(eq=False)
class CallDecision:
    """How calls of one key run.

    call     takes the module's arguments
    seconds  way -> measured seconds of a call
    step     a plan at work; None: no plan runs
    state    what the plan holds constant of the module
    threads  on which each op runs where no plan does; 0: on as many as the caller has set
    """

    way: str
    call: Callable[..., Any]
    seconds: dict[str, float] = field(default_factory=dict)
    step: LoadedStep | None = None
    state: "ModuleState | None" = None
    threads: int = 0

    @property
    def name(self) -> str:
        """The way, with its own number of threads."""
        return f"{self.way} ({counted_threads(self.threads)})" if self.threads else self.way


class OptimizedCalls:
    """What `module(...)` calls in place of the module's own call.

    settings   machine, seconds of a decision, whether it is a quick one
    """

    def __init__(
        self,
        module: nn.Module,
        machine: str | Machine,
        seconds: float,
        quick: bool,
        *,
        again: bool = False,
    ) -> None:
        self.module, self.settings, self._again = module, (machine, seconds, quick), again
        self.here = parse_machine(machine) if isinstance(machine, str) else machine
        self._plain = CallDecision(EAGER, plain_call(module))
        self._compiled: Callable[..., Any] | None = None
        self._decisions: dict[Any, CallDecision] = {}
        self._seen, self._decided = Counter[Any](), 0
        self._said = set[str]()
        self._look_at_parts()
        self._deciding = threading.Lock()
        self._changes, self._process = 0, 0

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module is a plain one, also where its class pickles all attributes.
        return type(None), ()

    def _look_at_parts(self) -> None:
        """Note the tables of hooks and tensors of the parts that the module has now."""
        parts = list(self.module.modules())
        self._hooks = hook_tables(self.module)
        self._of_parts = [table for part in parts for table in (part._parameters, part._buffers)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A process that was forked since has none of the threads that plans and torch began.
        if self._process not in (0, os.getpid()):
            self._say("it runs as it is in a process that was forked from the one that decided")
            return self._plain.call(*args, **kwargs)
        key = None if calls_are_observed() else self._key(args, kwargs)
        decision = self._plain if key is None else self._decisions.get(key)
        if decision is None:
            decision = self.decide(key, args, kwargs)
        # Hooks see the calls of the module's parts, which only the module's own call makes.
        if decision.name == EAGER or any(self._hooks):
            return self._plain.call(*args, **kwargs)
        if decision.state is None:
            try:
                return decision.call(*args, **kwargs)
            except Exception as error:
                # What the module itself raises is its user's to see.
                if not isinstance(error, compile_errors()):
                    raise
                self._say(f"torch cannot compile it, so it runs as it is: {line_of(error)}")
            self._decisions[key] = self._plain
            return self._plain.call(*args, **kwargs)
        if decision.state.holds():
            try:
                return decision.call(*args, **kwargs)
            # Whatever a plan fails at, the module may be able to do.
            except Exception as error:
                self._say(f"a plan of it is given up: {line_of(error)}")
        else:
            self._say("it was changed, so its calls are decided anew")
        # The module has other tensors or values now, or the input is wrong, and the module's own
        # call raises the error that its user knows.
        self._decisions.pop(key, None)
        self._seen.pop(key, None)
        self._changes += 1
        if decision.step is not None:
            decision.step.close()
        return self._plain.call(*args, **kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The key of a call; None if it has arguments that cannot be compared. Its first
        entry says whether the call needs gradients."""
        requiring: list[Tensor] = []
        met: list[int] = []
        try:
            given = key_of(args, requiring, met), key_of(kwargs, requiring, met)
        except OpaqueArgumentError:
            return None
        # The tensors that the module has at this call, which may be lent to it.
        needs = torch.is_grad_enabled() and (
            bool(requiring)
            or any(
                tensor is not None and tensor.requires_grad
                for table in self._of_parts
                for tensor in table.values()
            )
        )
        casts = torch.is_autocast_enabled("cpu")
        return (
            needs,
            # f(x, x) may be another graph than f(x, y).
            (given, tuple(map(met.index, met)) if len(set(met)) < len(met) else ()),
            torch.is_inference_mode_enabled(),
            self.module.training,
            torch.get_autocast_dtype("cpu") if casts else None,
            torch.get_default_dtype(),
        )

    def decide(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallDecision:
        """Decide how calls of this key run, if it is time to."""
        why = ""
        if any(self._hooks):
            why = "it has hooks, and runs as it is while it has them"
        elif self._changes >= MOST_CHANGES:
            why = f"plans of it ended {MOST_CHANGES} times, so it runs as it is from now on"
        elif len(self._decisions) >= MOST_KEYS:
            why = f"calls of more than {MOST_KEYS} keys run as they are"
        if why:
            self._say(why)
            return self._plain
        if len(self._seen) < 16 * MOST_KEYS:
            self._seen[key] += 1
        is_early = self._decided and self._seen[key] < DECIDED_AT_CALL
        # While one thread decides, others call the module as it is.
        if is_early or not self._deciding.acquire(blocking=False):
            return self._plain
        module, decision = self.module, self._plain
        try:
            self._look_at_parts()
            if any(self._hooks):
                return decision
            # Other parts may need gradients.
            key = self._key(args, kwargs)
            self._decided += 1
            self._process = os.getpid()
            # What captures, compiles or copies the module sees it as it is.
            replace_call(module, None)
            found = self.found(key, args, kwargs)
            if found.state is not None and not found.state.holds():
                if found.step is not None:
                    found.step.close()
                raise UsageError("optimize", "it changed while its calls were decided")
            decision = found
        # The user's program goes on whatever fails here. What its own code raises it raises again,
        # when the module is called as it is.
        except Exception as error:
            self._say(f"it runs as it is: {line_of(error)}")
        finally:
            # Meanwhile its user may have compiled it, or optimized it otherwise.
            if replaced_call(module) is None:
                replace_call(module, self)
            self._deciding.release()
        if decision.state is not None:
            decision.state = ModuleState(module)
        told = ", ".join(f"{way} {format_seconds(s)}" for way, s in decision.seconds.items())
        _log.info("%s runs by %s (%s)", type(module).__name__, decision.name, told or "unmeasured")
        self._decisions[key] = decision
        return decision

    def found(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallDecision:
        """The decision about a key, from the disk or by measuring. Raises a `DovetailError` where
        nothing can be measured."""
        module, needs, ends = self.module, key[0], clock() + self.settings[1]
        tensors = (*module.parameters(), *module.buffers(), *flatten((args, kwargs))[0])
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise UsageError("optimize", "its tensors are not all on the CPU")
        if is_keras(module) or unwrap(module) is not module:
            raise UsageError(
                "optimize", f"a {type(module).__name__} runs its module in its own way"
            )
        path, kind = self.record_path(key), runner_kind()
        kept = None if path is None or self._again else read_record(path, self._plain.call)
        if kept is not None and kept.name == EAGER:
            return kept
        decision, is_pure = None, False
        if not needs and (kept is None or kept.way == PLACED):
            decision, is_pure = self.planned(args, kwargs)
        if decision is None:
            is_known = kept is not None and kept.way != PLACED
            decision = kept if is_known else self.raced(args, kwargs, needs, ends)
        assert decision is not None, "a record of this way is a decision"
        if decision.way == COMPILED:
            decision.call = self.compiled()
        if decision.threads:
            decision.call = partial(on_threads, decision.threads, decision.call)
        if is_pure and decision.name != EAGER:
            planned = decision
            decision = None
            try:
                races = kept is None
                decision = self.beside_plain(planned, args, kwargs, races=races, ends=ends)
            finally:
                if planned.step is not None and decision is not planned:
                    planned.step.close()
        # A decision that waited for the runner had less time than the next process will have.
        if path is not None and kept is None and kind == runner_kind():
            record = {name: getattr(decision, name) for name in ("way", "threads", "seconds")}
            with suppress(OSError, UnwritableError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(record))
        return decision

    def planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallDecision | None, bool]:
        """(the faster of its plan and the user's own ways as planning measured them, whether calls
        neither write, draw nor leave anything); None if the module has no plan."""
        module, (machine, whole_seconds, quick) = self.module, self.settings
        state = ModuleState(module)
        try:
            with torch.inference_mode(False):
                step = capture_call(module, args, kwargs)
        except (CaptureError, ModelError) as error:
            self._say(f"it has no plan: {error.line}")
            return None, False
        calls = [call for call in step.program.calls if call is not None]
        is_opaque = state.is_opaque
        draws, writes = any(call.random for call in calls), any(call.in_place for call in calls)
        if draws or writes or step.plain is None or is_opaque:
            why = "its calls draw random numbers" if draws else "its calls write to its tensors"
            why = "what its parts hold cannot be compared from call to call" if is_opaque else why
            self._say(f"it has no plan: {why}")
            return None, False
        # The same number each time, by which the plan is found again.
        beside = max((1 - PLANNING_SHARE) * whole_seconds, LEAST_BESIDE_SECONDS)
        seconds = max(1.0, whole_seconds - beside)
        # Planning runs in no mode of the caller's; what was captured has their effect already.
        with torch.inference_mode(False), torch.enable_grad(), without_autocast():
            found = plan(
                step,
                machine,
                budget=f"{seconds:.3g}s",
                quick=quick,
                again=self._again,
            )
            if found.notes and found.notes[0].startswith(NOT_REACHED):
                missed = found.notes[0].partition(";")[0]
                more = "a longer budget" if self._again else "again=True, or a longer budget,"
                self._say(f"{missed}; {more} reaches more")
            measured = dict(found.measured)
            if FOUND_BEFORE in found.notes:
                # Torch may have to compile it again, for as long as it takes.
                measured.pop(COMPILED, None)
            if found.way != PLACED:
                # Never on more than the caller has set.
                threads = found.machine.devices[0].op_threads
                threads = threads if threads < torch.get_num_threads() else 0
                return CallDecision(found.way, self._plain.call, measured, threads=threads), True
            placed = run(found, step, in_place=True)
            # The tensors of the first call are the caller's to free.
            signature = replace(placed.captured.signature, inputs=(), targets=())
            placed.captured = replace(placed.captured, signature=signature)
        return CallDecision(PLACED, placed.step, measured, placed, state), True

    def raced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], needs: bool, ends: float
    ) -> CallDecision:
        """The faster of the module as it is and `torch.compile`, each in a process of its own,
        which can be ended while it compiles. Where the call needs gradients, those of a sum of its
        results are computed, too."""
        module, quick = self.module, self.settings[2]
        plain = CallDecision(EAGER, self._plain.call)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if quick or not has_compiler() or ends - clock() < LEAST_SECONDS or (needs and not trained):
            return plain
        casts = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if casts else None
        # No graph is needed to run the step as its user does.
        nothing: Any = np.empty(0, np.int32)
        graph = Graph(
            names=(), kinds=(), signatures=(), phases=nothing, producers=nothing, shapes=(),
            strides=(), dtypes=(), tensor_bytes=nothing, storages=nothing,
            input_offsets=np.zeros(1, np.int32), input_tensors=nothing,
        )  # fmt: skip
        step = Captured(
            graph=graph,
            program=Program((), (), -1, ()),
            source=Source(type(module).__name__, "", (), torch.__version__),
            module_of=lambda: module,
            signature=Signature.of(module, args, kwargs, ()),
            plain=PlainStep(sum_of_results, SGD(1e-9), dtype)
            if needs
            else PlainStep(None, None, dtype),
        )
        machine = with_threads(self.here, torch.get_num_threads())
        with ExitStack() as stack:
            timers: dict[str, Timer] = {}
            for way in (COMPILED, EAGER):
                network = PlainNetwork(step, machine, mode=MODES[way], apart=True)
                stack.callback(network.close)
                network.feed(step.inputs)
                network.send_first()
                while not network.has_begun(_LOOK_SECONDS):
                    if way == COMPILED and clock() > ends:
                        self._say(f"{COMPILED} took longer than the budget, and was ended")
                        return plain
                timers[way] = timer_of(network.step_seconds)
            seconds = in_turns(timers, BESIDE, calls=1)
        decision = CallDecision(COMPILED, self._plain.call, medians_of(seconds))
        return decision if gains(seconds, COMPILED) else replace(decision, way=EAGER)

    def compiled(self) -> Callable[..., Any]:
        """The module's own call by `torch.compile`."""
        if self._compiled is None:
            # torch counts compilations of a code object, so each module has one of its own. Also
            # the backward pass, which is compiled later, finds what was compiled for this.
            use_own_cache()
            plain = self._plain.call

            def call(*args: Any, **kwargs: Any) -> Any:
                return plain(*args, **kwargs)

            code = call.__code__.replace()
            own = FunctionType(code, call.__globals__, closure=call.__closure__)
            self._compiled = torch.compile(own)
        return self._compiled

    def beside_plain(
        self,
        decision: CallDecision,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        races: bool,
        ends: float,
    ) -> CallDecision:
        """The decision, or to run the module as it is, if that is as fast here as what was decided,
        or if a plan computes something else or leaves out what a call changes. Where it is close,
        `torch.compile` runs beside a plan, too."""
        plain, before, began = self._plain.call, ModuleState(self.module), clock()
        wanted = plain(*args, **kwargs)
        is_long = clock() - began > LONG_CALL_SECONDS
        if not before.holds():
            # Measuring would change more of the module than the user's own calls do.
            if decision.way != PLACED:
                return decision
            raise UsageError("optimize", "each call changes its attributes, which a plan does not")
        if decision.way == PLACED and not agree(decision.call(*args, **kwargs), wanted):
            raise UsageError("optimize", "its plan computes other results")
        if not races:
            return decision
        name, seconds = decision.name, decision.seconds
        calls = {EAGER: plain, name: decision.call}
        is_close = seconds.get(COMPILED, inf) < CLOSE * seconds.get(PLACED, 0.0)
        if decision.way == PLACED and is_close and ends - clock() > LEAST_SECONDS:
            compiled = self.compiled()
            # What it needs was compiled while the call was planned. Its failure is no reason to
            # lose the plan.
            with suppress(Exception):
                if agree(compiled(*args, **kwargs), wanted):
                    calls[COMPILED] = compiled
        timers: dict[str, Timer] = {
            way: partial(seconds_of, partial(call, *args, **kwargs)) for way, call in calls.items()
        }
        rounds = in_turns(timers, BESIDE, calls=is_long, warm_ups=not is_long)
        medians = medians_of(rounds)
        seconds.update(medians)
        if medians.get(COMPILED, inf) < medians[name]:
            decision = CallDecision(COMPILED, calls[COMPILED], seconds)
        return decision if gains(rounds, decision.name) else CallDecision(EAGER, plain, seconds)

    def record_path(self, key: Any) -> Path | None:
        """Where the decision about a key is kept; None if it cannot be said what it depends on.

        What a plan computes never depends on it: the module is captured in each process.
        """
        module, (_, seconds, quick) = self.module, self.settings
        try:
            sources = {
                part.code if isinstance(part, fx.GraphModule) else inspect.getsource(type(part))
                for part in module.modules()
            }
            tensors = (*module.named_parameters(), *module.named_buffers())
            shapes = [(name, value.shape, value.dtype) for name, value in tensors]
            parts = (
                sorted(sources), repr(module), shapes, key, seconds, quick,
                [(device.model, device.cores) for device in self.here.devices],
                torch.get_num_threads(), torch.__version__, version("dovetail"), has_compiler(),
                runner_kind(),
            )  # fmt: skip
            digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        # A class may be from no file, and its texts are the user's own code.
        except Exception:
            return None
        return cache_folder() / "ways" / f"{digest}.json"

    def _say(self, text: str) -> None:
        """Log it, once."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s: %s", type(self.module).__name__, text)


class ModuleState:
    """The Python values that the parts of a module hold, and those within these: lists, dicts and
    attributes of objects; the numbers of tensors among them, and the code of the parts' classes.

    is_opaque   there are values that may change unseen, or too many
    """

    def __init__(self, module: nn.Module) -> None:
        self.is_opaque = False
        self._tables: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._empty: list[Any] = []  # of all of these
        self._slots: list[tuple[Any, str, Any]] = []
        self._versions: list[tuple[Tensor, int, int]] = []
        # Tensors that the module is given later are the plan's own business.
        self._tensors: list[tuple[dict[str, Any], list[Any]]] = []
        self._runner = native_runner()
        most = _MOST_IN_PYTHON if self._runner is None else _MOST_TABLES
        kinds = {type(part) for part in module.modules()}
        self._slots += [(kind, "forward", kind.forward) for kind in kinds]
        waiting: list[Any] = []
        seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for part in module.modules():
            tables = [t for t in (part._parameters, part._buffers) if isinstance(t, dict)]
            self.is_opaque |= len(tables) < 2  # of TorchScript
            self._tensors += [(table, list(table.values())) for table in tables if table]
            self._empty += [table for table in tables if not table]
            seen |= {id(part), *map(id, tables)}
            waiting.append(vars(part))
        self._tied = self._ties()
        while waiting and not self.is_opaque:
            value = waiting.pop()
            kind = type(value)
            if kind in _LEAVES or id(value) in seen or isinstance(value, _FIXED):
                continue
            seen.add(id(value))
            if kind is Tensor or kind is nn.Parameter:
                if value.is_inference() or value.layout is not torch.strided or value.is_nested:
                    self.is_opaque = True
                else:
                    self._versions.append((value, value._version, value.data_ptr()))
                continue
            if isinstance(value, (dict, *_WALKED[1:6])) and not value:
                self._empty.append(value)
            elif isinstance(value, dict):
                self._tables.append((value, tuple(value), tuple(value.values())))
                waiting += (*value, *value.values())
                if kind is not dict:
                    # It may have another order than C sees.
                    self._lists.append((value, tuple(value)))
            elif isinstance(value, _WALKED[1:6]):
                # What a tuple holds stays the same objects.
                if kind is not tuple and kind is not frozenset:
                    self._lists.append((value, tuple(value)))
                waiting += value
            elif isinstance(value, MethodType):
                waiting.append(value.__self__)
            elif isinstance(value, partial):
                waiting += value.func, value.args, value.keywords
            members = [
                each.__name__
                for base in kind.__mro__
                for each in vars(base).values()
                if isinstance(each, MemberDescriptorType)
            ]
            self._slots += [(value, name, getattr(value, name, None)) for name in members]
            waiting += [held for _, _, held in self._slots[len(self._slots) - len(members) :]]
            # Those of torch for hooks have none but when it is asked for.
            if kind is not OrderedDict and hasattr(value, "__dict__"):
                waiting.append(value.__dict__)
            if isinstance(value, nn.Module):
                self._slots.append((kind, "forward", kind.forward))
            # An object of a class in C may be larger than what is seen of it.
            pointers = 2 + len(members) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
            is_seen = isinstance(value, _WALKED) or kind.__basicsize__ <= pointers * _POINTER_BYTES
            self.is_opaque |= not is_seen or isinstance(value, _HIDDEN)
            looked_at = sum(map(len, (self._tables, self._empty, self._lists, self._slots)))
            self.is_opaque |= looked_at > most
        self._dicts = [table for table, _, _ in self._tables]
        self._dicts += [table for table, _ in self._tensors]
        self._entries = self._taken()

    def _taken(self) -> list[tuple[Any, ...]]:
        """(key, value, key, value, ...) of each table."""
        return [tuple(chain.from_iterable(dict.items(table))) for table in self._dicts]

    def holds(self) -> bool:
        """True if the module has the same values still."""
        try:
            if self._runner is not None and self._runner.hold(self._dicts, self._entries):
                return self._has_like_parts()
            entries = self._taken() if self._runner is not None else []
            if not (self._has_like_parts() and self._has_like_tensors()):
                return False
            for table, keys, values in self._tables:
                is_same = all(map(is_, table.values(), values)) and all(map(is_, table, keys))
                if len(table) != len(keys) or not (
                    is_same or (alike(tuple(table), keys) and alike(tuple(table.values()), values))
                ):
                    return False
            # The next time equal values are the same ones.
            self._entries = entries
        # Another thread may change what is looked at.
        except Exception:
            return False
        return True

    def _has_like_parts(self) -> bool:
        """True if lists, and attributes in slots, hold what is alike, and nobody wrote to a tensor
        that is none of the module's own."""
        if any(self._empty):
            return False
        for items, values in self._lists:
            is_same = len(items) == len(values) and all(map(is_, items, values))
            if not is_same and not alike(tuple(items), values):
                return False
        for value, name, held in self._slots:
            if not alike(getattr(value, name, None), held):
                return False
        return all(
            tensor._version == number and tensor.data_ptr() == place
            for tensor, number, place in self._versions
        )

    def _has_like_tensors(self) -> bool:
        """True if the parameters and buffers, which may be others by now, are as many, of the same
        types, and tied as they were."""
        is_changed = False
        for tensors, known in self._tensors:
            if not all(map(is_, tensors.values(), known)) or len(tensors) != len(known):
                now = list(tensors.values())
                if [type(value) for value in now] != [type(value) for value in known]:
                    return False
                known[:] = now
                is_changed = True
        # A tensor in two places is one in a plan.
        return not is_changed or self._ties() == self._tied

    def _ties(self) -> list[int]:
        """For each parameter and buffer, the first place at which the same stands."""
        first: dict[int, int] = {}
        tensors = [value for _, known in self._tensors for value in known]
        return [first.setdefault(id(value), place) for place, value in enumerate(tensors)]


_LEAVES = {
    bool, int, float, complex, str, bytes, range, type(None), type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format,
}  # fmt: skip
_WALKED = dict, list, tuple, set, frozenset, deque, MethodType, partial
_HIDDEN = Tensor, np.ndarray, torch.Generator
_POINTER_BYTES = object.__basicsize__ // 2
_FIXED = (
    type, FunctionType, BuiltinFunctionType, MethodDescriptorType, ModuleType, re.Pattern, PurePath,
    np.generic, np.dtype, np.ufunc, ref, logging.Logger, inspect.Signature, fx.Graph, OpOverload,
    OptimizedCalls,
)  # fmt: skip
"""What does not change, or whose changes are none of what a module computes. An `fx.Graph` becomes
code, which its module's class holds."""


def alike(value: Any, other: Any) -> bool:
    """True for the same object, and for equal ones of a type whose values never change. 1, 1.0 and
    True differ, and so do 0.0 and -0.0."""
    if value is other:
        return True
    kind = type(value)
    if kind is not type(other):
        return False
    if kind is tuple or kind is torch.Size:
        return len(value) == len(other) and all(map(alike, value, other))
    if kind is MethodType:
        return value.__self__ is other.__self__ and value.__func__ is other.__func__
    return kind in _LEAVES and repr(value) == repr(other)


class OpaqueArgumentError(Exception):
    """An argument of which no key can be made."""


def key_of(value: Any, requiring: list[Tensor], met: list[int] | None = None) -> Any:
    """What a plan holds constant of an argument, as a key. Tensors that require gradients are added
    to `requiring`, and the identities of all to `met`. Raises `OpaqueArgumentError`."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise OpaqueArgumentError
        if met is not None:
            met.append(id(value))
        if value.requires_grad:
            requiring.append(value)
        lazy = value.is_neg(), value.is_conj()
        return value.shape, value.dtype, value.stride(), value.device, value.requires_grad, lazy
    if kind is tuple or kind is list:
        return kind, *[key_of(each, requiring, met) for each in value]
    if kind is dict:
        return kind, *value, *[key_of(each, requiring, met) for each in value.values()]
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    if kind is float:
        return kind, repr(value)
    if kind in _CONSTANTS:
        return kind, value
    raise OpaqueArgumentError


_CONSTANTS = {bool, int, str, type(None), torch.dtype, torch.device, torch.Size}


def sum_of_results(output: Any) -> Tensor:
    """A loss that needs the gradient of each result of a module."""
    results = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]
    sums = [
        value.abs().sum() if value.is_complex() else value.sum()
        for value in results
        if value.requires_grad
    ]
    return torch.stack([value.float() for value in sums]).sum()


def agree(result: Any, wanted: Any) -> bool:
    """True if two results have the same structure, and tensors of the same shapes, dtypes and, but
    for rounding, numbers."""
    tensors, _, template = flatten(wanted)
    try:
        own = matched(template, result)
    except Mismatch:
        return False
    casts = torch.is_autocast_enabled("cpu")
    for value, other in zip(own, tensors, strict=True):
        if value.shape != other.shape or value.dtype != other.dtype:
            return False
        if torch.is_grad_enabled() and value.requires_grad != other.requires_grad:
            return False
        if not (value.is_floating_point() or value.is_complex()):
            if not torch.equal(value, other):
                return False
            continue
        is_half = value.dtype in (torch.float16, torch.bfloat16)
        share = _AGREES_IN_HALF if casts or is_half else _AGREES
        if value.is_complex():
            value, other = torch.view_as_real(value), torch.view_as_real(other)
        value, other = value.detach().double(), other.detach().double()
        largest = (
            float(other.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if other.numel() else 0
        )
        if not torch.allclose(value, other, rtol=0.0, atol=share * largest, equal_nan=True):
            return False
    return True


def on_threads(threads: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call's result, with ops on so many threads, or as many as are set if these are fewer."""
    with op_threads(min(threads, torch.get_num_threads())):
        return call(*args, **kwargs)


def gains(seconds: Mapping[str, Sequence[float]], way: str) -> bool:
    """True if the way is faster than the module as it is by `GAIN`, by the median of the rounds'
    ratios and by the ratio of the medians."""
    medians = medians_of(seconds)
    ratios = ratios_of(seconds[way], seconds[EAGER])
    return max(median(ratios), medians[way] / medians[EAGER]) < 1 - GAIN


def medians_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Way -> its median seconds."""
    return {way: median(of_way) for way, of_way in seconds.items()}


def read_record(path: Path, call: Callable[..., Any]) -> CallDecision | None:
    """A decision that was kept, with the module's own call until its way is ready; None if there is
    none that can be read."""
    try:
        record = read_json(path)
        way, threads = record["way"], record["threads"]
        seconds = {str(key): float(value) for key, value in record["seconds"].items()}
        if way in (EAGER, COMPILED, PLACED) and int(threads) in range((os.cpu_count() or 1) + 1):
            return CallDecision(way, call, seconds, threads=int(threads))
    except (FileFormatError, KeyError, TypeError, ValueError, AttributeError):
        pass
    return None
