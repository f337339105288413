"""The papers' tables side by side with ours."""

# page.py:     write_page(name, cases, rows, towers, curves, path); name is "rl17" or "gdp", rows
#              are those that are done, in the cases' order
# tables.py:   write_csv(name, cases, rows, path)
# figures.py:  work_of(graph, machine, costs, groups, placement) -> Work; placement [ops]
# learning.py: curves(...) -> list[Curve]

from dovetail.bench.cases import CASES, GDP_CASES, GDP_COLUMNS, RL17_CASES, RL17_COLUMNS
from dovetail.bench.records import Case, Column, Curve, Found, Published, Row, Tower, Work

__all__ = [
    "CASES",
    "GDP_CASES",
    "GDP_COLUMNS",
    "RL17_CASES",
    "RL17_COLUMNS",
    "Case",
    "Column",
    "Curve",
    "Found",
    "Published",
    "Row",
    "Tower",
    "Work",
]
