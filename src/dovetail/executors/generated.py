"""Runs code that Inductor generated without its Python part.

    generated file                                runner's instructions
      call(x0, x1):
        assert_size_stride(x0, (16, 8), (8, 1))     CheckLayout
        buf0 = empty_strided_cpu(...)               RunOp   aten.empty_strided
        extern_kernels.mm(x0, x1, out=buf0)         RunOp   aten.mm.out
        cpp_fused_tanh_0(buf0)                      RunKernel, a C function of pointers
        return (buf0,)

The file's `call` is run once on example tensors, and what it does is noted. It does the same for
every input: shapes and strides are those of the code, and it looks at no value. Where it does
anything else than the above, `call` itself is run from Python.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.instructions import (
    BoundInstruction,
    CheckLayout,
    RunFunction,
    RunKernel,
    RunLanes,
    RunOp,
    last_touched,
    touched_by,
)
from dovetail.frontends.program import Call, Ref, fill_refs
from dovetail.frontends.recorded_calls import CallRecorder
from dovetail.frontends.runners import MOST_POINTERS, Runner, make_runner
from dovetail.runtime.torch_versions import view_operator

_KERNEL = "kernel"
"""The name of the C function in each library that Inductor builds for a CPU."""


@dataclass(frozen=True, eq=False)
class GeneratedCode:
    """A function of tensors that Inductor generated.

    call           the function in Python: of a list, which it empties
    instructions   what it does; the first entries are its arguments. None: not known, so the
                   function itself is called, and of `outputs` only the number counts
    outputs        the entries that it returns, of which there are none twice
    entries        how many entries there are
    """

    call: Callable[[list[Tensor]], Sequence[Tensor]]
    instructions: tuple[RunOp | RunKernel | CheckLayout, ...] | None = None
    outputs: tuple[int, ...] = ()
    entries: int = 0

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.call(list(tensors))

    def temporary_count(self, inputs: int) -> int:
        """How many entries of its own it needs beside its inputs and outputs."""
        return self.entries - inputs - len(self.outputs) if self.instructions is not None else 0

    def bound(self, tensors: Sequence[Tensor]) -> tuple[Runner, Callable[[], object]]:
        """(a runner, a function that runs the code there on these tensors). The outputs are the
        table's entries behind the tensors, and are overwritten by each run."""
        count = len(tensors)
        outputs = range(count, count + len(self.outputs))
        runner = make_runner(outputs.stop + self.temporary_count(count))
        for entry, tensor in enumerate(tensors):
            runner.set(entry, tensor)
        whole = self.instruction(range(count), outputs, first_temporary=outputs.stop, op=0)
        return runner, partial(runner.run, runner.stream([whole]))

    def instruction(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        first_temporary: int,
        op: int,
        frees: tuple[int, ...] = (),
    ) -> RunFunction | RunLanes:
        """The code as one instruction of a runner.

        inputs, outputs   the entries of the runner's table that it reads and makes
        first_temporary   the first of the `temporary_count` entries that it may use
        frees             the entries that are emptied afterwards
        """
        if self.instructions is None:
            return RunFunction(op, self, tuple(inputs), tuple(outputs), frees)
        own = dict(enumerate(inputs)) | dict(zip(self.outputs, outputs, strict=True))
        for entry in range(self.entries):
            if entry not in own:
                own[entry] = first_temporary
                first_temporary += 1
        refs = {entry: Ref(slot) for entry, slot in own.items()}
        # The entries that each instruction reads or makes.
        touched = []
        for done in self.instructions:
            match done:
                case RunKernel(takes=takes):
                    named = list(takes)
                case CheckLayout(tensor=entry):
                    named = [entry]
                case RunOp(call=call):
                    assert call is not None, "it is bound"
                    named = touched_by(call)
            touched.append([own[entry] for entry in named if entry >= 0])
        freed = last_touched(touched, {*inputs, *outputs})
        lane: list[BoundInstruction] = []
        for instruction, drops in zip(self.instructions, freed, strict=True):
            match instruction:
                case RunOp(call=Call() as call):
                    renamed = replace(
                        call,
                        args=tuple(fill_refs(list(call.args), refs)),
                        kwargs=fill_refs(call.kwargs, refs),
                        results=tuple(own[entry] if entry >= 0 else -1 for entry in call.results),
                    )
                    lane.append(RunOp(op, drops, renamed))
                case RunKernel(address=address, takes=takes):
                    lane.append(RunKernel(op, address, tuple(own[e] for e in takes), drops))
                case CheckLayout(tensor=entry, shape=shape, strides=strides):
                    lane.append(CheckLayout(op, own[entry], shape, strides))
        return RunLanes((tuple(lane),), frees)


def noted(module: ModuleType, examples: Sequence[Tensor]) -> GeneratedCode:
    """The code of a generated module, with what it does on arguments like these.

    Raises what the code raises.
    """
    call: Callable[[list[Tensor]], Sequence[Tensor]] = module.call
    if not callable(call):
        raise TypeError("what is called is no function")
    recorder = CallRecorder(dict(enumerate(examples)), {}, len(examples))
    try:
        with torch.inference_mode(), recorder, _noting(module, recorder):
            returned = call(list(examples))
    except (UsageError, _Unknown):
        with torch.inference_mode():
            return GeneratedCode(call, outputs=tuple(range(len(call(list(examples))))))
    outputs = tuple(recorder.entry_of(tensor) for tensor in returned)
    distinct = {entry for entry in outputs if entry is not None and entry >= len(examples)}
    # A constant of the code, or an output that is an argument or stands twice.
    if recorder.constants or len(distinct) < len(outputs):
        return GeneratedCode(call, outputs=tuple(range(len(outputs))))
    done = tuple(RunOp(0, call=c) if isinstance(c, Call) else c for c in recorder.calls)
    return GeneratedCode(call, done, tuple(e for e in outputs if e is not None), recorder.entries)


class _Unknown(Exception):
    """Raised where code does what runners do not."""


@contextmanager
def _noting(module: ModuleType, recorder: CallRecorder) -> Iterator[None]:
    """A context in which the functions that the module calls past the dispatcher are noted."""

    def entry_of(value: Any) -> int:
        entry = recorder.entry_of(value) if isinstance(value, Tensor) else None
        if entry is None:
            raise _Unknown
        return entry

    def expect(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], *_: Any) -> None:
        recorder.calls.append(CheckLayout(0, entry_of(tensor), tuple(shape), tuple(strides)))

    def make(
        own: Callable[..., Tensor], shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        made = own(shape, strides, dtype)
        target, arguments = torch.ops.aten.empty_strided.default, (list(shape), list(strides))
        results = (recorder.made(made),)
        recorder.calls.append(Call(target, arguments, {"dtype": dtype}, results))
        return made

    def view(
        own: Callable[..., Tensor],
        tensor: Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
    ) -> Tensor:
        entry = entry_of(tensor)
        made = own(tensor, shape, strides, offset)
        arguments = (Ref(entry), list(shape), list(strides), offset)
        recorder.calls.append(Call(view_operator(), arguments, {}, (recorder.made(made),)))
        return made

    def run(own: Any, *arguments: Any) -> None:
        entries = tuple(map(entry_of, arguments))
        library = getattr(getattr(own, "__self__", None), "__file__", None)
        if (
            not isinstance(own, BuiltinFunctionType)
            or library is None
            or len(entries) > MOST_POINTERS
        ):
            raise _Unknown
        own(*arguments)
        try:
            function = getattr(ctypes.CDLL(library), _KERNEL)
        except (OSError, AttributeError) as error:
            raise _Unknown from error
        address = int(ctypes.cast(function, ctypes.c_void_p).value or 0)
        recorder.calls.append(RunKernel(0, address, entries))

    def refuse(*_: Any, **__: Any) -> Any:
        raise _Unknown

    names = vars(module)
    before = dict(names)
    for name, own in before.items():
        if name == "assert_size_stride":
            names[name] = expect
        elif name == "empty_strided_cpu":
            names[name] = partial(make, own)
        elif name == "reinterpret_tensor":
            names[name] = partial(view, own)
        elif name.startswith("cpp_fused"):
            names[name] = partial(run, own)
        elif name.startswith("empty_strided") or name == "alloc_from_pool":
            names[name] = refuse
    try:
        yield
    finally:
        names.clear()
        names.update(before)
