"""Prepares a captured inference step for a device: one function per kernel. Moves it to a device.

This is done once, when a step is loaded:

* ops that depend on parameters and constants alone are computed (`FOLDED` ops);
* a batch normalisation y = (x - mean) / sqrt(var + eps) * gamma + beta after a convolution is
  folded into the convolution's weight and bias: w' = w s, b' = beta + (b - mean) s, with
  s = gamma / sqrt(var + eps);
* images and the weights of convolutions are laid out channels last, if the caller asks for it.

On CPU cores convolutions run by oneDNN on one thread too, as they do on several threads.

Folding changes the order of roundings: outputs equal the plain model's within float round-off.
Buffers that a step writes stay among the constants and are written in place. Every step draws the
random numbers that `run_step` draws at seed 0 and step 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.checks import CHECK
from dovetail.frontends.interpret import Values, call_arguments, initial_values, run_call, seed_for
from dovetail.frontends.program import Call, Captured, Ref, kind_of
from dovetail.frontends.structures import leaves
from dovetail.graph import Graph
from dovetail.graph.kernels import CONVOLUTION, FOLDED, NORMALISATIONS, Kernels, written_sources
from dovetail.runtime.torch_versions import pytree
from dovetail.schedulers.records import KernelBlock, OpSet

Function = Callable[..., tuple[Tensor, ...]]

aten = torch.ops.aten
_one_dnn: Any = torch.backends.mkldnn
_NEEDS_STRIDES = (aten.as_strided.default, aten.view_as_complex.default)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of a step.

    calls    the kernel's calls, in order
    reads    tensors of the graph that the kernel gets from other kernels or from the inputs
    writes   tensors of the graph that other kernels or the caller need from it
    """

    calls: tuple[Call, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PreparedKernels:
    """A step's kernels, prepared.

    kernels     in the order of `Kernels`
    constants   tensor -> value, for constant tensors that kernels or the caller need: those of the
                graph, and those that preparing added
    inputs      tensors that each step is given, in the order of the model's inputs
    outputs     what the step returns, as in `Program`
    """

    kernels: tuple[Kernel, ...]
    constants: Values
    inputs: tuple[int, ...]
    outputs: Any
    channels_last: bool

    @cached_property
    def returned(self) -> frozenset[int]:
        """The tensors that the step returns."""
        return frozenset(_refs(self.outputs))

    @cached_property
    def readers(self) -> dict[int, set[int]]:
        """Each tensor that a kernel writes or reads -> the kernels that read it."""
        found: dict[int, set[int]] = {t: set() for k in self.kernels for t in k.writes}
        for number, kernel in enumerate(self.kernels):
            for tensor in kernel.reads:
                found.setdefault(tensor, set()).add(number)
        return found

    def laid_out(self, value: Tensor) -> Tensor:
        """The input in the memory layout that the kernels expect."""
        if self.channels_last and value.dim() == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value

    def function(self, numbers: Sequence[int]) -> tuple[Function, tuple[int, ...], tuple[int, ...]]:
        """(function that runs these kernels in order, the tensors it takes, those it returns).

        It returns the tensors that other kernels or the caller need.
        """
        calls = [call for number in numbers for call in self.kernels[number].calls]
        made = dict.fromkeys(t for number in numbers for t in self.kernels[number].writes)
        reads = dict.fromkeys(t for number in numbers for t in self.kernels[number].reads)
        takes = tuple(t for t in reads if t not in made)
        here = set(numbers)
        returns = tuple(t for t in made if t in self.returned or not self.readers[t] <= here)

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            tensors = Layered(dict(zip(takes, given, strict=True)), self.constants)
            for call in calls:
                run_prepared(call, tensors)
            return tuple(tensors[t] for t in returns)

        return run, takes, returns


class Layered(dict[int, Tensor]):
    """A step's values by tensor; a tensor that has none is looked up among the constants."""

    def __init__(self, values: Values, constants: Values) -> None:
        super().__init__(values)
        self._constants = constants

    def __missing__(self, tensor: int) -> Tensor:
        return self._constants[tensor]


def prepare(
    captured: Captured, kernels: Kernels, *, channels_last: bool = False
) -> PreparedKernels:
    """Prepare the kernels of a captured inference step, with real weights."""
    graph, program = captured.graph, captured.program
    constants = initial_values(captured)
    written = written_sources(graph)
    outputs = set(graph.outputs.tolist())
    # [kernels] the calls of each. A call that draws random numbers has its seed built in.
    of_kernels: list[list[Call]] = [[] for _ in range(kernels.count)]
    with torch.inference_mode():
        of_ops: list[tuple[int, int, Call]] = []
        for op, captured_call in enumerate(program.calls):
            if captured_call is None:
                continue
            call = captured_call
            if call.random:
                seeded = Seeded(call.target, seed_for(0, 0, call.seed_index(op)))
                call = replace(call, target=seeded, random=False)
            number = int(kernels.of_op[op])
            if number == FOLDED:
                run_call(call, constants, 0)
            else:
                of_ops.append((op, number, call))
        for op, number, call in of_ops:
            own = of_kernels[number]
            # A normalisation is folded into the convolution that makes its input, if all else is
            # constant.
            if (
                own
                and graph.kinds[op] in NORMALISATIONS
                and kind_of(own[-1].target) == CONVOLUTION
                and isinstance(call.args[0], Ref)
                and call.args[0].tensor == own[-1].results[0]
                and not own[-1].args[6]  # transposed
                and not _named(call).get("training", False)
                and _named(call)["running_mean"] is not None
                and all(
                    t in constants and t not in written
                    for t in refs_of(call)[1:] + refs_of(own[-1])[1:]
                )
            ):
                # New constants get numbers above those of the graph's tensors.
                first = max(graph.tensors, 1 + max(constants, default=-1))
                own[-1] = _folded(own[-1], call, constants, first)
            else:
                own.append(call)
        of_kernels = [[_laid_out(call, graph, channels_last) for call in own] for own in of_kernels]
        if channels_last:
            convolutions = [
                call for own in of_kernels for call in own if kind_of(call.target) == CONVOLUTION
            ]
            for call in convolutions:
                weight = call.args[1].tensor if isinstance(call.args[1], Ref) else -1
                if weight in constants and constants[weight].dim() == 4:
                    constants[weight] = constants[weight].contiguous(
                        memory_format=torch.channels_last
                    )
    found = []
    for number, own in enumerate(of_kernels):
        made = [tensor for call in own for tensor in call.results if tensor >= 0]
        reads = []
        for tensor in dict.fromkeys(tensor for call in own for tensor in refs_of(call)):
            if tensor in made or tensor >= graph.tensors:
                continue
            producer = int(graph.producers[tensor])
            if kernels.of_op[producer] != FOLDED or graph.kinds[producer] == "input":
                reads.append(tensor)
        writes = tuple(
            tensor
            for tensor in made
            if tensor in outputs
            or any(int(kernels.of_op[reader]) != number for reader in graph.consumers_of(tensor))
        )
        found.append(Kernel(tuple(own), tuple(reads), writes))
    inputs = tuple(
        graph.outputs_of(op)[0]
        for op, source in enumerate(program.sources)
        if source is not None and source.role == "input"
    )
    wanted = {
        *_refs(program.outputs),
        *(t for k in found for call in k.calls for t in refs_of(call)),
    }
    constants = {tensor: value for tensor, value in constants.items() if tensor in wanted}
    return PreparedKernels(tuple(found), constants, inputs, program.outputs, channels_last)


def _folded(convolution: Call, normalisation: Call, constants: Values, first: int) -> Call:
    """The convolution with the normalisation in its weight and bias, two new constants from number
    `first` on.

    They are computed in float64, so that only the new weight and bias are rounded.
    """
    (_, weight, bias, *rest), _ = call_arguments(
        replace(convolution, args=(None, *convolution.args[1:])), constants
    )
    known = {
        name: constants[value.tensor].double() if isinstance(value, Ref) else value
        for name, value in _named(normalisation).items()
        if name != "input"
    }
    scale = torch.rsqrt(known["running_var"] + known["eps"])
    scale = scale if known["weight"] is None else scale * known["weight"]
    shift = ((0 if bias is None else bias.double()) - known["running_mean"]) * scale
    shift = shift if known["bias"] is None else shift + known["bias"]
    folded = weight.double() * scale.reshape(-1, *[1] * (weight.dim() - 1))
    constants[first], constants[first + 1] = folded.to(weight.dtype), shift.to(weight.dtype)
    arguments = (convolution.args[0], Ref(first), Ref(first + 1), *rest)
    return replace(convolution, args=arguments, results=(normalisation.results[0],))


def run_prepared(call: Call, tensors: Values) -> None:
    """Run one call of a kernel, and store its results in `tensors`."""
    if call.target is aten.convolution.default:
        call = replace(call, target=_convolution)
    run_call(call, tensors, 0)


def _convolution(  # noqa: PLR0917  those of aten.convolution
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """aten.convolution, which on one thread runs as it does on several threads.

    ATen uses oneDNN for 1x1 convolutions only on several threads. Without it they took 1.4 to 2.3
    times as long on one thread here.
    """
    # On several threads ATen uses oneDNN under this condition.
    several_threads_use_it = (
        groups > 1 or len(images) > 1 or min(weight.shape[2:]) > 3 or images.numel() > 20480
    )
    if (
        images.device.type == "cpu"
        and images.dtype == torch.float32
        and images.dim() == 4
        and not transposed
        and several_threads_use_it
        and _one_dnn.is_available()
    ):
        padding, stride, dilation = (
            list(given) * (2 // len(given)) for given in (padding, stride, dilation)
        )
        several: Tensor = aten.mkldnn_convolution.default(
            images, weight, bias, padding, stride, dilation, groups
        )
        return several
    one: Tensor = aten.convolution.default(
        images, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    return one


def refs_of(call: Call) -> list[int]:
    """The tensors that a call reads, in order."""
    return _refs((call.args, call.kwargs))


def _refs(tree: Any) -> list[int]:
    return [leaf.tensor for leaf in leaves(tree, Ref)]


@dataclass(frozen=True)
class Seeded:
    """A target that draws the numbers of one seed."""

    target: Callable[..., Any]
    seed: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(self.seed)
        return self.target(*args, **kwargs)


def _named(call: Call) -> dict[str, Any]:
    """The arguments of an operator's call, by name."""
    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[attr-defined]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def _laid_out(call: Call, graph: Graph, channels_last: bool) -> Call:
    """The call, made safe for tensors whose strides differ from those of the capture.

    Views become reshapes, which copy where a view is impossible. Ops that depend on strides get a
    copy with the strides of the capture.
    """
    if call.target in (aten.view.default, aten._unsafe_view.default):
        return replace(call, target=aten.reshape.default)
    if not channels_last or call.target not in _NEEDS_STRIDES:
        return call
    target, tensor = call.target, call.args[0].tensor
    shape, strides = graph.shapes[tensor], graph.strides[tensor]

    def run(given: Tensor, *args: Any) -> Any:
        if given.stride() != strides:
            given = torch.empty_strided(
                shape, strides, dtype=given.dtype, device=given.device
            ).copy_(given)
        return target(given, *args)

    return replace(call, target=run)


# ── On another device, in another precision ──────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class PlacedKernels:
    """Kernels on a device.

    prepared   the kernels, with their constants on the device
    inputs     tensor -> its example value on the device
    """

    prepared: PreparedKernels
    inputs: Values

    @property
    def block(self) -> KernelBlock:
        """Which kernels wait for which, by the tensors they read."""
        kernels = self.prepared.kernels
        # A tensor that no kernel writes is an input, and nobody waits for it.
        made_by = {t: number for number, kernel in enumerate(kernels) for t in kernel.writes}
        before = [{made_by[t] for t in kernel.reads if t in made_by} for kernel in kernels]
        return KernelBlock(tuple(sum(1 << number for number in own) for own in before))

    @property
    def outputs(self) -> OpSet:
        """Kernels that write a tensor which the caller wants."""
        return sum(
            1 << number
            for number, kernel in enumerate(self.prepared.kernels)
            if self.prepared.returned.intersection(kernel.writes)
        )


def place(
    prepared: PreparedKernels,
    inputs: Sequence[Tensor],
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.float32,
) -> PlacedKernels:
    """Move constants and inputs to a device; float32 becomes `dtype` (such as `torch.float16`).

    Raises `UsageError` if there is no such device, and for a network whose step draws random
    numbers, writes over its state or checks data, because a replayed CUDA graph can do none of
    these.
    """
    if str(device).startswith("cuda"):
        require(torch.cuda, str(device))
    for kernel in prepared.kernels:
        for call in kernel.calls:
            if call.target is CHECK:
                what = "reads data to check them"
            elif call.random:
                what = "draws random numbers"
            elif call.in_place:
                what = "writes over its arguments"
            else:
                continue
            raise UsageError("MODEL", f"{call.target} {what}; such a step is not captured")

    def moved(value: Tensor) -> Tensor:
        return value.to(device, dtype if value.dtype == torch.float32 else value.dtype)

    def named(value: torch.device | torch.dtype) -> torch.device | torch.dtype:
        if isinstance(value, torch.device):
            return torch.device(device)
        return dtype if value == torch.float32 else value

    def move(call: Call) -> Call:
        # Calls that name a device or a precision, such as `aten.full`, are given the new one.
        args, kwargs = pytree.tree_map_only(
            (torch.device, torch.dtype), named, (call.args, call.kwargs)
        )
        return replace(call, args=args, kwargs=kwargs)

    with torch.no_grad():
        constants = {tensor: moved(value) for tensor, value in prepared.constants.items()}
        pairs = zip(prepared.inputs, inputs, strict=True)
        given = {tensor: prepared.laid_out(moved(value)) for tensor, value in pairs}
    kernels = tuple(replace(k, calls=tuple(map(move, k.calls))) for k in prepared.kernels)
    return PlacedKernels(replace(prepared, kernels=kernels, constants=constants), given)


def require(cuda: Any, device: str = "cuda") -> None:
    """Raise `UsageError` if `cuda` (`torch.cuda` or a fake of it) sees no device, or not the one
    with the number that "cuda:1" names."""
    if not cuda.is_available():
        raise UsageError(
            "device", "torch sees no CUDA device here; run on a machine with a GPU and its torch"
        )
    _, numbered, number = device.partition(":")
    if numbered and not (number.isdecimal() and int(number) < cuda.device_count()):
        last = cuda.device_count() - 1
        raise UsageError("device", f"{device!r} is not here; torch sees cuda:0 to cuda:{last}")
