"""Histories: columns, epochs, text, and what comes back from files."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import FileFormatError, MissingLibraryError, UnwritableError
from dovetail.training.history import History, common_level
from dovetail.training.records import Evaluation, Event, Outcome, Row
from tests.support.histories import make_history

NASTY = '=1+1,"<b>\n\x1b[31m\u2028'


def comparable(records):
    """What is equal where the records are, nan equal to nan, whatever the order of figures."""
    if not isinstance(records, tuple):
        return records
    return [
        sorted((key, repr(dict(sorted(v.items())) if isinstance(v, dict) else v))
               for key, v in vars(record).items())
        for record in records
    ]  # fmt: skip


def same(left, right):
    """Equal outcomes but for theta and meta, nan equal to nan."""
    fields = ("clock", "samples", "seconds", "rows", "events", "evaluations")
    return all(
        comparable(getattr(left, name)) == comparable(getattr(right, name)) for name in fields
    )


def diverged():
    history = make_history(7)
    rows = list(history.outcome.rows)
    rows[3] = replace(rows[3], loss=math.inf, norm=math.nan)
    rows[4] = replace(rows[4], loss=0.1 + 0.2, seconds=1 / 3, norm=5e-324)
    evaluation = Evaluation(3, 60, 1.0, {NASTY: -math.inf, "accuracy": 0.5})
    return History(
        replace(
            history.outcome,
            rows=tuple(rows),
            evaluations=(*history.outcome.evaluations, evaluation),
            events=(Event("refused", 2, 0.5, NASTY), Event("stopped", -1, 9.0)),
        )
    )


def test_columns_have_an_entry_a_commit_and_count_the_samples_seen():
    columns = make_history(6).columns
    assert columns["worker"].tolist() == [0, 1, 2, 0, 1, 2]
    assert columns["seen"].tolist() == [20, 40, 60, 80, 100, 120]
    assert columns["loss"].dtype == np.float64


def test_an_epoch_ends_with_the_commit_that_completes_its_samples():
    epochs = make_history(60).epochs
    assert [epoch.commits for epoch in epochs] == [20, 20, 20]
    assert [epoch.samples for epoch in epochs] == [400, 400, 400]
    assert [epoch.figures["accuracy"] for epoch in epochs] == pytest.approx([0.3, 0.6, 0.9])
    rows = make_history(60).outcome.rows
    assert epochs[1].loss == pytest.approx(np.mean([row.loss for row in rows[20:40]]))
    assert epochs[1].seconds == rows[39].seconds


def test_a_stream_of_unknown_length_is_one_epoch():
    history = make_history(9, meta={"rule": "agn"})
    assert [epoch.commits for epoch in history.epochs] == [9]
    assert history.workers == 3


def test_momentum_is_the_median_of_the_estimates_beside_one_minus_one_over_n():
    history = make_history(9)
    assert history.momentum == 0.6
    assert history.expected_momentum == pytest.approx(2 / 3)
    assert math.isnan(make_history(2).momentum)


def test_the_best_of_a_figure_is_the_largest_accuracy_and_the_least_loss():
    history = make_history(60)
    assert history.best("accuracy").samples == 1200
    assert history.best("loss").figures["loss"] == 1.0
    assert history.best("nothing") is None


def test_the_summary_names_rule_staleness_momentum_and_epochs():
    text = make_history(60).summary()
    for words in ("agn (gamma 0.0001)", "3 workers, window 2, batch 10", "mean 2.00",
                  "momentum  0.6, 1 - 1/n is 0.667", "1 lost", "best accuracy"):  # fmt: skip
        assert words in text
    assert len(re.findall(r"^ +[123] +20 ", text, re.MULTILINE)) == 3


def test_the_rate_leaves_out_what_came_before_the_first_step():
    outcome = make_history(60).outcome
    rows = tuple(
        replace(row, seconds=row.seconds + 100, begin_seconds=row.begin_seconds + 100)
        for row in outcome.rows
    )
    late = replace(outcome, rows=rows, seconds=outcome.seconds + 100)
    told = [dict(History(one).facts())["did"].split(", ")[-1] for one in (outcome, late)]
    assert told[0] == told[1]


def test_a_server_that_was_restarted_is_in_the_summary():
    outcome = make_history(3).outcome
    found = History(replace(outcome, events=(Event("server_restarted", -1, 1.0, "resumed"),)))
    assert dict(found.facts())["events"] == "1 server restarted"


def test_a_run_without_commits_has_a_summary_too():
    empty = History(Outcome(np.zeros(2), 0, 0, 0.0))
    assert "0 commits" in empty.summary()
    assert empty.epochs == ()
    assert "\x1b" not in make_history(3, meta={"rule": NASTY}).summary()


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
@pytest.mark.parametrize("make", [make_history, diverged])
def test_a_saved_history_comes_back_whole(tmp_path, name, make):
    history = make()
    history.save(tmp_path / name)
    loaded = History.load(tmp_path / name)
    assert same(history.outcome, loaded.outcome)
    assert loaded.outcome.meta == history.outcome.meta
    assert loaded.outcome.theta.size == 0


@pytest.mark.parametrize("make", [make_history, diverged])
def test_a_csv_comes_back_but_for_the_meta(tmp_path, make):
    history = make()
    history.to_csv(tmp_path / "run.csv")
    read = History.from_csv(tmp_path / "run.csv").outcome
    for name in ("rows", "events", "evaluations", "samples"):
        assert comparable(getattr(read, name)) == comparable(getattr(history.outcome, name))


def test_a_saved_history_is_strict_json(tmp_path):
    diverged().save(tmp_path / "run.json")
    raw = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    assert raw["commits"]["loss"][3] == "inf"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.update(format="dovetail.plan"), "format"),
        (lambda raw: raw.update(surprise=1), "surprise"),
        (lambda raw: raw["commits"]["loss"].pop(), "one length"),
        (lambda raw: raw["commits"]["clock"].__setitem__(0, "x"), r"commits.clock.0"),
        (lambda raw: raw["commits"]["samples"].__setitem__(0, -1), "no count"),
        (lambda raw: raw["commits"]["samples"].__setitem__(0, 10**30), "no count"),
        (lambda raw: raw["commits"]["seconds"].__setitem__(0, "inf"), "not finite"),
        (lambda raw: raw["evaluations"][0].update(seconds="nan"), "not finite"),
        (lambda raw: raw["events"][0].pop("kind"), r"events.0.kind"),
        (lambda raw: raw.pop("meta"), "meta"),
    ],
)
def test_a_history_file_of_the_wrong_shape_says_where(tmp_path, change, complaint):
    path = tmp_path / "run.json"
    make_history().save(path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(FileFormatError, match=complaint):
        History.load(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text.replace("staleness", "tau", 1), "columns"),
        (lambda text: text.replace("commit", "comment", 1), "line 2"),
        (lambda text: text + "commit,,1\n", "line"),
        (lambda text: text.replace("2.0,1.0", "two,1.0", 1), "line 2.*two"),
        (lambda text: "", "columns"),
        (lambda text: text + "\0", "line"),
    ],
)
def test_a_csv_of_the_wrong_shape_says_where(tmp_path, change, complaint):
    path = tmp_path / "run.csv"
    make_history().to_csv(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(FileFormatError, match=complaint):
        History.from_csv(path)


def test_missing_and_unwritable_files_are_named(tmp_path):
    for read in (History.load, History.from_csv):
        with pytest.raises(FileFormatError, match="nothing"):
            read(tmp_path / "nothing")
    history = make_history(3)
    for write in (history.save, history.to_csv, history.to_tensorboard):
        with pytest.raises(UnwritableError, match="/proc/no"):
            write("/proc/no/way")


def scalars_of(history, folder):
    """Tag -> (step, value) pairs, as TensorBoard reads them from the history's files."""
    event_file_loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader"
    )
    history.to_tensorboard(folder)
    (file,) = folder.iterdir()
    found = {}
    for event in event_file_loader.LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_reads_the_scalars_back_by_samples(tmp_path):
    history = make_history(60)
    found = scalars_of(history, tmp_path)
    loss = [(20 * (i + 1), row.loss) for i, row in enumerate(history.outcome.rows)]
    assert found["train/loss"] == [(step, pytest.approx(value)) for step, value in loss]
    assert len(found["train/implicit_momentum"]) == 57
    assert found["evaluation/accuracy"][-1] == (1200, pytest.approx(0.9))


def test_a_long_run_is_thinned_to_means(tmp_path, monkeypatch):
    from dovetail.training import history as module

    monkeypatch.setattr(module, "POINTS", 7)
    history = make_history(61)
    samples, values = zip(*scalars_of(history, tmp_path)["train/loss"], strict=True)
    assert len(values) == 7
    assert samples[-1] == 61 * 20
    parts = np.split(history.columns["loss"], np.searchsorted(history.columns["seen"], samples[:-1],
                                                              side="right"))  # fmt: skip
    assert values == pytest.approx([part.mean() for part in parts])


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingLibraryError, match=re.escape("dovetail[tensorboard]")):
        make_history(3).to_tensorboard(tmp_path)


def test_histories_need_no_torch(tmp_path):
    make_history(3).save(tmp_path / "run.json")
    code = (
        "import sys; from dovetail.training.history import History; "
        f"h = History.load({str(tmp_path / 'run.json')!r}); h.to_csv({str(tmp_path / 'r.csv')!r}); "
        "h.summary(); print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_rows_of_a_csv_have_the_types_of_the_record(tmp_path):
    make_history(2).to_csv(tmp_path / "run.csv")
    row = History.from_csv(tmp_path / "run.csv").outcome.rows[0]
    assert isinstance(row, Row)
    assert isinstance(row.clock, int)
    assert isinstance(row.loss, float)


def test_runs_are_compared_at_the_best_level_that_all_reached():
    runs = [make_history(60, accuracy=best) for best in (0.6, 0.9)]
    assert common_level(runs, "accuracy") == pytest.approx(0.6)
    assert [run.seconds_to("accuracy", 0.6) for run in runs] == [20.0, pytest.approx(40 / 3)]
    assert runs[0].seconds_to("accuracy", 0.7) is None
    assert common_level(runs, "loss") == 1.0
    assert runs[0].seconds_to("loss", 1.5) == 10.0
    assert common_level([*runs, make_history(9, evaluations=())], "accuracy") is None
