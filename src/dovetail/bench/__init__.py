"""Computes the papers' tables and shows them side by side with ours.

    cases ──► table ──► worker processes ─► running: capture, bound, methods ──► rows/*.json
                │                           towers: towers, curves                   │
                └──────────── rows, towers, curves ◄─────────────────────────────────┘
                                      └──► page.write_page, tables.write_csv

This file imports nothing heavy, because every worker process imports it, also one that only waits.
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
