"""The learned columns: trained row by row, kept, continued, compared, and told of."""

import csv
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from dovetail.costs import analytic_costs
from dovetail.graph import Groups, colocate, layered
from dovetail.machine import parse_machine
from dovetail.simulator import Simulator
from reproductions import graphs, learned, running, store, tables
from reproductions.learned import FEWEST_GROUPS, Tally, run_learned, task_of
from reproductions.methods import HYPOTHESIS, PLAIN, lay_ground
from reproductions.page import render
from reproductions.records import BestSoFar, LearnedRun, Published
from reproductions.results import ResultTable
from reproductions.tables import (
    cut,
    effort,
    efforts,
    middle,
    middle_within,
    reached,
    span,
    target_of,
)
from reproductions.tasks import BenchTask, run_table, work_off
from tests.support.bench_samples import METHODS, fits, make_case, make_column, make_row, oom
from tests.support.tiny_tables import CASES as OURS
from tests.support.tiny_tables import MACHINE, settings

FEW = {PLAIN: ("1 CPU", "1 GPU", "expert"), "hypothesis": ("1 CPU",)}
CASES = tuple(replace(case, published=Published({})) for case in OURS)
"""Rows of the paper's table, in which methods are trained under the hypothesis as well."""


@pytest.fixture(scope="module")
def task():
    graph = layered(60, training=True)
    return task_of("tiny", graph, parse_machine(MACHINE), "gdp")[0]


def made_run(method, seed, bests, trials=100, seconds=None, invalid=0.0):
    """A training that found `bests` of (trial, seconds)."""
    found = tuple(BestSoFar(trial, trial, value) for trial, value in bests)
    last = bests[-1][1] if bests else seconds
    reached = fits(last) if bests else oom()
    return LearnedRun(method, seed, reached, 7, "by hand", trials, trials, 5, invalid, found)


def random_policy(method, tasks, tallies, *, trials, seed):
    """Stands for a training: it draws and never learns."""
    rng = np.random.default_rng(seed)
    problem = tasks[0].problem(threads=1)
    for _ in range(trials // 4):
        draws = rng.integers(0, problem.devices, (4, problem.groups.count))
        tallies[0](np.stack([problem.settle(draw) for draw in draws]))
    return trials // 4


@pytest.fixture
def trained(monkeypatch):
    """(method, seed) of every training from now on; none of them learns."""
    calls = []

    def noted(method, tasks, tallies, *, trials, seed):
        calls.append((tasks[0].name, method, seed))
        return random_policy(method, tasks, tallies, trials=trials, seed=seed)

    monkeypatch.setattr(learned, "train", noted)
    return calls


def test_groups_are_as_many_as_asked_for_or_all_that_colocation_leaves():
    machine = parse_machine("rl17/2")
    wide, small = layered(4000, training=True), layered(60, training=True)
    for graph, method in ((wide, "gdp"), (wide, "hdp"), (small, "gdp")):
        found, grouping = task_of("", graph, machine, method)
        assert found.groups.count >= FEWEST_GROUPS or grouping == "all that colocation leaves"
    by_rule, grouping = task_of("", wide, machine, "seq2seq")
    assert grouping == "RL17's rule"
    finer, grouping = task_of("", wide, machine, "gdp")
    assert by_rule.groups.count < FEWEST_GROUPS <= finer.groups.count


def test_too_many_groups_are_joined_and_stay_enough(monkeypatch):
    monkeypatch.setattr(learned, "FEWEST_GROUPS", 20)
    monkeypatch.setattr(learned, "MOST_GROUPS", 40)
    graph = layered(900, training=True)
    coarse, grouping = task_of("", graph, parse_machine("rl17/2"), "gdp")
    assert 20 <= coarse.groups.count <= 40
    assert grouping.endswith("then joined by heavy edges")


def test_a_tally_counts_repeats_once_as_different_and_keeps_every_new_best(task):
    told = []
    tally = Tally(task.problem(threads=1), lambda trials, seconds: told.append((trials, seconds)))
    rng = np.random.default_rng(0)
    problem = task.problem(threads=1)
    draws = [problem.settle(rng.integers(0, 2, problem.groups.count)) for _ in range(5)]
    simulator = Simulator(task.graph, task.machine, task.costs, ranked=True)
    values = simulator.evaluate(problem.spread(np.stack(draws))).values
    first = tally(np.stack([draws[0], draws[0], draws[1]]))
    tally(np.stack(draws[:5]))
    assert first.seconds.tolist() == [values[0], values[0], values[1]]
    assert (tally.trials, tally.distinct, tally.invalid) == (8, 5, 0)
    lows = np.minimum.accumulate(values)
    assert tally.bests[0] == BestSoFar(1, 1, values[0])
    assert tally.bests[-1].seconds == lows[-1]
    assert told[-1] == (8, lows[-1])
    trial_of = {0: 1, 1: 3, 2: 6, 3: 7, 4: 8}
    wins = [i for i in range(5) if i == 0 or values[i] < lows[i - 1]]
    assert [best.trial for best in tally.bests] == [trial_of[i] for i in wins]


def test_what_does_not_fit_is_no_best_and_says_what_lacks(task):
    devices = tuple(replace(device, memory_bytes=1000) for device in task.machine.devices)
    cramped = replace(task, machine=replace(task.machine, devices=devices))
    tally = Tally(cramped.problem(threads=1), lambda _trials, _seconds: None)
    found = tally(np.zeros((2, task.groups.count), dtype=np.int32))
    assert not found.valid.any()
    assert np.isinf(found.seconds).all()
    assert (tally.trials, tally.invalid, tally.bests) == (2, 2, [])
    assert tally.reason.startswith("OOM: k80:")


@pytest.mark.parametrize("method", ["seq2seq", "gdp", "hdp"])
def test_a_training_uses_its_trials_and_the_same_seed_gives_the_same_curve(method):
    graph = layered(40, training=True)
    costs = analytic_costs(graph, parse_machine(MACHINE))
    few = Groups((np.arange(len(graph)) * 6 // len(graph)).astype(np.int32), 6)
    small = learned.PlacementTask("small", graph, parse_machine(MACHINE), costs, few)
    runs = [run_learned(small, "by hand", method, trials=17, seed=3) for _ in range(2)]
    (one, placement), (two, _) = runs
    assert one.trials == 17
    assert one.bests == two.bests
    assert one.updates == two.updates > 1
    value = Simulator(graph, small.machine, costs).evaluate(placement[None][:, few.of_op])
    assert one.found.seconds == value.values[0] == one.bests[-1].seconds
    assert sum(one.found.peak_memory_bytes.values()) == value.peak_memory_bytes.sum()


def test_trainings_are_kept_one_by_one_and_a_second_run_trains_only_what_lacks(tmp_path, trained):
    asked = settings(tmp_path, methods=FEW, learn=40, seeds=2)
    table = run_table(asked, CASES, jobs=0)
    assert not table.failures
    assert sorted(trained) == sorted(
        (case.key, method, seed)
        for case in CASES
        for _column in (PLAIN, HYPOTHESIS)
        for method in ("seq2seq", "seq2seq-paper")
        for seed in (0, 1)
    )
    for column in (column for row in table.rows for column in row.columns.values()):
        runs = column.learned["seq2seq"]
        assert [run.seed for run in runs] == [0, 1]
        assert column.methods["seq2seq"] == middle(runs).found
        assert column.best != "seq2seq"
        assert all(run.trials == 40 for run in runs)
    trained.clear()
    assert run_table(asked, CASES, jobs=0).rows == table.rows
    assert not trained
    (tmp_path / "rows" / "tiny-2gpu.plain.seq2seq.seed-1.json").unlink()
    run_table(asked, CASES, jobs=0)
    assert trained == [("tiny-2gpu", "seq2seq", 1)]
    trained.clear()
    without = run_table(replace(asked, learn=0), CASES, jobs=0)
    assert without.computed == 0
    assert not without.rows[0].columns[PLAIN].learned
    more = replace(asked, learn=80, learn_of={"seq2seq-paper": 0})
    run_table(more, CASES[:1], jobs=0)
    assert trained == [("tiny-2gpu", "seq2seq", seed) for seed in (0, 0, 1, 1)]
    own = replace(asked, learn=0, learn_of={"seq2seq": 20})
    (row,) = run_table(own, CASES[:1], jobs=0).rows
    assert [run.trials for run in row.columns[PLAIN].learned["seq2seq"]] == [20, 20]


@pytest.mark.parametrize(
    ("kind", "again"), [(store.LEARNED, 2), (store.PLANNED, 2), (store.DRAWN, 2)]
)
def test_other_code_of_learning_leaves_what_was_planned_and_the_other_way_round(
    tmp_path, trained, monkeypatch, kind, again
):
    asked = settings(tmp_path, methods=FEW, learn_of={"seq2seq": 8, "auto@seq2seq": 0}, seeds=1)
    run_table(asked, CASES[:1], jobs=0)
    real = store.code_fingerprint
    for module in (store, running):
        monkeypatch.setattr(module, "code_fingerprint", lambda of: real(of) + "x" * (of == kind))
    other = replace(asked, code=store.all_code())
    assert run_table(other, CASES[:1], jobs=0).computed == again


def test_code_that_computes_nothing_of_a_kind_is_not_among_what_it_rests_on():
    files = {
        kind: {name for name, _ in store._files(store._RESTS_ON[kind], store._NOT.get(kind, ()))}
        for kind in store._RESTS_ON
    }
    # GDP's features are made by these planners, and DOS's lines hold figures of this module.
    assert {"placers/etf.py", "placers/expert.py"} <= files[store.LEARNED]
    assert "reports/schedules.py" in files[store.SCHEDULED]
    # `auto` reads there which methods it tries.
    assert "methods.py" in files[store.PLANNED] & files[store.SEARCHED]
    policy, planner = "placers/learned/gdp.py", "placers/local_search.py"
    assert policy in files[store.LEARNED]
    assert policy not in files[store.PLANNED]
    assert planner in files[store.PLANNED]
    assert planner not in files[store.LEARNED]
    assert "simulator/kernel.py" in files[store.LEARNED] & files[store.PLANNED]
    assert not {policy, planner, "reproductions/page.py"} & files[store.GRAPHS]
    named = {name for kind in (*store._RESTS_ON.values(), *store._NOT.values()) for name in kind}
    assert all(any(store._files([name], ())) for name in named)


@pytest.mark.parametrize("jobs", [0, 1])
def test_when_the_last_task_fails_what_waits_for_it_is_dropped_and_the_crew_ends(jobs):
    tasks = [
        BenchTask("bad", "tests.support.tiny_tasks:raises", ("no good",)),
        BenchTask("later", "tests.support.tiny_tasks:says", ("",), after=("bad",)),
    ]
    assert set(work_off(tasks, jobs, lambda *_: None, print)) == {"bad", "later"}


def test_the_run_of_the_median_counts_and_one_without_a_placement_is_the_worst():
    runs = [made_run("gdp", seed, [(3, value)]) for seed, value in enumerate((0.3, 0.1, 0.2))]
    assert middle(runs).seed == 2
    assert middle(runs[:2]).seed == 1
    lost = made_run("gdp", 3, [])
    assert middle([lost, runs[0]]).seed == 0
    assert span([runs[0], runs[1], lost]) == (0.1, math.inf)


def test_effort_is_how_much_less_is_evaluated_for_a_placement_as_good():
    hdp = made_run("hdp", 0, [(10, 0.9), (80, 0.5)])
    fast = made_run("gdp", 0, [(2, 0.6), (8, 0.5), (90, 0.3)])
    assert reached(fast, 0.5).trial == 8
    assert (effort(fast, hdp).ratio, effort(fast, hdp).limit) == (10.0, "")
    never = made_run("gdp", 0, [(2, 0.6)], trials=100)
    assert (effort(never, hdp).ratio, effort(never, hdp).limit) == (0.8, "at most")
    helpless = made_run("hdp", 0, [], trials=100)
    assert (effort(fast, helpless).ratio, effort(fast, helpless).limit) == (50.0, "at least")


def column_of(**seconds):
    methods = {name: fits(value) for name, value in seconds.items()}
    return replace(make_column(), methods=METHODS | methods)


def test_what_seq2seq_is_to_reach_is_the_smaller_of_the_papers_margin_and_most_of_the_head_room():
    printed = {"1 GPU": None, "Scotch": 14.19, "MinCut": 11.54, "expert": 4.99, "RL": 4.04}
    case = make_case(published=Published(printed))
    roomy = target_of(case, column_of(auto=0.5))
    assert roomy.baseline == "expert"  # .92, of 6.9, 1.57, 1.1, 1.0
    assert roomy.head_room == pytest.approx(0.92 / 0.5 - 1)
    assert roomy.margin == pytest.approx(4.99 / 4.04 - 1)
    assert roomy.seconds == pytest.approx(0.92 * 4.04 / 4.99)
    tight = target_of(case, column_of(auto=0.85))
    assert tight.seconds == pytest.approx(0.92 / (1 + 0.8 * (0.92 / 0.85 - 1)))
    assert target_of(case, column_of(auto=0.92)).seconds == 0.92
    unprinted = make_case(published=Published({"1 GPU": None, "RL": 33.46}))
    assert target_of(unprinted, column_of(auto=0.85)).margin is None
    assert target_of(case, replace(make_column(), methods={})) is None


def test_a_run_is_cut_to_as_many_placements_as_the_other_had():
    runs = {
        "gdp": tuple(
            made_run("gdp", seed, [(2, 0.9), (60, value)]) for seed, value in enumerate((0.5, 0.7))
        ),
        "hdp": (made_run("hdp", 0, [(1, 0.8)], trials=60), made_run("hdp", 1, [], trials=59)),
    }
    column = replace(make_column(), learned=runs)
    assert [cut(runs["gdp"][0], trials).found.seconds for trials in (1, 2, 59, 60)] == [
        None, 0.9, 0.9, 0.5,
    ]  # fmt: skip
    assert middle_within(column, "gdp", "hdp") == 0.5  # of .5 and .9 the better one
    alone = replace(column, learned={"gdp": runs["gdp"]})
    assert middle_within(alone, "gdp", "hdp") is None


def gdp_column():
    runs = {
        "gdp": tuple(made_run("gdp", s, [(2, 0.8), (10, 0.6)]) for s in (0, 1)),
        "auto@gdp": tuple(made_run("auto@gdp", s, [(30, 0.5)]) for s in (0, 1)),
        "hdp": tuple(made_run("hdp", s, [(50, 0.7)]) for s in (0, 1)),
    }
    methods = METHODS | {name: middle(of).found for name, of in runs.items()}
    return replace(make_column(), methods=methods, learned=runs)


def gdp_case():
    seconds = {"GDP-one": 0.234, "human": 0.257, "METIS": 0.355, "HDP": 0.243}
    published = Published(seconds, hours={"GDP-one": "2.95 times faster than HDP"})
    return make_case(machine="gdp/2", published=published)


def test_gdps_tables_have_its_ratios_its_effort_and_the_papers():
    done = [(gdp_case(), make_row(plain=gdp_column()))]
    against, effort_of, _ = tables.tables_of("gdp", done)
    ((row,), (spent,)), head = (against.cells, effort_of.cells), against.head
    found = dict(zip(head, row, strict=True))
    names = ("GDP-one", "HDP", "auto, same groups")
    assert [found[name] for name in names] == ["0.600 s", "0.700 s", "0.500 s"]
    assert found["in as many placements as HDP"] == "0.600 s"
    to = ("to HDP, in as many", "to human", "to auto")
    assert [found[column] for column in to] == ["0.857 x", "0.652 x", "1.200 x"]
    assert spent == ("RNNLM, 2 GPUs", "50, 50", "10, 10", "5.0 x", "5.0 x", "2.95 x")
    said = {what: figure for what, figure, _ in tables.verdicts("gdp", done)}
    assert said == {
        "GDP-one at or below HDP": "1 of 1",
        "GDP-one at or below human": "1 of 1",
        "GDP-one over auto": "1.200 x",
        "less search than HDP": "5.0 x",
    }
    assert [one.limit for one in efforts(gdp_column())] == ["", ""]


def published_column():
    """`gdp_column`, with both methods as published and what the shipped policy proposes."""
    runs = gdp_column().learned | {
        "gdp-paper": tuple(made_run("gdp-paper", s, [(7, 0.8 + s / 10)]) for s in (0, 1, 2)),
        "hdp-paper": (made_run("hdp-paper", 0, []),),
        "likeliest": (made_run("likeliest", 0, [(1, 0.88)], trials=1),),
        "proposals": (made_run("proposals", 0, [(1, 0.88), (40, 0.76)]),),
    }
    methods = METHODS | {name: middle(of).found for name, of in runs.items()}
    return replace(make_column(), methods=methods, learned=runs)


def test_as_published_stands_beside_ours_and_the_likeliest_apart_from_the_best_proposed():
    done = [(gdp_case(), make_row(plain=published_column()))]
    titled = {table.title: table for table in tables.tables_of("gdp", done)}
    published = titled["As published, and ours"]
    (row,) = published.cells
    found = dict(zip(published.head, row, strict=True))
    assert (found["gdp-paper"], found["gdp (ours)"]) == ("0.900 s", "0.600 s")
    assert (found["hdp-paper"], found["hdp (ours)"]) == ("OOM", "0.700 s")
    assert found["shipped policy: likeliest"] == "0.880 s"
    assert found["shipped policy: proposals"] == "0.760 s"
    assert (found["expert"], found["gdp-paper to expert"]) == ("0.920 s", "0.978 x")
    assert found["the paper's gdp"] == "0.911 x"  # .234 / .257
    assert "0.800 s to 1.00 s" in row
    assert "as published 0.900 s" in render("gdp", [done[0][0]], [done[0][1]], [], [])
    ours_alone = [(gdp_case(), make_row(plain=gdp_column()))]
    titles = [table.title for table in tables.tables_of("gdp", ours_alone)]
    assert titles and "As published, and ours" not in titles


def test_a_line_of_the_csv_has_the_papers_figure_beside_both_modes():
    lines = tables.lines_of("gdp", [gdp_case()], [make_row(plain=published_column())])
    found = {line["method"]: line for line in lines}
    for method in ("gdp", "gdp-paper"):
        assert (found[method]["paper_column"], found[method]["paper_seconds"]) == ("GDP-one", 0.234)
    assert found["likeliest"]["paper_column"] == ""


@pytest.mark.parametrize("method", ["likeliest", "proposals"])
def test_what_the_shipped_policy_proposes_is_judged_without_training(method, task):
    run, placement = run_learned(task, "by hand", method, trials=5, seed=0)
    assert run.updates == 0
    assert (run.trials == 1) == (method == "likeliest")
    problem = task.problem(threads=1)
    found = problem.evaluate(problem.spread(placement[None]))
    assert run.found.seconds == found.values[0]


@pytest.mark.parametrize("method", ["auto@gdp", "auto@gdp-paper"])
def test_auto_gets_the_groups_and_as_many_evaluations_as_a_method_that_learns(method):
    graph, machine = layered(300, training=True), parse_machine(MACHINE)
    task, grouping = task_of("tiny", graph, machine, method)
    paired, paired_grouping = task_of("tiny", graph, machine, method.removeprefix("auto@"))
    assert np.array_equal(task.groups.of_op, paired.groups.of_op)
    assert grouping == paired_grouping
    runs = [run_learned(task, grouping, method, trials=150, seed=1) for _ in range(2)]
    (one, placement), (two, _) = runs
    assert one.bests == two.bests and 50 < one.trials <= 150 and one.updates == 0
    evaluated = Simulator(graph, machine, task.costs, ranked=True).evaluate(
        placement[None][:, task.groups.of_op]
    )
    assert one.found.seconds == evaluated.values[0] == one.bests[-1].seconds


def test_auto_on_a_methods_groups_has_as_many_placements_as_that_method(tmp_path):
    own = {"gdp": 500, "gdp-paper": 0, "hdp": 60}
    asked = settings(tmp_path, name="gdp", learn=90, learn_of=own)
    assert asked.trials_of("auto@gdp") == asked.trials_of("gdp") == 500
    assert asked.trials_of("auto@gdp-paper") == 0
    assert replace(asked, learn_of={}).trials_of("auto@gdp") == 90
    assert replace(asked, learn_of=own | {"auto@gdp": 7}).trials_of("auto@gdp") == 7


def test_the_likeliest_placement_is_asked_for_once_and_the_rest_seed_by_seed(tmp_path):
    asked = settings(tmp_path, name="gdp", learn=9, seeds=2)
    every = list(learned.trainings(asked))
    assert every.count(("likeliest", 0)) == 1
    assert ("likeliest", 1) not in every
    assert {seed for method, seed in every if method == "gdp-paper"} == {0, 1}


def test_methods_as_published_place_rl17s_groups_or_every_op():
    wide, machine = layered(4000, training=True), parse_machine("rl17/2")
    assert task_of("", wide, machine, "seq2seq-paper")[1] == "cells and branches"
    for method in ("gdp-paper", "hdp-paper"):
        found, grouping = task_of("", wide, machine, method)
        assert (found.groups.count, grouping) == (
            colocate(wide).count, "all that colocation leaves",
        )  # fmt: skip


def test_the_page_shows_every_training_and_the_cards_their_sum():
    text = render("gdp", [gdp_case()], [make_row(plain=gdp_column())], [], [])
    assert "<h2>Learned methods</h2>" in text
    assert "0.600 s to 0.600 s" in text
    assert "less search than HDP" in text
    assert "No training was run." in render("gdp", [gdp_case()], [make_row()], [], [])


def trainings_file(name, done):
    """The lines of trainings.csv, read back."""
    made = ResultTable.of_records(tables.LEARNED_FIELDS, tables.training_lines(name, done))
    return list(csv.DictReader(io.StringIO(made.csv_text().decode())))


def test_a_line_of_the_csv_of_trainings_has_the_whole_curve():
    done = [(gdp_case(), make_row(plain=gdp_column()))]
    lines = trainings_file("gdp", done)
    assert [(line["method"], line["seed"]) for line in lines] == [
        ("gdp", "0"), ("gdp", "1"), ("auto@gdp", "0"), ("auto@gdp", "1"), ("hdp", "0"),
        ("hdp", "1"),
    ]  # fmt: skip
    assert lines[0]["curve"] == "2:2:0.8;10:10:0.6"
    assert lines[0]["trials_to_best"] == "10"
    assert tuple(lines[0]) == tables.LEARNED_FIELDS


def test_a_training_in_progress_tells_how_far_it_is(tmp_path, trained):
    said = []
    asked = settings(tmp_path, methods=FEW, learn=40, seeds=1)
    learned.run_training(asked, CASES[0], PLAIN, "seq2seq", 0, said.append, print)
    assert any("20 trials, " in line for line in said)


def test_under_the_hypothesis_a_training_is_judged_by_where_variables_are_then(tmp_path):
    asked = settings(tmp_path, methods=FEW, learn_of={"seq2seq": 24}, seeds=1)
    (row,) = run_table(asked, CASES[:1], jobs=0).rows
    (run,) = row.columns[HYPOTHESIS].learned["seq2seq"]
    kept = json.loads((tmp_path / "rows" / "tiny-2gpu.hypothesis.seq2seq.seed-0.json").read_text())
    graph = graphs.graph_for(asked.store(print, store.GRAPHS), CASES[0])
    ground = lay_ground(graph, parse_machine(MACHINE), HYPOTHESIS, seed=0)
    placement = np.array(kept["value"]["placement"], dtype=np.int32)
    found = ground.problem.evaluate(ground.problem.spread(placement[None]))
    assert run.found.seconds == found.values[0]
    assert run.found.seconds != row.columns[PLAIN].learned["seq2seq"][0].found.seconds


def test_rows_of_our_own_are_not_trained_under_the_hypothesis(tmp_path, trained):
    asked = settings(tmp_path, methods=FEW, learn_of={"seq2seq": 8, "auto@seq2seq": 0}, seeds=1)
    (row,) = run_table(asked, OURS[:1], jobs=0).rows
    assert len(trained) == 1
    learned_of = {name: list(column.learned) for name, column in row.columns.items()}
    assert learned_of == {PLAIN: ["seq2seq"], HYPOTHESIS: []}


def test_the_best_training_of_a_learned_method_is_drawn_and_redrawn_without_training(
    tmp_path, trained, monkeypatch
):
    asked = settings(tmp_path, methods=FEW, learn_of={"seq2seq": 40}, seeds=2)
    (row,) = run_table(asked, CASES[:1], jobs=0).rows
    column = row.columns[PLAIN]
    best = min(column.learned["seq2seq"], key=lambda run: run.found.seconds)
    work = column.shown["seq2seq"]
    assert work.picture.startswith("<svg")
    file = tmp_path / "rows" / f"tiny-2gpu.plain.seq2seq.seed-{best.seed}.work.json"
    assert json.loads(file.read_text())["value"]["forward_seconds"] == work.forward_seconds
    busy = [sum(of.values()) for of in (work.forward_seconds, work.backward_seconds)]
    assert 0 < sum(busy) <= len(work.forward_seconds) * best.found.seconds
    trained.clear()
    file.unlink()
    again = run_table(asked, CASES[:1], jobs=0)
    assert (again.computed, trained) == (1, [])
    assert again.rows == (row,)
    text = render("rl17", CASES[:1], [row], [], [])
    assert "<b>learned: seq2seq, best of 2 trainings</b>" in text


def test_controllers_train_around_a_server_in_virtual_time_and_alike_from_the_same_seed(tmp_path):
    graph = layered(40, training=True)
    machine = parse_machine(MACHINE)
    few = Groups((np.arange(len(graph)) * 6 // len(graph)).astype(np.int32), 6)
    small = learned.PlacementTask("small", graph, machine, analytic_costs(graph, machine), few)

    def run(controllers):
        asked = {"trials": 128, "seed": 3, "controllers": controllers}
        found, placement = run_learned(small, "by hand", "seq2seq-paper", **asked)
        return found, placement

    (one, _), (four, placement), (again, _) = run(1), run(4), run(4)
    assert (one.controllers, four.controllers) == (1, 4)
    assert (four.trials, four.updates) == (128, 16)
    assert four.bests == again.bests
    assert four.bests != one.bests
    value = Simulator(graph, machine, small.costs).evaluate(placement[None][:, few.of_op])
    assert four.found.seconds == value.values[0]


def test_trainings_by_several_controllers_stand_beside_those_by_one(tmp_path):
    trials = {"seq2seq-paper": 16, "auto@seq2seq-paper": 24}
    asked = settings(tmp_path, methods=FEW, learn_of=trials, seeds=1)
    run_table(asked, CASES[:1], jobs=0)
    several = replace(asked, controllers=3)
    table = run_table(several, CASES[:1], jobs=0)
    assert table.computed == 2  # what trains nothing has no controllers, and is kept
    column = table.rows[0].columns[PLAIN]
    assert [run.controllers for run in column.learned["seq2seq-paper"]] == [3]
    assert run_table(asked, CASES[:1], jobs=0).computed == 0
    read = trainings_file("rl17", table.done)
    lines = [(line["column"], line["method"], line["controllers"]) for line in read]
    assert lines == [
        (column, method, controllers)
        for column in (PLAIN, HYPOTHESIS)
        for method, controllers in (("seq2seq-paper", "3"), ("auto@seq2seq-paper", "1"))
    ]
    titles = [shown.title for shown in tables.tables_of("rl17", table.done)]
    assert titles == [
        "As published, and ours", "How they were trained", "As published, and ours, hypothesis",
        "How they were trained, hypothesis",
    ]  # fmt: skip
