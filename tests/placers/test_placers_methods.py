"""Each constructive method on a drawn example, and budgets."""

from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import UsageError
from dovetail.graph import Phase
from dovetail.placers import Budget, Score, parse_budget
from dovetail.placers.baselines import balanced, single
from dovetail.placers.etf import etf
from dovetail.placers.expert import expert
from dovetail.placers.local_search import MOVES, CriticalPath, local_search, move_tables
from tests.support.placer_instances import build_graph, build_machine, build_problem, random_problem


def chain(modules, **fields):
    return build_graph([[]] + [[i] for i in range(len(modules) - 1)], modules=modules, **fields)


def test_single_takes_the_device_that_is_fastest_as_a_whole():
    problem = build_problem(chain([""] * 3), build_machine(2), seconds=[[1, 2], [5, 1], [1, 2]])
    assert single(problem, Budget()).tolist() == [1, 1, 1]


def test_single_leaves_pinned_groups_where_they_are():
    problem = build_problem(chain([""] * 3), build_machine(2), pins=[("op1", "gpu1")])
    placement = single(problem, Budget()).tolist()
    assert placement in ([0, 1, 0], [1, 1, 1])


def test_expert_gives_each_recurrent_layer_its_device():
    #  embed | lstm.0 | lstm.1 | attention | softmax      on 4 devices
    #    0       0        1         1           1
    modules = ["embed", "net.lstm.0", "net.lstm.1.cell", "attention", "softmax"]
    problem = build_problem(chain(modules), build_machine(4))
    assert expert(problem, Budget()).tolist() == [0, 0, 1, 1, 1]


def test_expert_shares_devices_among_more_layers_than_devices():
    modules = [f"cells.{i}" for i in range(1, 7)]
    problem = build_problem(chain(modules), build_machine(2))
    assert expert(problem, Budget()).tolist() == [0, 0, 0, 1, 1, 1]


def test_expert_cuts_other_networks_in_runs_of_equal_layer_count():
    modules = ["stem", "stem", "stem", "mixed_a", "mixed_b", "head"]
    problem = build_problem(chain(modules), build_machine(2))
    assert expert(problem, Budget()).tolist() == [0, 0, 0, 0, 1, 1]


def test_expert_uses_the_gpus_where_there_are_any():
    machine = build_machine(3, kinds=["cpu", "gpu", "gpu"])
    problem = build_problem(chain(["lstm.0", "lstm.1"]), machine)
    assert expert(problem, Budget()).tolist() == [1, 2]


def test_expert_lets_sums_of_gradients_follow_their_heaviest_tensors():
    #  lstm.0 ─ lstm.1 ─ loss ─ ... the sum (op 3) shares 1000 bytes with the update of lstm.0
    graph = build_graph(
        [[], [0], [1], [2], [3, 0]],
        sizes=[4, 4, 4, 1000, 4],
        modules=["lstm.0", "lstm.1", "loss", "loss", "lstm.0"],
        phases=[Phase.FORWARD, Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE],
    )
    problem = build_problem(graph, build_machine(2))
    assert expert(problem, Budget()).tolist() == [0, 1, 1, 0, 0]


def test_balanced_minimises_the_largest_run():
    #  3 1 | 4 | 2 2  on three devices: loads 4, 4, 4
    seconds = np.repeat([[3.0], [1.0], [4.0], [2.0], [2.0]], 3, axis=1)
    problem = build_problem(chain([""] * 5), build_machine(3), seconds=seconds)
    assert balanced(problem, Budget()).tolist() == [0, 0, 1, 2, 2]


def test_balanced_gives_the_slower_device_less():
    seconds = np.tile([[1.0, 3.0]], (8, 1))
    problem = build_problem(chain([""] * 8), build_machine(2), seconds=seconds)
    assert balanced(problem, Budget()).tolist() == [0] * 6 + [1] * 2


def test_balanced_cuts_again_where_memory_turns_out_short():
    # By work 2 ops + 4; but only 3 outputs fit each device, which only evaluating shows.
    seconds = np.repeat([[2.0], [2.0], [1.0], [1.0], [1.0], [1.0]], 2, axis=1)
    problem = build_problem(
        chain([""] * 6, sizes=[10] * 6), build_machine(2, memory_bytes=30), seconds=seconds
    )
    placement = balanced(problem, budget := Budget())
    assert budget.score(problem, placement[None])[0].lacking_bytes == 0


def test_etf_spreads_branches_and_keeps_a_chain_together():
    #        ┌► 1 ─► 2 ┐
    #    0 ──┤         ├► 5       op 3 starts earlier beside than behind op 1
    #        └► 3 ─► 4 ┘
    graph = build_graph([[], [0], [1], [0], [3], [2, 4]])
    problem = build_problem(graph, build_machine(2))
    placement = etf(problem, Budget())
    assert placement[1] == placement[2] != placement[3] == placement[4]


def test_etf_stays_on_one_device_where_sending_takes_longer_than_computing():
    graph = build_graph([[], [0], [0], [1, 2]], sizes=[10_000] * 4)
    problem = build_problem(graph, build_machine(2))
    assert len(set(etf(problem, Budget()).tolist())) == 1


def test_etf_goes_on_where_no_device_has_room():
    graph = build_graph([[]] * 4, sizes=[100] * 4, outputs=[0, 1, 2, 3])
    problem = build_problem(graph, build_machine(2, memory_bytes=150))
    placement = etf(problem, Budget())
    assert sorted(placement.tolist()) == [0, 0, 1, 1]


def test_etf_asks_again_where_the_last_device_gives_an_op_to_one_that_had_none():
    #   gpu0 ├─ 0: 60 bytes ─┤├─ 2: 50 ─┤     op 2 no longer fits beside op 0, so gpu0 drops it;
    #   gpu1 ├─ 1: 60 bytes ─┤                then not beside op 1, and goes back where room is
    graph = build_graph([[]] * 3, sizes=[60, 60, 50], outputs=[0, 1, 2])
    problem = build_problem(graph, build_machine(2, memory_bytes=100))
    assert etf(problem, Budget()).tolist() == [0, 1, 0]


@pytest.mark.parametrize("share", [0.05, 0.2, 0.35])
def test_etf_places_every_group_however_tight_memory_is(share):
    for seed in range(20):
        problem = random_problem(np.random.default_rng(seed), groups=12, memory_share=share)
        placement = etf(problem, Budget())
        assert problem.allowed[np.arange(12), placement].all()


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_every_move_changes_only_groups_with_a_choice(move):
    rng = np.random.default_rng(0)
    problem = random_problem(rng, groups=20, devices=3, pins=[("op3", "gpu2"), ("op30", "gpu0")])
    path = CriticalPath(
        groups=np.array([2, 5, 9], dtype=np.int32),
        seconds=np.array([3.0, 1.0, 2.0]),
        producers=np.array([2, 5], dtype=np.int32),
        readers=np.array([5, 9], dtype=np.int32),
        crowded=np.array([1.0, 0.0, 2.0]),
    )
    land = replace(move_tables(problem), path=path)
    changed = 0
    for _ in range(100):
        placement = problem.settle(rng.integers(0, 3, size=20))
        before = placement.copy()
        moved = move(land, placement, rng)
        assert np.array_equal(placement, before)
        if moved is not None:
            changed += not np.array_equal(moved, before)
            assert problem.allowed[np.arange(20), moved].all()
    assert changed >= 50


def test_local_search_separates_two_independent_chains():
    #   0 ► 2 ► 4 ► ...        one second an op, heavy tensors: the optimum is one chain a device
    #   1 ► 3 ► 5 ► ...
    reads = [[i - 2] if i > 1 else [] for i in range(24)]
    problem = build_problem(build_graph(reads, sizes=[1000] * 24), build_machine(2))
    budget = parse_budget("1500e")
    placement = local_search(problem, budget)
    assert budget.score(problem, placement[None])[0] == Score(0.0, 12.0)


def test_group_bytes_count_parameters_and_what_backward_reads():
    #  parameter0 (100)   op1 (7) is read by backward op 3; op2 (50) only by forward
    graph = build_graph(
        [[], [0], [1], [1, 2]],
        sizes=[100, 7, 50, 3],
        sources={0: "parameter"},
        phases=[Phase.SOURCE, Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD],
        outputs=[],
    )
    problem = build_problem(graph, build_machine(2))
    assert problem.group_bytes.tolist() == [100, 7, 50, 0]


@pytest.mark.parametrize(
    ("text", "seconds", "evaluations"),
    [("10", 10, np.inf), ("2.5s", 2.5, np.inf), ("5000e", np.inf, 5000)],
)
def test_a_budget_is_seconds_or_evaluations(text, seconds, evaluations):
    budget = parse_budget(text)
    assert (budget.seconds, budget.evaluations) == (seconds, evaluations)


@pytest.mark.parametrize("text", ["", "ten", "-5", "0", "1.5e", "10m", "e", "nan"])
def test_what_is_no_budget_is_an_error(text):
    with pytest.raises(UsageError) as raised:
        parse_budget(text)
    assert raised.value.option == "--budget"


def test_fitting_into_memory_comes_before_speed():
    assert Score(0.0, 100.0) < Score(1.0, 0.1) < Score(1.0, 0.2)
