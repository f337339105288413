"""What is shown of a policy while it learns, and the page about it."""

import csv
import io
import re

import numpy as np
import pytest
from rich.console import Console

from dovetail.cli.learning_run import (
    LearningOutputs,
    LearningProgress,
    learn_and_write,
    sparkline,
)
from dovetail.cli.output import LINE_SECONDS
from dovetail.errors import InfeasibleError
from dovetail.pipeline import LearnRequest, TaskRequest, learning
from dovetail.pipeline.learning import LearningResult
from dovetail.placers.learned.log import curves_of, save_points
from dovetail.placers.learned.records import Learned, Point
from dovetail.reports.kit import save_page
from dovetail.reports.learning_page import MOST_CURVES, render_learning


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def point(update, task="t", controller=0, best=2.0, mean=3.0, invalid=0.25):
    return Point(
        controller, update, task, 8 * (update + 1), float(update), best, mean, invalid, 0.6, 1.5
    )


def learned(points, **fields):
    return Learned(
        np.zeros(3, np.float32), {"t": np.zeros(2, np.int32)}, {"t": 2.0}, {"t": 5}, 16, 2, 4.0,
        tuple(points), **fields,
    )  # fmt: skip


def drawn(progress):
    text = io.StringIO()
    Console(file=text, width=140).print(progress.table())
    return text.getvalue()


def test_a_table_has_a_line_a_task_and_controller():
    clock = Clock()
    progress = LearningProgress("m by gdp", 100, None, clock=clock)
    for update in range(4):
        progress.add(point(update, mean=4.0 - update))
    progress.add(point(0, controller=1, best=float("inf"), mean=float("nan"), invalid=1.0))
    clock.now = 10.0
    lines = drawn(progress).splitlines()
    assert "40 of 100 trials" in lines[0]
    assert "4 trials/s" in lines[0]
    first, second = (re.split(r"  +", line.strip()) for line in lines[2:4])
    assert first == ["t", "0", "4", "2 s", "1 s", "25 %", "0.6", "█▆▃▁"]
    assert second == ["t", "1", "1", "-", "-", "100 %", "0.6"]


def test_lines_come_at_a_pace_and_name_each_task():
    told, clock = [], Clock()
    progress = LearningProgress("m by gdp", None, 60.0, told.append, clock)
    progress.add(point(0))
    assert told == []
    clock.now = LINE_SECONDS
    progress.add(point(1, task="other", best=1.0))
    progress.add(point(2))
    assert len(told) == 1
    assert "other: best 1 s, mean 3 s, invalid 25 %, entropy 0.6" in told[0]
    assert "t: best 2 s" in told[0]


def test_foreign_names_cannot_style_the_terminal():
    progress = LearningProgress("[bold]m\x1b[0m", None)
    progress.add(point(0, task="[red]x\x1b"))
    shown = drawn(progress)
    assert "[bold]" in shown
    assert "[red]x" in shown
    assert "\x1b" not in shown


def test_a_sparkline_is_bounded_and_leaves_out_what_is_not_finite():
    assert sparkline([]) == sparkline([float("nan")]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, float("inf"), 7.0, 3.5]) == "▁█▅"
    assert len(sparkline(range(1000), 30)) == 30


def test_failed_trials_are_told_also_where_no_plan_is_left(monkeypatch, capsys):
    card = dict.fromkeys(("method", "reward", "seed", "controllers"))
    failures = ("cpu0 ran out of memory", "cpu1 died")
    result = LearningResult((None,), None, card, learned([point(0)]), failures=failures)
    monkeypatch.setattr(learning, "learn_all", lambda *_: result)
    request = LearnRequest([TaskRequest("t", None)])
    with pytest.raises(InfeasibleError):
        learn_and_write(request, LearningOutputs(), as_json=True)
    assert "2 trials failed, the last one: cpu1 died" in capsys.readouterr().err


def test_curves_are_kept_per_task_and_controller_and_as_csv(tmp_path):
    points = [point(0), point(0, controller=1), point(1, best=float("inf")), point(1, "b,\nc")]
    curves = curves_of(points)
    assert [(curve.task, curve.controller) for curve in curves] == [
        ("t", 0),
        ("t", 1),
        ("b,\nc", 0),
    ]
    assert curves[0].columns["trials"].tolist() == [8, 16]
    assert np.isnan(curves[0].columns["best"][1])
    save_points(points, tmp_path / "c.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text())))
    assert [row["task"] for row in rows] == ["t", "t", "t", "b,\nc"]
    assert rows[2]["best"] == ""
    assert float(rows[0]["mean"]) == 3.0


def test_a_page_shows_the_curves_and_escapes_every_name(tmp_path):
    name = "<script>alert(1)</script>"
    points = [point(update, task=name) for update in range(3)]
    card = {"method": "gdp", "trained_on": [name], "<b>": "</style>"}
    text = render_learning(learned(points), card, plans={name: None}, made="dovetail <i>")
    assert "<script" not in text
    assert "</style>" in text.partition("<body>")[0]
    assert "</style>" not in text.partition("<body>")[2]
    assert "<i>" not in text.partition("How this was made")[2]
    assert text.count("<svg") == 4
    assert "default-src 'none'" in text
    save_page(render_learning(learned(points), {}), tmp_path / "page.html")
    assert "Entropy of a decision" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("count", [0, 1, MOST_CURVES + 3])
def test_a_page_is_bounded_whatever_was_learned(count):
    points = [point(0, task=f"t{i}", mean=float("nan")) for i in range(count)]
    text = render_learning(learned(points, interrupted=True), {"method": "gdp"})
    assert "interrupted" in text
    assert text.count('class="line') <= 4 * MOST_CURVES
    assert ("curves are drawn" in text) == (count > MOST_CURVES)
