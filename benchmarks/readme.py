"""Write the tables of rl17/README.md and gdp/README.md from the CSV files beside them.

    python benchmarks/readme.py rl17 gdp

`python -m reproductions` writes rows.csv and trainings.csv; no figure of the README is typed by
hand.
"""

import sys
from pathlib import Path

from harness import fill, read_csv, table

from reproductions import tables
from reproductions.cases import CASES, LEARNED
from reproductions.methods import HYPOTHESIS, PLAIN
from reproductions.orderings import is_oom
from reproductions.records import BestSoFar, CaseResult, Column, LearnedRun, MethodResult
from reproductions.tables import middle

METHODS = {
    "rl17": (
        "1 CPU", "1 GPU", "scotch", "mincut", "metis", "expert", "heft", "auto", "auto-split",
        "seq2seq", "seq2seq-paper",
    ),
    "gdp": (
        "1 GPU", "metis", "scotch", "expert", "heft", "auto", "auto-split", "gdp", "gdp-paper",
        "hdp", "hdp-paper",
    ),
}  # fmt: skip
HERE = Path(__file__).parent


def rows_of(folder: Path, name: str) -> dict[str, CaseResult]:
    """key -> the row, as far as the CSV files tell of it."""
    lines = [line for line in read_csv(folder / "rows.csv") if line["column"]]
    runs = _trainings(folder / "trainings.csv")
    found: dict[str, CaseResult] = {}
    for key in dict.fromkeys(line["row"] for line in lines):
        own = [line for line in lines if line["row"] == key]
        columns = {
            column: _column([line for line in own if line["column"] == column], LEARNED[name])
            for column in dict.fromkeys(line["column"] for line in own)
        }
        for name_of_column, column in columns.items():
            learned = runs.get((key, name_of_column), {})
            column.learned.update({method: tuple(of) for method, of in learned.items()})
            column.methods.update({m: middle(of).found for m, of in learned.items()})
        sizes = [int(own[0][field]) for field in ("ops", "groups", "flops", "parameter_bytes")]
        found[key] = CaseResult(key, *sizes, columns, 0.0)
    return found


def _column(lines: list[dict[str, str]], learned: tuple[str, ...]) -> Column:
    methods = {
        line["method"]: MethodResult(_number(line["seconds"]), line["reason"], {},
                              _number(line["search_seconds"]) or 0.0)
        for line in lines
        if line["method"] not in learned
    }  # fmt: skip
    fitting = {name: found.seconds for name, found in methods.items() if found.seconds is not None}
    best = min(fitting, key=lambda name: fitting[name], default="")
    return Column(methods, best, float(lines[0]["bound_seconds"]), lines[0]["bound_proof"], {})


def _trainings(path: Path) -> dict[tuple[str, str], dict[str, list[LearnedRun]]]:
    """(row, column) -> method -> its trainings. Files of before the hypothesis was trained name no
    column and no controllers."""
    found: dict[tuple[str, str], dict[str, list[LearnedRun]]] = {}
    for line in read_csv(path) if path.exists() else ():
        bests = [best.split(":") for best in line["curve"].split(";") if best]
        run = LearnedRun(
            method=line["method"],
            seed=int(line["seed"]),
            found=MethodResult(
                _number(line["seconds"]), line["reason"], {}, float(line["wall_seconds"])
            ),
            groups=int(line["groups"]),
            grouping=line["grouping"],
            trials=int(line["trials"]),
            distinct=int(line["distinct"]),
            updates=int(line["updates"]),
            invalid_share=float(line["invalid_share"]),
            bests=tuple(BestSoFar(int(t), int(d), float(seconds)) for t, d, seconds in bests),
            controllers=int(line.get("controllers") or 1),
        )
        place = line["row"], line.get("column") or PLAIN
        found.setdefault(place, {}).setdefault(run.method, []).append(run)
    return found


def _number(text: str) -> float | None:
    return float(text) if text else None


def planned(name: str, rows: dict[str, CaseResult], column: str) -> str:
    """Every row's seconds by method, the best that does not learn, and the bound."""
    lines = []
    for case in CASES[name]:
        if case.key not in rows:
            continue
        row = rows[case.key]
        of = row.columns[column]
        best, expert = of.methods[of.best].seconds, of.methods["expert"].seconds
        lines.append((
            case.title, f"{row.ops:,}", f"{row.groups:,}",
            *(_cell(of.methods.get(method)) for method in METHODS[name]),
            f"{best:.3f} ({of.best})", f"{of.bound:.3f}", f"{100 * (best / of.bound - 1):.1f} %",
            "-" if expert is None else f"{expert / best:.2f}",
        ))  # fmt: skip
    head = ("row", "ops", "groups", *METHODS[name], "best planner", "bound", "above it",
            "expert / best")  # fmt: skip
    return table(head, lines)


def _cell(found: MethodResult | None) -> str:
    if found is None or found.seconds is None:
        return "OOM" if found is not None and is_oom(found) else "-"
    return f"{found.seconds:.3f}" if found.seconds < 10 else f"{found.seconds:.1f}"


def learned(name: str, rows: dict[str, CaseResult]) -> str:
    """The tables of the page's section on learned methods."""
    done = [(case, rows[case.key]) for case in CASES[name] if case.key in rows]
    parts = [
        f"* {what}: **{figure}** ({remark})" for what, figure, remark in tables.verdicts(name, done)
    ]
    for found in tables.tables_of(name, done):
        parts += ["", f"{found.title}:", "", table(found.head, found.cells)]
    return "\n".join(parts) or "Not run."


def main() -> None:
    for name in sys.argv[1:] or CASES:
        folder = HERE / name
        rows, readme = rows_of(folder, name), folder / "README.md"
        fill(readme, "planned", planned(name, rows, PLAIN))
        if any(HYPOTHESIS in row.columns for row in rows.values()):
            fill(readme, "hypothesis", planned(name, rows, HYPOTHESIS))
        fill(readme, "learned", learned(name, rows))


if __name__ == "__main__":
    main()
