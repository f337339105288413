"""The papers' tables side by side with ours.

    cases ──► table ──► crew of workers ──► running: capture, bound, methods ──► rows/*.json
                │                           towers: towers, curves                   │
                └──────────── rows, towers, curves ◄─────────────────────────────────┘
                                      └──► page.write_page, tables.write_csv

This file imports nothing heavy: workers that only wait would pay for it.
"""

from dovetail.bench.cases import CASES, GDP_CASES, GDP_COLUMNS, RL17_CASES, RL17_COLUMNS
from dovetail.bench.records import (
    Case,
    CaseResult,
    Column,
    LossCurve,
    MethodResult,
    PlanWork,
    Published,
    TowerResult,
)

__all__ = [
    "CASES",
    "GDP_CASES",
    "GDP_COLUMNS",
    "RL17_CASES",
    "RL17_COLUMNS",
    "Case",
    "CaseResult",
    "Column",
    "LossCurve",
    "MethodResult",
    "PlanWork",
    "Published",
    "TowerResult",
]
