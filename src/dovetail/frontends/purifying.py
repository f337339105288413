"""A recorded graph made pure: no op writes in place, none merely protects or renames a value.

A graph with ops that write in place is run and recorded anew through `functionalize`, which turns
them into pure ones. Then what moves no data goes: detach, alias, and clones that protected
something from an in-place op.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize

from dovetail.frontends.arguments import replace_nodes
from dovetail.frontends.recording import Recording, TracingError, record

aten = torch.ops.aten
_NO_OPS = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)


def purified(first: Recording, mode: FakeTensorMode, names: Sequence[str]) -> Recording:
    """The recording without ops that write in place, that move no data or that nobody needs; each
    call node is marked with its node in `first`, or with None. May change `first`'s graph. `names`
    are those of the values that the recorded function was given.

    Raises `TracingError` where an op writes over what was given to the recorded function.
    """
    if any(_writes(node) for node in first.marks):
        _check_constants(first.graph)
        second = _functionalized(first, mode)
    else:  # a second trace would be a copy
        second = Recording(
            first.graph, first.constants, {node: node for node in first.marks}, first.draws
        )
    _remove_no_ops(second.graph)
    _check_pure(second.graph, names)
    _remove_dead(second.graph)
    return second


def _check_constants(graph: fx.Graph) -> None:
    """Raise `TracingError` where an op writes over a constant, or a view of one: over a tensor that
    the model keeps, but that is neither parameter nor buffer."""
    constant: set[fx.Node] = set()  # get_attr nodes, and what shares their memory
    for node in graph.nodes:
        if node.op == "get_attr":
            constant.add(node)
        if not isinstance(node.target, OpOverload):
            continue
        arguments = node.target._schema.arguments
        for position, argument in enumerate(arguments):
            given = node.args[position] if position < len(node.args) else None
            if argument.alias_info is None or given not in constant:
                continue
            if argument.alias_info.is_write:
                value = given.meta["val"]
                raise TracingError(
                    f"{node.target} writes over a tensor of shape {tuple(value.shape)} that the "
                    "model keeps but has not registered; make it a buffer (register_buffer)"
                )
            constant.add(node)


def _functionalized(first: Recording, mode: FakeTensorMode) -> Recording:
    """A recording of the graph's own run, in which pure ops stand for those that write."""
    running: list[fx.Node | None] = []

    def rerun(*values: Tensor) -> list[Any]:
        rest, env = iter(values), dict[fx.Node, Any]()
        for node in first.graph.nodes:
            args, kwargs = replace_nodes((node.args, dict(node.kwargs)), env.__getitem__)
            if node.op == "placeholder":
                env[node] = next(rest)
            elif node.op == "get_attr":
                env[node] = first.constants[node.target]
            elif node.op == "call_function":
                running[:] = [node]
                env[node] = node.target(*args, **kwargs)
            else:
                running[:] = [None]  # what still comes, writing results back, is of no node
                return list(args[0])
        raise AssertionError("a graph ends with its output")

    values = [n.meta["val"] for n in first.graph.nodes if n.op == "placeholder"]
    # The casts of autocast are ops of the first recording already.
    with mode, torch.no_grad(), torch._C._DisableAutocast():
        return record(functionalize(rerun, remove="mutations"), values, lambda: running[0], {})


def _remove_no_ops(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = node.target in _NO_OPS
        if node.target is aten.clone.default:
            # Nothing is written in place any more, so a copy in the same layout protects nothing.
            same = node.meta["val"].stride() == node.args[0].meta["val"].stride()
        if same:
            base = node.args[0]
            # What was a view of the copy is now a view of the base: let its storage say so.
            aliases = [node.meta["val"], *node.meta.get("same_storage", ())]
            base.meta.setdefault("same_storage", []).extend(aliases)
            node.replace_all_uses_with(base)
            graph.erase_node(node)


def _remove_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)


def _check_pure(graph: fx.Graph, names: Sequence[str]) -> None:
    given = {node: name for node, name in zip(graph.nodes, names, strict=False)}
    for node in graph.nodes:
        if _writes(node):
            what = given.get(node.args[0], "a parameter or an input")
            raise TracingError(
                f"{node.target} writes over {what} in a way that cannot be made part of the graph; "
                "write to a buffer, or return the new value"
            )
        if node.op == "call_function" and isinstance(node.meta.get("val"), (tuple, list)):
            nested = [v for v in node.meta["val"] if isinstance(v, (tuple, list))]
            if nested:
                raise TracingError(f"{node.target} returns lists inside a tuple; split it up")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
