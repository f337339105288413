"""METIS and Scotch: cuts where few bytes cross, shares by speed, pins, memory; repeatable."""

import ctypes
import ctypes.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import InvalidError, MissingLibraryError
from dovetail.machine import Device, Link, Machine, parse_machine
from dovetail.placers import Budget
from dovetail.placers.metis import metis
from dovetail.placers.partitioning import (
    PartitionCandidate,
    has_empty_part,
    integers,
    net_of,
    parts_of,
    refit,
    trivial_labels,
)
from dovetail.placers.scotch import INSTALL, MOST_DISTANCE, distances, load_scotch, mincut, scotch
from tests.support.placer_instances import build_graph, build_machine, build_problem, random_problem


def _has_scotch():
    try:
        load_scotch()
    except MissingLibraryError:
        return False
    return True


HAS_SCOTCH = _has_scotch()
needs_scotch = pytest.mark.skipif(not HAS_SCOTCH, reason="the Scotch library is not installed")
ALL = [
    pytest.param(metis, id="metis"),
    pytest.param(scotch, id="scotch", marks=needs_scotch),
    pytest.param(mincut, id="mincut", marks=needs_scotch),
]
PRESENT = [metis, scotch, mincut] if HAS_SCOTCH else [metis]
each_method = pytest.mark.parametrize("method", ALL)


def two_cliques(**fields):
    """Ops 0 to 3 all read each other's outputs, and so do 4 to 7; op 4 reads op 3: the bridge."""
    reads = [[], [0], [0, 1], [0, 1, 2], [3], [4], [4, 5], [4, 5, 6]]
    return build_graph(reads, sizes=[100] * 8, **fields)


def chain(ops, **fields):
    return build_graph([[]] + [[i] for i in range(ops - 1)], **fields)


@each_method
def test_two_cliques_are_cut_at_their_bridge_and_parts_follow_the_graph(method):
    found = method(build_problem(two_cliques(), build_machine(2)), Budget())
    assert found.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@each_method
def test_parts_go_to_the_devices_where_what_they_talk_to_is_pinned(method):
    problem = build_problem(two_cliques(), build_machine(2), pins=[("op7", "gpu0")])
    assert method(problem, Budget()).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@each_method
def test_unlike_speeds_get_shares_of_the_work_by_speed(method):
    ops = 400
    seconds = np.outer(np.ones(ops), [1.0, 3.0])
    problem = build_problem(chain(ops), build_machine(2), seconds=seconds)
    counts = np.bincount(method(problem, Budget()), minlength=2)
    # 300 and 100 groups take both devices 300 seconds.
    assert 240 <= counts[0] <= 360


def test_shares_are_by_speed_less_the_work_that_is_pinned():
    seconds = np.outer(np.ones(8), [1.0, 3.0])
    problem = build_problem(chain(8), build_machine(2), seconds=seconds)
    assert parts_of(problem, net_of(problem), [0, 1]).shares == pytest.approx([3 / 4, 1 / 4])
    pinned = build_problem(
        chain(8), build_machine(2), seconds=seconds, pins=[("op0", "gpu0"), ("op1", "gpu0")]
    )
    parts = parts_of(pinned, net_of(pinned), [0, 1])
    # 6 of 8 seconds belong on the fast one, and 2 are there.
    assert parts.shares == pytest.approx([4 / 6, 2 / 6])
    assert parts.groups.tolist() == [2, 3, 4, 5, 6, 7]


def test_a_device_that_is_hardly_any_use_gets_no_part():
    seconds = np.outer(np.ones(8), [1.0, 1.0, 1e5])
    problem = build_problem(chain(8), build_machine(3), seconds=seconds)
    assert parts_of(problem, net_of(problem), [0, 1, 2]).devices == [0, 1]


def test_edges_of_both_directions_are_one_edge_with_the_sum_of_their_bytes():
    graph = build_graph([[], [0], [0, 1], [2]], sizes=[3, 5, 7, 9])
    groups = type(build_problem(graph, build_machine(2)).groups)(
        np.array([0, 1, 0, 2], np.int32), 3
    )
    problem = build_problem(graph, build_machine(2), groups=groups)
    net = net_of(problem)
    # 0 -> 1 with 3 bytes and 1 -> 0 with 5, and 0 -> 2 with 7.
    assert net.offsets.tolist() == [0, 2, 3, 4]
    assert net.neighbours.tolist() == [1, 2, 0, 0]
    assert net.edge_bytes.tolist() == [8, 7, 8, 7]


def test_integer_weights_are_positive_in_proportion_and_fit_32_bits():
    whole = integers(np.array([0.0, 1.0, 3.0]), 400)
    assert whole.tolist() == [1, 100, 300]
    assert integers(np.zeros(4), 400).tolist() == [100] * 4
    rng = np.random.default_rng(0)
    assert integers(rng.lognormal(0, 5, 10**6)).sum() < 2**31 // 4


@each_method
@pytest.mark.parametrize("pins", [(), (("op0", "gpu1"),), (("*", "gpu1"),)])
@pytest.mark.parametrize(("ops", "devices"), [(1, 2), (2, 3), (3, 3), (6, 2), (6, 3)])
def test_small_and_fully_pinned_problems_are_placed(method, ops, devices, pins):
    problem = build_problem(build_graph([[]] * ops), build_machine(devices), pins=pins)
    found = method(problem, Budget())
    assert found.dtype == np.int32
    assert problem.allowed[np.arange(ops), found].all()
    if not pins and ops >= devices:
        assert len(np.unique(found)) == devices


@each_method
def test_one_device_takes_everything(method):
    assert method(build_problem(two_cliques(), build_machine(1)), Budget()).tolist() == [0] * 8


@each_method
def test_groups_move_off_devices_that_are_over_full(method):
    problem = build_problem(
        two_cliques(), build_machine(2, memory_bytes=1000), caps=[("gpu0", 200)]
    )
    budget = Budget()
    found = method(problem, budget)
    assert budget.score(problem, found[None])[0].lacking_bytes == 0
    assert (found == 0).sum() == 2


def test_a_group_that_must_move_goes_where_it_talks_most_and_fits():
    problem = build_problem(two_cliques(), build_machine(3), caps=[("gpu0", 350)])
    placement = np.array([0, 0, 0, 0, 1, 1, 1, 2], np.int32)
    sizes = np.full(8, 100)
    moved = refit(
        problem,
        net_of(problem),
        PartitionCandidate([0, 1, 2], placement),
        sizes,
        problem.capacities,
    )
    # Op 3 has the bridge to op 4: leaving cuts least.
    assert moved.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    alone = refit(
        problem, net_of(problem), PartitionCandidate([0], placement * 0), sizes, problem.capacities
    )
    assert alone.tolist() == [0] * 8, "nothing else may be used: it stays and is scored as lacking"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), method=st.sampled_from(PRESENT))
def test_pins_hold_and_the_best_score_is_returned_on_random_problems(seed, method):
    rng = np.random.default_rng(seed)
    shape = random_problem(rng, groups=12, devices=3, memory_share=0.6, seed=seed)
    pin = (f"op{int(rng.integers(24))}", f"gpu{int(rng.integers(3))}")
    problem = build_problem(
        shape.graph, shape.machine, groups=shape.groups, seconds=shape.costs.compute_seconds,
        pins=[pin], seed=seed,
    )  # fmt: skip
    budget = Budget()
    found = method(problem, budget)
    assert problem.allowed[np.arange(12), found].all()
    assert budget.score(problem, found[None])[0] == budget.ledger.best[0]
    assert np.array_equal(found, method(problem, Budget())), "same seed, same plan"


@each_method
def test_the_same_seed_gives_the_same_plan_of_a_large_graph(method):
    rng = np.random.default_rng(5)
    ops = 3000
    reads = [[]] + [sorted({i - 1, int(rng.integers(max(0, i - 40), i))}) for i in range(1, ops)]
    graph = build_graph(reads, sizes=rng.integers(1, 1000, ops))
    plans = [
        method(build_problem(graph, build_machine(4), seed=2**40 + 7), Budget()) for _ in range(2)
    ]
    assert np.array_equal(*plans)
    assert np.bincount(plans[0], minlength=4).min() > ops / 8


@each_method
def test_ops_that_only_the_cpu_can_run_stay_there(method):
    kinds = ((), (), ("cpu",), (), (), (), (), ())
    problem = build_problem(
        two_cliques(device_kinds=kinds), build_machine(3, kinds=["gpu", "gpu", "cpu"])
    )
    assert method(problem, Budget())[2] == 2


@needs_scotch
def test_mincut_leaves_the_cpu_out_and_scotch_does_not():
    problem = build_problem(chain(60), build_machine(3, kinds=["gpu", "gpu", "cpu"]))
    assert set(mincut(problem, Budget()).tolist()) == {0, 1}
    assert set(scotch(problem, Budget()).tolist()) == {0, 1, 2}


@needs_scotch
def test_mincut_on_a_machine_of_cpus_is_scotch():
    problem = build_problem(chain(60), build_machine(2, kinds=["cpu", "cpu"]))
    assert np.array_equal(mincut(problem, Budget()), scotch(problem, Budget()))


def test_links_are_as_long_as_their_transfers_and_over_the_host_where_there_is_none():
    devices = tuple(
        Device(name, kind, kind, 10**9, {"float32": 1.0}, 1.0, 0.0)
        for name, kind in (("a", "gpu"), ("b", "gpu"), ("c", "cpu"))
    )
    links = tuple(
        Link(x, y, 100.0, 1.0, x + y) for x, y in (("a", "c"), ("c", "a"), ("b", "c"), ("c", "b"))
    )
    problem = build_problem(chain(4), Machine("star", devices, "c", links))
    #      a ── c ── b
    assert distances(problem, [0, 1, 2], 50.0).tolist() == [[1, 8, 4], [8, 1, 4], [4, 4, 1]]
    far = parse_machine("2 x p100 + haswell")
    assert distances(build_problem(chain(4), far), [0, 1, 2], 1e6).max() <= MOST_DISTANCE


@needs_scotch
def test_scotch_keeps_what_talks_on_devices_that_are_near():
    """Four cliques in two pairs that talk; two pairs of devices with slow links between them."""
    names = [f"gpu{i}" for i in range(4)]
    devices = tuple(Device(n, "gpu", "gpu", 10**9, {"float32": 1.0}, 1.0, 0.0) for n in names)
    links = tuple(
        Link(a, b, 100.0 if i // 2 == j // 2 else 15.0, 0.0, a + b)
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    )
    reads = [
        [*range(op - op % 6, op), *([op - 12] if op >= 12 and op % 6 > 1 else [])]
        for op in range(24)
    ]
    graph = build_graph(reads, sizes=[100] * 24)
    found = scotch(build_problem(graph, Machine("pairs", devices, "gpu0", links)), Budget())
    cliques = found.reshape(4, 6)
    assert (cliques == cliques[:, :1]).all()
    a, b, c, d = (cliques[:, 0] // 2).tolist()
    assert a == c != b == d, "clique 0 talks to 2, and 1 to 3"


def test_without_the_library_the_error_says_how_to_install_it():
    def absent(name, mode=0):
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(MissingLibraryError, match="apt-get install") as raised:
        load_scotch(absent)
    assert raised.value.library == "Scotch"
    assert isinstance(raised.value, InvalidError)


@pytest.mark.parametrize("method", [scotch, mincut])
def test_scotch_and_mincut_say_so_when_the_library_is_absent(method, monkeypatch):
    def absent():
        raise MissingLibraryError("Scotch", INSTALL)

    monkeypatch.setattr("dovetail.placers.scotch.load_scotch", absent)
    with pytest.raises(MissingLibraryError):
        method(build_problem(chain(4), build_machine(2)), Budget())


def test_a_library_without_scotchs_functions_counts_as_absent():
    other = ctypes.util.find_library("m") or ctypes.util.find_library("c")
    with pytest.raises(MissingLibraryError):
        load_scotch(lambda _name, mode=0: ctypes.CDLL(other))


def test_an_empty_part_is_noticed_and_an_impossible_one_is_a_bug():
    problem = build_problem(chain(6), build_machine(3))
    parts = parts_of(problem, net_of(problem), [0, 1, 2])
    assert trivial_labels(parts) is None
    assert has_empty_part(parts, np.array([0, 0, 0, 2, 2, 2]))
    assert not has_empty_part(parts, np.array([0, 0, 1, 1, 2, 2]))
    with pytest.raises(AssertionError, match="too many"):
        has_empty_part(parts, np.array([0, 0, 1, 1, 2, 3]))


def test_a_group_heavier_than_all_others_is_cut_quietly(capfd):
    """METIS prints of empty parts to standard output, where the command line writes its answer."""
    seconds = np.outer([1.0] * 9 + [1000.0], np.ones(4))
    metis(build_problem(chain(10), build_machine(4), seconds=seconds), Budget())
    print("ours")
    assert capfd.readouterr() == ("ours\n", "")
