"""The page about training runs: self-contained, deaf to hostile names, bounded in size."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from dovetail.errors import UnwritableError, UsageError
from dovetail.reports import charts, gantt
from dovetail.reports.kit import save_page
from dovetail.reports.training_page import histogram, render_training
from dovetail.training.history import History
from dovetail.training.records import Evaluation, Event, Outcome
from tests.support.histories import make_history
from tests.support.page_checks import check_self_contained

EVIL = "</script></svg><img src=x onerror=alert(1)>&\"'"


class Tags(HTMLParser):
    """Every tag, and all text."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_page_fetches_nothing_and_allows_no_script():
    page = render_training([make_history(), make_history(rule="downpour")])
    tags = Tags(page).tags
    check_self_contained(page, tags)


def named_history(name):
    """A history that has the name wherever a foreign one may stand."""
    history = make_history()
    meta = {
        "rule": name,
        "name": name,
        "options": {name: name},
        "backend": name,
        "diverged": name,
        "job": {"workers": 3, "window": name, name: 1},
    }
    figures = {name: 1.0, "accuracy": 0.5}
    return History(
        replace(
            history.outcome,
            meta=meta,
            events=(
                Event(name, 0, 1.0, name),
                Event("refused", 1, 2.0, name),
                Event("lost", 2, 3.0, f"x\n{name}"),
                Event("server_restarted", -1, 3.0, name),
            ),
            evaluations=(Evaluation(1, 20, 1.0, figures), Evaluation(9, 90, 9.0, figures)),
        )
    )


@pytest.mark.parametrize("name", [EVIL, "a&amp;b\u2028<!--<script>", "@@style@@", "x\ud800y"])
def test_foreign_names_stay_text_everywhere(name, tmp_path):
    named = render_training([named_history(name), make_history()], made=name)
    save_page(named, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    found = Tags(page)
    harmless = Tags(
        render_training(
            [named_history("plain error" if "error" in name else "plain"), make_history()],
            made="plain",
        )
    )
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in harmless.tags]
    assert EVIL not in page
    assert name.encode("utf-8", "replace").decode() in found.text


def test_what_was_measured_stands_in_the_tables():
    text = Tags(render_training([make_history(), make_history(rule="downpour", accuracy=0.6)])).text
    for words in ("best accuracy", "to accuracy 0.6", "downpour", "killed by SIGKILL", "0.667",
                  "commits by staleness", "worker 2", "1.5"):  # fmt: skip
        assert words in text


def test_a_row_of_runs_has_all_its_cells_though_the_common_level_is_zero():
    page = render_training([make_history(accuracy=0.0), make_history(rule="adag", accuracy=0.0)])
    section = page.partition("Runs</h2>")[2].partition("</section>")[0]
    head, *rows = re.findall(r"<tr.*?>(.*?)(?=<tr|</table>)", section, re.DOTALL)
    assert "to accuracy 0" in head
    assert len(rows) == 2
    assert {row.count("<td") + row.count("<th") for row in rows} == {head.count("<th")}


def test_temporal_efficiency_compares_each_pair():
    page = render_training([make_history(), make_history(rule="half", accuracy=0.45)])
    section = page.partition("Temporal efficiency</h2>")[2].partition("</section>")[0]
    cells = re.findall(r"<td>(.*?)</td>", section)
    assert [re.sub("<.*?>", "", cell) for cell in cells] == ["1", "2", "0.5", "1"]
    assert "<b>2</b>" in cells[1]


def test_time_begins_at_the_first_step():
    early = make_history()
    outcome, late = early.outcome, 40.0
    times = ("seconds", "begin_seconds", "end_seconds")
    rows = tuple(
        replace(row, **{name: getattr(row, name) + late for name in times}) for row in outcome.rows
    )
    moved = History(
        replace(
            outcome,
            seconds=outcome.seconds + late,
            rows=rows,
            events=tuple(replace(e, seconds=e.seconds + late) for e in outcome.events),
            evaluations=tuple(replace(e, seconds=e.seconds + late) for e in outcome.evaluations),
        )
    )
    pages = [render_training([each.from_first_step()]) for each in (early, moved)]
    assert pages[0] == pages[1]
    assert moved.start_up_seconds == early.start_up_seconds + late
    assert "start-up 40" in render_training([moved])
    # What was before the first step is shown where the axis begins.
    assert moved.from_first_step().columns["begin_seconds"].min() == 0


def test_runs_of_one_rule_are_told_apart():
    same = [make_history(), make_history(), make_history(workers=2)]
    text = Tags(render_training(same)).text
    for label in ("agn, 3 workers, window 2 (1)", "agn, 3 workers, window 2 (2)", "agn, 2 workers"):
        assert label in text


def test_a_run_that_left_nothing_is_shown_as_such():
    page = render_training([History(Outcome(np.zeros(2), 0, 0, 0.0))])
    assert "No commit was recorded" in page
    assert "Nothing was recorded" in page


def test_a_diverged_run_does_not_hide_the_others():
    bad = make_history(rule="downpour")
    rows = [
        replace(row, loss=math.inf if row.clock > 50 else row.loss * 10.0 ** max(0, row.clock - 20))
        for row in bad.outcome.rows
    ]
    page = render_training([History(replace(bad.outcome, rows=tuple(rows))), make_history()])
    assert "nan" not in page.partition("<main>")[2].replace("finance", "")
    chart = page.partition("training loss against time")[2].partition("</svg>")[0]
    heights = [
        float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", chart.split('<path class="line')[-1])
    ]
    assert max(heights) - min(heights) > 20  # of the other run's loss, which falls from 2 to 1


def test_size_is_bounded_whatever_the_length():
    short, long = (len(render_training([make_history(n)])) for n in (900, 30_000))
    assert long < 1.3 * short + 60_000
    assert long < 300_000


def test_short_runs_are_drawn_span_by_span_and_long_ones_as_shares(monkeypatch):
    history = make_history(9)
    exact = gantt.timeline(history)
    assert exact.count("z") - exact.count("zz") >= 9 * 2
    monkeypatch.setattr(gantt, "MOST_SPANS", 3)
    assert "Shares of pieces" in gantt.timeline(history)
    assert "Shares of pieces" not in exact


def test_shares_of_time_add_up_to_what_the_lanes_hold():
    history = make_history(60)
    for lane in gantt.lanes_of(history):
        assert lane.seconds_of("compute") == pytest.approx(0.8 * 20)
        assert lane.seconds_of("exchange") == pytest.approx(0.1 * 20)
        assert lane.seconds_of("wait") == pytest.approx(0.1 * 19)
        edges = np.linspace(0, 20, 41)
        covered = gantt.covered(*lane.spans_of("compute"), edges)
        assert covered[-1] == pytest.approx(0.8 * 20)
        assert (np.diff(covered) >= -1e-12).all()
        assert np.diff(covered).max() <= 0.5 + 1e-12


def test_clocks_that_disagree_make_no_negative_span():
    history = make_history(9)
    rows = tuple(replace(row, begin_seconds=-5.0, end_seconds=99.0) for row in history.outcome.rows)
    for lane in gantt.lanes_of(History(replace(history.outcome, rows=rows))):
        for kind in gantt.KINDS:
            starts, stops = lane.spans_of(kind)
            assert (stops >= starts).all()


def test_losses_and_restarts_are_marked_in_their_lane():
    history = make_history(
        events=(Event("lost", 1, 4.0, "killed"), Event("restarted", 1, 6.0),
                Event("joined", 0, 0.0), Event("server_restarted", -1, 9.0))
    )  # fmt: skip
    drawn = gantt.timeline(history)
    marks = re.findall(r'class="mark"[^>]* y="([\d.]+)"[^>]*>(.)', drawn)
    assert [sign for _, sign in marks] == ["✕", "▲"]
    assert len({y for y, _ in marks}) == 1
    assert '<path class="mark"' in drawn
    assert "worker 1 lost at 4 s: killed" in drawn


@pytest.mark.parametrize(
    ("values", "labels"),
    [([0, 0, 3], ["0", "1", "2", "3"]), ([0, 79], ["0-1", "78-79"]), ([2**52], None)],
)
def test_a_histogram_has_at_most_forty_bins(values, labels):
    counts, found = histogram(np.array(values))
    assert sum(counts) == len(values)
    assert len(counts) == len(found) <= 40
    if labels:
        assert found[0] == labels[0]
        assert found[-1] == labels[-1]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.97), (-1, 1.5), (3, 3.0001), (0, 1e30), (0, 7e-9)]
)
def test_ticks_are_four_to_nine_round_values_within_the_range(low, high):
    found = charts.ticks(low, high)
    assert 4 <= len(found) <= 10
    assert low - 1e-9 * abs(high) <= found[0] <= found[-1] <= high * (1 + 1e-9)


def test_averages_leave_out_what_is_not_finite():
    x = np.arange(8.0)
    y = np.array([1, math.nan, 3, 5, math.inf, math.nan, 1, 1.0])
    ends, means = charts.averaged(x, y, 4)
    assert ends.tolist() == [1, 3, 5, 7]
    assert means[[0, 1, 3]].tolist() == [1, 4, 1]
    assert math.isnan(means[2])


def test_no_run_and_too_many_are_refused(tmp_path):
    for histories in ([], [make_history(3)] * 41):
        with pytest.raises(UsageError, match="1 to 40"):
            render_training(histories)
    with pytest.raises(UnwritableError, match="/nowhere"):
        save_page(render_training([make_history(3)]), "/nowhere/page.html")
