"""`python -m reproductions PAPER`: computes a paper's table, with the paper's columns and ours side
by side. It runs in a checkout of the project."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.__main__ import run
from dovetail.cli import DEBUG, run_app
from dovetail.cli.arguments import Json, check_outputs
from dovetail.cli.options import command
from dovetail.cli.output import progress_bar, say, show, show_json
from dovetail.errors import UsageError
from dovetail.interrupts import take_interrupts
from dovetail.runtime.files import refuse_links, use_own_cache

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from reproductions import CaseResult, Column
    from reproductions.dos import DosSettings
    from reproductions.table import BenchTable
    from reproductions.thesis import ThesisSettings

PAGE, CSV, TRAININGS = "index.html", "rows.csv", "trainings.csv"
"""The files that the command writes into its folder."""


class Paper(StrEnum):
    """The papers whose tables the command can compute."""

    RL17 = "rl17"
    GDP = "gdp"
    DOS = "dos"
    THESIS = "thesis"


_PLACING = (Paper.RL17, Paper.GDP)
PAPERS_OF = {
    **dict.fromkeys(("budget", "learn", "controllers"), _PLACING),
    "rows": (*_PLACING, Paper.DOS),
    **dict.fromkeys(("jobs", "seeds"), (*_PLACING, Paper.THESIS)),
    **dict.fromkeys(("workers", "windows", "epochs", "data", "samples"), (Paper.THESIS,)),
    **dict.fromkeys(("device", "batch", "rounds", "sampled", "size"), (Paper.DOS,)),
}
"""Maps an option to the papers that it goes with. Those that are not named go with all."""


def bench(  # noqa: PLR0917  one argument an option
    context: typer.Context,
    paper: Annotated[
        Paper,
        typer.Argument(
            help="rl17: Mirhoseini et al., ICML 2017; gdp: Zhou et al., 2019; dos: Accelerate DNN "
            "Inference by Inter-Operator Parallelism, 2019; thesis: Hermans, 2017, update rules by "
            "workers and windows"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder for {PAGE}, {CSV} and the results. Must be given"),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Limit of each search: seconds (20s) or evaluations (5000e)")
    ] = ("20s"),
    rows: Annotated[
        str,
        typer.Option(
            help='Compute only these rows, e.g. "rnnlm-*,nmt-2gpu", or of dos '
            '"table5.*,table2.squeezenet.cpu"'
        ),
    ] = "",
    learn: Annotated[
        str,
        typer.Option(
            help="Placements that each training of a learned method tries, e.g. "
            '"5000e,hdp=1000e". "": no learned methods'
        ),
    ] = "3000e",
    seeds: Annotated[
        int, typer.Option(min=1, help="Trainings of each learned method, with seeds from --seed on")
    ] = 3,
    controllers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Asynchronous controllers of each training, around a parameter server; 1: one "
            "learner without a server",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of every method, and of the first training")] = 0,
    fresh: Annotated[
        bool, typer.Option(help="Compute these rows anew, even if their results are kept")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Rows that are computed at once, each on a core")
    ] = 2,
    workers: Annotated[
        str, typer.Option(help="thesis: numbers of workers n, e.g. 1,2")
    ] = "10,15,20,25,30,35,40",
    windows: Annotated[
        str, typer.Option(help="thesis: windows lambda, e.g. 5,10")
    ] = "10,15,20,25,30,35,40",
    epochs: Annotated[int, typer.Option(min=1, help="thesis: passes over the data")] = 40,
    data: Annotated[
        str,
        typer.Option(
            help="thesis: MNIST, a folder of its idx files or Keras' mnist.npz. Without it the "
            "data are a stand-in"
        ),
    ] = "",
    samples: Annotated[
        int | None, typer.Option(min=1, help="thesis: train on the first samples alone")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="dos: cpu or cuda:0, which are measured, and presets, which are predicted. Table "
            "1 has the paper's as well"
        ),
    ] = "cpu,v100",
    batch: Annotated[str, typer.Option(help="dos: batch sizes of table 2 and figure 6")] = (
        "1,2,4,8,16"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="dos: rounds of measuring")] = 15,
    sampled: Annotated[
        int, typer.Option(min=0, help="dos: random schedules of each network (figure 7)")
    ] = 100,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="dos: pixels of an image's side. By default the network's own"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute a paper's table with every method, and write it beside the paper's figures.

    Results are kept, so the same command goes on where it was stopped. If a row fails, the other
    rows are written and the exit status is 1.
    """
    from dovetail.pipeline.requests import check_seed

    _check_options(context, paper)
    check_seed(seed)
    if paper is Paper.DOS:
        from dovetail.runtime.setup import spin_briefly

        # OpenMP reads its settings when torch is imported, so this comes before.
        spin_briefly()
        from reproductions.dos import DosSettings

        devices = tuple(dict.fromkeys(filter(None, (part.strip() for part in device.split(",")))))
        networks = DosSettings(
            _folder(paper, out), devices, _numbers("--batch", batch), rounds, sampled, size, seed
        )
        _bench_dos(networks, rows, fresh, as_json)
        return
    if paper is Paper.THESIS:
        from reproductions.thesis import ThesisSettings

        grid = ThesisSettings(
            _folder(paper, out),
            _numbers("--workers", workers),
            _numbers("--windows", windows),
            epochs=epochs,
            data=data,
            samples=samples,
            seeds=seeds,
            seed=seed,
        )
        _bench_thesis(grid, jobs, fresh, as_json)
        return
    from dovetail.placers import parse_budget
    from reproductions.cases import CASES
    from reproductions.page import write_page
    from reproductions.running import BenchSettings
    from reproductions.table import matching, run_table
    from reproductions.tables import write_csv, write_trainings

    parse_budget(budget)
    trials, trials_of = _learning(paper.value, learn)
    matching(CASES[paper.value], rows)
    folder = _folder(paper, out)
    settings = BenchSettings(
        paper.value,
        folder,
        budget,
        seed,
        learn=trials,
        learn_of=trials_of,
        seeds=seeds,
        controllers=controllers,
    )
    settings.store(say)  # makes the folder
    page, csv, trainings = folder / PAGE, folder / CSV, folder / TRAININGS
    check_outputs(page, csv, trainings)
    with progress_bar() as progress:
        table = run_table(
            settings,
            rows=rows,
            jobs=jobs,
            fresh=fresh,
            tell=lambda said, fraction: progress(said, fraction, None),
            complain=say,
        )
    asked = learn or '""'
    facts = _facts(
        f"python -m reproductions {paper.value} --budget {budget} --learn {asked} --seeds {seeds} "
        f"--seed {seed} --jobs {jobs}" + (f" --controllers {controllers}" * (controllers > 1))
    )
    write_page(paper.value, table.cases, table.rows, table.towers, table.curves, page, facts=facts)
    write_csv(paper.value, table.cases, table.rows, csv)
    write_trainings(paper.value, table.done, trainings)
    for written in (page, csv, trainings):
        say(f"wrote {written}")
    for task, failure in table.failures.items():
        say(f"error: {task} failed:\n{failure}")
    if as_json:
        show_json(_summary(paper.value, table, page, csv))
    else:
        show(_rows_table(table))
    if table.failures:
        raise typer.Exit(1)


def _check_options(context: typer.Context, paper: Paper) -> None:
    """Raise `UsageError` for an option that was given and belongs to another table."""
    for name, papers in PAPERS_OF.items():
        source = context.get_parameter_source(name)
        if paper not in papers and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name}", f"does not go with {paper.value}")


def _folder(paper: Paper, out: Path | None) -> Path:
    if out is None:
        raise UsageError("--out", f"name the folder of the table, such as benchmarks/{paper.value}")
    if out.exists() and not out.is_dir():
        raise UsageError("--out", f"{out} is a file; name a folder")
    for name in (PAGE, CSV, TRAININGS):
        refuse_links(out / name)
    return out


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """The distinct numbers that "10,15" names, in its order. Raises `UsageError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(option, f"{text!r} is not a list of numbers such as 10,15")
    return tuple(dict.fromkeys(map(int, parts)))


def _bench_thesis(settings: "ThesisSettings", jobs: int, fresh: bool, as_json: bool) -> None:
    """Compute the thesis' grid, write its files, and print its tables or one JSON object."""
    from dataclasses import asdict

    from reproductions.thesis import MNIST, run_grid
    from reproductions.thesis_page import (
        WARNING,
        ordering,
        tables_of,
        write_thesis_csv,
        write_thesis_page,
    )

    data = settings.load()
    if data.name != MNIST:
        say(f"warning: {WARNING}")
    page, csv = settings.out / PAGE, settings.out / CSV
    settings.out.mkdir(parents=True, exist_ok=True)
    check_outputs(page, csv)
    with progress_bar() as progress:
        results, failures = run_grid(
            settings,
            jobs=jobs,
            fresh=fresh,
            tell=lambda said, fraction: progress(said, fraction, None),
            complain=say,
        )
    write_thesis_page(settings, results, page, facts=_facts(_thesis_command(settings, jobs)))
    write_thesis_csv(settings, results, csv)
    for written in (page, csv):
        say(f"wrote {written}")
    for task, failure in failures.items():
        say(f"error: {task} failed:\n{failure}")
    if as_json:
        cells = [asdict(cell) | asdict(result) for cell, result in results.items()]
        files = {"page": str(page), "csv": str(csv)}
        show_json(
            {"table": "thesis", "data": data.name, "cells": cells, "failures": failures} | files
        )
    else:
        for table in tables_of(settings, results):
            show(table)
        say(ordering(settings, results))
    if failures:
        raise typer.Exit(1)


def _bench_dos(settings: "DosSettings", rows: str, fresh: bool, as_json: bool) -> None:
    """Compute DOS's tables, write their files, and print the tables or one JSON object."""
    from dovetail.reports.kit import Table
    from reproductions.dos import OTHER_SIZE, run_rows
    from reproductions.dos_page import tables_of, write_dos_csv, write_dos_page
    from reproductions.table import matching

    matching(settings.rows, rows)
    warning = "" if settings.size is None else OTHER_SIZE
    if warning:
        say(f"warning: {warning}")
    page, csv = settings.out / PAGE, settings.out / CSV
    settings.out.mkdir(parents=True, exist_ok=True)
    check_outputs(page, csv)
    with progress_bar() as progress:
        found = run_rows(
            settings,
            rows=rows,
            fresh=fresh,
            tell=lambda said, fraction: progress(said, fraction, None),
            complain=say,
        )
    facts = _facts(_dos_command(settings))
    write_dos_page(found.lines, page, missing=found.missing, warning=warning, facts=facts)
    write_dos_csv(found.lines, csv)
    for written in (page, csv):
        say(f"wrote {written}")
    for task, failure in found.failures.items():
        say(f"error: {task} failed:\n{failure}")
    if as_json:
        show_json({
            "table": "dos", "lines": found.lines, "missing": found.missing,
            "tasks": found.computed, "failures": found.failures, "page": str(page),
            "csv": str(csv),
        })  # fmt: skip
    else:
        for shown in tables_of(found.lines):
            show(Table(shown.head, shown.rows, title=shown.title))
    if found.failures:
        raise typer.Exit(1)


def _dos_command(settings: "DosSettings") -> str:
    words = [
        "python -m reproductions dos",
        f"--device {','.join(settings.devices)}",
        f"--batch {','.join(map(str, settings.batches))}",
        f"--rounds {settings.rounds} --sampled {settings.sampled}",
        *([f"--size {settings.size}"] if settings.size else []),
        f"--seed {settings.seed}",
    ]
    return " ".join(words)


def _thesis_command(settings: "ThesisSettings", jobs: int) -> str:
    numbers = {"workers": settings.workers, "windows": settings.windows}
    lists = [f"--{name} {','.join(map(str, values))}" for name, values in numbers.items()]
    words = ["python -m reproductions thesis", *lists, f"--epochs {settings.epochs}"]
    words += ["--data MNIST"] if settings.data else []
    words += [f"--samples {settings.samples}"] if settings.samples else []
    words += [f"--seeds {settings.seeds} --seed {settings.seed} --jobs {jobs}"]
    return " ".join(words)


def _learning(paper: str, text: str) -> tuple[int, dict[str, int]]:
    """Reads a text such as "5000e,hdp=1000e". Raises `UsageError`.

    Returns (trials of a training, method -> its own number of trials).
    """
    from reproductions.cases import LEARNED

    trials, of = 0, dict[str, int]()
    for part in text.split(","):
        method, given, number = part.rpartition("=")
        if not given:
            trials = _trials(part)
        elif method.strip() in LEARNED[paper]:
            of[method.strip()] = _trials(number)
        else:
            methods = ", ".join(LEARNED[paper])
            raise UsageError("--learn", f"{method!r} is not one of {methods}, which learn here")
    return trials, of


def _trials(text: str) -> int:
    """The placements of a training that "3000e" or "3000" names; 0 for "". Raises `UsageError`."""
    digits = text.strip().removesuffix("e") or "0"
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError("--learn", f"{text!r} is no number of placements; write 3000e")
    return int(digits)


def _facts(command: str) -> list[tuple[str, str]]:
    """The lines of the page about how it was made."""
    import os
    from importlib.metadata import version

    from dovetail.machine import local_machine

    cores = len(os.sched_getaffinity(0))
    return [
        ("command", command),
        ("machine", f"{cores} cores of {local_machine().devices[0].model}"),
        ("versions", f"dovetail {version('dovetail')}, torch {version('torch')}"),
    ]


def _summary(paper: str, table: "BenchTable", page: Path, csv: Path) -> dict[str, Any]:
    """The object that `bench --json` prints."""
    return {
        "table": paper,
        "rows": [_row_summary(row) for row in table.rows],
        "missing": sorted({case.key for case in table.cases} - {row.key for row in table.rows}),
        "towers": [vars(tower) for tower in table.towers],
        "tasks": table.computed,
        "failures": table.failures,
        "page": str(page),
        "csv": str(csv),
    }


def _row_summary(row: "CaseResult") -> dict[str, Any]:
    return {
        "key": row.key,
        "ops": row.ops,
        "groups": row.groups,
        "flops": row.flops,
        "parameter_bytes": row.parameter_bytes,
        "seconds": row.seconds,
        "columns": {name: _column_summary(column) for name, column in row.columns.items()},
    }


def _column_summary(column: "Column") -> dict[str, Any]:
    return {
        "best": column.best or None,
        "value": column.methods[column.best].seconds if column.best else None,
        "lower_bound": column.bound,
        "bound_proof": column.proof,
        "methods": {name: found.seconds for name, found in column.methods.items()},
        "learned": {
            method: [
                {
                    "seed": run.seed,
                    "seconds": run.found.seconds,
                    "trials": run.trials,
                    "controllers": run.controllers,
                }
                for run in runs
            ]
            for method, runs in column.learned.items()
        },
    }


def _rows_table(table: "BenchTable") -> "RichTable":
    """A table with a line for each row and column: the expert's value, the best one, the bound."""
    from rich.table import Table as RichTable

    from dovetail.units import format_seconds

    shown = RichTable("row", "column", "ops", "expert", "best", "method", "bound", "took")
    for column_head in shown.columns[1:]:
        column_head.no_wrap = True
    titles = {case.key: case.title for case in table.cases}
    for row in table.rows:
        for name, column in row.columns.items():
            expert = column.methods.get("expert")
            best = column.methods.get(column.best)
            times = [
                "-" if result is None or result.seconds is None else format_seconds(result.seconds)
                for result in (expert, best)
            ]
            shown.add_row(
                titles[row.key],
                name,
                str(row.ops),
                *times,
                column.best or "nothing fits",
                format_seconds(column.bound),
                format_seconds(row.seconds),
            )
    return shown


def main() -> None:
    """Run the command line and exit with its status."""
    take_interrupts()
    # Before torch is imported, here or by a process that this one starts.
    use_own_cache()
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]
    run_app(app_of_papers, arguments, DEBUG in sys.argv[1:])


def app_of_papers() -> typer.Typer:
    """The command line, which has the one command."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"max_content_width": 100},
    )
    app.command(no_args_is_help=True)(command(bench))
    return app


if __name__ == "__main__":
    run(main)
