"""Captures the graphs of a table's networks and keeps them as files, which several rows share."""

import re
import time
from dataclasses import dataclass

import numpy as np

from dovetail.errors import FileFormatError, InvalidError
from dovetail.graph import Graph, group
from dovetail.graph.files import load_graph, save_graph
from reproductions.records import Case
from reproductions.store import GRAPHS, Kept, Store, fingerprint


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


def known(store: Store, case: Case) -> CapturedGraph | None:
    """The stored sizes of the case's graph; None if it must be captured."""
    kept = _sizes_of(store, case)
    value = kept.get()
    if value is None or not (store.folder / f"{kept.name}.json.gz").exists():
        return None
    return CapturedGraph(**value)


def _sizes_of(store: Store, case: Case) -> Kept:
    return Kept(store, name_of(case), fingerprint(GRAPHS, model=case.model, train=case.train))


def graph_for(store: Store, case: Case) -> Graph:
    """The case's graph, from its file or captured. Raises what a capture raises.

    If the file cannot be read, or holds another graph than was written, the graph is captured anew.
    """
    file, captured = store.folder / f"{name_of(case)}.json.gz", known(store, case)
    if captured is not None:
        try:
            graph = load_graph(file)
        except (FileFormatError, InvalidError) as error:
            store.complain(f"{error}; it is captured anew")
        else:
            if graph.fingerprint == captured.graph:
                return graph
            store.complain(f"{file} holds another graph; it is captured anew")
    # This imports torch, which only captures need.
    from dovetail.pipeline.sources import graph_of, resolve_model

    began = time.perf_counter()
    graph = graph_of(resolve_model(case.model, case.train))
    save_graph(graph, file)
    parameters = np.array([kind == "parameter" for kind in graph.kinds])[graph.producers]
    captured = CapturedGraph(
        graph=graph.fingerprint,
        ops=int((~graph.is_source).sum()),
        groups=group(graph).count,
        flops=int(graph.flops.sum()),
        parameter_bytes=int(graph.tensor_bytes[parameters].sum()),
        seconds=time.perf_counter() - began,
    )
    _sizes_of(store, case).put(vars(captured))
    return graph
