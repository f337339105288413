"""Shows the thesis' grid: a page, a CSV file and the lines of a table.

Wherever figures stand that are of the stand-in and not of MNIST, it says so.
"""

import csv
import io
import os
from collections.abc import Mapping, Sequence

import numpy as np

from dovetail.reports.charts import Axes, Line, line_chart
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Part,
    Section,
    Table,
    render_page,
    save_page,
    strong,
)
from dovetail.runtime.files import write_atomically
from reproductions.thesis import (
    MNIST,
    RULES,
    ThesisCell,
    ThesisResult,
    ThesisSettings,
    by_setting,
    mean_and_spread,
    published,
)

Results = Mapping[ThesisCell, ThesisResult]
FIELDS = (
    "data", "training_samples", "epochs", "rule", "workers", "window", "seed", "validation",
    "training", "virtual_seconds", "staleness", "commits", "diverged", "wall_seconds",
    "thesis_validation", "thesis_training", "thesis_seconds",
)  # fmt: skip
WARNING = (
    "The data are a stand-in that is drawn, not MNIST: the accuracies can be compared with each "
    "other, and not with the thesis'. Give MNIST's files with --data."
)


def tables_of(settings: ThesisSettings, results: Results) -> list[Table]:
    """The tables of validation and training accuracy: a row for each n and lambda, our columns,
    then the thesis'. Cells are % with half the seeds' range."""
    data = settings.load().name
    of_setting = by_setting(dict(results))
    printed = published()
    beside = [rule for rule in settings.rules if (rule, 10, 10) in printed]
    head = ("n", "lambda", *(RULES[r] for r in settings.rules),
            *(f"{RULES[r]}, thesis" for r in beside))  # fmt: skip
    shown = []
    for figure in ("validation", "training"):
        rows = []
        for workers in settings.workers:
            for window in settings.windows:
                runs = [of_setting.get((rule, workers, window), []) for rule in settings.rules]
                ours = [_accuracy([getattr(run, figure) for run in of_rule]) for of_rule in runs]
                theirs = [printed.get((rule, workers, window)) for rule in beside]
                cells = ["-" if p is None else f"{100 * getattr(p, figure):.2f}" for p in theirs]
                rows.append([str(workers), str(window), *ours, *cells])
        title = f"{figure.capitalize()} accuracy, %, on {_named(data)}"
        shown.append(Table(head, rows, title=title))
    return shown


def _named(data: str) -> str:
    return data if data == MNIST else f"the {data} (the thesis: on MNIST)"


def _accuracy(values: Sequence[float | None]) -> str:
    found = mean_and_spread(values)
    if found is None:
        return "-"
    mean, spread = found
    text = f"{100 * mean:.2f}" + (f" ± {100 * spread:.2f}" if len(values) > 1 else "")
    lost = sum(value is None for value in values)
    return f"{text} ({lost} of {len(values)} diverged)" if lost else text


def ordering(settings: ThesisSettings, results: Results) -> str:
    """In how many settings AGN's validation accuracy is above AEASGD's, here and in the thesis."""
    of_setting, printed = by_setting(dict(results)), published()
    ours = theirs = both = count = 0
    for workers in settings.workers:
        for window in settings.windows:
            pair = [
                mean_and_spread(r.validation for r in of_setting.get((x, workers, window), ()))
                for x in ("agn", "aeasgd")
            ]
            if pair[0] is None or pair[1] is None:
                continue
            count += 1
            ours += pair[0][0] > pair[1][0]
            paper = [printed.get((rule, workers, window)) for rule in ("agn", "aeasgd")]
            if paper[0] is not None and paper[1] is not None:
                both += 1
                theirs += paper[0].validation > paper[1].validation
    if not count:
        return ""
    text = f"AGN's validation accuracy is above AEASGD's in {ours} of {count} settings"
    return text + (f"; in the thesis in {theirs} of the {both} that it has" if both else "")


def write_thesis_csv(
    settings: ThesisSettings, results: Results, path: str | os.PathLike[str]
) -> None:
    """Write a line for each cell that is done, in full precision. Raises `UnwritableError`."""
    data, printed = settings.load(), published()
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    for cell, result in results.items():
        paper = printed.get((cell.rule, cell.workers, cell.window))
        writer.writerow({
            "data": data.name,
            "training_samples": len(data.labels),
            "epochs": settings.epochs,
            "rule": cell.rule,
            "workers": cell.workers,
            "window": cell.window,
            "seed": cell.seed,
            "validation": "" if result.validation is None else result.validation,
            "training": "" if result.training is None else result.training,
            "virtual_seconds": result.seconds,
            "staleness": "" if result.staleness is None else result.staleness,
            "commits": result.commits,
            "diverged": result.diverged,
            "wall_seconds": round(result.wall_seconds, 3),
            "thesis_validation": "" if paper is None else paper.validation,
            "thesis_training": "" if paper is None else paper.training,
            "thesis_seconds": "" if paper is None else paper.seconds,
        })  # fmt: skip
    write_atomically(path, text.getvalue())


def write_thesis_page(
    settings: ThesisSettings,
    results: Results,
    path: str | os.PathLike[str],
    *,
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page to `path`, whole or not at all.

    facts   (label, text) of how the run was made

    Raises `UnwritableError`.
    """
    save_page(render_thesis(settings, results, facts=facts), path)


def render_thesis(
    settings: ThesisSettings, results: Results, *, facts: Sequence[tuple[str, str]] = ()
) -> str:
    """The page as text."""
    data = settings.load()
    cells = len(settings.cells)
    cards: list[Card] = [
        ("data", data.name, f"{len(data.labels):,} to train on, {len(data.test_labels):,} to test"),
        ("cells", f"{len(results):,} of {cells:,}", f"{settings.seeds} seeds each"),
        ("epochs", str(settings.epochs), "of 40 in the thesis"),
    ]
    text = ordering(settings, results)
    head = ("n", "lambda", *(RULES[rule] for rule in settings.rules))
    parts: list[Part] = [
        Section("Accuracy", [
            "J. Hermans, On Scalable Deep Learning and Parallelizing Gradient Descent, 2017, "
            "chapter Accumulated Gradient Normalization, last table: n workers, lambda local steps "
            "between commits, a perceptron of 784-1000-2000-1000-10. A cell is the mean of the "
            "seeds, and half the way from the lowest to the highest. The thesis' training accuracy "
            "is the workers' on their last batches; ours is the center's.",
            *([f"{text}."] if text else []),
            *(Section(table.title, [table]) for table in tables_of(settings, results)),
        ])
    ]  # fmt: skip
    if charts := _charts(settings, results):
        parts.append(Section("More workers", [Figures(charts)]))
    parts += [
        Section("Virtual time", [
            "Steps of one worker until the run ended, and in brackets the mean staleness of the "
            "commits. The thesis' seconds are those of a cluster.",
            Table(head, _times(settings, results)),
        ]),
        Section("How this was made", [Table((), facts, "scroll left")]),
    ]  # fmt: skip
    return render_page(
        Page(
            "Workers and windows: the thesis' grid, and ours" + _marked(data.name),
            cards,
            parts,
            brand="python -m reproductions thesis",
            lead=[] if data.name == MNIST else [strong(WARNING)],
        )
    )


def _marked(data: str) -> str:
    return "" if data == MNIST else f" ({data} data)"


def _charts(settings: ThesisSettings, results: Results) -> list[Figure]:
    """The chart of each window: validation accuracy against the number of workers."""
    if len(settings.workers) < 2:
        return []
    of_setting, charts = by_setting(dict(results)), []
    x = np.array(settings.workers, np.float64)
    for window in settings.windows:
        lines = []
        for colour, rule in enumerate(settings.rules):
            means = [
                mean_and_spread(r.validation for r in of_setting.get((rule, n, window), ()))
                for n in settings.workers
            ]
            y = np.array([np.nan if mean is None else 100 * mean[0] for mean in means])
            lines.append(Line(RULES[rule], x, y, colour))
        title = f"lambda {window}"
        axes = Axes(f"Validation accuracy, %, against workers, {title}", str, zero=False)
        charts.append(Figure(title, line_chart(lines, axes)))
    return charts


def _times(settings: ThesisSettings, results: Results) -> list[list[str]]:
    """Rows of the mean virtual time and staleness of each rule."""
    of_setting, rows = by_setting(dict(results)), []
    for workers in settings.workers:
        for window in settings.windows:
            cells = []
            for rule in settings.rules:
                found = [r for r in of_setting.get((rule, workers, window), ()) if not r.diverged]
                if not found:
                    cells.append("-")
                    continue
                seconds = sum(r.seconds for r in found) / len(found)
                known = [r.staleness for r in found if r.staleness is not None]
                staleness = f" ({sum(known) / len(known):.1f})" if known else ""
                cells.append(f"{seconds:.0f}{staleness}")
            rows.append([str(workers), str(window), *cells])
    return rows
