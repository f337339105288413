"""What is shown of a training run while it goes on."""

import io
import math
from dataclasses import replace

from rich.console import Console

from dovetail.cli import training_run
from dovetail.cli.output import LINE_SECONDS
from dovetail.cli.training_run import News, TrainingProgress
from dovetail.training.records import Event
from tests.support.histories import make_history


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def drawn(progress):
    text = io.StringIO()
    Console(file=text, width=120).print(progress.table())
    return text.getvalue()


def test_a_table_has_a_line_a_worker_with_its_state():
    progress = TrainingProgress("m:f by agn", 4, 2400)
    for worker in range(3):
        progress.happened(Event("joined", worker, 0.0))
    progress.add(list(make_history(60).outcome.rows))
    progress.happened(Event("lost", 1, 9.0))
    progress.happened(Event("lost", 2, 9.0))
    progress.happened(Event("restarted", 2, 9.5))
    progress.watcher.should_stop([{"accuracy": 0.91}])
    lines = drawn(progress).splitlines()
    assert "1,200 of 2,400 samples (50 %)" in lines[0]
    assert "validation accuracy 0.91" in lines[1]
    states = [" ".join(line.split()[2:3]) for line in lines[2:]]
    assert states == ["working", "lost", "restarted", "waiting"]
    assert "400 samples" in lines[2]
    assert "1 commits/s" in lines[2]
    assert "staleness" in lines[2]


def test_lines_come_at_a_pace_and_events_at_once():
    told, clock = [], Clock()
    progress = TrainingProgress("m:f by agn", 3, None, told.append, clock)
    rows = list(make_history(60).outcome.rows)
    progress.add(rows[:20])
    assert told == []
    clock.now = LINE_SECONDS
    progress.add(rows[20:40])
    progress.add(rows[40:])
    assert len(told) == 1
    assert told[0].startswith("m:f by agn, 800 samples, commits/s 3")
    progress.happened(Event("joined", 0, 0.0))
    progress.happened(Event("lost", 0, 12.0, "Traceback\n  File x\nkilled by SIGKILL"))
    assert told[1:] == ["12 s: worker 0 was lost: killed by SIGKILL"]


def test_of_many_refused_commits_the_first_are_told():
    told = []
    progress = TrainingProgress("m:f by agn", 2, None, told.append)
    for _ in range(training_run.MOST_REFUSALS + 20):
        progress.happened(Event("refused", 1, 2.0, "not finite"))
    progress.happened(Event("lost", 1, 3.0))
    assert len(told) == training_run.MOST_REFUSALS + 1
    assert told[0] == "2 s: worker 1 had a commit refused: not finite"
    assert "further refusals are not shown" in told[-2]
    assert told[-1] == "3 s: worker 1 was lost"


def test_foreign_text_does_not_drive_the_terminal():
    progress = TrainingProgress("[bold]\x1b[31mm:f", 1, 10)
    progress.watcher.should_stop([{"[red]\x1b": 1.0}])
    shown = drawn(progress)
    assert "[bold]" in shown
    assert "[red]" in shown
    assert "\x1b" not in shown


def test_a_worker_without_a_finite_loss_is_shown_all_the_same():
    progress = TrainingProgress("m:f", 1, 100)
    progress.add([replace(make_history(1).outcome.rows[0], loss=math.nan)])
    assert "working" in drawn(progress)


def test_many_workers_are_cut_short():
    progress = TrainingProgress("m:f", 100, 10)
    assert "and 76 more" in drawn(progress)


def test_news_name_the_server_and_workers_by_what_they_are_called():
    news = News("controller")
    assert news.line(Event("server_restarted", -1, 3.0)) == "3 s: the server was restarted"
    assert news.line(Event("lost", 1, 3.0)) == "3 s: controller 1 was lost"
    assert news.line(Event("left", 1, 4.0)) == ""
