"""Reads nodes into ops: opens functions, decides conditions, unrolls sequences, folds constants.

node ──► function of the file? ──► its nodes, with the caller's values
     ──► If, sequence, Constant ──► decided while the file is read
     ──► its result is known?   ──► a constant: it has no place on a device
     ──► same value, or a view? ──► no work
     ──► an op
"""

import ast
import math
import re
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import (
    FileFormatError,
    ModelError,
    UnknownOpError,
    UnknownShapeError,
    UnsupportedOpError,
)
from dovetail.frontends.onnx.reading import (
    ELEMENT_TYPES,
    MOST_KNOWN_ELEMENTS,
    NodeValue,
    Op,
    Value,
    Weights,
)

# Module paths, which say where in the model a node stands, with dots as in direct captures.


_COUNTED = re.compile(r"_\d+$")
_TORCH_SCOPES = "pkg.torch.onnx.name_scopes"
"""Key under which torch's exporter writes a list of paths, outermost first; the last is the
operator's own."""


def label(node: Any) -> str:
    """Return a node's name, or if it has none a text that tells it from the others."""
    return node.name or f"{node.op_type} that makes {next(iter(node.output), '')!r}"


def scope_of(node: Any, modules: Set[str]) -> tuple[str | None, str]:
    """(module path, last part of the name) of a node; None where the file does not say.

    "/layer1/layer1.0/conv1/Conv" is ("layer1.0.conv1", "Conv"), and so is torch's metadata. A
    second call of a module, which torch's older exporter names "conv1_1", is conv1's where
    `modules` have a conv1 and no conv1_1.
    """
    for entry in node.metadata_props:
        if entry.key == _TORCH_SCOPES:
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(scopes, list) and len(scopes) > 1:
                return str(scopes[-2]), node.op_type
    parts = [part for part in node.name.split("/") if part]
    if not parts or "/" not in node.name:
        return None, parts[0] if parts else node.op_type
    path, last = "", ""
    for part in parts[:-1]:
        # A part may repeat the one before it: layer1, layer1.0 -> layer1.0.
        base = path.removesuffix(last).removesuffix(".") if part.startswith(last + ".") else path
        path, last = f"{base}.{part}".removeprefix("."), part
        first = _COUNTED.sub("", path)
        if path not in modules and first in modules:
            path = first
    return path, parts[-1]


def module_of_weight(name: str) -> str:
    """Return the module of a weight: "lstm.0" for "lstm.0.weight_x"."""
    return name.rpartition(".")[0]


def modules_of_weights(names: Iterable[str]) -> set[str]:
    """Return the modules that hold these weights, and the modules around those."""
    modules: set[str] = set()
    for name in names:
        module = module_of_weight(name)
        while module and module not in modules:
            modules.add(module)
            module = module_of_weight(module)
    return modules


# Sequences of tensors, which are unrolled while the file is read. Positions and lengths must be
# known then.


NodeRule = Callable[["NodeReader", Any, list[NodeValue], "Scope"], list[NodeValue]]
"""(reader, node, values of its inputs, scope) -> the values of the node's outputs."""


def _sequence_of(reader: "NodeReader", node: Any, value: NodeValue) -> list[Value]:
    if not isinstance(value, list):
        raise reader.unsupported(node, "reads a sequence that is not known")
    return value


def _tensor_of(reader: "NodeReader", node: Any, value: NodeValue) -> Value:
    if not isinstance(value, Value):
        raise reader.unsupported(node, "lacks a tensor to read")
    return value


def _axis_of(reader: "NodeReader", node: Any, axis: int | None, axes: int) -> int:
    if axis is None or not -axes <= axis < axes:
        raise reader.unsupported(node, f"has the axis {axis} of {axes}")
    return axis % axes


def _sequence_op(
    reader: "NodeReader", node: Any, inputs: list[NodeValue], _: "Scope"
) -> list[NodeValue]:
    """Make a sequence, or read, insert or count its tensors: no device has anything to do."""
    if node.op_type in ("SequenceConstruct", "SequenceEmpty"):
        return [[_tensor_of(reader, node, value) for value in inputs]]
    values = _sequence_of(reader, node, inputs[0])
    if node.op_type == "SequenceLength":
        data = np.array(len(values), dtype=np.int64)
        return [Value(node.output[0], 7, (), data, "constant")]
    inserts = node.op_type == "SequenceInsert"
    given = next(iter(inputs[2 if inserts else 1 :]), None)
    position: int | None = len(values) if inserts else 0
    if given is not None:
        position = None if isinstance(given, list) else given.number
    if position is None:
        raise reader.unsupported(node, "takes a position that depends on data")
    if inserts:
        longer = list(values)
        longer.insert(position, _tensor_of(reader, node, inputs[1]))
        return [longer]
    if not -len(values) <= position < len(values):
        raise reader.unsupported(node, f"takes {position} of {len(values)}")
    return [values[position]]


def _split_to_sequence(
    reader: "NodeReader", node: Any, inputs: list[NodeValue], scope: "Scope"
) -> list[NodeValue]:
    whole, options = _tensor_of(reader, node, inputs[0]), {a.name: a.i for a in node.attribute}
    axis = _axis_of(reader, node, options.get("axis", 0), len(whole.shape))
    given = inputs[1] if len(inputs) > 1 else None
    keep = given is not None or bool(options.get("keepdims", 1))
    length = whole.shape[axis]
    if given is not None and (isinstance(given, list) or given.data is None):
        raise reader.unsupported(node, "splits by sizes that depend on data")
    if given is not None and given.data is not None and given.shape:
        sizes = [int(size) for size in given.data.reshape(-1)]
        if len(given.shape) != 1 or sum(sizes) != length or min(sizes, default=0) < 0:
            raise reader.unsupported(node, f"splits {length} into {given.data.tolist()}")
    else:
        # One size for all parts; without any size each part is 1 long.
        size = 1 if given is None else max(given.number or 1, 1)
        if length > size * MOST_KNOWN_ELEMENTS:
            raise reader.unsupported(node, f"splits {length} into parts of {size}")
        sizes = [min(size, length - start) for start in range(0, length, size)]
    before, after = whole.shape[:axis], whole.shape[axis + 1 :]
    parts = [
        Value(f"{node.output[0]}/{i}", whole.code, (*before, *([size] if keep else ()), *after))
        for i, size in enumerate(sizes)
    ]
    reader.add(node, "onnx.SplitToSequence", [whole], list(parts), scope, {"axis": axis})
    return [parts]


def _concat_from_sequence(
    reader: "NodeReader", node: Any, inputs: list[NodeValue], scope: "Scope"
) -> list[NodeValue]:
    values, options = _sequence_of(reader, node, inputs[0]), {a.name: a.i for a in node.attribute}
    if not values:
        raise reader.unsupported(node, "joins an empty sequence")
    shape, new_axis = list(values[0].shape), bool(options.get("new_axis", 0))
    axis = _axis_of(reader, node, options.get("axis"), len(shape) + new_axis)
    joined_axis = -1 if new_axis else axis
    around = {tuple(-1 if i == joined_axis else n for i, n in enumerate(v.shape)) for v in values}
    if len(around) > 1:
        raise reader.unsupported(node, "joins tensors of unlike shapes")
    if new_axis:
        shape.insert(axis, len(values))
    else:
        shape[axis] = sum(value.shape[axis] for value in values)
    joined = Value(node.output[0], values[0].code, tuple(shape))
    kind, attributes = "onnx.ConcatFromSequence", {"axis": axis, "new_axis": int(new_axis)}
    return reader.add(node, kind, list(values), [joined], scope, attributes)


# Inference: the shapes of a node's outputs, and their content where all inputs are known.


_BOOL = 9
Inputs = Sequence[Value | None]
Shaped = tuple[int, tuple[int, ...]]
"""Element type and shape."""


def own_rule(node: Any, inputs: Inputs) -> Shaped | None:
    """Return type and shape of a node's first output by our own rules; None if no rule fits.

    They are for ops without a rule in the package `onnx`, and for `STFT`, whose rule there is
    wrong.
    """
    if node.domain not in ("", "ai.onnx"):
        return None
    attributes = {a.name: a.i for a in node.attribute}
    first, second, third, fourth = (*inputs, None, None, None, None)[:4]
    match node.op_type:
        case "GroupNormalization" | "MeanVarianceNormalization":
            return None if first is None else (first.code, first.shape)
        case "GreaterOrEqual" | "LessOrEqual":
            shapes = [value.shape for value in inputs if value is not None]
            try:
                return _BOOL, tuple(np.broadcast_shapes(*shapes))
            except ValueError:
                return None
        case "Compress":
            condition = None if second is None else second.data
            if first is None or condition is None or condition.ndim != 1:
                return None
            if "axis" not in attributes:
                return first.code, (int(np.count_nonzero(condition)),)
            axis = attributes["axis"]
            if not -len(first.shape) <= axis < len(first.shape):
                return None
            axis %= len(first.shape)
            kept = int(np.count_nonzero(condition[: first.shape[axis]]))
            return first.code, (*first.shape[:axis], kept, *first.shape[axis + 1 :])
        case "OneHot":  # indices, depth, values
            size = None if second is None else second.number
            if first is None or third is None or size is None:
                return None
            axis = attributes.get("axis", -1) % (len(first.shape) + 1)
            return third.code, (*first.shape[:axis], size, *first.shape[axis:])
        case "MaxUnpool":  # the third input is the shape
            if first is None or third is None or third.data is None:
                return None
            return first.code, tuple(third.data.tolist())
        case "STFT":  # signal, step, window, length -> [batch, frames, bins, 2]
            pace = None if second is None else second.number
            frame = None if fourth is None else fourth.number
            if frame is None and third is not None:
                frame = math.prod(third.shape)
            if first is None or len(first.shape) < 2 or pace is None or frame is None:
                return None
            bins = frame // 2 + 1 if attributes.get("onesided", 1) else frame
            frames = (first.shape[1] - frame) // max(pace, 1) + 1
            return first.code, (first.shape[0], frames, bins, 2)
    return None


_RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
}  # fmt: skip
_AXES = r"[A-Za-z ]*(\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(f"{_AXES}(,{_AXES})*(->{_AXES})?")
Versions = dict[str, int]
"""Domain -> version of its operators."""


def _fault(node: Any, inputs: Inputs) -> str:
    """Return text about a fault of a node that the package `onnx` does not notice, or on which it
    never returns; "" if there is none."""
    if node.domain not in ("", "ai.onnx"):
        return ""
    recurrent = node.op_type in ("GRU", "LSTM", "RNN")
    if recurrent and any(value is None or len(value.shape) != 3 for value in inputs[:3]):
        return "its first three inputs have three axes each"
    if node.op_type == "Einsum":
        equations = [a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"]
        wrong = [text for text in equations if not _EQUATION.fullmatch(text)]
        return f"{wrong[0]!r} is no equation" if wrong else ""
    return ""


def _read_shape(proto: Any) -> Shaped | None:
    """Return type and shape of a `TypeProto`; None if one of its axes is not known."""
    if proto is None or not proto.HasField("tensor_type"):
        return None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return None
    if any(not dim.HasField("dim_value") or dim.dim_value < 0 for dim in tensor.shape.dim):
        return None
    return tensor.elem_type, tuple(dim.dim_value for dim in tensor.shape.dim)


_VIEWS = {"Flatten", "Reshape", "Squeeze", "Unsqueeze"}
_MOST_NODES = 5_000_000
"""The most nodes that a file may unfold to: a few kilobytes of functions that call functions can
stand for any number."""
_MOST_CALLS = 100


@dataclass(frozen=True)
class Scope:
    """What nodes can refer to: values by name and the versions of operators. Inside a function also
    the attributes of its call, the module of its caller and the functions that are being called."""

    values: dict[str, NodeValue]
    versions: Versions
    attributes: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    calling: tuple[tuple[str, str, str], ...] = ()


class NodeReader:
    """Walks through nodes in their order and collects the ops that they become."""

    def __init__(self, onnx: Any, model: Any, weights: Weights) -> None:
        self.onnx = onnx
        self.path = str(weights.path)
        self.weights = weights
        self.ir_version = model.ir_version
        self.functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
        self.modules = modules_of_weights(tensor.name for tensor in model.graph.initializer)
        self.ops: list[Op] = []
        self.nodes = 0

    def run(self, nodes: Iterable[Any], scope: Scope) -> None:
        """Add the ops of these nodes, and store their outputs in the scope."""
        for node in nodes:
            self.nodes += 1
            if self.nodes > _MOST_NODES:
                raise ModelError(self.path, f"unfolds to more than {_MOST_NODES} nodes")
            values = self._node(_fill_attributes(node, scope.attributes), scope)
            for name, value in zip(node.output, values, strict=False):
                if name and name in scope.values and not scope.calling:
                    raise FileFormatError(self.path, f"two nodes make {name!r}")
                if name:
                    scope.values[name] = value

    def open_graph(self, graph: Any, scope: Scope) -> None:
        """File the graph's constants in the scope and run its nodes."""
        for tensor in graph.initializer:
            scope.values[tensor.name] = self.weights.value(tensor, tensor.name)
        if len(graph.sparse_initializer):
            name = graph.sparse_initializer[0].values.name
            raise ModelError(self.path, f"weight {name!r} is sparse; store it as a dense tensor")
        self.run(graph.node, scope)

    def _node(self, node: Any, scope: Scope) -> list[NodeValue]:
        """Return the values of a node's outputs, and add the op that makes them if there is one."""
        inputs = [self._read_value(node, name, scope) for name in node.input]
        function = self.functions.get((_domain(node.domain), node.op_type, node.overload))
        if function is not None:
            # Its nodes run in place of its call. `onnx.inliner` is not used, because it drops the
            # call's name, and with it the module of these nodes, and has no limit for functions
            # that call functions.
            key = (_domain(function.domain), function.name, function.overload)
            if key in scope.calling:
                raise ModelError(self.path, f"function {function.name} calls itself")
            if len(scope.calling) >= _MOST_CALLS:
                detail = f"has functions within more than {_MOST_CALLS} functions"
                raise ModelError(self.path, detail)
            given: dict[str, NodeValue] = dict.fromkeys(function.input)
            given.update(zip(function.input, inputs, strict=False))
            module, _ = scope_of(node, self.modules)
            inner = Scope(
                given,
                _versions(function.opset_import),
                {a.name: a for a in (*function.attribute_proto, *node.attribute)},
                scope.module if module is None else module,
                (*scope.calling, key),
            )
            self.run(function.node, inner)
            return [self._read_value(node, name, inner) for name in function.output]
        schema = self.schema(node, scope)
        if not node.output or len(node.input) < schema.min_input:
            raise FileFormatError(self.path, f"node {label(node)} lacks an input or an output")
        standard, kind = not _domain(node.domain), node.op_type
        special = _SPECIAL.get(kind) if standard else None
        if special is not None:
            return special(self, node, inputs, scope)
        tensors: list[Value | None] = []
        for value in inputs:
            if isinstance(value, list):
                raise self.unsupported(node, "reads a sequence")
            tensors.append(value)
        outputs = self._infer(node, schema, tensors, scope.versions)
        first, view = tensors[0] if tensors else None, False
        if standard and first is not None:
            result = outputs[0] if len(outputs) == 1 else None
            shaped = first.code, first.shape
            unchanged = result is not None and (result.code, result.shape) == shaped
            if (
                kind == "Identity"
                or (kind == "Dropout" and result is not None and len(node.input) < 3)
                or (unchanged and kind in ("Cast", "CastLike", "Expand", *_VIEWS))
            ):
                return [first]
            # A weight's transpose shares its memory, as in torch: the product that reads it
            # transposes it, or it is transposed once when the model is loaded. What is known is
            # folded; a weight's view stays one, so that its bytes are counted as its own.
            weight = first.root.is_weight
            view = (kind == "Transpose" and weight) or (
                kind in _VIEWS and (weight or first.data is None)
            )
            result = outputs[0]
            if view and result is not None and result.elements != first.elements:
                detail = f"{result.shape} has not as many elements as {first.shape}"
                raise UnknownShapeError(self.path, label(node), result.name, detail)
        if not view and all(v is None or v.data is not None for v in outputs):
            return list(outputs)
        attributes = {a.name: self.onnx.helper.get_attribute_value(a) for a in node.attribute}
        prefix = "onnx" if standard else node.domain.removeprefix("ai.")
        return self.add(node, f"{prefix}.{kind}", tensors, outputs, scope, attributes, view)

    def _infer(
        self, node: Any, schema: Any, inputs: Inputs, versions: Versions
    ) -> list[Value | None]:
        """Return a value per output, None where one is left out.

        Shapes follow by the rules of the package `onnx`, node by node and with all content that is
        known. So shapes that follow from other shapes, such as that of a `Reshape`, are found too.
        Raises `UnknownShapeError`.
        """
        onnx, op = self.onnx, label(node)
        if fault := _fault(node, inputs):
            raise UnknownShapeError(self.path, op, node.output[0], fault)
        types: dict[str, Any] = {}  # output -> `TypeProto`
        contents: list[NDArray[Any]] | None
        first = inputs[0] if len(inputs) == 1 and not _domain(node.domain) else None
        if first is not None and node.op_type == "Size":
            contents = [np.array(first.elements, dtype=np.int64)]
        elif first is not None and node.op_type == "Shape":
            ends = {a.name: a.i for a in node.attribute}
            part = first.shape[ends.get("start", 0) : ends.get("end", len(first.shape))]
            contents = [np.array(part, dtype=np.int64)]
        else:
            named = {name: v for name, v in zip(node.input, inputs, strict=True) if v is not None}
            given = {
                name: onnx.helper.make_tensor_type_proto(value.code, value.shape)
                for name, value in named.items()
            }
            data = {
                name: onnx.numpy_helper.from_array(value.data, name)
                for name, value in named.items()
                if value.data is not None
            }
            opsets = [onnx.helper.make_opsetid(*opset) for opset in versions.items()]
            try:
                types = onnx.shape_inference.infer_node_outputs(
                    schema, node, given, data, opset_imports=opsets, ir_version=self.ir_version
                )
            except Exception as error:  # several kinds, RuntimeError among them, of no common base
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise UnknownShapeError(self.path, op, node.output[0], lines[0]) from None
            contents = self._fold_constant(node, types, inputs, versions)
        if contents is not None and len(contents) < len(node.output):
            detail = f"it has {len(node.output)} outputs, but makes {len(contents)}"
            raise UnknownShapeError(self.path, op, node.output[len(contents)], detail)
        values: list[Value | None] = []
        for position, name in enumerate(node.output):
            if not name:
                values.append(None)
                continue
            if contents is not None:
                content = contents[position]
                code = onnx.helper.np_dtype_to_tensor_dtype(content.dtype)
                values.append(Value(name, code, content.shape, content, role="constant"))
                continue
            ruled = own_rule(node, inputs) if position == 0 else None
            shaped = ruled or _read_shape(types.get(name))
            if shaped is None:
                raise UnknownShapeError(self.path, op, name, "it depends on data, or has no rule")
            if shaped[0] not in ELEMENT_TYPES:
                detail = f"makes {name!r}, which is text or unknown"
                raise UnsupportedOpError(self.path, op, detail)
            value = Value(name, *shaped)
            if not value.possible:
                raise UnknownShapeError(self.path, op, name, f"{value.shape} is impossible")
            values.append(value)
        return values

    def _fold_constant(
        self, node: Any, types: dict[str, Any], inputs: Inputs, versions: Versions
    ) -> list[NDArray[Any]] | None:
        """Return the outputs' content if it follows from the file alone and is small, else None."""
        if node.op_type in _RANDOM or any(v is not None and v.data is None for v in inputs):
            return None
        ruled = own_rule(node, inputs)
        for name in node.output:
            shaped = ruled if ruled and name == node.output[0] else _read_shape(types.get(name))
            if shaped is not None and math.prod(shaped[1]) > MOST_KNOWN_ELEMENTS:
                return None
        onnx = self.onnx
        graph = onnx.helper.make_graph(
            [node],
            "one node",
            [
                onnx.helper.make_tensor_value_info(name, value.code, value.shape)
                for name, value in dict(zip(node.input, inputs, strict=True)).items()
                if value is not None
            ],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        opsets = [onnx.helper.make_opsetid(*opset) for opset in versions.items()]
        given = {n: v.data for n, v in zip(node.input, inputs, strict=True) if v is not None}
        try:
            model = onnx.helper.make_model(graph, opset_imports=opsets)
            with np.errstate(all="ignore"):
                evaluated = onnx.reference.ReferenceEvaluator(model).run(None, given)
            codes = {onnx.helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype) for a in evaluated}
        except Exception:  # what the reference cannot evaluate is an op like any other
            return None
        # The reference leaves out what has no name.
        arrays = iter(evaluated)
        results = [next(arrays, None) if name else np.empty(0) for name in node.output]
        tensors = all(isinstance(a, np.ndarray | np.generic) for a in results)
        return [np.asarray(a) for a in results] if tensors and codes <= set(ELEMENT_TYPES) else None

    def unsupported(self, node: Any, detail: str) -> UnsupportedOpError:
        """Return the error for a node that no graph can have."""
        return UnsupportedOpError(self.path, label(node), detail)

    def _read_value(self, node: Any, name: str, scope: Scope) -> NodeValue:
        if name and name not in scope.values:
            raise FileFormatError(
                self.path, f"node {label(node)} reads {name!r}, which nothing before it makes"
            )
        return scope.values[name] if name else None

    def schema(self, node: Any, scope: Scope) -> Any:
        """The operator's schema. Raises `UnknownOpError` where the package `onnx` has none."""
        domain = _domain(node.domain)
        version = scope.versions.get(domain)
        if version is not None:
            supported = self.onnx.defs.onnx_opset_version() if not domain else version
            if version > supported:
                raise ModelError(
                    self.path,
                    f"is of opset {version}; the installed onnx knows {supported}: update it",
                )
            try:
                schema = self.onnx.defs.get_schema(node.op_type, version, domain)
            except self.onnx.defs.SchemaError:
                schema = None
            if schema is not None and not schema.deprecated:
                return schema
        raise UnknownOpError(self.path, label(node), domain, node.op_type)

    def add(
        self,
        node: Any,
        kind: str,
        inputs: list[Value | None],
        outputs: list[Value | None],
        scope: Scope,
        attributes: dict[str, Any],
        view: bool = False,
    ) -> list[NodeValue]:
        """Add an op; return its outputs."""
        module, leaf = scope_of(node, self.modules)
        if module is None:
            # The module of the first weight that is read, else of the op that makes the first
            # input.
            read = [value for value in inputs if value is not None]
            of_weights = [
                module_of_weight(value.root.name)
                for value in read
                if value.root.role in ("parameter", "buffer") and "." in value.root.name
            ]
            of_ops = [value.op.module for value in read if value.op is not None]
            module = scope.module or next(iter([*of_weights, *of_ops]), "")
        present = [value for value in outputs if value is not None]
        op = Op(kind, leaf, module, tuple(inputs), attributes, present, view)
        for value in present:
            value.op, value.role = op, ""
            value.base = inputs[0] if view else None
        self.ops.append(op)
        return list(outputs)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _versions(imports: Iterable[Any]) -> Versions:
    return {_domain(opset.domain): opset.version for opset in imports}


def top_scope(model: Any, inputs: Iterable[Value]) -> Scope:
    """The scope of the main graph's nodes before any of them is read."""
    return Scope({value.name: value for value in inputs}, _versions(model.opset_import))


def _fill_attributes(node: Any, attributes: dict[str, Any]) -> Any:
    """The node with the attributes of its function's call put in."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    filled = type(node)()
    filled.CopyFrom(node)
    del filled.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            filled.attribute.add().CopyFrom(attribute)
        elif attribute.ref_attr_name in attributes:
            added = filled.attribute.add()
            added.CopyFrom(attributes[attribute.ref_attr_name])
            added.name = attribute.name
    return filled


# Nodes that are decided while the file is read. Each rule returns the values of the node's outputs.


_CONSTANTS = {
    "value_float": ("f", 1, np.float32), "value_floats": ("floats", 1, np.float32),
    "value_int": ("i", 7, np.int64), "value_ints": ("ints", 7, np.int64),
}  # fmt: skip
"""Attribute of a `Constant` -> the field of its value, and the value's type."""


def _constant(reader: NodeReader, node: Any, _: list[NodeValue], scope: Scope) -> list[NodeValue]:
    attribute = node.attribute[0] if len(node.attribute) == 1 else None
    if attribute is None or attribute.name not in ("value", *_CONSTANTS):
        raise reader.unsupported(node, "is a constant of text or a sparse one")
    name = node.output[0]
    if attribute.name == "value":
        value = reader.weights.value(attribute.t, name)
        value.role, value.literal = "constant", True  # `settle_roles` knows weights by their use
        return [value]
    held, code, dtype = _CONSTANTS[attribute.name]
    data = np.array(getattr(attribute, held), dtype=dtype)
    return [Value(name, code, data.shape, data, "constant", literal=True)]


def _if(reader: NodeReader, node: Any, inputs: list[NodeValue], scope: Scope) -> list[NodeValue]:
    condition = inputs[0]
    if not isinstance(condition, Value) or condition.number is None:
        raise reader.unsupported(node, "branches on data; export the model without the branch")
    branch_name = "then_branch" if condition.number else "else_branch"
    branch = next((a.g for a in node.attribute if a.name == branch_name), None)
    if branch is None:
        raise FileFormatError(reader.path, f"node {label(node)} lacks its {branch_name}")
    inner = Scope(dict(scope.values), scope.versions, scope.attributes, scope.module, scope.calling)
    reader.open_graph(branch, inner)
    return [reader._read_value(node, output.name, inner) for output in branch.output]


def _loop(reader: NodeReader, node: Any, _: list[NodeValue], __: Scope) -> list[NodeValue]:
    raise reader.unsupported(node, f"is a {node.op_type}: a graph has no loops; export it unrolled")


_SPECIAL: dict[str, NodeRule] = {
    "ConcatFromSequence": _concat_from_sequence,
    "Constant": _constant,
    "If": _if,
    "Loop": _loop,
    "Scan": _loop,
    "SequenceAt": _sequence_op,
    "SequenceConstruct": _sequence_op,
    "SequenceEmpty": _sequence_op,
    "SequenceInsert": _sequence_op,
    "SequenceLength": _sequence_op,
    "SequenceMap": _loop,
    "SplitToSequence": _split_to_sequence,
}
