"""Captures the graphs of a table's networks and keeps them as files, which several rows share."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.errors import FileFormatError, InvalidError
from dovetail.graph import Graph, group
from dovetail.graph.files import load_graph, save_graph
from reproductions.records import Case
from reproductions.store import GRAPHS, Store, fingerprint


@dataclass(frozen=True)
class CapturedGraph:
    """The sizes of a captured graph.

    graph     the graph's fingerprint
    seconds   seconds that the capture took
    """

    graph: str
    ops: int
    groups: int
    flops: int
    parameter_bytes: int
    seconds: float


def name_of(case: Case) -> str:
    """The name in the store of a case's network with its optimizer."""
    return "graph." + re.sub(r"[^a-z0-9]+", "-", f"{case.model} {case.train}".lower()).strip("-")


def _fingerprint(case: Case) -> str:
    return fingerprint(GRAPHS, model=case.model, train=case.train)


def known(store: Store, case: Case) -> CapturedGraph | None:
    """The stored sizes of the case's graph; None if it must be captured."""
    name = name_of(case)
    value = store.get(name, _fingerprint(case))
    if value is None or not _file(store, name).exists():
        return None
    return CapturedGraph(**value)


def graph_for(store: Store, case: Case) -> Graph:
    """The case's graph, from its file or captured. Raises what a capture raises.

    If the file cannot be read, or holds another graph than was written, the graph is captured anew.
    """
    name, captured = name_of(case), known(store, case)
    if captured is not None:
        try:
            graph = load_graph(_file(store, name))
        except (FileFormatError, InvalidError) as error:
            store.complain(f"{error}; it is captured anew")
        else:
            if graph.fingerprint == captured.graph:
                return graph
            store.complain(f"{_file(store, name)} holds another graph; it is captured anew")
    return _capture(store, case, name)


def _capture(store: Store, case: Case, name: str) -> Graph:
    # This imports torch, which only captures need.
    from dovetail.pipeline.sources import graph_of, resolve_model

    began = time.perf_counter()
    graph = graph_of(resolve_model(case.model, case.train))
    save_graph(graph, _file(store, name))
    parameters = np.array([kind == "parameter" for kind in graph.kinds])[graph.producers]
    captured = CapturedGraph(
        graph=graph.fingerprint,
        ops=int((~graph.is_source).sum()),
        groups=group(graph).count,
        flops=int(graph.flops.sum()),
        parameter_bytes=int(graph.tensor_bytes[parameters].sum()),
        seconds=time.perf_counter() - began,
    )
    store.put(name, _fingerprint(case), vars(captured))
    return graph


def _file(store: Store, name: str) -> Path:
    return store.folder / f"{name}.json.gz"
