"""List scheduling: drawn examples, the rules by brute force, memory, and what holds of all."""

import numpy as np
import pytest

from dovetail.costs import Costs
from dovetail.graph import Groups
from dovetail.machine import Device, Link, Machine
from dovetail.placers import Budget, make_problem
from dovetail.placers.etf import etf, etf_schedule
from dovetail.placers.heft import MOST_GAPS, heft, heft_schedule, upward_ranks
from dovetail.placers.list_scheduling import limits_of, tasks_of
from dovetail.placers.m_topo import even_shares, m_topo
from dovetail.placers.sct import favourites_of, sct
from dovetail.simulator import Simulator
from tests.support.placer_instances import (
    BANDWIDTH,
    LATENCY_SECONDS,
    build_graph,
    build_machine,
    build_problem,
    random_problem,
)

METHODS = [m_topo, heft, etf, sct]
by_name = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def sct_schedule(tasks, limits):
    return etf_schedule(tasks, limits, favourites_of(tasks, limits))


SCHEDULES = [heft_schedule, etf_schedule, sct_schedule]


def plain_machine(count, *, links=None, latency=0.0, memory_bytes=10**9):
    """Devices "d0", "d1", ... of one model, 1 byte a second; `links` pairs, else all."""
    devices = [Device(f"d{i}", "gpu", "gpu", memory_bytes, {}, 1.0, 0.0) for i in range(count)]
    every = [(a, b) for a in range(count) for b in range(count) if a != b]
    joined = tuple(Link(f"d{a}", f"d{b}", 1.0, latency, f"{a}->{b}") for a, b in (links or every))
    return Machine("plain", tuple(devices), "d0", joined)


def scheduled(schedule, problem, device_set=0):
    return schedule(tasks_of(problem), limits_of(problem, device_set))


def drawn(problem, listed):
    """device -> [(op, start, end)] by start."""
    rows = {}
    for op in np.lexsort((listed.ends, listed.starts)).tolist():
        if not problem.graph.is_source[op]:
            device = int(listed.placed[problem.groups.of_op[op]])
            span = (op, float(listed.starts[op]), float(listed.ends[op]))
            rows.setdefault(device, []).append(span)
    return rows


# The example of the HEFT paper: figure 2 and table 2. One tensor per edge, 1 byte a second.
EDGES = {
    (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16,
    (3, 7): 23, (4, 8): 27, (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11,
    (9, 10): 13,
}  # fmt: skip
SECONDS = [
    [14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10],
    [13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16],
]  # fmt: skip


def paper_problem():
    edges = sorted(EDGES)
    reads = [[i for i, (_, to) in enumerate(edges) if to == op] for op in range(1, 11)]
    count = len(edges)
    graph = build_graph(
        reads,
        sizes=[4] * count,
        producers=[before - 1 for before, _ in edges],
        shapes=((1,),) * count,
        strides=((1,),) * count,
        dtypes=("float32",) * count,
        storages=range(count),
        overwrites=[False] * count,
        outputs=[],
    )
    costs = Costs(np.array(SECONDS, float), "given", np.array([EDGES[e] for e in edges], float))
    groups = Groups(np.arange(10, dtype=np.int32), 10)
    return make_problem(graph, plain_machine(3), costs, lambda _: None, groups=groups)


def test_heft_ranks_the_papers_example_as_the_paper_does():
    problem = paper_problem()
    ranks = upward_ranks(tasks_of(problem), limits_of(problem, 0))
    known = [108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert ranks == pytest.approx(known, abs=1e-3)


def test_heft_schedules_the_papers_example_as_the_paper_does():
    #      0        9       18   26 27  28    38 40 42    49   56  57  62  68   73   80
    #   P1 |                        [────  2  ────]                [8 ]
    #   P2 |                 [─ 4 ─][────── 6 ───────]         [─── 9 ────]    [ 10 ]
    #   P3 [─ 1 ─][───── 3 ────────────][── 5 ──][─── 7 ───]
    problem = paper_problem()
    rows = drawn(problem, scheduled(heft_schedule, problem))
    one_based = {p + 1: [(op + 1, start, end) for op, start, end in row] for p, row in rows.items()}
    assert one_based == {
        1: [(2, 27, 40), (8, 57, 62)],
        2: [(4, 18, 26), (6, 26, 42), (9, 56, 68), (10, 73, 80)],
        3: [(1, 0, 9), (3, 9, 28), (5, 28, 38), (7, 38, 49)],
    }


@pytest.mark.parametrize(("seconds", "starts"), [(3, 0), (5, 0), (6, 13)])
def test_heft_puts_an_op_into_a_gap_that_holds_it(seconds, starts):
    #   d0 [ 0 ]                       op 0 sends 3 bytes to op 1
    #   d1 [── gap ──][───── 1 ─────]  op 2 comes last, having the lowest rank
    #      0   2      5             13
    problem = build_problem(
        build_graph([[], [0], []], sizes=[3, 4, 4]),
        plain_machine(2),
        seconds=[[2, 2], [8, 8], [seconds, seconds]],
        pins=[("op0", "d0"), ("op1", "d1"), ("op2", "d1")],
    )
    listed = scheduled(heft_schedule, problem)
    assert listed.starts.tolist() == [0, 5, starts]


def test_heft_forgets_the_earliest_gaps_only():
    #   d0 [0]   [2]   [4] ...      a chain to and fro, one second an op, one a send:
    #   d1    [1]   [3]   [5] ...   gaps of three seconds on d1 between its
    #      ops; the last op is long, so that its rank is above that of the one for the gaps
    extra = 10
    chain = 2 * (MOST_GAPS + extra)
    reads = [[]] + [[i] for i in range(chain - 1)] + [[]]
    pins = [(f"op{i}", f"d{i % 2}") for i in range(chain)] + [(f"op{chain}", "d1")]
    problem = build_problem(
        build_graph(reads, sizes=[1] * len(reads)),
        plain_machine(2),
        seconds=[[1, 1]] * (chain - 1) + [[9, 9], [2, 2]],
        pins=pins,
    )
    starts = scheduled(heft_schedule, problem).starts
    assert starts[1] == 2 and starts[3] == 6  # gaps: 0 to 2, 3 to 6, 7 to 10, ...
    assert starts[chain] == 4 * extra - 1


def test_etf_takes_the_pair_that_starts_first_then_the_longer_path():
    #   d0 [──── 0 ────][ 3 ]         op 1 has the longest path, but 0 and 1 start together at 0;
    #   d1 [ 1 ][── 2 ──]             op 2 starts first beside what it reads
    #      0    1  2    3   4
    problem = build_problem(
        build_graph([[], [], [1], [0, 2]], sizes=[5, 5, 0, 5]),
        plain_machine(2),
        seconds=[[3, 3], [1, 1], [2, 2], [1, 1]],
        pins=[("op0", "d0")],
    )
    rows = drawn(problem, scheduled(etf_schedule, problem))
    assert rows == {0: [(0, 0, 3), (3, 3, 4)], 1: [(1, 0, 1), (2, 1, 3)]}


def test_sends_without_a_link_take_both_hops_through_the_host():
    #   d1 [ 0 ]──► d0 ──►[ 1 ] d2       each hop .5 s + 2 bytes at 1 byte a second
    problem = build_problem(
        build_graph([[], [0]], sizes=[2, 2]),
        plain_machine(3, links=[(0, 1), (1, 0), (0, 2), (2, 0)], latency=0.5),
        pins=[("op0", "d1"), ("op1", "d2")],
    )
    for schedule in SCHEDULES:
        assert scheduled(schedule, problem).starts.tolist() == [0, 1 + 2 * 2.5]


def test_order_without_data_is_an_empty_send():
    #   d0 [ 0 ]─.5 s─►[ 1 ] d1
    problem = build_problem(
        build_graph([[], []], sizes=[9, 9], control=np.array([[0, 1]]), outputs=[0, 1]),
        plain_machine(2, latency=0.5),
        pins=[("op0", "d0"), ("op1", "d1")],
    )
    for schedule in SCHEDULES:
        assert scheduled(schedule, problem).starts.tolist() == [0, 1.5]


def test_a_device_waits_for_the_favourite_child_but_for_urgent_ops():
    #       ┌─► 2 (C) ─► 3 (D)         sends of P take 4 s, of Q 1 s; C of 1 s waits for both,
    #   P ──┤                          D takes 20 s, X takes 10 s
    #   0   └─► 4 (X)        Q (1) ─► C
    #
    #   d0 [ P ]  .  [C][──────── D ─ ...     waits for C from 2 to 3; ETF starts X there at 2
    #   d1 [ Q ]
    #      0   2     3  4
    problem = build_problem(
        build_graph([[], [], [0, 1], [2], [0]], sizes=[4, 1, 4, 4, 4]),
        plain_machine(2),
        seconds=np.repeat([[2.0], [2.0], [1.0], [20.0], [10.0]], 2, axis=1),
        pins=[("op0", "d0"), ("op1", "d1")],
    )
    tasks, limits = tasks_of(problem), limits_of(problem, 0)
    assert favourites_of(tasks, limits).children.tolist() == [2, -1, 3, -1, -1]
    waiting, at_once = sct_schedule(tasks, limits), etf_schedule(tasks, limits)
    assert waiting.starts[[2, 3]].tolist() == [3, 4] and waiting.placed[2] == 0
    assert at_once.starts[4] == 2 and at_once.starts[2] == 6


def test_an_awake_device_takes_an_urgent_op_that_no_other_device_is_free_for():
    #   d0 [ P ][Z][..]       Y and Z wait for nothing, so both are urgent at 2: the longer goes
    #   d1 [ Q ][  Y  ]       first, and to d1, which does not wait; Z, to d0, which does
    #      0   2  2.5  4
    problem = build_problem(
        build_graph([[], [], [0, 1], [2], [], []], sizes=[4, 1, 4, 4, 4, 4]),
        plain_machine(2),
        seconds=np.repeat([[2.0], [2.0], [1.0], [20.0], [1.5], [0.5]], 2, axis=1),
        pins=[("op0", "d0"), ("op1", "d1")],
    )
    rows = drawn(problem, scheduled(sct_schedule, problem))
    assert rows[0][:3] == [(0, 0, 2), (5, 2, 2.5), (2, 3, 4)]
    assert rows[1] == [(1, 0, 2), (4, 2, 3.5)]


def test_the_favourite_child_is_the_one_whose_send_costs_most_on_the_longest_path():
    #       ┌─► 1 ─► 3 ┐      equal seconds and sends, but 2 ─► 4 takes longer:
    #   0 ──┤          ├─► 5  2 must be the favourite of 0, and 4 of 2, and 5 of 4
    #       └─► 2 ─► 4 ┘
    problem = build_problem(
        build_graph([[], [0], [0], [1], [2], [3, 4]], sizes=[1] * 6),
        plain_machine(2),
        seconds=np.repeat([[1.0], [1.0], [1.0], [1.0], [3.0], [1.0]], 2, axis=1),
    )
    children = favourites_of(tasks_of(problem), limits_of(problem, 0)).children
    assert children.tolist() == [2, 3, 4, -1, 5, -1]


def test_favourite_children_come_from_the_heaviest_sends_beyond_the_limit():
    #   0 ─5─► 2      the heaviest first: 1 ─► 2 (9 s), then 1 and 2 are taken, 0 ─► 3
    #   0 ─5─► 3      (as heavy as 0 ─► 2); 1 ─► 3 comes too late
    problem = build_problem(
        build_graph([[], [], [0, 1], [0, 1]], sizes=[5, 9, 1, 1], outputs=[2, 3]), plain_machine(2)
    )
    found = favourites_of(tasks_of(problem), limits_of(problem, 0), most_edges=3)
    assert found.children.tolist() == [3, 2, -1, -1]
    assert found.patience_seconds.tolist() == [5, 9, 0, 0]


def test_favourite_children_come_from_the_heaviest_sends_where_the_solver_gives_up(monkeypatch):
    problem = random_problem(np.random.default_rng(1), groups=60, devices=3)
    tasks, limits = tasks_of(problem), limits_of(problem, 0)
    solved, heaviest = (favourites_of(tasks, limits, most) for most in (10**6, 0))
    assert not np.array_equal(solved.children, heaviest.children)
    monkeypatch.setattr("dovetail.placers.sct.MOST_ITERATIONS", 1)
    assert np.array_equal(favourites_of(tasks, limits).children, heaviest.children)


def test_ops_that_can_share_no_device_are_no_favourites():
    problem = build_problem(
        build_graph([[], [0]]), plain_machine(2), pins=[("op0", "d0"), ("op1", "d1")]
    )
    children = favourites_of(tasks_of(problem), limits_of(problem, 0)).children
    assert children.tolist() == [-1, -1]


@pytest.mark.parametrize("seed", range(5))
def test_an_op_has_one_favourite_and_is_the_favourite_of_one(seed):
    problem = random_problem(np.random.default_rng(seed), groups=40, devices=3)
    tasks, limits = tasks_of(problem), limits_of(problem, 0)
    for most_edges in (0, 10**6):
        children = favourites_of(tasks, limits, most_edges).children
        chosen = children[children >= 0]
        assert len(chosen) > 5
        assert len(np.unique(chosen)) == len(chosen)
        for parent in np.flatnonzero(children >= 0):
            first, last = tasks.after_offsets[parent], tasks.after_offsets[parent + 1]
            assert children[parent] in tasks.afters[first:last]


def test_m_topo_cuts_the_order_where_memory_is_shared_evenly():
    #   bytes 10 10 10 | 10 10 10 | 10 10       sum 80: up to 26 + 10 a device
    problem = build_problem(build_graph([[]] + [[i] for i in range(7)], sizes=[10] * 8), machine3())
    assert m_topo(problem, Budget()).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def machine3(memory_bytes=10**9):
    return build_machine(3, memory_bytes=memory_bytes)


def test_m_topo_gives_a_small_device_what_it_holds():
    #   bytes 10 | 10 10 10 10 | 10 10 10       10 fit on gpu0, and 35 a device are left for two;
    graph = build_graph([[]] + [[i] for i in range(7)], sizes=[10] * 8)  # each + 10
    problem = build_problem(graph, machine3(), caps=[("gpu0", 10)])
    assert m_topo(problem, Budget()).tolist() in (
        [0, 1, 1, 1, 1, 2, 2, 2],
        [0, 0, 1, 1, 1, 1, 2, 2],
    )


@pytest.mark.parametrize(
    ("total", "room", "shares"),
    [
        (90, [100, 100, 100], [30, 30, 30]),
        (90, [10, 100, 100], [10, 40, 40]),
        (90, [10, 30, 100], [10, 30, 50]),
        (90, [10, 0, 100], [10, 0, 80]),
        (90, [10, 20, 15], [20, 40, 30]),
    ],
)
def test_even_shares_fill_small_devices_and_level_the_others(total, room, shares):
    assert even_shares(total, np.array(room, float)).tolist() == pytest.approx(shares)


def test_m_topo_leaves_a_pinned_group_out_of_its_run():
    graph = build_graph([[]] + [[i] for i in range(5)], sizes=[10] * 6)
    problem = build_problem(graph, build_machine(2), pins=[("op0", "gpu1")])
    placement = m_topo(problem, Budget()).tolist()
    assert placement[0] == 1 and placement[1:] == sorted(placement[1:])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_a_group_goes_where_its_bytes_fit_and_else_where_most_is_left(schedule):
    #   gpu0 ├─ 0: 60 bytes ─┤├─ 2: 50 ─┤     of 100 on either: op 1 no longer fits beside op 0,
    #   gpu1 ├─ 1: 60 bytes ─┤                op 2 beside neither, and as much is left on both
    graph = build_graph([[]] * 3, sizes=[60, 60, 50], outputs=[0, 1, 2])
    problem = build_problem(
        graph, build_machine(2, memory_bytes=100), seconds=[[9, 10], [2, 8], [1, 2]]
    )
    assert scheduled(schedule, problem).placed.tolist() == [0, 1, 0]


@by_name
def test_memory_that_turns_out_short_is_counted_anew(method):
    # A chain starts earliest and ends earliest where it is; but 3 outputs fit each device.
    graph = build_graph([[]] + [[i] for i in range(5)], sizes=[10] * 6)
    problem = build_problem(graph, build_machine(2, memory_bytes=30))
    placement = method(problem, budget := Budget())
    assert budget.score(problem, placement[None])[0].lacking_bytes == 0


@by_name
def test_what_fits_nowhere_comes_back_with_what_it_lacks(method):
    graph = build_graph([[]] + [[i] for i in range(5)], sizes=[10] * 6)
    problem = build_problem(graph, build_machine(2, memory_bytes=25))
    placement = method(problem, budget := Budget())
    assert budget.score(problem, placement[None])[0].lacking_bytes > 0


def simulated(problem):
    """The same problem, evaluated by the simulator."""
    simulator = Simulator(
        problem.graph, problem.machine, problem.costs, capacities=problem.capacities
    )
    return build_problem(
        problem.graph,
        problem.machine,
        groups=problem.groups,
        seconds=problem.costs.compute_seconds,
        evaluate=lambda placements: simulator.evaluate(placements, "step"),
    )


@by_name
def test_tight_memory_holds_on_random_instances(method):
    # Each of three devices holds half of all bytes; half as much again lies around in a schedule.
    fitting = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = simulated(random_problem(rng, groups=12, devices=3, memory_share=0.5))
        placement = method(problem, budget := Budget())
        fitting += budget.score(problem, placement[None])[0].lacking_bytes == 0
        assert (budget.ledger.best[1] == placement).all()
    assert fitting >= 34


@by_name
def test_groups_whose_graph_has_a_cycle_stay_together(method):
    #   group 0: ops 0 and 2, group 1: op 1 between them
    problem = build_problem(
        build_graph([[], [0], [1]]),
        build_machine(2),
        groups=Groups(np.array([0, 1, 0], np.int32), 2),
        pins=[("op1", "gpu1")],
    )
    placement = method(problem, Budget())
    assert placement[1] == 1 and placement[0] in (0, 1)


@by_name
def test_a_host_that_runs_nothing_is_left_alone(method):
    problem = build_problem(build_graph([[], [], [0, 1]]), build_machine(2, host=True))
    assert set(method(problem, Budget()).tolist()) <= {0, 1}


@by_name
def test_idle_slow_devices_draw_nothing_where_that_loses(method):
    #   two independent ops of 1 s on the gpu and 100 s on the cpu: both belong on the gpu
    problem = build_problem(
        build_graph([[], []], outputs=[0, 1]),
        build_machine(2, kinds=["gpu", "cpu"]),
        seconds=[[1, 100], [1, 100]],
    )
    assert method(problem, Budget()).tolist() == [0, 0]


@by_name
def test_a_graph_of_sources_and_one_op_is_placed(method):
    graph = build_graph([[], [0]], sources={0: "parameter"}, phases=[0, 1])
    problem = build_problem(graph, build_machine(2))
    placement = method(problem, Budget())
    assert problem.allowed[np.arange(2), placement].all()


@by_name
def test_the_same_problem_gives_the_same_placement(method):
    for seed in range(3):
        first, second = (
            method(random_problem(np.random.default_rng(seed), groups=60, devices=4), Budget())
            for _ in range(2)
        )
        assert np.array_equal(first, second)


def transfer_seconds(size):
    return LATENCY_SECONDS + size / BANDWIDTH


def reads_of(problem, op):
    """op before -> bytes that it sends."""
    graph, before = problem.graph, {}
    for tensor in graph.inputs_of(op).tolist():
        producer = int(graph.producers[tensor])
        before[producer] = before.get(producer, 0) + int(graph.tensor_bytes[tensor])
    return before


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
@pytest.mark.parametrize("share", [None, 0.4, 0.1])
def test_no_op_starts_before_its_inputs_arrive_nor_beside_another(schedule, share):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        problem = random_problem(
            rng, groups=int(rng.integers(5, 120)), devices=int(rng.integers(2, 6)),
            memory_share=share, pins=[("op3", "gpu1")],
        )  # fmt: skip
        listed = scheduled(schedule, problem)
        devices = listed.placed[problem.groups.of_op]
        assert problem.allowed[np.arange(problem.groups.count), listed.placed].all()
        for op in range(len(problem.graph)):
            seconds = problem.costs.compute_seconds[op, devices[op]]
            assert listed.ends[op] == listed.starts[op] + seconds
            for before, size in reads_of(problem, op).items():
                moves = devices[before] != devices[op]
                arrives = listed.ends[before] + moves * transfer_seconds(size)
                assert listed.starts[op] >= arrives - 1e-9
        for device in range(problem.devices):
            here = np.flatnonzero(devices == device)
            here = here[np.argsort(listed.starts[here])]
            assert (listed.starts[here[1:]] >= listed.ends[here[:-1]] - 1e-9).all()


def arrival_on(problem, placed, ends, op, device):
    waits = [
        ends[before] + (placed[before] != device) * transfer_seconds(size)
        for before, size in reads_of(problem, op).items()
    ]
    return max(waits, default=0.0)


@pytest.mark.parametrize("seed", range(8))
def test_etf_is_its_rule_by_brute_force(seed):
    # Every op its own group, memory for all: of all ready ops and devices, the first start.
    problem = random_problem(np.random.default_rng(seed), groups=30, devices=3)
    graph, seconds = problem.graph, problem.costs.compute_seconds
    problem = build_problem(graph, problem.machine, seconds=seconds)
    levels = np.zeros(len(graph))
    for op in reversed(range(len(graph))):
        after = [levels[later] for later in range(len(graph)) if op in reads_of(problem, later)]
        levels[op] = seconds[op].min() + max(after, default=0.0)
    placed, starts, ends, free = {}, {}, {}, [0.0] * 3
    while len(placed) < len(graph):
        ready = [
            op
            for op in range(len(graph))
            if op not in placed and all(before in placed for before in reads_of(problem, op))
        ]
        start, _, op, device = min(
            (max(free[d], arrival_on(problem, placed, ends, op, d)), -levels[op], op, d)
            for op in ready
            for d in range(3)
        )
        placed[op], starts[op] = device, start
        ends[op] = free[device] = start + seconds[op, device]
    listed = scheduled(etf_schedule, problem)
    assert listed.placed.tolist() == [placed[op] for op in range(len(graph))]
    assert listed.starts == pytest.approx([starts[op] for op in range(len(graph))])


@pytest.mark.parametrize("seed", range(8))
def test_heft_is_its_rule_by_brute_force(seed):
    problem = random_problem(np.random.default_rng(seed), groups=30, devices=3)
    graph, seconds = problem.graph, problem.costs.compute_seconds
    problem = build_problem(graph, problem.machine, seconds=seconds)
    ranks = np.zeros(len(graph))
    for op in reversed(range(len(graph))):
        after = [
            transfer_seconds(reads_of(problem, later)[op]) + ranks[later]
            for later in range(len(graph))
            if op in reads_of(problem, later)
        ]
        ranks[op] = seconds[op].mean() + max(after, default=0.0)
    placed, ends, busy = {}, {}, [[], [], []]
    for op in sorted(range(len(graph)), key=lambda op: (-ranks[op], op)):
        options = []
        for device in range(3):
            ready = arrival_on(problem, placed, ends, op, device)
            spans = sorted(busy[device])
            gaps = zip([(0.0, 0.0), *spans], [*spans, (np.inf, np.inf)], strict=True)
            fits = [
                max(ready, before)
                for (_, before), (after, _) in gaps
                if max(ready, before) + seconds[op, device] <= after
            ]
            options.append((min(fits) + seconds[op, device], device, min(fits)))
        ends[op], placed[op], start = min(options)
        busy[placed[op]].append((start, ends[op]))
    listed = scheduled(heft_schedule, problem)
    assert listed.placed.tolist() == [placed[op] for op in range(len(graph))]
    assert listed.ends == pytest.approx([ends[op] for op in range(len(graph))])
