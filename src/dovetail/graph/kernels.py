"""Joins ops into kernels. A device runs a kernel as one, and stages consist of kernels.

The rules for an inference step, in this order:

1. An op that depends on parameters and constants alone is *folded*: it is computed once, when a
   step is loaded. A buffer that the step writes is no constant.
2. A view joins the kernel that makes its base.
3. A batch normalisation joins the convolution before it. An activation joins the convolution,
   normalisation, product or sum before it. Neither joins if another op reads the value in between.
4. A 1x1 convolution joins the depthwise convolution before it under the same condition. Together
   they are a separable convolution.
5. Pointwise ops that only one convolution, product or pointwise op reads join that op.

`compiled_ties` has the ops of training steps as well that compiled code runs as one kernel.

Papers: "Accelerate DNN Inference by Inter-Operator Parallelism", 2019; Y. Ding et al., "IOS:
Inter-Operator Scheduler for CNN Acceleration", MLSys 2021, https://arxiv.org/abs/2011.01302. Both
fuse convolution, normalisation and activation before they schedule, and both count ReLU and
separable convolution as one op.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from dovetail.graph.records import Graph, Int32, Phase

FOLDED = -1
CONVOLUTION = "aten.convolution"
NORMALISATIONS = frozenset(
    {"aten._native_batch_norm_legit_no_training", "aten.native_batch_norm", "aten.batch_norm"}
)
PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})
ACTIVATIONS = frozenset(
    {"aten.relu", "aten.sigmoid", "aten.tanh", "aten.silu", "aten.gelu", "aten.hardtanh",
     "aten.leaky_relu", "aten.elu", "aten.hardswish", "aten.hardsigmoid"}
)  # fmt: skip
POINTWISE = ACTIVATIONS | frozenset(
    {"aten.add", "aten.sub", "aten.mul", "aten.div", "aten.neg", "aten.exp", "aten.sqrt",
     "aten.rsqrt", "aten.pow", "aten.where", "aten.maximum", "aten.minimum", "aten.clamp",
     "aten.constant_pad_nd"}
)  # fmt: skip
"""The kinds of ops that a kernel takes in, by rule 5 and in `compiled_ties`. Padding counts as one.
Torch has more pointwise ops, such as `aten.sin`, which no kernel takes in."""
REDUCTIONS = NORMALISATIONS | {
    "aten._native_batch_norm_legit_functional", "aten.native_layer_norm", "aten._softmax",
    "aten._log_softmax", "aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.var_mean",
}  # fmt: skip
"""Compiled code computes these in one pass with the pointwise ops before and after them."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernel of each op.

    of_op   [ops] 0 <= kernel < count, numbered so that no edge goes back; `FOLDED` for sources and
            for ops that depend on parameters and constants alone
    """

    of_op: Int32
    count: int


def fuse(graph: Graph) -> Kernels:
    """Return the kernels by all rules. Near-linear in ops + reads."""
    return _number_kernels(graph, _find_roots(graph, fused=True))


def single(graph: Graph) -> Kernels:
    """Return the kernels by rules 1 and 2 alone: every op is a kernel, with its views."""
    return _number_kernels(graph, _find_roots(graph, fused=False))


def compiled_ties(graph: Graph, cell_of: Int32) -> Int32:
    """Return [ties, 2] pairs of forward ops that compiled code runs in one kernel, since only the
    second reads what the first makes: pointwise ops, reductions, and views of what they make.

    cell_of   [ops] the cell or branch of each op. No tie goes from one to another, for segments of
              compiled code end there (`graph.cells`)

    Their gradients are ops of compiled kernels too, and are with their forward ops anyway
    (`grouping.colocate`), so an op and its gradient count as one reader. Updates, of the statistics
    of a batch normalisation say, do not count. O(ops + reads).
    """
    is_view = np.zeros(len(graph), dtype=np.bool_)
    is_view[graph.producers[np.flatnonzero((graph.bases >= 0) & ~graph.overwrites)]] = True
    joins = is_view | np.isin(graph.kinds, sorted(POINTWISE | REDUCTIONS))
    joins &= (graph.phases == Phase.FORWARD) & ~graph.is_source
    owners = np.where(graph.gradient_of >= 0, graph.gradient_of, np.arange(len(graph)))
    returned = {int(graph.producers[t]) for t in graph.outputs}
    ties = []
    for op in np.flatnonzero(joins).tolist():
        readers = {
            int(owners[reader])
            for tensor in graph.outputs_of(op)
            for reader in graph.consumers_of(tensor).tolist()
            if graph.phases[reader] != Phase.UPDATE
        } - {op}
        if len(readers) != 1 or op in returned:
            continue
        (reader,) = readers
        if joins[reader] and cell_of[op] == cell_of[reader]:
            ties.append((op, reader))
    return np.array(ties, dtype=np.int32).reshape(-1, 2)


def _find_roots(graph: Graph, *, fused: bool) -> list[int]:
    """Return [ops] the root of each op's kernel, one of its ops; `FOLDED` for folded ops."""
    # Rule 1: sources, and ops that depend on parameters and constants alone.
    written = {int(graph.producers[t]) for t in written_sources(graph)}
    constant = [
        bool(source) and kind != "input" and op not in written
        for op, (source, kind) in enumerate(zip(graph.is_source, graph.kinds, strict=True))
    ]
    for op in range(len(graph)):
        if not graph.is_source[op]:
            inputs = graph.inputs_of(op)
            constant[op] = len(inputs) > 0 and all(constant[graph.producers[t]] for t in inputs)
    folded = [c or bool(s) for c, s in zip(constant, graph.is_source, strict=True)]
    roots = [FOLDED if folded[op] else op for op in range(len(graph))]
    # Rules 2 to 4.
    bases = graph.bases
    for op in range(len(graph)):
        if roots[op] == FOLDED:
            continue
        producers = [int(graph.producers[t]) for t in graph.inputs_of(op)]
        producers = [producer for producer in producers if not folded[producer]]
        of_base = {int(graph.producers[bases[t]]) for t in graph.outputs_of(op) if bases[t] >= 0}
        is_view = bool(of_base) and bool(producers) and producers[0] in of_base
        if is_view or (fused and len(set(producers)) == 1 and _continues(graph, producers[0], op)):
            roots[op] = roots[producers[0]]
    if not fused:
        return roots
    # Rule 5, from the last kernel to the first. In this order a chain joins as a whole: its last op
    # has joined its reader before the op in front of it is looked at.
    members: dict[int, list[int]] = {}
    for op, root in enumerate(roots):
        if root != FOLDED:
            members.setdefault(root, []).append(op)
    returned = {int(graph.producers[t]) for t in graph.outputs}
    for root in sorted(members, reverse=True):
        ops = members[root]
        if any(graph.kinds[op] not in POINTWISE or op in returned for op in ops):
            continue
        readers = {
            int(reader)
            for op in ops
            for t in graph.outputs_of(op)
            for reader in graph.consumers_of(t)
        } - set(ops)
        homes = {roots[reader] for reader in readers}
        kinds = {graph.kinds[reader] for reader in readers}
        if len(homes) == 1 and kinds <= POINTWISE | PRODUCTS | {CONVOLUTION}:
            home = homes.pop()
            for op in ops:
                roots[op] = home
            members[home] = ops + members[home]
    return roots


def written_sources(graph: Graph) -> set[int]:
    """Return the tensors of the sources that the step writes over."""
    return {
        t
        for op in np.flatnonzero(graph.is_source).tolist()
        for t in graph.outputs_of(op)
        if int(graph.storages[t]) in graph.writers
    }


def _continues(graph: Graph, before: int, op: int) -> bool:
    """Return True if rule 3 or 4 joins `op` to `before`, the only op that it reads."""
    first, then = graph.kinds[before], graph.kinds[op]
    # The step returns this value as it is, so no op may join behind it.
    if any(t in graph.outputs for t in graph.outputs_of(before)):
        return False
    readers = {int(r) for t in graph.outputs_of(before) for r in graph.consumers_of(t)}
    if readers != {op}:
        return False
    if then in NORMALISATIONS:
        return first == CONVOLUTION
    if then in ACTIVATIONS:
        return first == CONVOLUTION or first in NORMALISATIONS | PRODUCTS | {"aten.add"}
    if then != CONVOLUTION or first != CONVOLUTION:
        return False
    # A 1x1 convolution after a depthwise one.
    image, weight = (graph.shapes[t] for t in graph.inputs_of(before)[:2])
    if weight[1] != 1 or image[1] <= 1:
        return False
    image, weight = (graph.shapes[t] for t in graph.inputs_of(op)[:2])
    return weight[1] == image[1] and all(size == 1 for size in weight[2:])


def _number_kernels(graph: Graph, roots: list[int]) -> Kernels:
    """Return the kernels in topological order; of those that are ready the one comes first whose
    last op has the lowest index."""
    last: dict[int, int] = {}
    for op, root in enumerate(roots):
        if root != FOLDED:
            last[root] = op
    after: dict[int, set[int]] = {root: set() for root in last}
    left = dict.fromkeys(last, 0)
    producers = graph.producers[graph.input_tensors].tolist()
    for reader, producer in zip(graph.readers.tolist(), producers, strict=True):
        first, then = roots[producer], roots[reader]
        if FOLDED not in (first, then) and first != then and then not in after[first]:
            after[first].add(then)
            left[then] += 1
    ready = [(last[root], root) for root, count in left.items() if not count]
    heapq.heapify(ready)
    number: dict[int, int] = {}
    while ready:
        _, root = heapq.heappop(ready)
        number[root] = len(number)
        for then in after[root]:
            left[then] -= 1
            if not left[then]:
                heapq.heappush(ready, (last[then], then))
    assert len(number) == len(last), "joined ops never wait for what waits for them"
    of_op = [FOLDED if root == FOLDED else number[root] for root in roots]
    return Kernels(np.array(of_op, dtype=np.int32), len(number))
