"""Computes the papers' tables and shows them side by side with ours.

    cases ──► table ──► worker processes ─► running: capture, bound, methods ──► rows/*.json
                │                           towers: towers, curves                   │
                └──────────── rows, towers, curves ◄─────────────────────────────────┘
                                      └──► page.write_page, tables.write_csv

This file imports nothing heavy, because every worker process imports it, also one that only waits.
"""

from pathlib import Path

from reproductions.cases import CASES, GDP_CASES, GDP_COLUMNS, RL17_CASES, RL17_COLUMNS
from reproductions.records import (
    Case,
    CaseResult,
    Column,
    LossCurve,
    MethodResult,
    PlanWork,
    Published,
    TowerResult,
)

STYLE = Path(__file__).with_name("papers.css")
"""The style sheet of the papers' pages, behind that of `dovetail.reports`."""

__all__ = [
    "CASES",
    "GDP_CASES",
    "GDP_COLUMNS",
    "RL17_CASES",
    "RL17_COLUMNS",
    "STYLE",
    "Case",
    "CaseResult",
    "Column",
    "LossCurve",
    "MethodResult",
    "PlanWork",
    "Published",
    "TowerResult",
]
