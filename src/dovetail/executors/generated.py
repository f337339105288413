"""Runs code that Inductor generated without its Python part.

    generated file                                runner's instructions
      call(x0, x1):
        assert_size_stride(x0, (16, 8), (8, 1))     expect
        buf0 = empty_strided_cpu(...)               call   aten.empty_strided
        extern_kernels.mm(x0, x1, out=buf0)         call   aten.mm.out
        cpp_fused_tanh_0(buf0)                      kernel, a C function of pointers
        return (buf0,)

The file's `call` is run once on example tensors, and what it does is noted. It does the same for
every input: shapes and strides are those of the code, and it looks at no value. Where it does
anything else than the above, `call` itself is run from Python.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.program import Call, Ref, distinct_refs, fill_refs
from dovetail.frontends.recorded_calls import CallRecorder
from dovetail.frontends.runners import MOST_POINTERS, Runner, Stream, make_runner
from dovetail.runtime.torch_versions import view_operator

_KERNEL = "kernel"
"""The name of the C function in each library that Inductor builds for a CPU."""


@dataclass(frozen=True)
class KernelCall:
    """A call of the C function at an address on the data of some entries."""

    address: int
    entries: tuple[int, ...]


@dataclass(frozen=True)
class Expectation:
    """The shape and strides that an entry must have."""

    entry: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


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
    instructions: tuple[Call | KernelCall | Expectation, ...] | None = None
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
        stream = runner.stream()
        self.add_to(stream, runner, range(count), outputs, first_temporary=outputs.stop, tag=0)
        return runner, partial(runner.run, stream)

    def add_to(
        self,
        stream: Stream,
        runner: Runner,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        first_temporary: int,
        tag: int,
        frees: Sequence[int] = (),
    ) -> None:
        """Add the code to a stream of the runner, as one instruction.

        inputs, outputs   the entries of the runner's table that it reads and makes
        first_temporary   the first of the `temporary_count` entries that it may use
        frees             the entries that are emptied afterwards
        """
        if self.instructions is None:
            stream.function(self, inputs, outputs, tag=tag, frees=frees)
            return
        own = dict(enumerate(inputs)) | dict(zip(self.outputs, outputs, strict=True))
        for entry in range(self.entries):
            if entry not in own:
                own[entry] = first_temporary
                first_temporary += 1
        last = {entry: i for i, done in enumerate(self.instructions) for entry in _touched(done)}
        kept = {*inputs, *outputs}
        refs = {entry: Ref(slot) for entry, slot in own.items()}
        inner = runner.stream()
        for index, instruction in enumerate(self.instructions):
            drops = [own[e] for e, when in last.items() if when == index and own[e] not in kept]
            match instruction:
                case Call(target, args, kwargs, results):
                    named = fill_refs(list(args), refs), fill_refs(kwargs, refs)
                    made = tuple(own[entry] if entry >= 0 else -1 for entry in results)
                    call = Call(target, tuple(named[0]), named[1], made)
                    inner.call(call, tag=tag, frees=drops)
                case KernelCall(address, entries):
                    inner.kernel(address, [own[e] for e in entries], tag=tag, frees=drops)
                case Expectation(entry, shape, strides):
                    inner.expect(own[entry], shape, strides, tag=tag)
        stream.fork([inner], tag=tag, frees=frees)


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
    done = tuple(recorder.calls)
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
        recorder.calls.append(Expectation(entry_of(tensor), tuple(shape), tuple(strides)))

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
        recorder.calls.append(KernelCall(address, entries))

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


def _touched(instruction: Call | KernelCall | Expectation) -> list[int]:
    """The entries that an instruction reads or makes."""
    match instruction:
        case Call(_, args, kwargs, results):
            return [*distinct_refs((args, kwargs)), *(entry for entry in results if entry >= 0)]
        case KernelCall(_, entries):
            return list(entries)
        case Expectation(entry):
            return [entry]
