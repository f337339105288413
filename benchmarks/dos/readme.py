"""Write the tables of README.md from the rows.csv beside it: python benchmarks/dos/readme.py

`python -m reproductions dos` writes rows.csv; no figure of the README is typed by hand.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import fill, read_csv, table

from reproductions.dos import OTHER_SIZE
from reproductions.dos_page import tables_of

HERE = Path(__file__).parent
NAMES = ("table 5", "work", "search", "table 1", "table 2", "figure 6", "figure 7", "blocks")


def main(folder: Path = HERE) -> None:
    lines = read_csv(folder / "rows.csv")
    if any(line["size"] for line in lines):
        sys.exit(f"rows.csv is no result for the README. {OTHER_SIZE}")
    shown = {found.key: found for found in tables_of(lines)}
    for name in NAMES:
        found = shown.get(name)
        text = "Not computed." if found is None else table(found.head, found.cells)
        fill(folder / "README.md", name, text)


if __name__ == "__main__":
    main()
