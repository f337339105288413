"""Predicts how long one kernel runs on a GPU that is not there, from what the GPU physically is.

A matrix product of [batches, rows, inner] and [batches, inner, columns] is split into tiles of
t x u outputs, each of which one multiprocessor works through:

    of a tile      2 t u' (inner + overhead) (1 + alpha (1/t + 1/u)) / rate of a multiprocessor
    arithmetic     of the tiles that the busiest multiprocessor has, the last wave partly filled
    traffic        each operand once, and again for what the last cache cannot hold between tiles
    rate           the peak, or what the card's watts allow: (watts - memory) / joules a FLOP

u' is what of u is really there, in sixteens. The seconds are a soft maximum of arithmetic and of
traffic over bandwidth, of the best of six tiles. A convolution is such a product of filters with
windows (implicit GEMM), with coefficients of its own. All other kernels take the bytes that they
access over a share of the bandwidth that depends on their class.

Tiles and waves follow S. Lee et al., "Forecasting GPU Performance for Deep Learning Training and
Inference" (NeuSight), ASPLOS 2025, section 4. Differences: NeuSight has a neural network for the
rate that a tile reaches, and looks the tile up in recorded calls; here both follow from a dozen
coefficients, so that a few hundred calls fit them, and a card's power counts.

`kernels.json` holds the coefficients and what they were fitted to. `benchmarks/predictor/fit.py`
makes it, and judges it on cards that were left out.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import MachineError
from dovetail.graph import Graph
from dovetail.graph.kernels import CONVOLUTION, PRODUCTS
from dovetail.machine import Device, Machine

TABLE = Path(__file__).with_name("kernels.json")
Floats = NDArray[np.float64]

_TILES = np.array([(32, 32), (32, 128), (64, 64), (64, 128), (128, 32), (128, 128)], float)
_SCALE_NANOMETRES = 12.0
"""`picojoules` are those of a FLOP in a process of this size."""
_MEMORY_WATTS = 0.03e-9
"""Watts that the memory takes for each byte/s of its bandwidth."""
_LEAST_VOLTAGE = 0.6
"""The share of its full voltage that a chip still needs as its clock nears 0. Assumed."""
_OLDER_NANOMETRES = 16.0
"""Libraries run their oldest kernels on GPUs of processes of this size or larger, which are slower
by the coefficient `older`."""
_FILL, _CACHE, _REREAD = 0.05, 5.0, 0.3
"""Where a fit left them when they were free: the least waves of tiles of 8,192 outputs that a
product's time stands for, how much better the last cache holds operands than its size says, and the
share of rereads that miss it. Little depends on them."""
_ITEM_BYTES = {
    "float64": 8, "complex128": 16, "complex64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
}  # fmt: skip
_TENSOR_CORES = 0.75
"""The share of tensor cores' peak that a library's products reach where tiles fill the GPU. Not
fitted."""

_WIDEST_FIRST = (
    "complex128", "complex64", "float64", "float32", "complex32", "bfloat16", "float16"
)  # fmt: skip
EXACT = ("bool", "int", "uint", "bits")
ROOFLINE_SPREAD = 0.7
"""Of a device without a chip. Assumed: peaks of data sheets are off by half and more."""
MOVES_NOTHING = "moves nothing"
_OF_KIND: dict[str, str] = {
    **dict.fromkeys(
        (*PRODUCTS, "aten.linear", "aten.mv", "aten.addmv", "aten.dot", "aten.vdot",
         "aten._scaled_mm", "aten._int_mm", "onnx.Gemm", "onnx.MatMul", "onnx.Einsum",
         "onnx.MatMulInteger", "onnx.QLinearMatMul"), "product"
    ),
    **dict.fromkeys(
        (CONVOLUTION, "aten.convolution_backward", "aten._convolution",
         "aten.convolution_overrideable", "aten._slow_conv2d_forward",
         "aten.cudnn_convolution", "onnx.Conv", "onnx.ConvTranspose", "onnx.ConvInteger",
         "onnx.QLinearConv", "onnx.DeformConv"), "convolution"
    ),
    **dict.fromkeys(
        ("aten._softmax", "aten._log_softmax", "aten._softmax_backward_data",
         "aten._log_softmax_backward_data", "onnx.Softmax", "onnx.LogSoftmax"), "softmax"
    ),
    **dict.fromkeys(("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.argmax",
                     "aten.cumsum", "aten.max", "aten.min", "aten.prod", "aten.argmin",
                     "aten.var_mean", "aten.linalg_vector_norm", "onnx.ArgMax", "onnx.ArgMin"),
                    "reduction"),
    **dict.fromkeys(
        ("aten.embedding", "aten.embedding_dense_backward", "aten.gather", "aten.index",
         "aten.index_select", "aten.index_put", "aten.scatter", "aten.scatter_add", "aten.sort",
         "aten.topk", "aten.index_add", "aten.scatter_reduce", "onnx.TopK"), "gather"
    ),
    **dict.fromkeys(("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward", "onnx.LSTM",
                     "onnx.GRU", "onnx.RNN"), "recurrent"),
    **dict.fromkeys(("aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
                     "onnx.Transpose", "onnx.Reshape"), MOVES_NOTHING),
}  # fmt: skip
_SCALES = frozenset({"onnx.Add", "onnx.Sub", "onnx.Mul", "onnx.Div"})
_HEADS = frozenset({"product", "convolution", "normalisation"})
_OF_PART = {
    "attention": "attention", "Attention": "attention", "_norm": "normalisation",
    "Normalization": "normalisation", "onnx.Reduce": "reduction", "onnx.Gather": "gather",
    "onnx.Scatter": "gather", "dovetail.": "update",
}  # fmt: skip
"""Classes of kinds that hold a text."""


def class_of(kind: str) -> str:
    """The class of a kind of op: "product", "convolution", "attention", "softmax",
    "normalisation", "reduction", "gather", "recurrent", "update", `MOVES_NOTHING` or, of all
    others, "pointwise"."""
    found = _OF_KIND.get(kind)
    if found is None:
        found = next((of for part, of in _OF_PART.items() if part in kind), "pointwise")
    return found


@dataclass(frozen=True)
class ProductLaw:
    """The coefficients of products, or of convolutions.

    overhead     a tile's fixed time, in steps of the inner axis
    old_overhead, older   factors of the overhead and of the time on GPUs of `_OLDER_NANOMETRES`
    alpha        how much small tiles lose, in outputs
    share        of the bandwidth that products reach
    picojoules   a FLOP in float32 takes, in a process of 12 nanometres
    shrink       exponent of the size of the process in that
    """

    overhead: float
    old_overhead: float
    older: float
    alpha: float
    share: float
    picojoules: float
    shrink: float


@dataclass(frozen=True)
class KernelModel:
    """What `kernels.json` holds.

    laws       of "product" and "convolution"
    shares     class -> shares of the bandwidth that its kernels reach on older and on newer GPUs
    spreads    class -> natural logarithm of the factor by which 80 % of the predictions are off at
               most
    pooling    the spread of a step's seconds over the mean spread of its kernels
    """

    laws: Mapping[str, ProductLaw]
    shares: Mapping[str, tuple[float, float]]
    spreads: Mapping[str, float]
    pooling: float


@cache
def kernel_model() -> KernelModel:
    """The model that dovetail comes with."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return KernelModel(
        {name: ProductLaw(**law) for name, law in table["laws"].items()},
        {name: (older, newer) for name, (older, newer) in table["shares"].items()},
        table["spreads"],
        table["pooling"],
    )


def _largest(a: Floats, b: Floats | float, power: float) -> Floats:
    """A smooth maximum of positive numbers."""
    top = np.maximum(a, b)
    return top * ((a / top) ** power + (b / top) ** power) ** (1 / power)


def is_older(device: Device) -> bool:
    """True of GPUs for which libraries have only their oldest kernels."""
    return device.chip is not None and device.chip.nanometres >= _OLDER_NANOMETRES


def product_seconds(
    law: ProductLaw,
    device: Device,
    sizes: Floats,
    dtype: str = "float32",
    factor: float = 1.0,
) -> Floats:
    """Return [ops] the seconds of products on a device with a chip, without their launches.

    sizes    [4, ops] batches, rows, columns and inner axis
    factor   of the peak in this dtype that products can reach
    """
    chip, bandwidth = device.chip, device.bandwidth_bytes_per_second
    assert chip is not None, device.name
    units = chip.multiprocessors
    rate = device.rate(dtype) * factor
    if chip.watts and chip.nanometres and dtype in ("float32", "float64"):
        joules = 1e-12 * law.picojoules * (chip.nanometres / _SCALE_NANOMETRES) ** law.shrink
        watts = max(chip.watts - _MEMORY_WATTS * bandwidth, chip.watts / 8)
        # Of the clock at which it draws that. Voltage falls with the clock, power with its square.
        low, high = 0.0, 1.0
        while watts < joules * rate and (share := (low + high) / 2) not in (low, high):
            drawn = joules * rate * share * (_LEAST_VOLTAGE + (1 - _LEAST_VOLTAGE) * share) ** 2
            low, high = (share, high) if drawn < watts else (low, share)
        rate *= high
    is_old = is_older(device)
    inner_overhead = law.overhead * (law.old_overhead if is_old else 1.0)
    batches, rows, columns, inner = sizes[:, None]
    tile_rows, tile_columns = _TILES.T[:, :, None]
    down, across = np.ceil(rows / tile_rows), np.ceil(columns / tile_columns)
    # Of the last column of tiles only what is there is worked on.
    used = np.ceil(columns / 16) * 16 / across
    work = 2 * tile_rows * used * (inner + inner_overhead)
    work *= (1 + law.alpha * (1 / tile_rows + 1 / tile_columns)) * (law.older if is_old else 1.0)
    each = batches * down * across / units
    # The last wave is half hidden behind others, less so where there are few.
    waves = each + 0.5 * (np.ceil(each) - each) / np.maximum(1, each / 4)
    least = _FILL * np.maximum(1.0, 8192 / (tile_rows * tile_columns))
    arithmetic = work * units / rate * _largest(waves, least, 4.0)

    item = _ITEM_BYTES.get(dtype, 1 if dtype.startswith("float8") else 4)
    wave = np.minimum(down * across, 2.0 * units)
    wave_across = np.minimum(across, wave)
    wave_down = np.maximum(1.0, wave / wave_across)
    once = item * batches * (rows * inner + inner * columns + rows * columns)
    tiles = item * batches * down * across * inner
    read = wave_across * tile_columns + wave_down * tile_rows
    shared = tiles / (wave_across * wave_down) * read
    again = tiles * (tile_rows + tile_columns)
    held = _CACHE * max(chip.l2_bytes, 1)
    lost = 1 / (1 + held / (item * read * inner))
    far = 1 / (1 + held / (item * inner * np.minimum(rows, columns)))
    traffic = once + far * np.maximum(shared - once, 0)
    traffic += _REREAD * lost * np.maximum(again - np.maximum(shared, once), 0)
    reached = bandwidth * min(law.share, 1.0)
    return np.asarray(_largest(arithmetic, traffic / reached, 4.0).min(axis=0))


@dataclass(frozen=True, eq=False)
class KernelTable:
    """The distinct kernels of a graph.

    of_op        [ops] index of its kernel
    kinds        [kernels] of op
    classes      [kernels]
    dtypes       [kernels] whose rate counts
    flops, accessed_bytes   [kernels]
    sizes        [4, kernels] of products and convolutions
    joins        [kernels] True: it runs within the kernel before it, and is not launched
    """

    of_op: NDArray[np.intp]
    kinds: tuple[str, ...]
    classes: NDArray[np.str_]
    dtypes: NDArray[np.str_]
    flops: Floats
    accessed_bytes: Floats
    sizes: Floats
    joins: NDArray[np.bool_]


def rate_dtypes(graph: Graph) -> NDArray[np.str_]:
    """Return [ops] the dtype at whose rate each op runs: that of its widest floating-point or
    complex output or input. Integer and boolean work runs at the float32 rate."""
    inexact = {dtype for dtype in set(graph.dtypes) if not dtype.startswith(EXACT)}
    ranked = [dtype for dtype in _WIDEST_FIRST if dtype in inexact]
    ranked += sorted(inexact.difference(_WIDEST_FIRST))
    rank = {dtype: i for i, dtype in enumerate(ranked)}
    of_tensor = np.array([rank.get(dtype, len(rank)) for dtype in graph.dtypes], dtype=np.intp)
    of_op = np.full(len(graph), len(ranked), dtype=np.intp)
    np.minimum.at(of_op, graph.producers, of_tensor)
    np.minimum.at(of_op, graph.readers, of_tensor[graph.input_tensors])
    return np.array([*ranked, "float32"])[of_op]


def kernels_of(graph: Graph) -> KernelTable:
    """Return a graph's kernels: ops of one signature that access as many bytes are one."""
    of_kind = {kind: class_of(kind) for kind in set(graph.kinds)}
    saved, joins = _joined(graph, of_kind)
    bare = (graph.flops == 0) & (graph.accessed_bytes == 0)
    accessed = np.maximum(graph.accessed_bytes - saved, 0)
    dtypes = rate_dtypes(graph)
    place: dict[tuple[Any, ...], int] = {}
    numbers = (graph.flops.tolist(), accessed.tolist(), joins.tolist())
    keys = zip(graph.kinds, graph.signatures, dtypes.tolist(), *numbers, strict=True)
    of_op = np.array([place.setdefault(key, len(place)) for key in keys], np.intp)
    _, first = np.unique(of_op, return_index=True)
    kinds = tuple(graph.kinds[op] for op in first.tolist())
    named = zip(kinds, bare[first].tolist(), strict=True)
    classes = np.array(
        [MOVES_NOTHING if moves else of_kind[kind] for kind, moves in named], np.str_
    )
    sizes = np.ones((4, len(first)))
    outputs = np.full(len(graph), -1, np.intp)
    outputs[graph.producers[::-1]] = np.arange(graph.tensors)[::-1]
    for kernel in np.flatnonzero((classes == "product") | (classes == "convolution")).tolist():
        op = int(first[kernel])
        sizes[:, kernel] = _sizes(graph, op, int(outputs[op]), classes[kernel] == "convolution")
    return KernelTable(
        of_op, kinds, classes, dtypes[first], graph.flops[first].astype(float),
        accessed[first].astype(float), sizes, joins[first],
    )  # fmt: skip


def pointwise_kernels(
    kind: str, flops: Floats, accessed_bytes: Floats, dtypes: list[str]
) -> KernelTable:
    """Return the kernels of ops of one pointwise kind; all three are [ops]."""
    count = len(flops)
    classes = np.array([class_of(kind)] * count, np.str_)
    return KernelTable(
        np.arange(count), (kind,) * count, classes, np.array(dtypes, np.str_), flops,
        accessed_bytes, np.ones((4, count)), np.zeros(count, np.bool_),
    )  # fmt: skip


def _joined(
    graph: Graph, of_kind: Mapping[str, str]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """([ops] bytes that an op need not access, [ops] whether it runs within another op's kernel).

    ONNX writes as several ops what torch has as one kernel: a bias is added after a product or a
    convolution, a normalisation is scaled and shifted by parameters, and SiLU is a product with a
    sigmoid. Such an op joins the one before it if nothing else reads the value in between.
    """
    saved, joins = np.zeros(len(graph), np.int64), np.zeros(len(graph), np.bool_)
    if not any(kind.startswith("onnx.") for kind in of_kind):
        return saved, joins
    read = np.bincount(graph.input_tensors, minlength=graph.tensors)
    np.add.at(read, graph.outputs, 1)
    producers, kinds = graph.producers.tolist(), graph.kinds
    is_source = graph.is_source.tolist()
    moves = (graph.flops == 0) & (graph.accessed_bytes == 0)
    moves |= np.array([of_kind[kind] == MOVES_NOTHING for kind in kinds])

    def inputs(op: int) -> list[int]:
        start, end = graph.input_offsets[op : op + 2].tolist()
        return list(graph.input_tensors[start:end].tolist())

    for op in np.flatnonzero([kind in _SCALES for kind in kinds]).tolist():
        given = inputs(op)
        if len(given) != 2:
            continue
        by_parameter = [
            t
            for t, other in (given, given[::-1])
            if is_source[producers[other]] and kinds[producers[other]] != "input"
        ]
        gates = [
            t
            for t, other in (given, given[::-1])
            if kinds[producers[t]] == "onnx.Sigmoid" and inputs(producers[t]) == [other]
        ]
        is_silu = kinds[op] == "onnx.Mul" and len(gates) == 1
        live = gates if is_silu else by_parameter
        if len(live) != 1 or is_source[producers[live[0]]]:
            continue
        # Views stand between some heads and what joins them.
        tensor, seen = live[0], [live[0]]
        while moves[producers[tensor]] and len(inputs(producers[tensor])) == 1:
            tensor = inputs(producers[tensor])[0]
            seen.append(tensor)
        head = producers[tensor]
        name, size = of_kind[kinds[head]], int(graph.tensor_bytes[tensor])
        if not (is_silu or joins[head] or name in _HEADS) or not (read[seen] == 1).all():
            continue
        joins[op] = True
        # The law of a product counts what it writes, which its last op does.
        is_law = name in ("product", "convolution")
        saved[op] += 2 * size if is_law else size
        saved[head] += 0 if is_law else size
    return saved, joins


def _sizes(graph: Graph, op: int, output: int, is_convolution: bool) -> tuple[float, ...]:
    """(batches, rows, columns, inner axis) of a product, or of the product that a convolution is:
    windows by filters. All are 1 where the shapes do not tell."""
    start, end = graph.input_offsets[op : op + 2].tolist()
    inputs = graph.input_tensors[start:end].tolist()
    # The gradient of the windows, of which there is one for each output of the forward op.
    if graph.kinds[op] == "aten.convolution_backward" and inputs:
        output = inputs[0]
    shape, flops = graph.shapes[output] if output >= 0 else (0,), int(graph.flops[op])
    elements = math.prod(shape)
    if not elements or not shape:
        return 1.0, 1.0, 1.0, 1.0
    inner = max(1.0, flops / (2 * elements))
    if is_convolution:
        columns = shape[1] if len(shape) > 2 else shape[0]
        return 1.0, elements / columns, float(columns), inner
    columns = shape[-1] if len(shape) > 1 else 1
    # A matrix is multiplied with all batches at once.
    is_batched = len(shape) > 2 and all(len(graph.shapes[t]) != 2 for t in inputs)
    batches = math.prod(shape[:-2]) if is_batched else 1
    return float(batches), elements / (columns * batches), float(columns), inner


def kernel_seconds(
    kernels: KernelTable, device: Device, model: KernelModel | None = None
) -> Floats:
    """Return [kernels] the seconds of kernels on a device, with their launches: by their class if
    `is_modelled`, else by the roofline. Raises `MachineError` for a dtype without a rate."""
    model = model or kernel_model()
    # Kernels without FLOPs need no rate; any value will do.
    rates = np.ones(len(kernels.flops))
    for dtype in set(kernels.dtypes.tolist()):
        of_dtype = (kernels.dtypes == dtype) & (kernels.flops > 0)
        if of_dtype.any():
            rates[of_dtype] = device.rate(dtype)
    bandwidth = device.bandwidth_bytes_per_second
    if is_modelled(device):
        age = 0 if is_older(device) else 1
        shares = np.array(
            [model.shares.get(name, model.shares["pointwise"])[age] for name in kernels.classes]
        )
        work = np.maximum(kernels.flops / rates, kernels.accessed_bytes / (bandwidth * shares))
        for name, law in model.laws.items():
            for dtype in set(kernels.dtypes[kernels.classes == name].tolist()):
                of_law = (kernels.classes == name) & (kernels.dtypes == dtype)
                of = np.flatnonzero(of_law & (kernels.flops > 0))
                if not len(of):
                    continue
                factor = _TENSOR_CORES if _on_tensor_cores(device, dtype) else 1.0
                found = product_seconds(law, device, kernels.sizes[:, of], dtype, factor)
                least = np.maximum(
                    kernels.flops[of] / rates[of], kernels.accessed_bytes[of] / bandwidth
                )
                work[of] = np.maximum(found, least)
    else:
        if device.efficiencies:
            reached = {kind: device.efficiency(kind) for kind in set(kernels.kinds)}
            rates *= np.array([reached[kind] for kind in kernels.kinds])
        work = np.maximum(kernels.flops / rates, kernels.accessed_bytes / bandwidth)
    if device.calibration:
        unknown = sorted(device.calibration.keys() - model.spreads.keys())
        if unknown:
            known = ", ".join(sorted(model.spreads.keys() - {"tensor cores"}))
            raise MachineError(
                f"device {device.name}: calibration of {unknown[0]!r}, which is none of {known}"
            )
        work *= np.array([device.calibration.get(name, 1.0) for name in kernels.classes])
    seconds: Floats = np.where(kernels.joins, 0.0, device.op_overhead_seconds) + work
    if is_modelled(device):
        seconds[kernels.classes == MOVES_NOTHING] = 0.0
    return seconds


def is_modelled(device: Device) -> bool:
    """True if a device's kernels are costed by their class: a GPU that is known, whose rates nobody
    has fitted to a roofline."""
    return device.kind == "gpu" and device.chip is not None and not device.efficiencies


def _on_tensor_cores(device: Device, dtype: str) -> bool:
    """True if products in this dtype are that much faster than in float32."""
    plain = device.flops_per_second.get("float32")
    return plain is not None and device.rate(dtype) > 2.0 * plain


def step_spread(
    graph: Graph,
    machine: Machine,
    placement: NDArray[np.integer[Any]],
    compute_seconds: Floats,
    model: KernelModel | None = None,
) -> float:
    """Return the spread of a step's predicted seconds: 80 % of steps are within a factor of its
    exponential. It is the mean of its kernels' spreads, weighted by their seconds, times
    `KernelModel.pooling`.

    placement         [ops] device indices
    compute_seconds   [ops, devices] analytic costs
    """
    model, kernels = model or kernel_model(), kernels_of(graph)
    spent = compute_seconds[np.arange(len(graph)), placement]
    spent = np.where(np.isfinite(spent), spent, 0.0)
    total = 0.0
    for d, device in enumerate(machine.devices):
        here = placement == d
        if not spent[here].any():
            continue
        if not is_modelled(device):
            total += ROOFLINE_SPREAD * float(spent[here].sum())
            continue
        spreads = np.array([model.spreads[name] for name in kernels.classes])
        for dtype in set(kernels.dtypes.tolist()):
            fast = (kernels.dtypes == dtype) & np.isin(kernels.classes, list(model.laws))
            if fast.any() and _on_tensor_cores(device, dtype):
                spreads[fast] = model.spreads["tensor cores"]
        total += model.pooling * float(spreads[kernels.of_op[here]] @ spent[here])
    return total / float(spent.sum()) if total else 0.0
