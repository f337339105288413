"""Several calls as one function of tensors, which Inductor compiles to one piece of code.

    calls of ops 7, 8, 9 ──► FusedCall ──► key: equal calls on equal inputs have one piece of code
                                   │
                                   └──► fx graph ──► Inductor (`executors.compiling`)

The calls are of ATen already, so nothing is traced again. A fused call also runs without being
compiled, call by call, with the same bits as its ops.
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, fx

from dovetail.frontends.fused_updates import fused_updates, has_fused_kernel
from dovetail.frontends.gpu_calls import on_gpu
from dovetail.frontends.instructions import RunOp, last_touched, touched_by
from dovetail.frontends.interpret import run_call
from dovetail.frontends.program import Call, Program, Ref, distinct_refs, fill_refs
from dovetail.frontends.runners import make_runner
from dovetail.graph import Graph, Phase
from dovetail.runtime.torch_versions import OpOverload

Meta = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(dtype, shape, strides) of a tensor."""


CPU = torch.device("cpu")
_NOT_FUSED = ("as_strided", "empty", "new_empty", "mkldnn_rnn_layer")


def may_be_fused(graph: Graph, program: Program, op: int) -> bool:
    """True for a call of ATen that draws no numbers, writes over nothing and is no update. One that
    makes an empty tensor is not fused either, since what is in it differs from call to call, nor is
    a whole recurrent layer or a call on complex numbers: compiled code would only call it. Nor is a
    view by strides, which reads what torch lays so: compiled code may lay it otherwise."""
    call = program.calls[op]
    touched = (*graph.inputs_of(op).tolist(), *graph.outputs_of(op))
    return (
        call is not None
        and isinstance(call.target, OpOverload)
        and call.target.namespace == "aten"
        and not call.target.overloadpacket.__name__.startswith(_NOT_FUSED)
        and not (call.random or call.in_place or call.target._schema.is_mutable)
        and graph.phases[op] != Phase.UPDATE
        and not any(graph.dtypes[tensor].startswith("complex") for tensor in touched)
    )


def has_fused_update(graph: Graph, program: Program, op: int) -> bool:
    """True for an update of an optimizer that has a fused kernel."""
    call = program.calls[op]
    if call is None or graph.phases[op] != Phase.UPDATE or not has_fused_kernel(call.target):
        return False
    parameter = graph.outputs_of(op)[0]
    return graph.dtypes[parameter] in ("float32", "float64")


@dataclass(frozen=True, eq=False)
class FusedCall:
    """Calls that run one after another, as a function of `inputs` tensors.

    calls     their `Ref`s are numbers of this function's own: its arguments come first
    metas     of each argument
    outputs   the numbers of what it returns
    """

    calls: tuple[Call, ...]
    metas: tuple[Meta, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(graph: Graph, program: Program, ops: Sequence[int]) -> "tuple[FusedCall, Places]":
        """Return the fused call of these ops, in their order, and the graph's tensors that it reads
        and makes. What only these ops read is not returned by it."""
        inside, returned = set(ops), set(graph.outputs.tolist())
        made = {tensor for op in ops for tensor in graph.outputs_of(op)}
        calls = [call for op in ops if (call := program.calls[op]) is not None]
        read = [t for call in calls for t in distinct_refs((call.args, call.kwargs))]
        inputs = tuple(dict.fromkeys(t for t in read if t not in made))
        outputs = tuple(
            tensor
            for op in ops
            for tensor in graph.outputs_of(op)
            if tensor in returned or not inside.issuperset(graph.consumers_of(tensor).tolist())
        )
        numbers = {tensor: number for number, tensor in enumerate(inputs)}
        for call in calls:
            for tensor in call.results:
                if tensor >= 0:
                    numbers.setdefault(tensor, len(numbers))
        refs = {tensor: Ref(number) for tensor, number in numbers.items()}
        own = tuple(
            replace(
                call,
                args=tuple(fill_refs(list(call.args), refs)),
                kwargs=fill_refs(call.kwargs, refs),
                results=tuple(numbers[t] if t >= 0 else -1 for t in call.results),
            )
            for call in calls
        )
        metas = tuple((graph.dtypes[t], graph.shapes[t], graph.strides[t]) for t in inputs)
        fused = FusedCall(own, metas, tuple(numbers[t] for t in outputs))
        return fused, Places(inputs, outputs)

    @cached_property
    def key(self) -> str:
        """16 hex digits that are equal for equal calls on inputs of equal metas."""
        lines = [str(self.metas), str(self.outputs)]
        for call in self.calls:
            arguments = f"{call.args!r} {sorted(call.kwargs.items())!r}"
            target = call.target
            name = str(target) if isinstance(target, OpOverload) else target.__qualname__
            lines.append(f"{name} {arguments} -> {call.results}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def is_update(self) -> bool:
        """True if all are updates, whose fused form is not compiled."""
        return all(has_fused_kernel(call.target) for call in self.calls)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the calls one by one."""
        values = dict(enumerate(tensors))
        for call in self.calls:
            run_call(call, values, 0)
        return tuple(values[number] for number in self.outputs)

    def bound(self, tensors: Sequence[Tensor]) -> Callable[[], object]:
        """Return a function that runs the calls on these tensors as a device does, by a runner,
        which drops each result after its last use."""
        frees = last_touched(list(map(touched_by, self.calls)), range(len(self.metas)))
        runner = make_runner(len(self.metas) + sum(map(len, frees)))
        for number, tensor in enumerate(tensors):
            runner.set(number, tensor)
        calls = enumerate(zip(self.calls, frees, strict=True))
        stream = runner.stream(RunOp(index, drops, call) for index, (call, drops) in calls)
        return partial(runner.run, stream)

    def with_fused_updates(self) -> "FusedCall":
        """The same updates in their fused form."""
        return replace(self, calls=(fused_updates(self.calls),))

    def on(self, device: torch.device) -> "FusedCall":
        """The calls as a GPU makes them; on the CPU these."""
        if device.type == "cpu":
            return self
        return replace(self, calls=tuple(on_gpu(call, device) for call in self.calls))

    def examples(self, device: torch.device = CPU) -> tuple[Tensor, ...]:
        """Return arguments of zeros."""
        return examples_of(self.metas, device)

    def module(self) -> fx.GraphModule:
        """Return the calls as a graph for Inductor."""
        graph = fx.Graph()
        nodes: dict[int, fx.Node] = {
            number: graph.placeholder(f"x{number}") for number in range(len(self.metas))
        }
        for call in self.calls:
            node = graph.call_function(
                call.target, tuple(fill_refs(list(call.args), nodes)), fill_refs(call.kwargs, nodes)
            )
            # An operator may return one tensor, and no list of tensors. A function that stands for
            # an operator on GPUs returns a tuple.
            returns = call.target._schema.returns if isinstance(call.target, OpOverload) else ()
            if len(returns) == 1 and isinstance(returns[0].type, torch.TensorType):
                nodes[call.results[0]] = node
                continue
            for element, number in enumerate(call.results):
                if number >= 0:
                    nodes[number] = graph.call_function(operator.getitem, (node, element))
        graph.output(tuple(nodes[number] for number in self.outputs))
        return fx.GraphModule(torch.nn.Module(), graph)


@dataclass(frozen=True)
class Places:
    """The graph's tensors that a fused call takes, and that it returns, in order."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def examples_of(metas: Sequence[Meta], device: torch.device = CPU) -> tuple[Tensor, ...]:
    """Return tensors of zeros with these metas."""
    return tuple(
        torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device).zero_()
        for dtype, shape, strides in metas
    )
