"""Shows the thesis' grid: a page, a CSV file and the lines of a table.

Wherever figures stand that are of the stand-in and not of MNIST, it says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from dovetail.reports.charts import Axes, Line, line_chart
from dovetail.reports.kit import (
    Card,
    Figure,
    Figures,
    Page,
    Section,
    Table,
    render_page,
    strong,
)
from reproductions.results import Outcome, PaperTable, ResultTable
from reproductions.thesis import (
    MNIST,
    RULES,
    ThesisCell,
    ThesisResult,
    ThesisSettings,
    by_setting,
    mean_and_spread,
    published,
    run_grid,
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


def paper_table(settings: ThesisSettings, *, jobs: int, fresh: bool) -> PaperTable:
    """The thesis' grid, as the command line asks for it."""
    data = settings.load()
    numbers = {"workers": settings.workers, "windows": settings.windows}
    lists = (f"--{name} {','.join(map(str, values))}" for name, values in numbers.items())
    command = (
        f"python -m reproductions thesis {' '.join(lists)} --epochs {settings.epochs}"
        f"{' --data MNIST' if settings.data else ''}"
        f"{f' --samples {settings.samples}' if settings.samples else ''}"
        f" --seeds {settings.seeds} --seed {settings.seed} --jobs {jobs}"
    )

    def compute(tell: Callable[[str, float], None], complain: Callable[[str], None]) -> Outcome:
        results, failures = run_grid(settings, jobs=jobs, fresh=fresh, tell=tell, complain=complain)
        cells = [asdict(cell) | asdict(result) for cell, result in results.items()]
        return Outcome(
            page=lambda facts: render(settings, results, facts=facts),
            files={"rows.csv": lines_of(settings, results)},
            printed=[table.shown() for table in tables_of(settings, results)],
            summary={"table": "thesis", "data": data.name, "cells": cells},
            failures=failures,
            said=ordering(settings, results),
        )

    warning = "" if data.name == MNIST else WARNING
    return PaperTable(settings.out, command, ("rows.csv",), compute, warning)


def lines_of(settings: ThesisSettings, results: Results) -> ResultTable:
    """A line for each cell that is done, in full precision."""
    data, printed = settings.load(), published()
    lines = []
    for cell, result in results.items():
        line = vars(cell) | vars(result)
        line["data"], line["training_samples"] = data.name, len(data.labels)
        line["epochs"], line["virtual_seconds"] = settings.epochs, result.seconds
        line["wall_seconds"] = round(result.wall_seconds, 3)
        if paper := printed.get((cell.rule, cell.workers, cell.window)):
            line |= {f"thesis_{name}": value for name, value in vars(paper).items()}
        lines.append(line)
    return ResultTable.of_records(FIELDS, lines)


def tables_of(settings: ThesisSettings, results: Results) -> list[ResultTable]:
    """The tables of validation and training accuracy: a row for each n and lambda, our columns,
    then the thesis'. Cells are % with half the seeds' range."""
    data = settings.load().name
    named = data if data == MNIST else f"the {data} (the thesis: on MNIST)"
    of_setting, printed = by_setting(results), published()
    beside = [rule for rule in settings.rules if (rule, 10, 10) in printed]
    head = ("n", "lambda", *(RULES[r] for r in settings.rules),
            *(f"{RULES[r]}, thesis" for r in beside))  # fmt: skip
    shown = []
    for figure in ("validation", "training"):
        rows = []
        for workers, window in settings.grid:
            cells: list[str | None] = []
            for rule in settings.rules:
                runs = of_setting.get((rule, workers, window), ())
                cells.append(_accuracy([getattr(run, figure) for run in runs]))
            for rule in beside:
                paper = printed.get((rule, workers, window))
                cells.append(None if paper is None else f"{100 * getattr(paper, figure):.2f}")
            rows.append((workers, window, *cells))
        title = f"{figure.capitalize()} accuracy, %, on {named}"
        shown.append(ResultTable.of(head, rows, title=title))
    return shown


def _accuracy(values: Sequence[float | None]) -> str | None:
    found = mean_and_spread(values)
    if found is None:
        return None
    mean, spread = found
    text = f"{100 * mean:.2f}" + (f" ± {100 * spread:.2f}" if len(values) > 1 else "")
    lost = sum(value is None for value in values)
    return f"{text} ({lost} of {len(values)} diverged)" if lost else text


def ordering(settings: ThesisSettings, results: Results) -> str:
    """In how many settings AGN's validation accuracy is above AEASGD's, here and in the thesis."""
    of_setting, printed = by_setting(results), published()
    ours = theirs = both = count = 0
    for setting in settings.grid:
        keys = [(rule, *setting) for rule in ("agn", "aeasgd")]
        agn, aeasgd = (
            mean_and_spread(run.validation for run in of_setting.get(key, ())) for key in keys
        )
        if agn is None or aeasgd is None:
            continue
        count += 1
        ours += agn[0] > aeasgd[0]
        paper_agn, paper_aeasgd = map(printed.get, keys)
        if paper_agn is not None and paper_aeasgd is not None:
            both += 1
            theirs += paper_agn.validation > paper_aeasgd.validation
    if not count:
        return ""
    text = f"AGN's validation accuracy is above AEASGD's in {ours} of {count} settings"
    return text + (f"; in the thesis in {theirs} of the {both} that it has" if both else "")


def render(
    settings: ThesisSettings, results: Results, *, facts: Sequence[tuple[str, str]] = ()
) -> str:
    """The page as text."""
    data, of_setting = settings.load(), by_setting(results)
    cards: list[Card] = [
        ("data", data.name, f"{len(data.labels):,} to train on, {len(data.test_labels):,} to test"),
        ("cells", f"{len(results):,} of {len(settings.cells):,}", f"{settings.seeds} seeds each"),
        ("epochs", str(settings.epochs), "of 40 in the thesis"),
    ]
    text = ordering(settings, results)
    charts = []
    for window in settings.windows if len(settings.workers) > 1 else ():
        lines = []
        for colour, rule in enumerate(settings.rules):
            means = [
                mean_and_spread(r.validation for r in of_setting.get((rule, n, window), ()))
                for n in settings.workers
            ]
            y = np.array([np.nan if mean is None else 100 * mean[0] for mean in means])
            lines.append(Line(RULES[rule], np.array(settings.workers, np.float64), y, colour))
        title = f"lambda {window}"
        axes = Axes(f"Validation accuracy, %, against workers, {title}", str, zero=False)
        charts.append(Figure(title, line_chart(lines, axes)))
    times = []
    for setting in settings.grid:
        cells: list[str | None] = []
        for rule in settings.rules:
            runs = [r for r in of_setting.get((rule, *setting), ()) if not r.diverged]
            known = [r.staleness for r in runs if r.staleness is not None]
            staleness = f" ({sum(known) / len(known):.1f})" if known else ""
            mean = sum(r.seconds for r in runs) / len(runs) if runs else 0.0
            cells.append(f"{mean:.0f}{staleness}" if runs else None)
        times.append((*setting, *cells))
    head = ("n", "lambda", *(RULES[rule] for rule in settings.rules))
    return render_page(
        Page(
            "Workers and windows: the thesis' grid, and ours"
            + ("" if data.name == MNIST else f" ({data.name} data)"),
            cards,
            [
                Section("Accuracy", [
                    "J. Hermans, On Scalable Deep Learning and Parallelizing Gradient Descent, "
                    "2017, chapter Accumulated Gradient Normalization, last table: n workers, "
                    "lambda local steps between commits, a perceptron of 784-1000-2000-1000-10. A "
                    "cell is the mean of the seeds, and half the way from the lowest to the "
                    "highest. The thesis' training accuracy is the workers' on their last batches; "
                    "ours is the center's.",
                    *([f"{text}."] if text else []),
                    *(table.section() for table in tables_of(settings, results)),
                ]),
                *([Section("More workers", [Figures(charts)])] if charts else []),
                Section("Virtual time", [
                    "Steps of one worker until the run ended, and in brackets the mean staleness "
                    "of the commits. The thesis' seconds are those of a cluster.",
                    ResultTable.of(head, times).shown(),
                ]),
                Section("How this was made", [Table((), facts, "scroll left")]),
            ],
            brand="python -m reproductions thesis",
            lead=[] if data.name == MNIST else [strong(WARNING)],
        )
    )  # fmt: skip
