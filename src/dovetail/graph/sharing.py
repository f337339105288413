"""Computations that many parts of a network share and that anybody can repeat: positions, rotary
cosines, attention masks.

    arange ─► cos ─┬─► layer 0          arange ─► cos ─► layer 0
                   └─► layer 1          arange ─► cos ─► layer 1

They read inputs, constants and buffers, but no parameter, draw no random number, and no gradient
goes through them. So they tie nothing together: a copy beside each reader gives the same bits.
"""

import re

import numpy as np

from dovetail.graph.records import Bool, Graph, Phase

_RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal_|uniform|exponential|poisson")
_OWNED = ("parameter", "state")


def shareable(graph: Graph) -> Bool:
    """[ops] True for forward ops that may be repeated beside each reader. O(ops + reads)."""
    has_gradient = np.zeros(len(graph), dtype=bool)
    has_gradient[graph.gradient_of[graph.gradient_of >= 0]] = True
    random = {kind for kind in set(graph.kinds) if _RANDOM.search(kind)}
    written = np.zeros(int(graph.storages.max(initial=-1)) + 1, dtype=bool)
    written[graph.storages[graph.overwrites]] = True
    found = np.zeros(len(graph), dtype=bool)
    for op in range(len(graph)):
        if graph.is_source[op]:
            found[op] = graph.kinds[op] not in _OWNED and not any(
                written[graph.storages[t]] for t in graph.outputs_of(op)
            )
        elif graph.phases[op] == Phase.FORWARD:
            makers = graph.producers[graph.inputs_of(op)]
            free = not has_gradient[op] and graph.kinds[op] not in random
            found[op] = free and bool(found[makers].all())
    return found & ~graph.is_source


def spread_out(graph: Graph) -> Bool:
    """[ops] True for shareable ops that modules other than their own read."""
    found = shareable(graph)
    modules = np.unique(np.array(graph.modules), return_inverse=True)[1].reshape(-1)
    producers = graph.producers[graph.input_tensors]
    elsewhere = modules[producers] != modules[graph.readers]
    read_elsewhere = np.zeros(len(graph), dtype=bool)
    read_elsewhere[producers[elsewhere & ~graph.is_source[graph.readers]]] = True
    return found & read_elsewhere
