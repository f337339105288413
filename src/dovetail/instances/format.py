"""The file's shape: what may stand in it, and complaints that name the node."""

from collections import Counter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.errors import FileFormatError
from dovetail.graph.files import first_complaint
from dovetail.instances.records import MOST_DEVICES
from dovetail.units import UNLIMITED_BYTES

COST_TOLERANCE_MS = 1e-6
"""By which costs on the edges of one source may differ, as the authors' own programs allow."""
MOST_MILLISECONDS = 1e15
_IGNORING = ConfigDict(extra="ignore", allow_inf_nan=False)
_Milliseconds = Field(default=None, ge=0, le=MOST_MILLISECONDS)


class Node(BaseModel):
    """A node. A latency may be absent where no device could make use of it."""

    model_config = _IGNORING
    id: int
    name: str = ""
    supportedOnFpga: bool = True
    cpuLatency: float | None = _Milliseconds
    fpgaLatency: float | None = _Milliseconds
    isBackwardNode: bool = False
    colorClass: int | str | None = None
    size: float = Field(default=0.0, ge=0)


class Edge(BaseModel):
    model_config = _IGNORING
    sourceId: int
    destId: int
    cost: float = Field(default=0.0, ge=0, le=MOST_MILLISECONDS)


class File(BaseModel):
    model_config = _IGNORING
    maxSizePerFPGA: float = Field(ge=0)
    maxFPGAs: int = Field(ge=0, le=MOST_DEVICES)
    maxCPUs: int = Field(ge=0, le=MOST_DEVICES)
    nodes: list[Node]
    edges: list[Edge]


def parse(raw: Any, path: str) -> File:
    """The file, checked but for cycles. Raises `FileFormatError` that names node or edge."""
    try:
        file = File.model_validate(raw)
        _check_machine(file)
        _check_nodes(file)
        _check_edges(file)
    except ValidationError as error:
        raise FileFormatError(path, _complaint(error, raw)) from None
    except ValueError as error:
        raise FileFormatError(path, str(error)) from None
    return file


def label(node: Node) -> str:
    """How an error names a node."""
    return f"node {node.id}" + (f" ({node.name})" if node.name else "")


def _complaint(error: ValidationError, raw: Any) -> str:
    """The first complaint; where it is about a node or an edge, with what names that."""
    text = first_complaint(error)
    where = error.errors(include_url=False)[0]["loc"]
    if len(where) > 2 and isinstance(where[1], int):
        entry = raw[where[0]][where[1]]
        if where[0] == "nodes" and isinstance(entry, dict) and "id" in entry:
            return f"node {entry['id']}: {text}"
        if where[0] == "edges" and isinstance(entry, dict):
            return f"edge {entry.get('sourceId')} -> {entry.get('destId')}: {text}"
    return text


def _check_machine(file: File) -> None:
    if file.maxFPGAs + file.maxCPUs < 1:
        raise ValueError("maxFPGAs and maxCPUs are 0: no device")


def _check_nodes(file: File) -> None:
    if not file.nodes:
        raise ValueError("nodes: there are none")
    double = [i for i, count in Counter(node.id for node in file.nodes).items() if count > 1]
    if double:
        raise ValueError(f"nodes: two have the id {double[0]}")
    total = 0.0
    for node in file.nodes:
        total += node.size
        if total > UNLIMITED_BYTES:
            raise ValueError(f"{label(node)}: sizes up to here are {total:.3g} bytes in all")
        if node.cpuLatency is None and file.maxCPUs:
            raise ValueError(f"{label(node)} has no cpuLatency, and there are CPUs")
        if node.fpgaLatency is None and file.maxFPGAs and node.supportedOnFpga:
            raise ValueError(f"{label(node)} has no fpgaLatency, and may be on an accelerator")


def _check_edges(file: File) -> None:
    known = {node.id: node for node in file.nodes}
    costs: dict[int, float] = {}
    for edge in file.edges:
        for end in (edge.sourceId, edge.destId):
            if end not in known:
                raise ValueError(f"edges: {edge.sourceId} -> {edge.destId}: no node {end}")
        cost = costs.setdefault(edge.sourceId, edge.cost)
        if abs(cost - edge.cost) > COST_TOLERANCE_MS:
            raise ValueError(
                f"{label(known[edge.sourceId])}: its edges cost {cost} and {edge.cost}; cost "
                "moves the whole output, and must be the same on all of them"
            )
