"""The result tables of RL17 and GDP: every method's seconds, every training, and what they show.

Search effort compares GDP with HDP in evaluated placements, for two runs of one seed: the number
of placements up to HDP's best, over the number up to a placement of GDP that is at least as good.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.units import format_seconds
from reproductions.cases import AS_PUBLISHED, AUTO_ON, LEARNED, LIKELIEST, METHOD_OF, PROPOSALS
from reproductions.methods import PLAIN
from reproductions.orderings import format_step
from reproductions.records import BestSoFar, Case, CaseResult, Column, LearnedRun, MethodResult
from reproductions.results import NOTHING, ResultTable

OOM = "OOM"
NOT_RUN = "not yet run"
FIELDS = (
    "table", "row", "title", "model", "optimizer", "machine", "gpus", "gpu_memory_bytes",
    "column", "method", "paper_column", "paper_seconds", "seconds", "ratio_to_paper", "reason",
    "bound_seconds", "bound_proof", "peak_memory_bytes", "peak_memory_by_device_bytes",
    "search_seconds", "ops", "paper_ops", "groups", "paper_groups", "flops", "parameter_bytes",
    "sizes_of_ours",
)  # fmt: skip
LEARNED_FIELDS = (
    "row", "column", "method", "seed", "controllers", "seconds", "reason", "groups", "grouping",
    "trials", "distinct", "updates", "invalid_share", "trials_to_best", "distinct_to_best",
    "wall_seconds", "curve",
)  # fmt: skip
Line = dict[str, Any]
"""A line of a CSV file: field -> value; one without a value is absent or None."""
Done = Sequence[tuple[Case, CaseResult]]
Trained = list[tuple[Case, Column]]
"""Rows with one of their columns in which methods were trained."""


# ---- The lines of the CSV files ----


def lines_of(name: str, cases: Sequence[Case], rows: Sequence[CaseResult]) -> Iterator[Line]:
    """Yield a line for each row, column and method, with the paper's figure beside ours.

    A method that no column of the paper corresponds to has an empty `paper_column`; one with two
    such columns has a line for each. A case without a row has one line that says so, and so has a
    learned method that was not run. A learned method that was run has the training of the median.
    """
    of_case = {row.key: row for row in rows}
    for case in cases:
        published = case.published
        printed = published.seconds if published else {}
        line: Line = {
            "table": name,
            "row": case.key,
            "title": case.title,
            "model": case.model,
            "optimizer": case.train,
            "machine": case.machine,
            "gpus": case.gpus,
            "gpu_memory_bytes": case.gpu_memory_bytes,
            "paper_ops": published.ops if published else None,
            "paper_groups": published.groups if published else None,
            "sizes_of_ours": case.ours,
        }
        row = of_case.get(case.key)
        if row is None:
            yield line | {"reason": NOT_RUN}
            continue
        sizes = ("ops", "groups", "flops", "parameter_bytes")
        line |= {size: getattr(row, size) for size in sizes}
        for column_name, column in row.columns.items():
            line["column"] = column_name
            bound = {"bound_seconds": column.bound, "bound_proof": column.proof}
            for method, result in column.methods.items():
                peaks = result.peak_memory_bytes
                ours = {
                    "method": method,
                    "seconds": result.seconds,
                    "reason": result.reason,
                    "peak_memory_bytes": max(peaks.values(), default=None),
                    "peak_memory_by_device_bytes": ";".join(f"{d}={n}" for d, n in peaks.items()),
                    "search_seconds": result.search_seconds,
                }
                for paper in [each for each in printed if method in _methods_of(each)] or [""]:
                    yield line | bound | ours | _beside(printed, paper, result)
            for paper in printed:
                for method in _methods_of(paper):
                    if method in LEARNED[name] and method not in column.methods:
                        lacks = {"method": method, "reason": NOT_RUN}
                        yield line | lacks | _beside(printed, paper, None)


def _methods_of(paper_column: str) -> tuple[str, ...]:
    """Our methods for a column of a paper: ours, and of one that learns the same as published."""
    method = METHOD_OF[paper_column]
    return (method, AS_PUBLISHED[method]) if method in AS_PUBLISHED else (method,)


def _beside(
    printed: dict[str, float | None], paper_column: str, result: MethodResult | None
) -> Line:
    """The paper's figure in a column, or that it has none, with the ratio of ours to it."""
    seconds = printed.get(paper_column)
    line: Line = {"paper_column": paper_column}
    if paper_column in printed:
        line["paper_seconds"] = OOM if seconds is None else seconds
    if seconds and result is not None and result.seconds is not None:
        line["ratio_to_paper"] = result.seconds / seconds
    return line


def training_lines(name: str, done: Done) -> Iterator[Line]:
    """Yield a line for each training of a row, column, method and seed. `curve` is
    "trial:distinct:seconds" of every placement that was better than all before it."""
    for case, row in done:
        for column_name, column in row.columns.items():
            for run in (run for m in LEARNED[name] for run in column.learned.get(m, ())):
                last = run.bests[-1] if run.bests else None
                curve = (f"{best.trial}:{best.distinct}:{best.seconds!r}" for best in run.bests)
                yield vars(run) | {
                    "row": case.key,
                    "column": column_name,
                    "seconds": run.found.seconds,
                    "reason": run.found.reason,
                    "trials_to_best": last.trial if last else None,
                    "distinct_to_best": last.distinct if last else None,
                    "wall_seconds": run.found.search_seconds,
                    "curve": ";".join(curve),
                }


# ---- Trainings of learned methods: the run of the median, search effort, targets ----

CLOSE = 1 + 1e-9
"""Seconds of at most this many times others count as no more than those."""
BASELINES = ("1 CPU", "1 GPU", "Scotch", "MinCut", "expert")
"""RL17 compares its learned placements with these columns."""
HEAD_ROOM_SHARE = 0.8
"""A learned placement is to reach at most this share of the head room: see `LearningTarget`."""


def middle(runs: Sequence[LearnedRun]) -> LearnedRun:
    """The run of the median seconds, of two middle ones the better. A run that found nothing is
    worse than any other."""
    return sorted(runs, key=_seconds)[(len(runs) - 1) // 2]


def span(runs: Sequence[LearnedRun]) -> tuple[float, float]:
    """(best, worst) seconds of the runs; inf for a run that found nothing."""
    seconds = [_seconds(run) for run in runs]
    return min(seconds), max(seconds)


def _seconds(run: LearnedRun) -> float:
    return math.inf if run.found.seconds is None else run.found.seconds


def format_span(runs: Sequence[LearnedRun]) -> str:
    """The seconds from the best run to the worst, as text: "0.298 s to 0.305 s"."""
    return " to ".join(format_step(s if math.isfinite(s) else None) for s in span(runs))


def reached(run: LearnedRun, seconds: float) -> BestSoFar | None:
    """The first placement of a run that takes at most `seconds`; None if there is none."""
    return next((best for best in run.bests if best.seconds <= seconds * CLOSE), None)


def cut(run: LearnedRun, trials: int) -> LearnedRun:
    """The run's curve and seconds as if it had ended after `trials` placements. Its counts stay
    those of the whole run."""
    bests = tuple(best for best in run.bests if best.trial <= trials)
    seconds = bests[-1].seconds if bests else None
    return replace(run, bests=bests, found=replace(run.found, seconds=seconds))


def middle_within(column: Column, method: str, other: str) -> float | None:
    """The median seconds of a method's runs, each cut to as many placements as the other method's
    run of that seed had. None if nothing fits, or if no seed has both."""
    of_seed = {run.seed: run.trials for run in column.learned.get(other, ())}
    runs = column.learned.get(method, ())
    both = [cut(run, of_seed[run.seed]) for run in runs if run.seed in of_seed]
    return middle(both).found.seconds if both else None


@dataclass(frozen=True)
class EffortAgainstHDP:
    """The factor by which one run evaluates less than another for a placement as good as the
    other's best.

    ratio       the factor in evaluated placements; `distinct_ratio` in different ones
    limit       "at most": the run never found one as good, and all its placements are counted;
                "at least": the other run found nothing that fits, and all of its placements are
                counted; "": the ratio is exact
    """

    ratio: float
    distinct_ratio: float
    limit: str = ""


def effort(run: LearnedRun, other: LearnedRun) -> EffortAgainstHDP:
    """The search effort of `run` against `other`."""
    last = other.bests[-1] if other.bests else BestSoFar(other.trials, other.distinct, math.inf)
    hit = reached(run, last.seconds)
    limit = "" if other.bests else "at least"
    if hit is None:
        hit, limit = BestSoFar(run.trials, run.distinct, math.inf), "at most"
    ratio = last.trial / max(1, hit.trial)
    return EffortAgainstHDP(ratio, last.distinct / max(1, hit.distinct), limit)


def efforts(column: Column, method: str = "gdp", other: str = "hdp") -> list[EffortAgainstHDP]:
    """The search effort of a method against another, for each seed that both have."""
    of_seed = {run.seed: run for run in column.learned.get(other, ())}
    return [
        effort(run, of_seed[run.seed])
        for run in column.learned.get(method, ())
        if run.seed in of_seed
    ]


@dataclass(frozen=True)
class LearningTarget:
    """The seconds that a placement learned by RL17's method is to reach on a row.

    baseline      the baseline of least seconds, `baseline_seconds`
    head_room     the baseline's seconds over `auto`'s, less 1: the gain that is possible. It is
                  that of `auto@seq2seq` if it was run, on the same groups
    margin        the same gain of the paper's RL over its best baseline; None: not printed
    seconds       the target: it gains the margin, or `HEAD_ROOM_SHARE` of the head room if that is
                  less
    """

    baseline: str
    baseline_seconds: float
    auto_seconds: float
    head_room: float
    margin: float | None
    seconds: float


def target_of(case: Case, column: Column) -> LearningTarget | None:
    """The target of a row; None if no baseline of ours fits, or `auto` was not run."""
    ours = {METHOD_OF[name]: _median(column, METHOD_OF[name]) for name in BASELINES}
    baseline_seconds = {name: seconds for name, seconds in ours.items() if seconds is not None}
    # The head room is of the same groups and as many placements, where that was run.
    auto = column.methods.get("auto@seq2seq") or column.methods.get("auto")
    if not baseline_seconds or auto is None or auto.seconds is None:
        return None
    baseline = min(baseline_seconds, key=lambda name: baseline_seconds[name])
    head_room = max(0.0, baseline_seconds[baseline] / auto.seconds - 1)
    printed = case.published.seconds if case.published else {}
    given = [seconds for name in BASELINES if (seconds := printed.get(name)) is not None]
    learned = printed.get("RL")
    margin = max(0.0, min(given) / learned - 1) if given and learned else None
    gain = HEAD_ROOM_SHARE * head_room
    gain = gain if margin is None else min(gain, margin)
    return LearningTarget(
        baseline, baseline_seconds[baseline], auto.seconds, head_room, margin,
        baseline_seconds[baseline] / (1 + gain),
    )  # fmt: skip


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of the values; None if there are none."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


# ---- Tables on learned methods, for page and README, and the figures that sum them up ----
#
#     rl17   seq2seq against the best baseline, and against its `LearningTarget`
#     gdp    GDP-one and HDP against human and `auto` on the same groups; how much less GDP
#            evaluates than HDP
#     both   each method beside the same as published; of GDP what the shipped policy proposes

PAPER_HOURS = "12 to 27 hours"
_AUTO = "auto@gdp"


def tables_of(name: str, done: Done) -> list[ResultTable]:
    """Every table on learned methods that has rows: those of the plain column, then those of the
    others, whose titles name them."""
    columns = dict.fromkeys(column for _, row in done for column in row.columns)
    found = []
    for column in sorted(columns, key=lambda column: column != PLAIN):
        trained = _trained(done, column)
        if name == "rl17":
            tables = [_against_baselines(trained)]
        else:
            tables = [_against_human(trained), _search_effort(trained)]
        tables += [_as_published(name, trained), _how_trained(name, trained)]
        more = "" if column == PLAIN else f", {column}"
        found += [replace(table, title=table.title + more) for table in tables if table.rows]
    return found


def _trained(done: Done, column: str) -> Trained:
    return [
        (case, row.columns[column])
        for case, row in done
        if column in row.columns and row.columns[column].learned
    ]


def _against_baselines(trained: Trained) -> ResultTable:
    rows = []
    for case, column in trained:
        target, runs = target_of(case, column), column.learned.get("seq2seq")
        if target is not None and runs:
            seconds = middle(runs).found.seconds
            gain = None if seconds is None else _percent(target.baseline_seconds / seconds - 1)
            rows.append((
                case.title,
                f"{format_step(target.baseline_seconds)} ({target.baseline})",
                format_step(target.auto_seconds),
                _percent(target.head_room),
                None if target.margin is None else _percent(target.margin),
                format_step(target.seconds),
                format_step(seconds),
                format_span(runs),
                gain,
                "yes" if _at_most(seconds, target.seconds) else "no",
            ))  # fmt: skip
    head = (
        "row", "best baseline", "auto", "head room", "the paper's margin", "to reach", "seq2seq",
        "best to worst", "over baseline", "reached",
    )  # fmt: skip
    return ResultTable.of(head, rows, title="Against the best baseline")


def _against_human(trained: Trained) -> ResultTable:
    rows = []
    for case, column in trained:
        seconds = {name: _median(column, name) for name in ("gdp", "hdp", "expert", _AUTO)}
        gdp_seconds, printed = seconds["gdp"], case.published.seconds if case.published else {}
        paper, within = printed.get("GDP-one"), middle_within(column, "gdp", "hdp")
        rows.append((
            case.title,
            *_median_and_span(column, "gdp"),
            format_step(within) if "hdp" in column.learned else None,
            *_median_and_span(column, "hdp"),
            *(format_step(seconds[name]) for name in ("expert", _AUTO)),
            _ratio(within, seconds["hdp"]),
            *(_ratio(gdp_seconds, seconds[name]) for name in ("expert", _AUTO)),
            *(_ratio(paper, printed.get(name)) for name in ("HDP", "human")),
        ))  # fmt: skip
    head = (
        "row", "GDP-one", "best to worst", "in as many placements as HDP", "HDP", "best to worst",
        "human", "auto, same groups", "to HDP, in as many", "to human", "to auto",
        "the paper to HDP", "the paper to human",
    )  # fmt: skip
    return ResultTable.of(head, rows, title="Against human, HDP and auto")


def _search_effort(trained: Trained) -> ResultTable:
    rows = []
    for case, column in trained:
        of_seed = efforts(column)
        if not of_seed:
            continue
        seeds = {run.seed for run in column.learned["gdp"]}
        hdp_runs = [run for run in column.learned["hdp"] if run.seed in seeds]
        hdp_trials = [run.bests[-1].trial if run.bests else run.trials for run in hdp_runs]
        gdp_trials = [
            f"{'not in ' * (each.limit == 'at most')}{trials / each.ratio:,.0f}"
            for trials, each in zip(hdp_trials, of_seed, strict=True)
        ]
        hours = case.published.hours.get("GDP-one", "") if case.published else ""
        distinct = geometric_mean(max(each.distinct_ratio, 1e-9) for each in of_seed)
        rows.append((
            case.title,
            ", ".join(f"{n:,}" for n in hdp_trials),
            ", ".join(gdp_trials),
            f"{geometric_mean(each.ratio for each in of_seed):.1f} x",
            f"{distinct:.1f} x",
            hours.replace(" times faster than HDP", " x"),
        ))  # fmt: skip
    head = (
        "row", "HDP's placements to its best", "GDP's to one as good", "times fewer",
        "different ones", "the paper, of time",
    )  # fmt: skip
    return ResultTable.of(head, rows, title="Search effort")


def _as_published(name: str, trained: Trained) -> ResultTable:
    """Each method of the table as its paper has it, beside ours; of rows that have one of them. The
    last columns compare with the expert, and have the paper's own ratio."""
    pairs = [(ours, AS_PUBLISHED[ours]) for ours in LEARNED[name] if ours in AS_PUBLISHED]
    shipped = [method for method in (LIKELIEST, PROPOSALS) if method in LEARNED[name]]
    head = ["row"]
    for ours, published in pairs:
        head += [published, "best to worst"]
        head += ["auto, same groups"] if f"auto@{published}" in AUTO_ON else []
        head += [f"{ours} (ours)"]
    head += [f"shipped policy: {method}" for method in shipped] + ["expert"]
    head += [f"{published} to expert" for _, published in pairs]
    head += [f"the paper's {ours}" for ours, _ in pairs]
    rows = []
    for case, column in trained:
        if not column.learned.keys() & {*AS_PUBLISHED.values(), *shipped}:
            continue
        printed = case.published.seconds if case.published else {}
        human = printed.get("expert", printed.get("human"))
        of_paper = {METHOD_OF[paper]: seconds for paper, seconds in printed.items()}
        cells: list[str | None] = [case.title]
        for ours, published in pairs:
            cells += _median_and_span(column, published)
            if (auto := f"auto@{published}") in AUTO_ON:
                cells += [_median_and_span(column, auto)[0]]
            cells += [_median_and_span(column, ours)[0]]
        cells += [_median_and_span(column, method)[0] for method in shipped]
        expert = _median(column, "expert")
        cells += [format_step(expert) if "expert" in column.methods else None]
        cells += [_ratio(_median(column, published), expert) for _, published in pairs]
        cells += [_ratio(of_paper.get(ours), human) for ours, _ in pairs]
        rows.append(cells)
    return ResultTable.of(head, rows, title="As published, and ours")


def _how_trained(name: str, trained: Trained) -> ResultTable:
    rows = []
    for case, column in trained:
        for method in LEARNED[name]:
            if runs := column.learned.get(method):
                run = middle(runs)
                rows.append((
                    case.title,
                    method,
                    f"{run.groups:,}",
                    run.grouping,
                    len(runs),
                    run.controllers,
                    f"{run.trials:,}",
                    f"{run.distinct:,}",
                    f"{run.bests[-1].trial:,}" if run.bests else None,
                    f"{run.updates:,}",
                    _percent(run.invalid_share),
                    format_seconds(run.found.search_seconds),
                ))  # fmt: skip
    head = (
        "row", "method", "groups", "how they came about", "trainings", "controllers",
        "placements each", "different ones", "to the best", "updates", "does not fit",
        "a training took",
    )  # fmt: skip
    return ResultTable.of(head, rows, title="How they were trained")


def verdicts(name: str, done: Done) -> Iterator[tuple[str, str, str]]:
    """Yield (label, figure, remark) of the cards that sum up all rows with trainings."""
    trained = _trained(done, PLAIN)
    if name == "rl17":
        rows = [
            (target, middle(column.learned["seq2seq"]).found.seconds)
            for case, column in trained
            if (target := target_of(case, column)) and "seq2seq" in column.learned
        ]
        if not rows:
            return
        better = sum(_at_most(seconds, target.baseline_seconds) for target, seconds in rows)
        met = sum(_at_most(seconds, target.seconds) for target, seconds in rows)
        runs = [run for _, column in trained for run in column.learned.get("seq2seq", ())]
        longest = max(run.found.search_seconds for run in runs)
        most = max(run.trials for run in runs)
        yield "seq2seq at or below the best baseline", f"{better} of {len(rows)}", "rows, by median"
        yield (
            "seq2seq reaches its target", f"{met} of {len(rows)}",
            "the paper's margin, or 80 % of the head room if that is less",
        )  # fmt: skip
        yield (
            "the longest training", format_seconds(longest),
            f"at most {most:,} simulated placements; the paper's took {PAPER_HOURS}",
        )  # fmt: skip
        return
    for other, label, remark in (
        ("hdp", "HDP", "rows, by median, in as many placements as HDP"),
        ("expert", "human", "rows, by median"),
    ):
        columns = [column for _, column in trained if {"gdp", other} <= column.methods.keys()]
        count = 0
        for column in columns:
            within = middle_within(column, "gdp", "hdp") if other == "hdp" else None
            ours = within if other == "hdp" else _median(column, "gdp")
            count += _at_most(ours, _median(column, other))
        if columns:
            yield f"GDP-one at or below {label}", f"{count} of {len(columns)}", remark
    pairs = [(_median(column, "gdp"), _median(column, _AUTO)) for _, column in trained]
    to_auto = [gdp / auto for gdp, auto in pairs if gdp and auto]
    if (mean := geometric_mean(to_auto)) is not None:
        yield (
            "GDP-one over auto", f"{mean:.3f} x",
            f"geometric mean of {len(to_auto)} rows; auto does not learn, on the same groups",
        )  # fmt: skip
    of_rows = [of_seed for _, column in trained if (of_seed := efforts(column))]
    ratios = [geometric_mean(each.ratio for each in of_seed) or math.nan for of_seed in of_rows]
    if (mean := geometric_mean(ratios)) is not None:
        limited = sum(each.limit == "at most" for of_seed in of_rows for each in of_seed)
        yield (
            "less search than HDP", f"{mean:.1f} x",
            f"evaluated placements up to HDP's best, geometric mean of {len(of_rows)} rows"
            + (f"; {limited} trainings never get there, and count as a whole" if limited else ""),
        )  # fmt: skip


def _median(column: Column, method: str) -> float | None:
    result = column.methods.get(method)
    return None if result is None else result.seconds


def _median_and_span(column: Column, method: str) -> tuple[str | None, str | None]:
    runs = column.learned.get(method)
    return (format_step(_median(column, method)), format_span(runs)) if runs else (None, None)


def _at_most(seconds: float | None, other_seconds: float | None) -> bool:
    """True if the first seconds are no slower; a placement that does not fit is slower than
    anything."""
    return seconds is not None and (other_seconds is None or seconds <= other_seconds * CLOSE)


def _ratio(seconds: float | None, other_seconds: float | None) -> str:
    return f"{seconds / other_seconds:.3f} x" if seconds and other_seconds else NOTHING


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
