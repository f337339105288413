"""`python -m reproductions PAPER`: computes a paper's table, with the paper's columns and ours side
by side. It runs in a checkout of the project."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from reproductions.results import PaperTable

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

    for name, papers in PAPERS_OF.items():
        source = context.get_parameter_source(name)
        if paper not in papers and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name}", f"does not go with {paper.value}")
    check_seed(seed)
    if paper is Paper.DOS:
        from dovetail.runtime.setup import spin_briefly

        # OpenMP reads its settings when torch is imported, so this comes before.
        spin_briefly()
        from reproductions import dos_page
        from reproductions.dos import DosSettings

        devices = tuple(dict.fromkeys(filter(None, (part.strip() for part in device.split(",")))))
        networks = DosSettings(
            _folder(paper, out), devices, _numbers("--batch", batch), rounds, sampled, size, seed
        )
        table = dos_page.paper_table(networks, rows=rows, fresh=fresh)
    elif paper is Paper.THESIS:
        from reproductions import thesis_page
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
        table = thesis_page.paper_table(grid, jobs=jobs, fresh=fresh)
    else:
        from dovetail.placers import parse_budget
        from reproductions import page
        from reproductions.cases import CASES
        from reproductions.running import BenchSettings
        from reproductions.tasks import matching

        parse_budget(budget)
        trials, trials_of = _learning(paper.value, learn)
        matching(CASES[paper.value], rows)
        settings = BenchSettings(
            paper.value,
            _folder(paper, out),
            budget,
            seed,
            learn=trials,
            learn_of=trials_of,
            seeds=seeds,
            controllers=controllers,
        )
        settings.store(say)  # so that a folder that cannot be used is told of before all else
        asked = learn or '""'
        command = (
            f"python -m reproductions {paper.value} --budget {budget} --learn {asked} "
            f"--seeds {seeds} --seed {seed} --jobs {jobs}"
            f"{f' --controllers {controllers}' * (controllers > 1)}"
        )
        table = page.paper_table(settings, rows=rows, jobs=jobs, fresh=fresh, command=command)
    _compute(table, as_json)


def _compute(table: "PaperTable", as_json: bool) -> None:
    """Compute a table, write its page and files, and print its tables or one JSON object."""
    import os
    from importlib.metadata import version

    from dovetail.machine import local_machine
    from dovetail.reports.kit import save_page
    from dovetail.runtime.files import write_atomically

    if table.warning:
        say(f"warning: {table.warning}")
    table.out.mkdir(parents=True, exist_ok=True)
    page, files = table.out / PAGE, {name: table.out / name for name in table.files}
    check_outputs(page, *files.values())
    with progress_bar() as progress:
        found = table.compute(lambda said, fraction: progress(said, fraction, None), say)
    facts = [
        ("command", table.command),
        ("machine", f"{len(os.sched_getaffinity(0))} cores of {local_machine().devices[0].model}"),
        ("versions", f"dovetail {version('dovetail')}, torch {version('torch')}"),
    ]
    save_page(found.page(facts), page)
    for name, path in files.items():
        write_atomically(path, found.files[name].csv_text())
    for written in (page, *files.values()):
        say(f"wrote {written}")
    for task, failure in found.failures.items():
        say(f"error: {task} failed:\n{failure}")
    if as_json:
        paths = {"page": str(page), "csv": str(files[CSV])}
        show_json({**found.summary, "failures": found.failures, **paths})
    else:
        for shown in found.printed:
            show(shown)
        if found.said:
            say(found.said)
    if found.failures:
        raise typer.Exit(1)


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


def _learning(paper: str, text: str) -> tuple[int, dict[str, int]]:
    """Reads a text such as "5000e,hdp=1000e". Raises `UsageError`.

    Returns (trials of a training, method -> its own number of trials).
    """
    from reproductions.cases import LEARNED

    trials, of = 0, dict[str, int]()
    for part in text.split(","):
        method, given, number = part.rpartition("=")
        if given and method.strip() not in LEARNED[paper]:
            methods = ", ".join(LEARNED[paper])
            raise UsageError("--learn", f"{method!r} is not one of {methods}, which learn here")
        digits = number.strip().removesuffix("e") or "0"
        if not (digits.isascii() and digits.isdigit()):
            raise UsageError("--learn", f"{number!r} is no number of placements; write 3000e")
        if given:
            of[method.strip()] = int(digits)
        else:
            trials = int(digits)
    return trials, of


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
