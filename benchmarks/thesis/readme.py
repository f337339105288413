"""Write the tables of README.md from the rows.csv beside it: python benchmarks/thesis/readme.py

`python -m reproductions thesis` writes rows.csv; no figure of the README is typed by hand.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import fill, read_csv, table

from reproductions.thesis import RULES, mean_and_spread

HERE = Path(__file__).parent
FIGURES = ("validation", "training")
PUBLISHED = ("agn", "aeasgd")


def main() -> None:
    lines = read_csv(HERE / "rows.csv")
    settings = list(dict.fromkeys((int(x["workers"]), int(x["window"])) for x in lines))
    head = [
        "n",
        "lambda",
        *RULES.values(),
        *(f"{RULES[rule]}, thesis, MNIST" for rule in PUBLISHED),
    ]
    for figure in FIGURES:
        rows = [_row(lines, workers, window, figure) for workers, window in settings]
        fill(HERE / "README.md", figure, table(head, rows))
    commits = [_commits(lines, workers, window) for workers, window in settings]
    fill(HERE / "README.md", "commits", table(["n", "lambda", *RULES.values()], commits))


def _of(lines, workers: int, window: int, rule: str):
    wanted = (str(workers), str(window), rule)
    return [x for x in lines if (x["workers"], x["window"], x["rule"]) == wanted]


def _row(lines, workers: int, window: int, figure: str) -> list[str]:
    cells = []
    for rule in RULES:
        of_rule = _of(lines, workers, window, rule)
        found = mean_and_spread(float(x[figure]) if x[figure] else None for x in of_rule)
        cells.append("-" if found is None else f"{100 * found[0]:.1f} ± {100 * found[1]:.1f}")
    for rule in PUBLISHED:
        printed = _of(lines, workers, window, rule)[0][f"thesis_{figure}"]
        cells.append(f"{100 * float(printed):.2f}" if printed else "-")
    return [str(workers), str(window), *cells]


def _commits(lines, workers: int, window: int) -> list[str]:
    cells = []
    for rule in RULES:
        of_rule = _of(lines, workers, window, rule)
        known = [float(x["staleness"]) for x in of_rule if x["staleness"]]
        staleness = f", {sum(known) / len(known):.2f}" if known else ""
        cells.append(f"{of_rule[0]['commits']}{staleness}")
    return [str(workers), str(window), *cells]


if __name__ == "__main__":
    main()
