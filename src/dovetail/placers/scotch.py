"""Places with Scotch: static mapping of the graph of groups onto the graph of the machine.

    minimise    sum over edges (a, b) of   bytes(a, b) x distance(device of a, device of b)
    subject to  work of a device in proportion to its speed

by dual recursive bipartitioning: Scotch cuts the devices in two by distance and the groups in two
parts to match, and so on down to single devices. Distances are the seconds of a transfer of mean
size, over the host if two devices have no link. Speeds and weights are those of `partitioning`.

Paper: Pellegrini and Roman, "SCOTCH: a software package for static mapping by dual recursive
bipartitioning of process and architecture graphs", HPCN 1996,
https://doi.org/10.1007/3-540-61142-8_588, as used by Mirhoseini et al., "Device Placement
Optimization with Reinforcement Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4.2:
all devices, the CPU included. Differences: groups without a choice are left out instead of being
handed over as fixed vertices, because `SCOTCH_graphMapFixed` may then never return. Groups are
moved off over-full devices afterwards. Three imbalances are tried, and the evaluator picks the
best.
"""

import ctypes
import ctypes.util
import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import MissingLibraryError
from dovetail.placers.budget import Budget
from dovetail.placers.partitioning import (
    PartitionProblem,
    best_candidate,
    candidates_within,
    integers,
    net_of,
)
from dovetail.placers.problem import GroupPlacement, PlacementProblem, route
from dovetail.simulator.flat import Int64

# ── The Scotch library through ctypes: one call, which maps a graph onto another ────────────────
#
# Scotch's objects are opaque, and their sizes differ between versions, so Scotch allocates them
# itself. Its integers have 32 or 64 bits (`SCOTCH_numSizeof`). Since version 7 Scotch works on all
# cores, and two runs differ; so each call gets a context of one thread with a random stream of its
# own. Version 6 has no contexts, but one thread and one random stream for the whole process; a lock
# guards that stream.


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
"""`SCOTCH_STRATQUALITY` of the C header: prefer good mappings to fast ones."""
_LOCK = threading.Lock()
"""Held during each call of Scotch, because its random stream belongs to the process."""


class Csr(NamedTuple):
    """An undirected graph that holds every edge in both directions; all weights are positive.

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
        """Return [vertices of source] the vertex of `target` that each is mapped to.

        imbalance   share by which a target may have more than its weight entitles it to
        """
        labels = np.zeros(len(source.weights), self._dtype)
        number = self._number
        with _LOCK, ExitStack() as stack:
            self._library.SCOTCH_randomSeed(number(seed % 2**31))
            self._library.SCOTCH_randomReset()
            machine, build = self._make_object("arch", stack), self._make_object("strat", stack)
            devices = self._graph(target, stack)
            self._call("archBuild", machine, devices, number(0), None, build)
            strategy = self._make_object("strat", stack)
            flags, parts = number(_QUALITY), number(len(target.weights))
            self._call("stratGraphMapBuild", strategy, flags, parts, ctypes.c_double(imbalance))
            graph = self._graph(source, stack)
            if self._contexts:
                # The graph is bound to a context of one thread with its own random stream. Version
                # 6 has no contexts.
                context = self._make_object("context", stack)
                self._call("contextThreadSpawn", context, ctypes.c_int(1), None)
                self._call("contextRandomClone", context)
                self._library.SCOTCH_contextRandomSeed(context, number(seed % 2**31))
                self._library.SCOTCH_contextRandomReset(context)
                bound = self._make_object("graph", stack)
                self._call("contextBindGraph", context, graph, bound)
                graph = bound
            self._call("graphMap", graph, machine, strategy, _pointer(labels))
        return labels.astype(np.int64)

    def _graph(self, csr: Csr, stack: ExitStack) -> ctypes.c_void_p:
        """Return a Scotch graph, which is freed with the stack."""
        arrays = [np.ascontiguousarray(part, self._dtype) for part in csr]
        # Scotch keeps pointers into the arrays, so they must outlive the graph. The stack unwinds
        # in reverse order and drops them after it has freed the graph below.
        stack.callback(arrays.clear)
        graph = self._make_object("graph", stack)
        offsets, neighbours, weights, edge_weights = map(_pointer, arrays)
        number = self._number
        vertices, arcs = number(len(csr.weights)), number(len(csr.neighbours))
        self._call(
            "graphBuild", graph, number(0), vertices, offsets, None, weights, None, arcs,
            neighbours, edge_weights,
        )  # fmt: skip
        return graph

    def _make_object(self, kind: str, stack: ExitStack) -> ctypes.c_void_p:
        """Return a new object of Scotch, which is closed and freed with the stack."""
        allocate = self._function(f"{kind}Alloc")
        allocate.restype = ctypes.c_void_p
        handle = ctypes.c_void_p(allocate())
        assert handle.value, f"Scotch found no memory for a {kind}"
        # The stack runs these callbacks last to first: the object is closed, then freed.
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
    """Load the library of the Python environment, else that of the system.

    Raises `MissingLibraryError` if there is none that can be used.
    """
    # Pairs (libscotcherr, libscotch): first those that lie side by side in a folder, then names for
    # the linker's own search.
    pairs: list[tuple[str, str]] = []
    for folder, name in itertools.product(_FOLDERS, _NAMES):
        for found in sorted(folder.glob(name.format("libscotch"))):
            errors = found.with_name(found.name.replace("libscotch", "libscotcherr"))
            pairs.append((str(errors), str(found)))
    named = [ctypes.util.find_library(name) for name in ("scotcherr", "scotch")]
    if named[0] and named[1]:
        pairs.append((named[0], named[1]))
    suffixes = (".so", "-7.0.so", "-6.1.so", "-6.0.so")
    pairs += [(f"libscotcherr{suffix}", f"libscotch{suffix}") for suffix in suffixes]
    for errors_name, library in pairs:
        try:
            # RTLD_GLOBAL, because some builds of libscotch look up the functions of libscotcherr
            # among the symbols of the process.
            open_library(errors_name, mode=ctypes.RTLD_GLOBAL)
            return Scotch(open_library(library))
        except (OSError, AttributeError):
            continue
    raise MissingLibraryError("Scotch", INSTALL)


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


# ── The placers ─────────────────────────────────────────────────────────────────────────────────

IMBALANCES = (0.01, 0.05, 0.2)
"""A device may exceed its share by one of these shares; a mapping is made with each."""
MOST_DISTANCE = 32
"""Distances are integers, of which the shortest is 4. So no distance counts as more than 8 times
the shortest."""
SPEEDS = 1000
"""The integer speeds of the devices sum to about this number times the number of devices."""


def scotch(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return the best mapping on all devices. Ties: the smaller imbalance.

    Raises `MissingLibraryError`.
    """
    return map_within(problem, budget, problem.device_sets[0])


def map_within(problem: PlacementProblem, budget: Budget, within: list[int]) -> GroupPlacement:
    """Return the best mapping on the devices `within`. Groups that may not be there go to their
    fastest device."""
    library, net = load_scotch(), net_of(problem)
    mean_bytes = float(problem.edges[2].mean()) if len(problem.edges[2]) else 0.0

    def cut(parts: PartitionProblem) -> tuple[list[Int64], bool]:
        lengths = distances(problem, parts.devices, mean_bytes)
        is_pair = ~np.eye(len(parts.devices), dtype=bool)
        target = Csr(
            offsets=np.arange(len(is_pair) + 1) * (len(is_pair) - 1),
            neighbours=np.nonzero(is_pair)[1],
            weights=integers(parts.shares, SPEEDS * len(is_pair)),
            edge_weights=lengths[is_pair],
        )
        # Scotch multiplies edge weights by distances, and the sums must still fit 32 bits.
        shrunk = np.maximum(parts.edge_weights // MOST_DISTANCE, 1)
        source = Csr(parts.offsets, parts.neighbours, parts.weights, shrunk)
        tried = [library.map(source, target, imbalance, problem.seed) for imbalance in IMBALANCES]
        # A swap of parts costs nothing only where all links are alike.
        return tried, len(np.unique(lengths[is_pair])) == 1

    candidates = candidates_within(problem, net, within, cut)
    return best_candidate(problem, net, budget, candidates)


def distances(problem: PlacementProblem, devices: list[int], transfer_bytes: float) -> Int64:
    """Return [devices, devices] the integer distance between each two devices.

    It is the mean time of a transfer of `transfer_bytes` to and fro, scaled to 4 for the nearest
    pair and clipped to `MOST_DISTANCE`.
    """

    def seconds(a: int, b: int) -> float:
        links = route(problem.machine, a, b)
        return sum(
            link.latency_seconds + transfer_bytes / link.bandwidth_bytes_per_second
            for link in links
        )

    table = np.array([[0.0 if a == b else seconds(a, b) for b in devices] for a in devices])
    table = (table + table.T) / 2
    nearest = table[~np.eye(len(devices), dtype=bool)].min(initial=np.inf)
    scaled = np.rint(4 * table / nearest) if 0 < nearest < np.inf else np.full(table.shape, 4.0)
    return np.clip(scaled, 1, MOST_DISTANCE).astype(np.int64)


def mincut(problem: PlacementProblem, budget: Budget) -> GroupPlacement:
    """Return Scotch's best mapping on all devices but the CPUs. Raises `MissingLibraryError`.

    Ops that only a CPU can run stay there. If a machine has only CPUs, this is the same as
    `scotch`.

    Paper: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML
    2017, https://arxiv.org/abs/1706.04972, section 4.2. Differences: as in `scotch`.
    """
    devices = problem.device_sets[0]
    within = [d for d in devices if problem.machine.devices[d].kind != "cpu"]
    return map_within(problem, budget, within or devices)
