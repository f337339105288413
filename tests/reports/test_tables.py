import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dovetail.graph.records import Phase
from dovetail.machine import parse_machine
from dovetail.plans import describe_gap, ratio_to
from dovetail.reports import (
    PlanReport,
    chrome_trace,
    find_limits,
    graph_summary,
    limits_table,
    machine_table,
    network_table,
    networks_table,
    plan_table,
    run_table,
)
from dovetail.reports.tables import interval_of
from tests.support.report_samples import (
    make_graph,
    make_machine,
    make_plan,
    make_timeline,
    training_chain,
)


def text_of(renderable):
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def row_of(text, first):
    """Words of the line that starts with `first`."""
    return next(line.split() for line in text.splitlines() if line.startswith(first))


@pytest.fixture
def two_ops():
    """cpu0 ├ a ┤ 0-1, tensor 0 over the wire 1-2, cpu1 ├ b ┤ 2-4."""
    machine = make_machine(2)
    graph = make_graph([("a", Phase.FORWARD, [], "top[red]"), ("b", Phase.FORWARD, [0])])
    timeline = make_timeline(machine, [(0, 0, 0, 1), (1, 1, 2, 4)], [(0, 0, 0, 1, 1, 2)])
    return machine, graph, timeline


def test_a_plan_says_which_dtypes_its_cards_compute_in_float32(two_ops):
    _, graph, _ = two_ops
    machine = parse_machine("2080ti + a100")
    plan = make_plan(graph, machine, [0, 1])
    assert "in float32" not in text_of(plan_table(plan, graph))
    text = text_of(plan_table(plan, replace(graph, dtypes=("bfloat16",) * len(graph.dtypes))))
    assert "a 2080ti has no fast units for bfloat16: costed as computed in float32" in text
    assert "a100 has" not in text
    assert "bfloat16 13.4 TFLOP/s (computed in float32)" in text_of(machine_table(machine))


def test_a_plan_says_which_rates_it_derives(two_ops):
    _, graph, _ = two_ops
    plan = make_plan(graph, parse_machine("2080ti + a100"), [0, 1], costs_source="analytic")
    text = text_of(plan_table(plan, replace(graph, dtypes=("complex64",) * len(graph.dtypes))))
    assert "complex64 is costed at 1/4 of float32's rate, as 2080ti and a100 give none" in text
    assert "is costed at" not in text_of(plan_table(plan, graph))


def test_a_plan_is_shown_with_its_methods_bound_and_memory(two_ops):
    machine, graph, _ = two_ops
    plan = make_plan(graph, machine, [0, 1], caps=(("cpu1", 300_001),), pins=(("b", "cpu1"),))
    text = text_of(plan_table(plan, graph))
    assert "zoo:sample?layers=2, adam" in text
    assert row_of(text, "single") == ["single", "6", "ms", "1.500", "x"]
    assert row_of(text, "expert") == ["expert", "infeasible"]
    assert row_of(text, "etf (chosen)")[2:] == ["4", "ms", "1.000", "x"]
    assert "3.2 ms, by load balance (LP)" in text
    assert "within 25 % of optimal" in text
    assert row_of(text, "cpu1")[-2:] == ["100.0", "%"]
    assert "293 KiB (cap)" in text
    assert "b = cpu1" in text


def test_a_chosen_method_missing_from_the_methods_is_added(two_ops):
    machine, graph, _ = two_ops
    text = text_of(
        plan_table(make_plan(graph, machine, [0, 1], placer="mine", baselines={}), graph)
    )
    assert row_of(text, "mine (chosen)")


def test_an_interrupted_search_and_an_exact_plan_say_so(two_ops):
    machine, graph, _ = two_ops
    plan = make_plan(graph, machine, [0, 1], interrupted=True, lower_bound=4e-3)
    text = text_of(plan_table(plan, graph))
    assert "interrupted: best so far" in text
    assert row_of(text, "gap") == ["gap", "optimal"]


def test_a_distant_bound_is_a_ratio_and_none_is_no_bound(two_ops):
    machine, graph, _ = two_ops
    assert describe_gap(make_plan(graph, machine, [0, 1], lower_bound=1e-3)) == (
        "at most 4 x the optimum"
    )
    assert describe_gap(make_plan(graph, machine, [0, 1], lower_bound=0.0)) == "no bound"


def test_predicted_stands_beside_measured_with_the_error(two_ops):
    _, _, timeline = two_ops
    text = text_of(run_table(timeline, np.array([4.0, 5.0, 9.0]), timeline))
    assert row_of(text, "step, median")[2:] == ["4", "s", "5", "s", "-20.0", "%"]
    assert row_of(text, "step, mean")[2:] == ["4", "s", "6", "s", "-33.3", "%"]
    assert "4 s to 9 s" in text
    assert row_of(text, "cpu1 computes")[2:] == ["2", "s", "2", "s", "+0.0", "%"]


def test_a_run_without_a_recorded_timeline_leaves_its_cells_empty(two_ops):
    _, _, timeline = two_ops
    text = text_of(run_table(timeline, [4.0]))
    assert row_of(text, "cpu1 computes") == ["cpu1", "computes", "2", "s"]


def test_machine_graph_networks_and_limits_are_tables(two_ops):
    machine, graph, timeline = two_ops
    text = text_of(machine_table(machine))
    assert row_of(text, "cpu0 (host)")[2:6] == ["cpu", "here", "1", "MiB"]
    assert row_of(text, "cpu0 -> cpu1")[3:] == ["10", "GB/s", "1", "us", "cpu0->cpu1"]
    text = text_of(graph_summary(training_chain(3)))
    assert row_of(text, "forward")[:2] == ["forward", "12"]
    assert row_of(text, "parameter")[:3] == ["parameter", "3", "48"]
    text = text_of(networks_table([{"network": "rnnlm", "parameters": 2e6, "parameter_bytes": 8}]))
    assert row_of(text, "rnnlm") == ["rnnlm", "2", "M", "8", "B"]
    text = text_of(network_table([("network", "rnnlm"), ("flops", 2000)], {"on": True, "n": 3000}))
    assert row_of(text, "FLOPs") == ["FLOPs", "2,000", "(2", "k)"]
    assert row_of(text, "on") == ["on", "true"]
    assert row_of(text, "n ") == ["n", "3,000"]
    plan = make_plan(graph, machine, [0, 1])
    text = text_of(limits_table(find_limits(timeline, graph), timeline, plan))
    assert row_of(text, "computing on cpu1")[3:] == ["2", "s", "50.0", "%"]


def test_small_parts_of_the_critical_chain_are_summed_up(two_ops):
    # cpu0 ├──── a 0-1 s ────┤, then 1 us over the wire and 1 us of b
    machine, graph, _ = two_ops
    spans = [(0, 0, 0, 1), (1, 1, 1.000001, 1.000002)]
    timeline = make_timeline(machine, spans, [(0, 0, 0, 1, 1, 1.000001)])
    plan = make_plan(graph, machine, [0, 1])
    text = text_of(limits_table(find_limits(timeline, graph), timeline, plan))
    assert row_of(text, "2 smaller") == ["2", "smaller", "2", "us", "0.0", "%"]
    assert "computing on cpu1" not in text


def test_an_empty_critical_chain_has_no_table():
    machine = make_machine(1)
    graph = make_graph([("w", Phase.SOURCE, [])])
    timeline = make_timeline(machine, [])
    plan = make_plan(graph, machine, [0])
    assert "share" not in text_of(limits_table(find_limits(timeline, graph), timeline, plan))


def test_markup_in_foreign_names_is_not_obeyed(two_ops):
    _, graph, _ = two_ops
    machine = make_machine(2, name="[bold]box[/bold]")
    plan = make_plan(
        graph, machine, [0, 1], placer="[red]", baselines={"[/nope]": 1.0}, bound_proof="[x]"
    )
    text = text_of(plan_table(plan, graph))
    assert "[bold]box[/bold]" in text
    assert "[red] (chosen)" in text
    assert "[/nope]" in text
    assert "by [x]" in text
    assert "[bold]box[/bold]" in text_of(machine_table(machine))
    assert "[/red]" in text_of(networks_table([{"network": "[/red]"}]))


def test_control_characters_in_foreign_names_never_reach_the_terminal():
    evil = "\x1b]0;x\x07"
    machine = make_machine(2, name=evil)
    graph = make_graph([(evil, Phase.FORWARD, []), ("b", Phase.FORWARD, [0])])
    timeline = make_timeline(machine, [(0, 0, 0, 1), (1, 1, 1, 2)])
    plan = make_plan(graph, machine, [0, 1], placer=evil, baselines={evil: 1.0}, bound_proof=evil)
    shown = (
        plan_table(plan, graph),
        machine_table(machine),
        networks_table([{"network": evil}]),
        limits_table(find_limits(timeline, graph), timeline, plan),
    )
    for table in shown:
        text = text_of(table)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert r"\x1b]0;x\x07" in text


def test_derived_figures_of_a_report(two_ops):
    machine, graph, timeline = two_ops
    plan = make_plan(graph, machine, [0, 1])
    report = PlanReport(plan, graph, timeline, measured_seconds=[4.0, 5.0, 9.0])
    assert report.speedup == (pytest.approx(1.5), "over the best single device")
    assert report.measured_step_seconds == 5.0
    bare = PlanReport(
        make_plan(graph, machine, [0, 1], baselines={"single": None}), graph, timeline
    )
    assert bare.speedup is None
    all_cores = {"single": 6e-3, "here": 5e-3}
    faster = PlanReport(make_plan(graph, machine, [0, 1], baselines=all_cores), graph, timeline)
    assert faster.speedup == (pytest.approx(1.25), "over the best single device")
    assert bare.measured_step_seconds is None
    assert [name for name, _ in bare.timelines] == ["predicted"]
    measured = {"placed": 4e-3, "eager": 8e-3, "torch.compile": 5e-3}
    compared = make_plan(graph, machine, [0, 1], baselines=all_cores, measured=measured)
    shown = PlanReport(compared, graph, timeline).speedup
    assert shown == (pytest.approx(1.25), "over torch.compile, measured")


def test_what_was_measured_is_compared_with_what_was_measured(two_ops):
    machine, graph, _ = two_ops
    measured = {"placed": 4e-3, "eager": 8e-3}
    plan = make_plan(graph, machine, [0, 1], baselines={"eager": 8e-3}, measured=measured)
    assert ratio_to(plan, "eager", 8e-3) == pytest.approx(2.0)
    assert ratio_to(plan, "single", 2 * plan.value) == pytest.approx(2.0)
    assert "2.000 x" in text_of(plan_table(plan, graph))


def test_a_trace_has_every_span_and_transfer_in_microseconds(two_ops):
    _, graph, timeline = two_ops
    trace = json.loads(json.dumps(chrome_trace(timeline, graph)))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("a", 0, 0, 0.0, 1e6),
        ("b", 0, 1, 2e6, 2e6),
        ("a", 0, 2, 1e6, 1e6),
    ]
    assert spans[2]["args"] == {"bytes": 64, "tensor": 0, "to": "cpu1"}
    assert spans[0]["args"] == {"kind": "aten.mm", "module": "top[red]"}


def test_a_trace_has_predicted_and_measured_as_two_processes_on_one_axis(two_ops):
    _, graph, timeline = two_ops
    slower = replace(timeline, op_ends=timeline.op_ends + 1, step_seconds=timeline.step_seconds + 1)
    trace = chrome_trace(timeline, graph, slower)
    named = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert named == {0: "predicted", 1: "measured"}
    ends = {
        (e["pid"], e["name"], e["tid"]): e["ts"] + e["dur"]
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    }
    assert ends[1, "b", 1] - ends[0, "b", 1] == pytest.approx(1e6)
    threads = [
        (e["pid"], e["tid"], e["args"]["name"])
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    ]
    assert threads[:2] == [(0, 0, "cpu0"), (0, 1, "cpu1")]
    assert threads[2][2].startswith("transfers on ")
    assert [(tid, name) for pid, tid, name in threads if pid] == [
        (tid, name) for pid, tid, name in threads if not pid
    ]


def test_predictions_have_an_interval_within_which_methods_are_too_close_to_call(two_ops):
    _, graph, _ = two_ops
    machine = parse_machine("2 x v100 + xeon")
    tried = {"single": 6e-3, "expert": None, "etf": 4e-3, "random": 4e-2}
    plan = make_plan(graph, machine, [0, 1], peak_memory_bytes=(1, 1, 0), baselines=tried)
    least, most = interval_of(plan, graph)
    assert least * most == pytest.approx(plan.value**2)
    assert 1.01 < most / plan.value < 1.5
    rough = interval_of(replace(plan, machine=make_machine(3)), graph)
    assert rough[1] > most

    close = replace(plan, baselines=tried | {"single": plan.value * 1.01})
    text = text_of(plan_table(close, graph))
    assert "80 % likely" in text
    assert "1.010 x, too close to call" in text
    assert "10.000 x" in text
    assert text.count("too close to call") == 1


def test_values_of_measured_costs_have_the_interval_that_such_plans_had(two_ops):
    machine, graph, _ = two_ops
    plan = replace(make_plan(graph, machine, [0, 1]), costs_source="measured")
    least, most = interval_of(plan, graph)
    assert least < plan.value < most
    assert "80 % likely" in text_of(plan_table(plan, graph))
    assert interval_of(replace(plan, measured={"placed": 1e-3}), graph) is None
    assert interval_of(replace(plan, objective="load"), graph) is None
    devices = tuple(replace(device, kind="gpu") for device in machine.devices)
    assert interval_of(replace(plan, machine=replace(machine, devices=devices)), graph) is None


def test_measured_and_given_values_have_no_interval(two_ops):
    machine, graph, _ = two_ops
    plan = make_plan(graph, machine, [0, 1])
    assert interval_of(replace(plan, costs_source="given"), graph) is None
    whole = replace(plan, way="eager", measured={"eager": 1e-3})
    assert interval_of(whole, graph) is None
    assert "too close" not in text_of(plan_table(whole, graph))
