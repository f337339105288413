"""From nodes to ops: functions opened, conditions decided, sequences unrolled, constants folded.

node ──► function of the file? ──► its nodes, with the caller's values
     ──► If, sequence, Constant ──► decided while the file is read
     ──► its result is known?   ──► a constant: it has no place on a device
     ──► same value, or a view? ──► no work
     ──► an op
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.errors import (
    FileFormatError,
    ModelError,
    UnknownOpError,
    UnknownShapeError,
    UnsupportedOpError,
)
from dovetail.frontends.onnx.reading import Weights
from dovetail.frontends.onnx.records import Found, Op, Value
from dovetail.frontends.onnx.scopes import label, module_of_weight, modules_of_weights, scope_of
from dovetail.frontends.onnx.sequences import SEQUENCE_RULES, NodeRule
from dovetail.frontends.onnx.shapes import Inference, Versions

_VIEWS = {"Flatten", "Reshape", "Squeeze", "Unsqueeze"}
_MOST_NODES = 5_000_000
"""Functions that call functions can make any number of nodes of a few kilobytes."""
_MOST_CALLS = 100


@dataclass(frozen=True)
class Scope:
    """What nodes see: values by name, operators' versions, and, in a function, the attributes of
    its call, the module of its caller and the functions being called."""

    values: dict[str, Found]
    versions: Versions
    attributes: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    calling: tuple[tuple[str, str, str], ...] = ()


class Walk:
    """Walks nodes in their order and gathers the ops that they are."""

    def __init__(self, onnx: Any, model: Any, weights: Weights) -> None:
        self.onnx = onnx
        self.path = str(weights.path)
        self.weights = weights
        self.inference = Inference(self.path, model.ir_version)
        self.functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
        self.modules = modules_of_weights(tensor.name for tensor in model.graph.initializer)
        self.ops: list[Op] = []
        self.nodes = 0

    def run(self, nodes: Iterable[Any], scope: Scope) -> None:
        """Add the ops of these nodes, and file in the scope what they make."""
        for node in nodes:
            self.nodes += 1
            if self.nodes > _MOST_NODES:
                raise ModelError(self.path, f"unfolds to more than {_MOST_NODES} nodes")
            found = self._node(_filled(node, scope.attributes), scope)
            for name, value in zip(node.output, found, strict=False):
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

    def _node(self, node: Any, scope: Scope) -> list[Found]:
        inputs = [self._found(node, name, scope) for name in node.input]
        function = self.functions.get((_domain(node.domain), node.op_type, node.overload))
        if function is not None:
            return self._call(node, function, inputs, scope)
        schema = self.schema(node, scope)
        if not node.output or len(node.input) < schema.min_input:
            raise FileFormatError(self.path, f"node {label(node)} lacks an input or an output")
        special = _SPECIAL.get(node.op_type) if not _domain(node.domain) else None
        if special is not None:
            return special(self, node, inputs, scope)
        tensors = []
        for value in inputs:
            if isinstance(value, list):
                raise UnsupportedOpError(self.path, label(node), "reads a sequence")
            tensors.append(value)
        return self._op(node, schema, tensors, scope)

    def _found(self, node: Any, name: str, scope: Scope) -> Found:
        if name and name not in scope.values:
            raise FileFormatError(
                self.path, f"node {label(node)} reads {name!r}, which nothing before it makes"
            )
        return scope.values[name] if name else None

    def _call(self, node: Any, function: Any, inputs: list[Found], scope: Scope) -> list[Found]:
        """Run a function's nodes in place of its call."""
        key = (_domain(function.domain), function.name, function.overload)
        if key in scope.calling:
            raise ModelError(self.path, f"function {function.name} calls itself")
        if len(scope.calling) >= _MOST_CALLS:
            raise ModelError(self.path, f"has functions within more than {_MOST_CALLS} functions")
        attributes = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
        given: dict[str, Found] = dict.fromkeys(function.input)
        given.update(zip(function.input, inputs, strict=False))
        module, _ = scope_of(node, self.modules)
        inner = Scope(
            given,
            _versions(function.opset_import),
            attributes,
            scope.module if module is None else module,
            (*scope.calling, key),
        )
        self.run(function.node, inner)
        return [self._found(node, name, inner) for name in function.output]

    def schema(self, node: Any, scope: Scope) -> Any:
        """The operator's schema. Raises `UnknownOpError` where the package `onnx` has none."""
        domain = _domain(node.domain)
        version = scope.versions.get(domain)
        if version is not None:
            known = self.onnx.defs.onnx_opset_version() if not domain else version
            if version > known:
                raise ModelError(
                    self.path, f"is of opset {version}; the installed onnx knows {known}: update it"
                )
            try:
                schema = self.onnx.defs.get_schema(node.op_type, version, domain)
            except self.onnx.defs.SchemaError:
                schema = None
            if schema is not None and not schema.deprecated:
                return schema
        raise UnknownOpError(self.path, label(node), domain, node.op_type)

    def _op(self, node: Any, schema: Any, inputs: list[Value | None], scope: Scope) -> list[Found]:
        name = label(node)
        outputs = self.inference.outputs(name, node, schema, inputs, scope.versions)
        standard = not _domain(node.domain)
        first = inputs[0] if inputs else None
        if standard and first is not None and _same(node, first, outputs):
            return [first]
        view = standard and first is not None and _is_view(node, first)
        made = outputs[0]
        if view and first is not None and made is not None and made.elements != first.elements:
            detail = f"{made.shape} has not as many elements as {first.shape}"
            raise UnknownShapeError(self.path, name, made.name, detail)
        if not view and all(v is None or v.data is not None for v in outputs):
            return list(outputs)
        attributes = {a.name: self.onnx.helper.get_attribute_value(a) for a in node.attribute}
        prefix = "onnx" if standard else node.domain.removeprefix("ai.")
        return self.add(node, f"{prefix}.{node.op_type}", inputs, outputs, scope, attributes, view)

    def add(
        self,
        node: Any,
        kind: str,
        inputs: list[Value | None],
        outputs: list[Value | None],
        scope: Scope,
        attributes: dict[str, Any],
        view: bool = False,
    ) -> list[Found]:
        """Add an op; return its outputs."""
        module, leaf = scope_of(node, self.modules)
        if module is None:
            module = scope.module or _module_of_reads(inputs)
        made = [value for value in outputs if value is not None]
        op = Op(kind, leaf, module, tuple(inputs), attributes, made, view)
        for value in made:
            value.op, value.role = op, ""
            value.base = inputs[0] if view else None
        self.ops.append(op)
        return list(outputs)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _versions(imports: Iterable[Any]) -> Versions:
    return {_domain(opset.domain): opset.version for opset in imports}


def top_scope(model: Any, inputs: Iterable[Value]) -> Scope:
    """What the nodes of the main graph see before any of them has run."""
    return Scope({value.name: value for value in inputs}, _versions(model.opset_import))


def _filled(node: Any, attributes: dict[str, Any]) -> Any:
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


def _same(node: Any, first: Value, outputs: list[Value | None]) -> bool:
    """Is the one result the first input itself?"""
    made = outputs[0] if len(outputs) == 1 else None
    if node.op_type == "Identity":
        return True
    if node.op_type == "Dropout":
        return made is not None and len(node.input) < 3
    unchanged = made is not None and (made.code, made.shape) == (first.code, first.shape)
    return unchanged and node.op_type in ("Cast", "CastLike", "Expand", *_VIEWS)


def _is_view(node: Any, first: Value) -> bool:
    """Does the result share its input's memory? A weight's transpose does, as in torch: the
    product that reads it turns it, or it is turned once, when the model is loaded."""
    weight = first.root.is_weight
    if node.op_type == "Transpose":
        return weight
    # What is known is folded; a weight's view stays one, so that its bytes are counted as its own.
    return node.op_type in _VIEWS and (weight or first.data is None)


def _module_of_reads(inputs: list[Value | None]) -> str:
    """The module of the first weight read, else of the op that made the first input."""
    values = [value for value in inputs if value is not None]
    for value in values:
        if value.root.role in ("parameter", "buffer") and "." in value.root.name:
            return module_of_weight(value.root.name)
    return next((value.op.module for value in values if value.op is not None), "")


# What is decided while the file is read. Each returns what the node's outputs stand for.


_CONSTANTS = {
    "value_float": ("f", 1, np.float32), "value_floats": ("floats", 1, np.float32),
    "value_int": ("i", 7, np.int64), "value_ints": ("ints", 7, np.int64),
}  # fmt: skip
"""Attribute of a `Constant` -> where it keeps what it holds, and the type of that."""


def _constant(walk: Walk, node: Any, _: list[Found], scope: Scope) -> list[Found]:
    attribute = node.attribute[0] if len(node.attribute) == 1 else None
    if attribute is None or attribute.name not in ("value", *_CONSTANTS):
        raise UnsupportedOpError(walk.path, label(node), "is a constant of text or a sparse one")
    name = node.output[0]
    if attribute.name == "value":
        value = walk.weights.value(attribute.t, name)
        value.role, value.literal = "constant", True  # `settle_roles` knows weights by their use
        return [value]
    held, code, dtype = _CONSTANTS[attribute.name]
    data = np.array(getattr(attribute, held), dtype=dtype)
    return [Value(name, code, data.shape, data, "constant", literal=True)]


def _if(walk: Walk, node: Any, inputs: list[Found], scope: Scope) -> list[Found]:
    condition = inputs[0]
    if not isinstance(condition, Value) or condition.number is None:
        raise UnsupportedOpError(
            walk.path, label(node), "branches on data; export the model without the branch"
        )
    wanted = "then_branch" if condition.number else "else_branch"
    branch = next((a.g for a in node.attribute if a.name == wanted), None)
    if branch is None:
        raise FileFormatError(walk.path, f"node {label(node)} lacks its {wanted}")
    inner = Scope(dict(scope.values), scope.versions, scope.attributes, scope.module, scope.calling)
    walk.open_graph(branch, inner)
    return [walk._found(node, output.name, inner) for output in branch.output]


def _loop(walk: Walk, node: Any, _: list[Found], __: Scope) -> list[Found]:
    raise UnsupportedOpError(
        walk.path, label(node), f"is a {node.op_type}: a graph has no loops; export it unrolled"
    )


_SPECIAL: dict[str, NodeRule] = {
    **SEQUENCE_RULES,
    "Constant": _constant,
    "If": _if,
    "Loop": _loop,
    "Scan": _loop,
    "SequenceMap": _loop,
}
