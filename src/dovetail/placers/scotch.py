"""Scotch: static mapping of the graph of groups onto the graph of the machine.

    minimise    sum over edges (a, b) of   bytes(a, b) x distance(device of a, device of b)
    subject to  work of a device in proportion to its speed

by dual recursive bipartitioning: the devices are cut in two by distance, the groups in two parts to
match, and so on down to single devices. Distances are the seconds of a transfer of mean size, over
the host where two devices have no link; speeds and weights: see `partitioning`.

Paper: Pellegrini and Roman, "SCOTCH: a software package for static mapping by dual recursive
bipartitioning of process and architecture graphs", HPCN 1996,
https://doi.org/10.1007/3-540-61142-8_588, as used by Mirhoseini et al., "Device Placement
Optimization with Reinforcement Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4.2:
all devices, the CPU included. Differences: groups without a choice are left out rather than handed
over as fixed vertices, with which `SCOTCH_graphMapFixed` may not return; groups move afterwards off
devices that are over-full; three imbalances are tried, and the evaluator says which is best.
"""

import ctypes
import ctypes.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import MissingLibraryError
from dovetail.placers.budget import Budget
from dovetail.placers.partitioning import (
    GroupNetwork,
    PartitionCandidate,
    PartitionProblem,
    best_fitting,
    has_empty_part,
    integers,
    net_of,
    overflows,
    parts_of,
    placed,
    trivial_labels,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem
from dovetail.simulator.flat import Int64

# ── The Scotch library through ctypes: one call, which maps a graph onto another ────────────────
#
# Objects of Scotch are opaque: it allocates them itself, since their sizes differ between versions.
# Its integers have 32 or 64 bits (`SCOTCH_numSizeof`). Since version 7 it works on all cores, and
# two runs differ: it gets a context of one thread with a random stream of its own. Without contexts
# (version 6) it has one thread and one random stream for the process, which a lock guards.


INSTALL = (
    "`apt-get install libscotch-dev` on Debian and Ubuntu, `brew install scotch` on macOS, "
    "`conda install -c conda-forge scotch` elsewhere"
)
_NAMES = ("{}.so", "{}-7.*.so", "{}-6.*.so", "{}.so.*", "{}.dylib", "{}.*.dylib")
_FOLDERS = (
    Path(sys.prefix) / "lib",
    *sorted(Path("/usr/lib").glob("*-linux-gnu*")),
    *map(Path, ("/usr/lib64", "/usr/lib", "/usr/local/lib", "/opt/homebrew/lib")),
)
_QUALITY = 1
"""`SCOTCH_STRATQUALITY`: prefer good mappings to fast ones."""
_LOCK = threading.Lock()


class Csr(NamedTuple):
    """An undirected graph: every edge twice, all weights positive.

    offsets [vertices + 1], neighbours and edge_weights [2 x edges], weights [vertices]
    """

    offsets: Int64
    neighbours: Int64
    weights: Int64
    edge_weights: Int64


class Scotch:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        wide = library.SCOTCH_numSizeof() == 8
        self._number = ctypes.c_int64 if wide else ctypes.c_int32
        self._dtype = np.int64 if wide else np.int32
        self._contexts = hasattr(library, "SCOTCH_contextAlloc")

    def map(self, source: Csr, target: Csr, imbalance: float, seed: int) -> Int64:
        """[vertices of source] the vertex of `target` that each is mapped to.

        imbalance   a target may have that share more than its weight's
        """
        labels = np.zeros(len(source.weights), self._dtype)
        number = self._number
        with _LOCK, ExitStack() as stack:
            self._library.SCOTCH_randomSeed(number(seed % 2**31))
            self._library.SCOTCH_randomReset()
            machine, build = self._made("arch", stack), self._made("strat", stack)
            devices = self._graph(target, stack)
            self._call("archBuild", machine, devices, number(0), None, build)
            strategy = self._made("strat", stack)
            flags, parts = number(_QUALITY), number(len(target.weights))
            self._call("stratGraphMapBuild", strategy, flags, parts, ctypes.c_double(imbalance))
            graph = self._alone(self._graph(source, stack), seed, stack)
            self._call("graphMap", graph, machine, strategy, _pointer(labels))
        return labels.astype(np.int64)

    def _graph(self, csr: Csr, stack: ExitStack) -> ctypes.c_void_p:
        arrays = [np.ascontiguousarray(part, self._dtype) for part in csr]
        stack.callback(arrays.clear)  # Scotch keeps pointers into them until the graph goes
        graph = self._made("graph", stack)
        offsets, neighbours, weights, edge_weights = map(_pointer, arrays)
        number = self._number
        vertices, arcs = number(len(csr.weights)), number(len(csr.neighbours))
        self._call(
            "graphBuild", graph, number(0), vertices, offsets, None, weights, None, arcs,
            neighbours, edge_weights,
        )  # fmt: skip
        return graph

    def _alone(self, graph: ctypes.c_void_p, seed: int, stack: ExitStack) -> ctypes.c_void_p:
        """The graph in a context of one thread with its own random stream."""
        if not self._contexts:
            return graph
        context = self._made("context", stack)
        self._call("contextThreadSpawn", context, ctypes.c_int(1), None)
        self._call("contextRandomClone", context)
        self._library.SCOTCH_contextRandomSeed(context, self._number(seed % 2**31))
        self._library.SCOTCH_contextRandomReset(context)
        bound = self._made("graph", stack)
        self._call("contextBindGraph", context, graph, bound)
        return bound

    def _made(self, kind: str, stack: ExitStack) -> ctypes.c_void_p:
        """A new object, which goes with the stack."""
        allocate = self._function(f"{kind}Alloc")
        allocate.restype = ctypes.c_void_p
        handle = ctypes.c_void_p(allocate())
        assert handle.value, f"Scotch found no memory for a {kind}"
        stack.callback(self._function("memFree"), handle)
        self._call(f"{kind}Init", handle)
        stack.callback(self._function(f"{kind}Exit"), handle)
        return handle

    def _call(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        assert status == 0, f"SCOTCH_{name} failed; it wrote why to stderr"

    def _function(self, name: str) -> "ctypes._NamedFuncPointer":
        function: ctypes._NamedFuncPointer = getattr(self._library, f"SCOTCH_{name}")
        return function


def load_scotch(open_library: Callable[..., ctypes.CDLL] = ctypes.CDLL) -> Scotch:
    """The library of this system, or that of the Python environment. Raises `MissingLibraryError`
    where there is none that can be used."""
    for errors, library in _pairs():
        try:
            # Global: some builds of libscotch look for the functions of libscotcherr in the process
            open_library(errors, mode=ctypes.RTLD_GLOBAL)
            return Scotch(open_library(library))
        except (OSError, AttributeError):
            continue
    raise MissingLibraryError("Scotch", INSTALL)


def _pairs() -> Iterator[tuple[str, str]]:
    """(libscotcherr, libscotch) that lie side by side; then by the linker's own search."""
    for folder in _FOLDERS:
        for name in _NAMES:
            for library in sorted(folder.glob(name.format("libscotch"))):
                errors = library.with_name(library.name.replace("libscotch", "libscotcherr"))
                yield str(errors), str(library)
    named = [ctypes.util.find_library(name) for name in ("scotcherr", "scotch")]
    if named[0] and named[1]:
        yield named[0], named[1]
    for suffix in (".so", "-7.0.so", "-6.1.so", "-6.0.so"):
        yield f"libscotcherr{suffix}", f"libscotch{suffix}"


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


# ── The placers ─────────────────────────────────────────────────────────────────────────────────

IMBALANCES = (0.01, 0.05, 0.2)
"""Shares by which a device may have more than its part; each is tried."""
MOST_DISTANCE = 32
"""Distances are integers, the shortest link is 4: no link counts as more than 8 times as long."""
SPEEDS = 1000
"""Sum of the integer speeds of the devices, for each device."""


def scotch(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """The best mapping on all devices. Ties: the smaller imbalance.

    Raises `MissingLibraryError`.
    """
    return map_within(problem, budget, problem.device_sets[0])


def map_within(problem: PlacementProblem, budget: Budget, within: list[int]) -> GroupPlacement:
    """The best mapping on some devices; groups that may not be there go to their fastest."""
    library = load_scotch()
    net = net_of(problem)
    candidates = _mappings(problem, net, parts_of(problem, net, within), library)
    if any(overflows(problem, candidate.placement) for candidate in candidates):
        parts = parts_of(problem, net, within, memory=True)
        candidates += _mappings(problem, net, parts, library)
    return best_fitting(problem, net, budget, candidates)


def distances(problem: PlacementProblem, devices: list[int], transfer_bytes: float) -> Int64:
    """[devices, devices] of a transfer, 4 for the nearest pair, at most `MOST_DISTANCE`."""
    machine, index = problem.machine, problem.machine.link_index
    host = machine.host_index

    def seconds(a: int, b: int) -> float:
        if index[a, b] < 0:
            return seconds(a, host) + seconds(host, b)
        link = machine.links[index[a, b]]
        return float(link.latency_seconds + transfer_bytes / link.bandwidth_bytes_per_second)

    table = np.array([[0.0 if a == b else seconds(a, b) for b in devices] for a in devices])
    table = (table + table.T) / 2
    nearest = table[~np.eye(len(devices), dtype=bool)].min(initial=np.inf)
    scaled = np.rint(4 * table / nearest) if 0 < nearest < np.inf else np.full(table.shape, 4.0)
    return np.clip(scaled, 1, MOST_DISTANCE).astype(np.int64)


def _mappings(
    problem: PlacementProblem, net: GroupNetwork, parts: PartitionProblem, library: Scotch
) -> list[PartitionCandidate]:
    labels = trivial_labels(parts)
    if labels is not None:
        return [placed(problem, net, parts, labels, reorder=True)]
    mean_bytes = float(problem.edges[2].mean()) if len(problem.edges[2]) else 0.0
    lengths = distances(problem, parts.devices, mean_bytes)
    is_pair = ~np.eye(len(parts.devices), dtype=bool)
    target = Csr(
        offsets=np.arange(len(is_pair) + 1) * (len(is_pair) - 1),
        neighbours=np.nonzero(is_pair)[1],
        weights=integers(parts.shares, SPEEDS * len(is_pair)),
        edge_weights=lengths[is_pair],
    )
    shrunk = np.maximum(parts.edge_weights // MOST_DISTANCE, 1)
    source = Csr(parts.offsets, parts.neighbours, parts.weights, shrunk)
    tried = [library.map(source, target, imbalance, problem.seed) for imbalance in IMBALANCES]
    full = [labels for labels in tried if not has_empty_part(parts, labels)]
    # A swap of parts costs nothing only where all links are alike.
    uniform = len(np.unique(lengths[is_pair])) == 1
    return [placed(problem, net, parts, labels, reorder=uniform) for labels in full or tried]


def mincut(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Scotch's best mapping on all devices but the CPUs. Raises `MissingLibraryError`.

    Ops that only a CPU can run stay there; where a machine has only CPUs, this is `scotch`.

    Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML
    2017, https://arxiv.org/abs/1706.04972, section 4.2. Differences: as in `scotch`.
    """
    devices = problem.device_sets[0]
    within = [d for d in devices if problem.machine.devices[d].kind != "cpu"]
    return map_within(problem, budget, within or devices)
