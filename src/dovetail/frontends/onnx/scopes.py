"""Where in the model a node stands: a dotted module path, as direct captures have."""

import ast
import re
from collections.abc import Iterable, Set
from typing import Any

_COUNTED = re.compile(r"_\d+$")
_TORCH_SCOPES = "pkg.torch.onnx.name_scopes"
"""Of torch's exporter: a list of paths, outermost first; the last is the operator's own."""


def label(node: Any) -> str:
    """A node's name, or what tells it from the others."""
    return node.name or f"{node.op_type} that makes {next(iter(node.output), '')!r}"


def scope_of(node: Any, modules: Set[str]) -> tuple[str | None, str]:
    """(module path, last part of the name) of a node; None where the file does not say.

    "/layer1/layer1.0/conv1/Conv" is ("layer1.0.conv1", "Conv"), and so is torch's metadata. A
    second call of a module, which torch's older exporter names "conv1_1", is conv1's where
    `modules` have a conv1 and no conv1_1.
    """
    for entry in node.metadata_props:
        if entry.key == _TORCH_SCOPES:
            scopes = _listed(entry.value)
            if len(scopes) > 1:
                return scopes[-2], node.op_type
    parts = [part for part in node.name.split("/") if part]
    if parts and "/" in node.name:
        return _joined(parts[:-1], modules), parts[-1]
    return None, parts[0] if parts else node.op_type


def module_of_weight(name: str) -> str:
    """ "lstm.0" of the weight "lstm.0.weight_x"."""
    return name.rpartition(".")[0]


def modules_of_weights(names: Iterable[str]) -> set[str]:
    """The modules that these weights stand in, and those around them."""
    modules: set[str] = set()
    for name in names:
        module = module_of_weight(name)
        while module and module not in modules:
            modules.add(module)
            module = module_of_weight(module)
    return modules


def _joined(parts: list[str], modules: Set[str]) -> str:
    """A path of parts, some of which repeat the one before: layer1, layer1.0 -> layer1.0."""
    path, last = "", ""
    for part in parts:
        base = path.removesuffix(last).removesuffix(".") if part.startswith(last + ".") else path
        path, last = f"{base}.{part}".removeprefix("."), part
        first = _COUNTED.sub("", path)
        if path not in modules and first in modules:
            path = first
    return path


def _listed(text: str) -> list[str]:
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(scope) for scope in scopes] if isinstance(scopes, list) else []
