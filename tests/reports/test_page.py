import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from dovetail.errors import UnwritableError
from dovetail.graph.records import Phase
from dovetail.machine import Link
from dovetail.reports import PlanReport, write_html
from dovetail.reports.page import render
from dovetail.reports.pictures import runs, split_name
from tests.support.report_samples import (
    EVIL,
    make_graph,
    make_machine,
    make_plan,
    make_timeline,
    run_in_order,
    training_chain,
)


class Tags(HTMLParser):
    """Every tag, and the text of every script."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.scripts = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data


def small_report(**changes):
    machine = make_machine(2)
    graph = training_chain(4)
    placement = np.arange(len(graph)) // 12 % 2
    rng = np.random.default_rng(0)
    predicted = run_in_order(graph, machine, placement, rng.uniform(1e-6, 9e-6, len(graph)))
    predicted = replace(
        predicted,
        memory_times=(np.array([0.0, 2e-5]), np.array([0.0])),
        memory_bytes=(np.array([1000, 600_000]), np.array([300_000])),
    )
    plan = make_plan(graph, machine, placement)
    return PlanReport(**({"plan": plan, "graph": graph, "predicted": predicted} | changes))


def unpack(page):
    return json.loads(Tags(page).scripts[0])


def names_of(ops):
    """What assets/timeline.js makes of the packed names."""
    names, template, last = [], 0, [0] * len(ops["templates"])
    for step, difference in zip(ops["which"], ops["numbers"], strict=True):
        template += step
        last[template] += difference
        before, after = (ops["strings"][i] for i in ops["templates"][template][:2])
        names.append(before + (str(last[template]) if last[template] >= 0 else "") + after)
    return names


def spans_of(row):
    """[(op, start, end)] in nanoseconds, likewise."""
    spans, op, now = [], 0, 0
    for step, gap, length in zip(row["ops"], row["gaps"], row["lengths"], strict=True):
        op += step
        spans.append((op, now + gap, now + gap + length))
        now += gap + length
    return spans


def test_the_page_fetches_nothing_and_allows_only_its_own_script():
    page = render(small_report())
    tags = Tags(page).tags
    assert not [attrs for _, attrs in tags if {"src", "href"} & attrs.keys()]
    assert not re.search(r"https?://|url\(|@import|innerHTML|eval\(", page)
    policy = next(a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    # The policy forbids style attributes and handlers: none may be relied on.
    assert not [a for _, a in tags if any(k == "style" or k.startswith("on") for k in a)]


def named_report(name):
    """A report that has the name wherever a foreign one may stand."""
    harmless = small_report()
    graph = replace(
        harmless.graph,
        names=(name, *harmless.graph.names[1:]),
        kinds=tuple(k if k == "parameter" else name for k in harmless.graph.kinds),
        modules=tuple(name for _ in harmless.graph.modules),
    )
    machine = replace(harmless.plan.machine, name=name)
    machine = replace(
        machine,
        devices=tuple(replace(d, name=d.name + name) for d in machine.devices),
        links=tuple(
            Link(x.source + name, x.destination + name, 1e9, 0.0, name + x.channel)
            for x in machine.links
        ),
        host=machine.host + name,
    )  # fmt: skip
    predicted = replace(harmless.predicted, devices=machine.device_names, channels=machine.channels)
    plan = replace(
        harmless.plan,
        source=replace(harmless.plan.source, model=name),
        machine=machine,
        placer=name,
        bound_proof=name,
        baselines={name: 4e-3, f"{name}2": None, f"{name}3": 5e-3},
        pins=((name, name),),
        caps=((machine.device_names[0], 700_000),),
    )
    return PlanReport(plan, graph, predicted, predicted, np.array([1e-3]))


@pytest.mark.parametrize("name", [EVIL, "a&amp;b\u2028<!--<script>", "'\"`\\", "x\ud800y"])
def test_foreign_names_stay_text_everywhere(name, tmp_path):
    write_html(named_report(name), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    measured = small_report().predicted
    harmless = small_report(measured=measured, measured_seconds=[1e-3])
    allowed = [tag for tag, _ in Tags(render(harmless)).tags]
    found = [tag for tag, _ in Tags(page).tags]
    assert set(found) == set(allowed)
    assert found.count("script") == 2
    assert EVIL not in page
    shown = name.encode("utf-8", "replace").decode()
    data = unpack(page)
    assert names_of(data["ops"])[0] == shown
    assert data["devices"][0] == "cpu0" + shown


def test_what_the_script_unpacks_is_what_was_packed():
    report = small_report()
    data = unpack(render(report))
    assert names_of(data["ops"]) == list(report.graph.names)
    (timeline,) = data["timelines"]
    assert timeline["name"] == "predicted"
    predicted = report.predicted
    for device, row in enumerate(timeline["rows"][:2]):
        of = np.flatnonzero(predicted.op_devices == device)
        assert [op for op, _, _ in spans_of(row)] == predicted.ops[of].tolist()
        starts = [start for _, start, _ in spans_of(row)]
        assert starts == np.rint(predicted.op_starts[of] * 1e9).astype(int).tolist()
        assert sum(row["critical"]) == len(of)
    assert sum(len(row["bytes"]) for row in timeline["rows"][2:]) == len(predicted.transfer_ops)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lstm.0/addmm_3", ("lstm.0/addmm_", 3, "")),
        ("mm_3_backward", ("mm_", 3, "_backward")),
        ("plain", ("plain", -1, "")),
        ("zero_007", ("zero_007", -1, "")),
        ("5", ("", 5, "")),
        ("big_12345678901", ("big_12345678901", -1, "")),
        ("arabic_\u0663", ("arabic_\u0663", -1, "")),
        ("line\n2", ("line\n", 2, "")),
        ("", ("", -1, "")),
    ],
)
def test_names_split_only_where_they_come_back(name, parts):
    assert split_name(name) == parts


def test_runs_alternate_and_start_with_false():
    assert runs(np.array([True, True, False, True])) == [0, 2, 1, 1]
    assert runs(np.array([False, True])) == [1, 1]
    assert sum(runs(np.zeros(0, dtype=bool))) == 0


def test_a_hundred_thousand_spans_make_a_page_of_less_than_3_mb(tmp_path):
    machine = make_machine(2)
    graph = training_chain(100, repeats=125)
    placement = np.arange(len(graph)) % 997 // 499
    seconds = np.random.default_rng(0).lognormal(np.log(2e-4), 1.0, len(graph))
    predicted = run_in_order(graph, machine, placement, seconds)
    assert len(predicted.ops) >= 100_000
    report = PlanReport(make_plan(graph, machine, placement), graph, predicted)
    write_html(report, tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size <= 3e6


def test_measured_figures_stand_beside_the_predicted():
    report = small_report()
    bare = render(report)
    assert "Not measured" in bare
    slower = make_timeline(report.plan.machine, [(1, 0, 0.0, 2e-3)], step=2e-3)
    page = render(replace(report, measured=slower, measured_seconds=np.array([1e-3, 2e-3, 6e-3])))
    assert "Not measured" not in page
    assert "3 measured steps" in page
    assert "<td>1 ms to 6 ms</td>" in page
    assert [t["name"] for t in unpack(page)["timelines"]] == ["predicted", "measured"]


def test_methods_memory_and_bound_are_shown():
    page = render(small_report())
    assert "1.50 x" in page  # over the best single device
    assert "within 25 % of optimal" in page
    assert "<th scope=row>expert</th><td>infeasible</td>" in page
    assert "lower bound: load balance (LP)" in page
    assert "cpu0: peak 586 KiB of 1 MiB" in page
    assert 'class="capacity"' in page


def test_facts_that_no_card_tells_stand_in_the_last_table():
    plan = replace(small_report().plan, contiguous=True, notes=("a note",), whole=("block.*",))
    page = render(small_report(plan=plan))
    facts = dict(
        re.findall("<th scope=row>([a-z ]+)</th><td>([^<]*)</td>", page.split("Plan</h2>")[1])
    )
    assert facts["method"] == "etf, seed 7, contiguous"
    assert facts["note"] == "a note"
    assert facts["whole"] == "block.*"
    assert not {"predicted", "lower bound", "gap"} & facts.keys()


def test_an_empty_step_and_costs_without_seconds_still_make_a_page():
    machine = make_machine(1)
    graph = make_graph([("w", Phase.SOURCE, [])])
    plan = make_plan(
        graph, machine, [0], value=0.0, lower_bound=0.0, costs_source="given", baselines={}
    )
    page = render(PlanReport(plan, graph, make_timeline(machine, [])))
    assert "optimal" in page  # nothing takes less than no time
    assert "Memory was not recorded" in page


def test_an_unwritable_path_is_an_error_that_names_it(tmp_path):
    path = str(tmp_path / "missing" / "page.html")
    with pytest.raises(UnwritableError) as caught:
        write_html(small_report(), path)
    assert caught.value.path == path


def test_every_device_has_one_colour_in_all_charts_and_no_two_the_same():
    machine = make_machine(12)
    graph = training_chain(12)
    placement = np.arange(len(graph)) % 12
    report = PlanReport(
        make_plan(graph, machine, placement, peak_memory_bytes=(1,) * 12),
        graph,
        run_in_order(graph, machine, placement, np.full(len(graph), 1e-6)),
    )
    page = render(report)
    for device in range(12):
        assert page.count(f"--d{device}:#") == 2, "once for light, once for dark"
        assert f'<figure class="m{device}"><figcaption><i class="d{device}"></i>cpu{device}' in page
        assert f'<th scope=col><i class="d{device}"></i>cpu{device}</th>' in page
    assert "colours.devices[" in page
    assert "% 8" not in page


def test_the_table_of_modules_by_device_is_folded_and_says_seconds_and_parameters():
    machine = make_machine(1)
    graph = training_chain(16)
    placement = np.zeros(len(graph), dtype=int)
    report = PlanReport(
        make_plan(graph, machine, placement),
        graph,
        run_in_order(graph, machine, placement, np.full(len(graph), 1e-6)),
    )
    page = render(report)
    table = page.split('<table id="layers">')[1].split("</table>")[0]
    rows = table.split("<tr")[2:]
    assert "(model)" in rows[0]
    assert "hidden" not in rows[0]
    folded = [row for row in rows if " hidden" in row.split(">")[0]]
    assert len(folded) == 4 + 16  # the blocks of one run, and their layers
    assert 'aria-expanded="false">0-3</button>' in table
    data = unpack(page)["modules"]
    assert len(rows) == len(data["labels"])
    assert max(data["leaves"]["folds"]) < len(data["labels"])
    assert sum(data["leaves"]["ops"]) == int((~graph.is_source).sum())


def test_a_plan_for_load_shows_the_filled_pipeline_and_others_do_not():
    assert "The pipeline, filled" not in render(small_report())
    machine = make_machine(2)
    graph = make_graph([("a", Phase.FORWARD, [], "one"), ("b", Phase.FORWARD, [0], "two")])
    plan = make_plan(graph, machine, [0, 1], objective="load", value=2e-3)
    report = PlanReport(plan, graph, run_in_order(graph, machine, [0, 1], np.full(2, 1e-3)))
    page = render(report)
    assert "The pipeline, filled" in page
    assert "2e+03 samples/s, 500 steps a second of 4" in page
    assert page.count('class="d1 pale"') == 3
    circle = make_graph([("a", Phase.FORWARD, []), ("b", Phase.FORWARD, [0]),
                         ("c", Phase.FORWARD, [1])])  # fmt: skip
    plan = make_plan(circle, machine, [0, 1, 0], objective="load", value=2e-3)
    report = PlanReport(plan, circle, run_in_order(circle, machine, [0, 1, 0], np.full(3, 1e-3)))
    assert "hand samples back and forth" in render(report)


def test_module_names_are_escaped_in_the_table():
    graph = make_graph([("a", Phase.FORWARD, [], EVIL), ("b", Phase.FORWARD, [0], "fine")])
    machine = make_machine(1)
    report = PlanReport(
        make_plan(graph, machine, [0, 0]), graph, run_in_order(graph, machine, [0, 0], [1e-3] * 2)
    )
    assert "<img" not in render(report)


def text_of(page):
    """The page's text between the tags, in one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.partition("<body>")[2]))


def cards_of(page):
    return re.findall(r'<div class="card"><span>(.*?)</span><strong>(.*?)</strong>', page)


def local_report(**changes):
    """A report of a plan on cores of this machine."""
    report = small_report()
    devices = tuple(
        replace(device, cores=(i,)) for i, device in enumerate(report.plan.machine.devices)
    )
    machine = replace(report.plan.machine, devices=devices)
    return replace(report, plan=replace(report.plan, machine=machine, **changes))


def test_a_plan_that_was_interrupted_says_so_above_all_else():
    report = small_report()
    page = render(replace(report, plan=replace(report.plan, interrupted=True)))
    header = page.partition("<header>")[2].partition('<div class="cards">')[0]
    assert "This plan is not finished" in header
    assert "not finished" not in render(report)


def test_first_comes_how_much_faster_it_is_then_the_command_then_why_then_the_methods():
    measured = {"placed": 4e-3, "torch.compile": 5e-3, "eager": 8e-3}
    page = render(local_report(measured=measured, baselines={"eager": 8e-3}))
    (first, *_) = cards_of(page)
    assert first == ("speed-up", "1.25 x")
    assert "over torch.compile, measured" in page
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles[0] == "Use it"
    assert titles.index("What bounds it") < titles.index("Methods")


def test_the_command_is_the_one_that_works_for_this_plan():
    def use_of(report):
        return text_of(render(report)).partition("Use it")[2].partition("Timeline of")[0]

    local = local_report()
    of_zoo = use_of(replace(local, file="my plans/a.json"))
    assert "dovetail run &#39;my plans/a.json&#39;" in of_zoo
    assert "dt.run(plan, step)" in of_zoo
    source = replace(local.plan.source, model="my_models:digits")
    of_code = use_of(replace(local, plan=replace(local.plan, source=source)))
    assert "dovetail run plan.json my_models:digits" in of_code
    source = replace(local.plan.source, model="Sequential")
    of_module = use_of(replace(local, plan=replace(local.plan, source=source)))
    assert "dovetail run" not in of_module
    assert "dt.run(plan, step)" in of_module
    elsewhere = use_of(small_report())
    assert "dovetail export plan.json --to device-map" in elsewhere
    assert "dovetail run" not in elsewhere


def test_where_nothing_is_faster_than_what_the_user_has_the_page_says_so():
    measured = {"placed": 9e-3, "eager": 4e-3}
    report = local_report(way="eager", placer="eager", measured=measured, lower_bound=0.0)
    page = render(report)
    assert cards_of(page)[0] == ("speed-up", "none")
    assert "no plan is faster than eager, which runs" in page
    uncompared = render(local_report(way="eager", placer="eager", lower_bound=0.0))
    assert cards_of(uncompared)[0] == ("speed-up", "not compared")


def test_without_a_bound_nothing_is_said_of_a_distance_to_it():
    report = small_report()
    assert ("distance to the bound", "within 25 % of optimal") in cards_of(render(report))
    page = render(replace(report, plan=replace(report.plan, lower_bound=0.0)))
    assert "distance to the bound" not in dict(cards_of(page))
    assert "no bound" not in text_of(page)


def test_a_measured_step_has_one_card_and_other_figures_of_it_are_explained():
    report = local_report(measured={"placed": 3e-3, "eager": 8e-3})
    slower = make_timeline(report.plan.machine, [(1, 0, 0.0, 5e-3)], step=5e-3)
    seconds = np.array([1e-3, 2e-3, 2e-3, 2e-3, 6e-3])
    page = render(replace(report, measured=slower, measured_seconds=seconds))
    steps = [card for card in cards_of(page) if "step" in card[0]]
    assert steps == [("measured step", "2 ms")]
    assert "spread 0.0 % of 5 steps; predicted step 4 ms, by etf" in page
    text = text_of(page)
    assert "measured timeline, of 5 ms, is one more step" in text
    assert "measured while planning, in turn with eager" in text
    assert "step, beside your own ways 4 ms 3 ms +33.3 %" in text
    # Without a run there is the figure of the planning alone.
    page = render(report)
    assert ("measured step", "3 ms") in cards_of(page)
    assert "while planning; predicted step 4 ms, by etf" in page
    assert "one more step" not in text_of(page)


def test_a_channel_that_is_busy_for_more_than_the_step_is_explained():
    report = small_report()
    both = [(0, 0, 0, 1, 0.0, 1e-3), (1, 1, 0, 1, 0.0, 1e-3)]
    line = make_timeline(report.plan.machine, [(1, 0, 0.0, 1e-3)], both, step=1e-3)
    page = render(replace(report, predicted=line))
    assert "200.0 %" in page
    assert "Each transfer counts, also where several share a channel" in page
    assert "Each transfer counts" not in render(report)


def test_a_device_that_is_a_channel_as_well_has_a_row_of_each():
    report = small_report()
    links = [Link("cpu0", "cpu1", 1e9, 0.0, "cpu0"), Link("cpu1", "cpu0", 1e9, 0.0, "cpu1")]
    machine = replace(report.plan.machine, links=tuple(links))
    line = make_timeline(machine, [(1, 0, 0.0, 4e-3)], [(0, 0, 0, 1, 4e-3, 5e-3)], step=5e-3)
    page = render(replace(report, plan=replace(report.plan, machine=machine), predicted=line))
    assert "<th scope=row>cpu0</th><td>4 ms</td><td>80.0 %</td>" in page
    assert "<th scope=row>transfers on cpu0</th><td>1 ms</td><td>20.0 %</td>" in page


def test_no_more_devices_are_at_work_than_there_are():
    machine = make_machine(3)
    host = replace(machine.devices[2], kind="host", flops_per_second={})
    machine = replace(machine, devices=(*machine.devices[:2], host), host="cpu2")
    graph = make_graph([("a", Phase.FORWARD, [], "one"), ("b", Phase.FORWARD, [0], "two")])
    plan = make_plan(graph, machine, [0, 1], objective="load", value=2e-3,
                     peak_memory_bytes=(1, 1, 0))  # fmt: skip
    report = PlanReport(plan, graph, run_in_order(graph, machine, [0, 1], np.full(2, 1e-3)))
    share = dict(cards_of(render(report)))["devices at work"]
    assert 0 < float(share.removesuffix(" %")) <= 100
