"""What learned methods came to, as tables of text: for the page and for README; and every training
as CSV.

    rl17   seq2seq against the best baseline, and against the paper's margin or what there is
    gdp    GDP-one and HDP against human and `auto`; how much less GDP evaluates than HDP
"""

import csv
import io
import math
import os
from collections.abc import Iterator, Sequence

from dovetail.bench.cases import LEARNED
from dovetail.bench.effort import (
    CLOSE,
    Effort,
    Target,
    efforts,
    geometric_mean,
    middle,
    middle_within,
    span,
    target_of,
)
from dovetail.bench.methods import PLAIN
from dovetail.bench.orderings import format_step
from dovetail.bench.records import Case, Column, LearnedRun, Row
from dovetail.runtime.files import write_atomically
from dovetail.units import format_seconds

Done = Sequence[tuple[Case, Row]]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""head, rows"""
PAPER_HOURS = "12 to 27 hours"
FIELDS = (
    "row", "method", "seed", "seconds", "reason", "groups", "grouping", "trials", "distinct",
    "updates", "invalid_share", "trials_to_best", "distinct_to_best", "wall_seconds", "curve",
)  # fmt: skip
NOTHING = "-"


def tables_of(name: str, done: Done) -> list[tuple[str, Table]]:
    """(title, table) of every table that has rows."""
    trained = [(case, row.columns[PLAIN]) for case, row in done if row.columns[PLAIN].learned]
    found = [("How they were trained", _trainings(name, trained))]
    if name == "rl17":
        found.insert(0, ("Against the best baseline", _rl17(trained)))
    else:
        found.insert(0, ("Against human, HDP and auto", _gdp(trained)))
        found.insert(1, ("Search effort", _efforts(trained)))
    return [(title, table) for title, table in found if table[1]]


def verdicts(name: str, done: Done) -> list[tuple[str, str, str]]:
    """(what, figure, remark) over all rows that were trained."""
    columns = [(case, row.columns[PLAIN]) for case, row in done if row.columns[PLAIN].learned]
    return list(_rl17_verdicts(columns) if name == "rl17" else _gdp_verdicts(columns))


_Trained = list[tuple[Case, Column]]


def _rl17(trained: _Trained) -> Table:
    head = (
        "row", "best baseline", "auto", "head room", "the paper's margin", "to reach", "seq2seq",
        "best to worst", "over baseline", "reached",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for case, column in trained:
        target, runs = target_of(case, column), column.learned.get("seq2seq")
        if target is None or not runs:
            continue
        seconds = middle(runs).found.seconds
        rows.append((
            case.title,
            f"{format_step(target.baseline_seconds)} ({target.baseline})",
            format_step(target.auto_seconds),
            _percent(target.head_room),
            NOTHING if target.margin is None else _percent(target.margin),
            format_step(target.seconds),
            format_step(seconds),
            _span(runs),
            NOTHING if seconds is None else _percent(target.baseline_seconds / seconds - 1),
            _yes(_met(target, seconds)),
        ))  # fmt: skip
    return head, rows


def _rl17_verdicts(trained: _Trained) -> Iterator[tuple[str, str, str]]:
    known = [
        (target, middle(column.learned["seq2seq"]).found.seconds)
        for case, column in trained
        if (target := target_of(case, column)) and "seq2seq" in column.learned
    ]
    if not known:
        return
    better = sum(_at_most(seconds, target.baseline_seconds) for target, seconds in known)
    met = sum(_met(target, seconds) for target, seconds in known)
    yield "seq2seq at or below the best baseline", f"{better} of {len(known)}", "rows, by median"
    yield (
        "seq2seq reaches its target", f"{met} of {len(known)}",
        "the paper's margin, or 80 % of the head room if that is less",
    )  # fmt: skip
    runs = [run for _, column in trained for run in column.learned.get("seq2seq", ())]
    longest = max(run.found.search_seconds for run in runs)
    most = max(run.trials for run in runs)
    yield (
        "the longest training", format_seconds(longest),
        f"at most {most:,} simulated placements; the paper's took {PAPER_HOURS}",
    )  # fmt: skip


def _gdp(trained: _Trained) -> Table:
    head = (
        "row", "GDP-one", "best to worst", "in as many placements as HDP", "HDP", "best to worst",
        "human", "auto", "to HDP, in as many", "to human", "to auto", "the paper to HDP",
        "the paper to human",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for case, column in trained:
        seconds = {name: _median(column, name) for name in ("gdp", "hdp", "expert", "auto")}
        ours, printed = seconds["gdp"], case.published.seconds if case.published else {}
        paper, cut = printed.get("GDP-one"), middle_within(column, "gdp", "hdp")
        rows.append((
            case.title,
            *_median_and_span(column, "gdp"),
            format_step(cut) if "hdp" in column.learned else NOTHING,
            *_median_and_span(column, "hdp"),
            *(format_step(seconds[name]) for name in ("expert", "auto")),
            _ratio(cut, seconds["hdp"]),
            *(_ratio(ours, seconds[name]) for name in ("expert", "auto")),
            *(_ratio(paper, printed.get(name)) for name in ("HDP", "human")),
        ))  # fmt: skip
    return head, rows


def _gdp_verdicts(trained: _Trained) -> Iterator[tuple[str, str, str]]:
    for name, said, remark in (
        ("hdp", "HDP", "rows, by median, in as many placements as HDP"),
        ("expert", "human", "rows, by median"),
    ):
        columns = [column for _, column in trained if {"gdp", name} <= column.methods.keys()]
        if columns:
            at_most = sum(
                _at_most(
                    middle_within(column, "gdp", name) if name == "hdp" else _median(column, "gdp"),
                    _median(column, name),
                )
                for column in columns
            )
            yield f"GDP-one at or below {said}", f"{at_most} of {len(columns)}", remark
    to_auto = [
        ours / theirs
        for _, column in trained
        if (ours := _median(column, "gdp")) and (theirs := _median(column, "auto"))
    ]
    mean = geometric_mean(to_auto)
    if mean is not None:
        yield (
            "GDP-one over auto", f"{mean:.3f} x",
            f"geometric mean of {len(to_auto)} rows; auto does not learn",
        )  # fmt: skip
    of_rows = [found for _, column in trained if (found := efforts(column))]
    mean = geometric_mean(of_row(found) for found in of_rows)
    if mean is not None:
        limited = sum(effort.limit == "at most" for found in of_rows for effort in found)
        yield (
            "less search than HDP", f"{mean:.1f} x",
            f"evaluated placements up to HDP's best, geometric mean of {len(of_rows)} rows"
            + (f"; {limited} trainings never get there, and count as a whole" if limited else ""),
        )  # fmt: skip


def _efforts(trained: _Trained) -> Table:
    head = (
        "row", "HDP's placements to its best", "GDP's to one as good", "times fewer",
        "different ones", "the paper, of time",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for case, column in trained:
        found = efforts(column)
        if not found:
            continue
        seeds = {run.seed for run in column.learned["gdp"]}
        others = [run for run in column.learned["hdp"] if run.seed in seeds]
        theirs = [run.bests[-1].trial if run.bests else run.trials for run in others]
        ours = [them / effort.ratio for them, effort in zip(theirs, found, strict=True)]
        hours = case.published.hours.get("GDP-one", "") if case.published else ""
        distinct = geometric_mean(max(effort.distinct_ratio, 1e-9) for effort in found)
        rows.append((
            case.title,
            ", ".join(f"{n:,}" for n in theirs),
            ", ".join(_said(n, effort) for n, effort in zip(ours, found, strict=True)),
            f"{of_row(found):.1f} x",
            f"{distinct:.1f} x",
            hours.replace(" times faster than HDP", " x"),
        ))  # fmt: skip
    return head, rows


def of_row(found: Sequence[Effort]) -> float:
    """The geometric mean over the seeds of a row."""
    return geometric_mean(effort.ratio for effort in found) or math.nan


def _said(trials: float, effort: Effort) -> str:
    return f"not in {trials:,.0f}" if effort.limit == "at most" else f"{trials:,.0f}"


def _trainings(name: str, trained: _Trained) -> Table:
    head = (
        "row", "method", "groups", "how they came about", "trainings", "placements each",
        "different ones", "to the best", "updates", "does not fit", "a training took",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for case, column in trained:
        for method in LEARNED[name]:
            runs = column.learned.get(method)
            if not runs:
                continue
            run = middle(runs)
            rows.append((
                case.title,
                method,
                f"{run.groups:,}",
                run.grouping,
                str(len(runs)),
                f"{run.trials:,}",
                f"{run.distinct:,}",
                f"{run.bests[-1].trial:,}" if run.bests else NOTHING,
                f"{run.updates:,}",
                _percent(run.invalid_share),
                format_seconds(run.found.search_seconds),
            ))  # fmt: skip
    return head, rows


def write_trainings(name: str, done: Done, path: str | os.PathLike[str]) -> None:
    """Write one line for each training: row, method, seed. `curve` is "trial:distinct:seconds" of
    every placement better than all before it. Raises `UnwritableError`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    for case, row in done:
        for method in LEARNED[name]:
            for run in row.columns[PLAIN].learned.get(method, ()):
                writer.writerow(_line(case, run))
    write_atomically(path, text.getvalue().encode("utf-8", "replace"))


def _line(case: Case, run: LearnedRun) -> dict[str, str | int | float]:
    last = run.bests[-1] if run.bests else None
    return {
        "row": case.key,
        "method": run.method,
        "seed": run.seed,
        "seconds": "" if run.found.seconds is None else run.found.seconds,
        "reason": run.found.reason,
        "groups": run.groups,
        "grouping": run.grouping,
        "trials": run.trials,
        "distinct": run.distinct,
        "updates": run.updates,
        "invalid_share": run.invalid_share,
        "trials_to_best": last.trial if last else "",
        "distinct_to_best": last.distinct if last else "",
        "wall_seconds": run.found.search_seconds,
        "curve": ";".join(f"{best.trial}:{best.distinct}:{best.seconds!r}" for best in run.bests),
    }


def _median(column: Column, method: str) -> float | None:
    found = column.methods.get(method)
    return None if found is None else found.seconds


def _median_and_span(column: Column, method: str) -> tuple[str, str]:
    runs = column.learned.get(method)
    return (format_step(_median(column, method)), _span(runs)) if runs else (NOTHING, NOTHING)


def _span(runs: Sequence[LearnedRun]) -> str:
    return " to ".join(format_step(s if math.isfinite(s) else None) for s in span(runs))


def _met(target: Target, seconds: float | None) -> bool:
    return _at_most(seconds, target.seconds)


def _at_most(ours: float | None, theirs: float | None) -> bool:
    """What does not fit is slower than anything."""
    return ours is not None and (theirs is None or ours <= theirs * CLOSE)


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.3f} x" if ours and theirs else NOTHING


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
