"""Runs a step as its user would run it without a plan, eager or by `torch.compile`.

    caller                               all cores: the caller's own process, else one of its own
    load ── module, signature ─────────► `PlainModule`
    feed ── inputs and targets ────────► of the next steps
    step ──────────────────────────────► step ──► seconds, result
    time_steps ────────────────────────► steps ─► seconds of each
    state, set_state ◄─────────────────► parameters, buffers, optimizer state

Nothing of ours touches the computation: it has torch's own defaults, but for the number of threads.
On a GPU the module is moved there, and each step's inputs are copied there, as a plan copies them;
a step ends when the GPU has ended.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dovetail.errors import ProcessDiedError, ProcessError, UsageError, WorkerDiedError, WorkerError
from dovetail.executors.loaded import LoadedStep, StateName, check_steps, seconds_of_call
from dovetail.executors.workers import LocalWorker, check_here, is_this_process
from dovetail.frontends.interpret import seed_for, source_value
from dovetail.frontends.plain import GRAPHS, PlainModule
from dovetail.frontends.program import Captured, PlainStep, Ref, Signature
from dovetail.frontends.recording import is_fake
from dovetail.frontends.structures import leaves, substitute
from dovetail.machine import Machine
from dovetail.plans import COMPILED, EAGER, REDUCED
from dovetail.runtime.cuda import MakeCuda, cuda_maker
from dovetail.runtime.files import own_cache
from dovetail.runtime.neighbours import Neighbours
from dovetail.runtime.parcels import Parcel, pack_parcel, unpack_parcel
from dovetail.runtime.processes import Worker, launch
from dovetail.runtime.setup import op_threads, rest_openmp
from dovetail.runtime.shared import Block
from dovetail.runtime.timers import clock
from dovetail.runtime.user_code import UserCode
from dovetail.timeline import Timeline

MODES = {EAGER: "", COMPILED: "default", REDUCED: GRAPHS}
"""Way to run the step -> the mode of `torch.compile`; "": it is not compiled."""
ENTRY = "dovetail.executors.plain:PlainProcess"
"""What lives in the process, as `launch` takes it."""
State = tuple[dict[str, Tensor], dict[str, Tensor]]  # of the module, of the optimizer


class ServedPlain:
    """The module at work, with the tensors of its next steps.

    draws   steps draw random numbers, by a seed of each
    """

    def __init__(self, *, draws: bool = True) -> None:
        self._plain: PlainModule | None = None
        self._cuda: Any = None
        self._device: Any = None
        self.tensors: tuple[Tensor, ...] = ()
        self.draws = draws

    @property
    def infers(self) -> bool:
        """True if steps run in inference mode by themselves."""
        return self._plain is not None and self._plain.infers

    @property
    def plain(self) -> PlainModule:
        """The module."""
        assert self._plain is not None, "it was loaded before"
        return self._plain

    def load(
        self,
        parcel: Parcel,
        mode: str,
        seed: int,
        torch_device: str,
        make_cuda: MakeCuda,
        descriptor: int,
    ) -> None:
        """Make the module of the parcel in the block of this descriptor, which is taken over."""
        self._cuda = make_cuda() if torch_device else None
        self._device = self._cuda.device(torch_device) if self._cuda is not None else None
        with own_cache() if mode else nullcontext():
            try:
                module, signature, step = unpack_parcel(parcel, descriptor)
            finally:
                os.close(descriptor)
            if not isinstance(module, nn.Module):  # what makes it
                self._seed_torch(seed)
                module = module()
            if self._device is not None:
                module.to(self._device)
            self.use(module, signature, step, mode, seed)

    def use(
        self, module: nn.Module, signature: Signature, step: PlainStep, mode: str, seed: int
    ) -> None:
        """Take this module itself."""
        self._seed = seed
        # Code is compiled in the first steps.
        self._steps_in_cache = _STEPS_THAT_COMPILE if mode else 0
        self._plain = PlainModule(module, signature, step, mode=mode)

    def feed(self, tensors: tuple[Tensor, ...]) -> None:
        """Take the inputs and targets of the next steps."""
        self.tensors = tensors

    def step(self, number: int, returns: bool) -> tuple[float, Any]:
        """Run one step: (seconds, result, or None unless `returns`)."""
        began = clock()
        result = self.run(number)
        return clock() - began, result if returns else None

    def time_steps(self, number: int, count: int) -> list[float]:
        """[count] seconds of steps from that number on, timed as a user has them."""
        numbers = range(number, number + count)
        return [seconds_of_call(partial(self.run, each)) for each in numbers]

    def state(self) -> State:
        return self.plain.module.state_dict(), self.plain.optimizer_state()

    def set_state(
        self, of_module: dict[str, Tensor] | None, of_optimizer: dict[str, Tensor] | None
    ) -> None:
        """Replace the module's state or the optimizer's, where it is not None."""
        if of_module is not None:
            # A step may have left tensors of inference mode in buffers.
            with torch.inference_mode(self.plain.infers):
                self.plain.module.load_state_dict(of_module)
        if of_optimizer is not None:
            self.plain.set_optimizer_state(of_optimizer)

    def pause(self) -> None:
        """Do nothing: the module runs as its user would run it, whatever other programs do."""

    def close(self) -> None:
        """Forget the module."""
        self._plain, self.tensors = None, ()

    def run(self, number: int, ordinary: bool = True) -> Any:
        """The result of one step, on the device that it has run on; see `PlainModule.step`."""
        plain, tensors = self.plain, self.tensors
        if self.draws:
            self._seed_torch(seed_for(self._seed, number, -1))
        if self._device is not None:
            tensors = tuple(tensor.to(self._device) for tensor in tensors)
        with UserCode("a step of the model", plain.module):
            if self._steps_in_cache:
                self._steps_in_cache -= 1
                with own_cache():
                    result = plain.step(tensors, ordinary=ordinary)
            else:
                result = plain.step(tensors, ordinary=ordinary)
        if self._cuda is not None:
            self._cuda.synchronize(self._device)
        return result

    def _seed_torch(self, seed: int) -> None:
        if self._device is None:
            # torch.manual_seed would seed the GPUs that the caller may use, too.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)


class PlainProcess(ServedPlain):
    """What lives in the step's own process.

    threads         on which each op runs
    default_dtype   torch's, in the caller's process
    """

    def __init__(self, threads: int, default_dtype: torch.dtype) -> None:
        super().__init__()
        torch.set_num_threads(threads)
        torch.set_default_dtype(default_dtype)

    def use_threads(self, threads: int) -> None:
        """Run each op on so many threads from now on."""
        torch.set_num_threads(threads)

    def fill_main(self) -> None:
        """Give `__main__` the names that the user's functions know, where these come from a script.

        The script does not run here: its classes travel by value, with the names that they use.
        `torch.compile` looks these up in the module of a function's class, which is `__main__`.
        """
        classes = {cls for part in self.plain.module.modules() for cls in type(part).__mro__}
        functions = [f for cls in classes for f in vars(cls).values()] + [self.plain.loss]
        names = vars(sys.modules["__main__"])
        for function in functions:
            if isinstance(function, FunctionType) and function.__module__ == "__main__":
                for name, value in function.__globals__.items():
                    names.setdefault(name, value)

    # A tensor that is sent would take a GPU's memory or a larger storage with it.

    def step(self, number: int, returns: bool) -> tuple[float, Any]:
        seconds, result = super().step(number, returns)
        return seconds, substitute(result, Tensor, lambda tensor: _alone(tensor.cpu()))

    def state(self) -> State:
        found: State = substitute(super().state(), Tensor, lambda tensor: _alone(tensor.cpu()))
        return found


_STEPS_THAT_COMPILE = 3
"""`torch.compile` may compile in this many first steps; its cache is our own folder meanwhile."""


class PlainNetwork(LoadedStep):
    """A step at work as its user would run it.

    machine    of one device, whose cores and threads the step has, or a GPU
    mode       of `torch.compile`, whose first step compiles; "": eager
    seed       seeds the weights if the captured module is fake, and each step's random numbers
    apart      a process of its own runs the step even where this one could. It can be killed while
               it compiles, and its steps count as if this process ran them
    in_place   this process runs the step, with the captured module itself instead of a copy
    threads    on which each op runs now

    Raises `UsageError` if the step has no plain form, or if it cannot be copied.
    """

    def __init__(
        self,
        captured: Captured,
        machine: Machine,
        *,
        mode: str = "",
        seed: int = 0,
        apart: bool = False,
        in_place: bool = False,
    ) -> None:
        (self.device,) = machine.devices
        check_here(self.device)
        super().__init__(captured, seed)
        self.machine, self.mode = machine, mode
        self.threads = self.device.op_threads
        self._may_return_own = _may_return_own(captured)
        is_local = is_this_process(machine)
        # Of a step that this process would run, its own process counts the seconds.
        self._times_itself = is_local and apart
        if in_place and not is_local:
            says = f"is {machine.name}; only a step on all cores as one device works in place"
            raise UsageError("machine", says)
        packed = None if in_place else _pack(captured)
        self._block: Block | None = None if packed is None else packed[1]
        threads = self.device.op_threads or len(os.sched_getaffinity(0))
        self._local: ServedPlain | None = None
        self._process: Worker | LocalWorker
        if is_local and not apart:
            draws = any(call is not None and call.random for call in captured.program.calls)
            self._local = ServedPlain(draws=draws)
            self._process = LocalWorker(self.device.name, threads, self._local)
        else:
            self._process = launch(
                ENTRY,
                cores=self.device.cores,
                threads=threads,
                name=self.device.name,
                spins_briefly=False,
            )
        try:
            if isinstance(self._process, Worker):
                self._process.post("make", threads, torch.get_default_dtype())
            if packed is None:
                check_plain(captured)
                own = captured.module, captured.signature, captured.plain
                self._ask("use", *own, mode, seed)
            else:
                parcel, block = packed
                load = parcel, mode, seed, self.device.torch_device, cuda_maker()
                self._ask("load", *load, files=(block.descriptor,))
            if isinstance(self._process, Worker):
                self._ask("fill_main")
        except BaseException:
            self._release("it could not be started", kill=True)
            raise

    @property
    def pid(self) -> int:
        """The process that runs the step."""
        return self._process.pid

    def _take(self, tensors: Sequence[Tensor]) -> None:
        if self._local is not None:
            self._local.tensors = tuple(tensor.detach() for tensor in tensors)
            return
        with op_threads(1):
            self._process.post("feed", tuple(map(_alone, tensors)))
        rest_openmp()

    def begin(self) -> float:
        """Run the first step, which compiles, and return its seconds."""
        return self._advance()[0]

    def send_first(self) -> None:
        """Ask for the first step without waiting for it; `has_begun` tells of its end."""
        self._ask_step(returns=False)

    def has_begun(self, timeout_seconds: float) -> bool:
        """True as soon as the step that `send_first` asked for has ended."""
        try:
            self._reach(partial(self._process.receive, timeout_seconds))
        except TimeoutError:
            return False
        return True

    def set_threads(self, threads: int) -> None:
        """Run each op on this many threads from now on."""
        self._check_open()
        if threads != self.threads:
            self._ask("use_threads", threads)
            self.threads = threads

    def step_seconds(self, steps: int = 10) -> NDArray[np.float64]:
        if not self._times_itself:
            return super().step_seconds(steps)
        check_steps(steps)
        self._check_open()
        if self.fed is None:
            self.feed()
        self._reach(partial(self._process.begin, "time_steps", self.steps, steps))
        self.steps += steps
        try:
            return np.array(self._reach(self._process.receive)[1:])
        except KeyboardInterrupt:
            # The process may yet answer, and the next request would take that for its own.
            self._release("a measurement was interrupted", kill=True)
            raise

    def _run_step(self) -> Any:
        return self._advance(returns=True)[1]

    def _neighbours(self) -> Neighbours:
        pids = (self.pid,) if isinstance(self._process, Worker) else ()
        return Neighbours(self.device.cores, pids)

    def timeline(self) -> Timeline:
        """The timeline of one more step. It knows how long the step takes, and of no op."""
        seconds = seconds_of_call(self._step_on_fed)
        none, nothing = np.empty(0, np.int32), np.empty(0)
        return Timeline(
            self.machine.device_names, self.machine.channels, none, none, nothing, nothing,
            none, none, none, none, none, nothing, nothing, (nothing,), (np.empty(0, np.int64),),
            seconds,
        )  # fmt: skip

    def _copies(self, what: StateName) -> dict[str, Tensor]:
        module, optimizer = self._ask("state")
        found: dict[str, Tensor] = module
        if what == "optimizer_state_dict":
            found = _initial_state(self.captured) | optimizer
        if self._local is not None:
            found = substitute(found, Tensor, lambda tensor: tensor.detach().clone())
        return found

    def _values(self, what: StateName) -> dict[str, Tensor]:
        if what == "state_dict":
            examples: dict[str, Tensor] = self.captured.module.state_dict()
            return examples
        return _initial_state(self.captured)

    def _put(self, what: StateName, state: dict[str, Tensor]) -> None:
        given = {name: _alone(tensor) for name, tensor in state.items()}
        self._ask("set_state", *((given, None) if what == "state_dict" else (None, given)))

    def _end(self, *, kill: bool) -> None:
        # In the middle of a compilation the process would not see that its channel is closed.
        self._release("it was closed", kill=kill or bool(self.mode))

    def _advance(self, *, returns: bool = False) -> tuple[float, Any]:
        """Run one step: (seconds, result)."""
        local, began = self._local, clock()
        try:
            if local is None or not returns:
                self._ask_step(returns)
                found: tuple[float, Any] = self._reach(self._process.receive)
                return found
            # A short step feels each line between the caller and the module, because the caller's
            # own work has driven them out of the processor's caches.
            self._check_open()
            assert isinstance(self._process, LocalWorker), "it serves what runs here"
            number, self.steps = self.steps, self.steps + 1
            ordinary = not torch.is_inference_mode_enabled()
            self._process.answer(local.run, number, ordinary)
            result = self._reach(self._process.receive)
        except KeyboardInterrupt:
            # Some of its parameters may have changed, and its process may yet answer.
            self._release("a step was interrupted", kill=True)
            raise
        seconds = clock() - began
        return seconds, substitute(result, Tensor, self._given) if self._may_return_own else result

    def _given(self, tensor: Tensor) -> Tensor:
        """A tensor of a result as the caller's own, and not the module's memory, which the next
        step may change."""
        assert self._local is not None, "it has run the step"
        tensor = tensor.detach()
        return tensor.clone() if self._local.plain.owns(tensor) else tensor

    def _ask_step(self, returns: bool) -> None:
        self._check_open()
        if self.fed is None:
            self.feed()
        self._reach(partial(self._process.begin, "step", self.steps, returns))
        self.steps += 1

    def _ask(self, method: str, *arguments: object, files: Sequence[int] = ()) -> Any:
        """What the process's method returns; raises as `_reach` does."""
        self._reach(partial(self._process.begin, method, *arguments, files=files))
        return self._reach(self._process.receive)

    def _reach(self, call: Callable[[], Any]) -> Any:
        """What a call of the process's handle returns. An error of the process is raised here, and
        closes this."""
        try:
            return call()
        except ProcessDiedError as error:
            self._release("its process died", kill=True)
            raise WorkerDiedError(self.device.name, "", error.status) from None
        except ProcessError as error:
            self._release("a step failed", kill=True)
            raise WorkerError(self.device.name, "", error.traceback, error.said) from None

    def _release(self, reason: str, *, kill: bool) -> None:
        if not self._closed:
            self._closed, self.fed = reason, None
            self._process.close(kill=kill)
            if self._block is not None:
                self._block.close()


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without its gradient, and copied if it is a part of a larger storage: it is sent
    with all of its storage."""
    whole = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor.detach() if whole else tensor.detach().clone()


def check_plain(captured: Captured) -> None:
    """Raise `UsageError` for a step that has no plain form."""
    if captured.plain is None:
        raise UsageError(
            "step", "has no plain form: it has several towers, scales gradients or writes inputs"
        )


def _pack(captured: Captured) -> tuple[Parcel, Block]:
    """The module, or what makes it, with its signature and its plain step, as a parcel."""
    check_plain(captured)
    module: Any = captured.make
    if module is None:
        module = captured.module
        if any(map(is_fake, (*module.parameters(), *module.buffers()))):
            raise UsageError("step", "has fake weights; capture a module with real ones")
    # The examples may be fake, and serve no purpose there.
    signature = replace(captured.signature, inputs=(), targets=())
    try:
        return pack_parcel((module, signature, captured.plain))
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise UsageError("step", f"cannot be copied to run by itself: {line}") from error


def _may_return_own(captured: Captured) -> bool:
    """True if what an inference step returns may be the module's own memory, or may become it: it
    is a view of a parameter or buffer, or the step writes some. Looking through all that a model of
    transformers returns takes longer than calling it."""
    graph, program = captured.graph, captured.program
    lasting = {
        int(graph.storages[tensor])
        for op, source in enumerate(program.sources)
        if source is not None and source.role != "input"
        for tensor in graph.outputs_of(op)
    }
    returned = {int(graph.storages[ref.tensor]) for ref in leaves(program.outputs, Ref)}
    writes = any(call is not None and call.in_place for call in program.calls)
    return graph.training or writes or not returned.isdisjoint(lasting)


def _initial_state(captured: Captured) -> dict[str, Tensor]:
    """The optimizer's state before the first step, by name."""
    return {
        source.name: source_value(captured.graph, captured.graph.outputs_of(op)[0], source)
        for op, source in enumerate(captured.program.sources)
        if source is not None and source.role == "state"
    }
