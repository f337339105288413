"""Counts FLOPs and bytes of ONNX ops, in the convention of the direct capture.

* Matrix products, convolutions and attention count 2 x multiply-adds.
* Pointwise ops count 1 per output element.
* Reductions, normalisations, pools, random numbers and interpolations count 1 per element of their
  largest tensor.
* Ops that only move data count 0.
* Ops of other kinds have no rule. They count as reductions, which is a lower bound, and
  `unknown_flops` lists them.

Operators: https://onnx.ai/onnx/operators/
"""

import math
from collections import Counter
from collections.abc import Callable

from dovetail.frontends.onnx.reading import Op, Value
from dovetail.graph import Graph

_MOVES = (
    "BitCast", "Cast", "CastLike", "CenterCropPad", "Compress", "Concat", "ConcatFromSequence",
    "Constant", "ConstantOfShape", "DepthToSpace", "Expand", "EyeLike", "Flatten", "Gather",
    "GatherElements", "GatherND", "Identity", "MaxUnpool", "NonZero", "OneHot", "Pad", "Range",
    "Reshape", "ReverseSequence", "Scatter", "ScatterElements", "ScatterND", "Shape", "Size",
    "Slice", "SpaceToDepth", "Split", "SplitToSequence", "Squeeze", "TensorScatter", "Tile",
    "Transpose", "Unsqueeze",
)  # fmt: skip
_POINTWISE = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift",
    "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "BlackmanWindow", "Ceil", "Celu",
    "Clip", "Cos", "Cosh", "DequantizeLinear", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HammingWindow", "HannWindow", "HardSigmoid",
    "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean",
    "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "QuantizeLinear",
    "Reciprocal", "Relu", "RotaryEmbedding", "Round", "Selu", "Shrink", "Sigmoid", "Sign",
    "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "SwiGLU", "Swish", "Tan",
    "Tanh", "ThresholdedRelu", "Trilu", "Where", "Xor",
)  # fmt: skip
_WIDEST = (
    "ArgMax", "ArgMin", "AveragePool", "BatchNormalization", "Bernoulli", "Col2Im", "CumProd",
    "CumSum", "DynamicQuantizeLinear", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool",
    "GridSample", "GroupNormalization", "Hardmax", "InstanceNormalization", "LRN",
    "LayerNormalization", "LogSoftmax", "LpNormalization", "LpPool", "MaxPool",
    "MeanVarianceNormalization", "Multinomial", "NegativeLogLikelihoodLoss", "RMSNormalization",
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare", "Resize", "Softmax",
    "SoftmaxCrossEntropyLoss", "TopK", "Upsample",
)  # fmt: skip
_GATHERS = ("Gather", "GatherElements", "GatherND", "Slice")
"""These ops read only the rows that they return, not the whole of their first input."""


def _input(op: Op, position: int) -> Value:
    value = op.inputs[position]
    assert value is not None  # shape inference has refused the op
    return value


def _product(op: Op) -> int:
    """2 x outputs x the inner axis, which is the last axis of the left input."""
    return 2 * op.outputs[0].elements * (_input(op, 0).shape or (1,))[-1]


def _gemm(op: Op) -> int:
    rows, columns = _input(op, 0).shape
    inner = rows if op.attributes.get("transA") else columns
    return 2 * op.outputs[0].elements * inner


def _convolution(weight: int = 1) -> Callable[[Op], int]:
    """Return the rule of a convolution with weight [out, in / groups, ...]: each output takes one
    multiply-add per element of a filter."""
    return lambda op: 2 * op.outputs[0].elements * math.prod(_input(op, weight).shape[1:])


def _transposed_convolution(op: Op) -> int:
    """Return the FLOPs of a transposed convolution with weight [in, out / groups, ...]: each input
    takes one multiply-add per element of its filters."""
    return 2 * _input(op, 0).elements * math.prod(_input(op, 1).shape[1:])


def _attention(op: Op) -> int:
    """Return the FLOPs of attention's two products, query x key and scores x value, with past keys.

    Q, K, V are [batch, heads, sequence, width] or [batch, sequence, heads x width].
    """
    query, key, value = (_input(op, position).shape for position in range(3))
    past = op.inputs[4].shape[2] if len(op.inputs) > 4 and op.inputs[4] is not None else 0
    if len(query) == 4:
        heads, rows, width, value_width = query[1], query[2], query[3], value[3]
    else:
        heads, rows = int(op.attributes["q_num_heads"]), query[1]
        width = query[2] // heads
        value_width = value[2] // int(op.attributes["kv_num_heads"])
    columns = key[-2] + past
    return 2 * query[0] * heads * rows * columns * (width + value_width)


def _recurrent(pointwise: int) -> Callable[[Op], int]:
    """Return the rule of a recurrent layer.

    Each step and row of the batch takes a product with W [directions, gates x hidden, input], one
    with R [directions, gates x hidden, hidden], and `pointwise` FLOPs per hidden unit.
    """

    def flops(op: Op) -> int:
        rows = math.prod(_input(op, 0).shape[:2])
        weights, recurrence = _input(op, 1), _input(op, 2)
        hidden = recurrence.shape[0] * recurrence.shape[2]
        return rows * (2 * (weights.elements + recurrence.elements) + pointwise * hidden)

    return flops


def _einsum(op: Op) -> int:
    """Return the FLOPs of an einsum whose operands are multiplied from left to right.

    A pair counts the product of all its axes, twice if an axis is summed away. A single operand
    counts its elements if an axis is summed away, else nothing.
    """
    equation = op.attributes["equation"]
    text = equation if isinstance(equation, str) else equation.decode(errors="replace")
    text = text.replace(" ", "")
    terms, arrow, result = text.partition("->")
    sizes: dict[str, int] = {}
    operands = []
    for position, term in enumerate(terms.split(",")):
        operands.append(_axes(term, _input(op, position).shape, sizes))
    letters = [axis for axes in operands for axis in axes]
    kept = {axis for axis in sizes if letters.count(axis) == 1 or axis.startswith(".")}
    if arrow:
        kept = {axis for axis in sizes if axis.startswith(".") or axis in result}
    total, so_far = 0, set(operands[0])
    if len(operands) == 1:
        return 0 if so_far <= kept else _input(op, 0).elements
    for position, axes in enumerate(operands[1:], start=2):
        later = kept.union(*operands[position:])
        joined = so_far.union(axes)
        so_far = joined & later
        total += math.prod(sizes[axis] for axis in joined) * (2 if joined - so_far else 1)
    return total


def _axes(term: str, shape: tuple[int, ...], sizes: dict[str, int]) -> list[str]:
    """Return the names of an operand's axes; those of "..." are ".1" (the last of them), ".2", ...

    Their sizes are noted in `sizes`.
    """
    before, dots, after = term.partition("...")
    hidden = len(shape) - len(before) - len(after) if dots else 0
    axes = [*before, *(f".{i}" for i in range(hidden, 0, -1)), *after]
    for axis, size in zip(axes, shape, strict=True):
        sizes[axis] = max(size, sizes.get(axis, 1))
    return axes


_MATRIX: dict[str, Callable[[Op], int]] = {
    "Attention": _attention,
    "Conv": _convolution(),
    "ConvInteger": _convolution(),
    "ConvTranspose": _transposed_convolution,
    "Einsum": _einsum,
    "GRU": _recurrent(11),  # 3 sums of products, 3 activations, 5 for the mix
    "Gemm": _gemm,
    "LSTM": _recurrent(13),  # 4 sums of products, 5 activations, 4 for the cell
    "MatMul": _product,
    "MatMulInteger": _product,
    "QLinearConv": _convolution(3),
    "QLinearMatMul": _product,
    "RNN": _recurrent(2),
}
ONNX_MATRIX_KINDS = frozenset(f"onnx.{kind}" for kind in _MATRIX)
"""The kinds of ops whose FLOPs are 2 x multiply-adds."""


def _widest(op: Op) -> int:
    return max([v.elements for v in (*op.reads, *op.outputs)], default=0)


_RULES: dict[str, Callable[[Op], int]] = {
    f"onnx.{kind}": rule
    for kind, rule in (
        *dict.fromkeys(_MOVES, lambda _: 0).items(),
        *dict.fromkeys(_POINTWISE, lambda op: op.outputs[0].elements).items(),
        *dict.fromkeys(_WIDEST, _widest).items(),
        *_MATRIX.items(),
    )
}


def count_flops(op: Op) -> int:
    """Return the FLOPs of the op; without a rule 1 per element of its largest tensor."""
    return 0 if op.view else _RULES.get(op.kind, _widest)(op)


def count_bytes(op: Op) -> int:
    """Return the bytes that the op reads and writes; 0 for a view."""
    if op.view:
        return 0
    written = sum(value.size_bytes for value in op.outputs)
    reads = op.reads
    if op.kind.removeprefix("onnx.") in _GATHERS and reads and reads[0] is op.inputs[0]:
        return 2 * written + sum(value.size_bytes for value in reads[1:])
    return written + sum(value.size_bytes for value in reads)


def unknown_flops(graph: Graph) -> dict[str, int]:
    """Return kind -> number of its ops, for ONNX ops that have no rule and count as reductions."""
    kinds = [kind for kind in graph.kinds if kind.startswith("onnx.") and kind not in _RULES]
    return dict(sorted(Counter(kinds).items()))
