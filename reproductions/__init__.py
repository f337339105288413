"""Computes the papers' tables and shows them side by side with ours.

    cases ──► tasks ──► worker processes ─► running: capture, bound, methods ──► rows/*.json
                │                           learned: trainings                       │
                │                           towers: towers, curves                   │
                └──────────── rows, towers, curves ◄─────────────────────────────────┘
                                      └──► page, tables ──┐
    dos, elsewhere ──► dos_page ──────────────────────────┼──► results: page, CSV files, terminal
    thesis ──► thesis_page ───────────────────────────────┘
    elsewhere ──► elsewhere_page: schedules of any network where they were not made for

This file imports nothing heavy, because every worker process imports it, also one that only waits.
"""

from pathlib import Path

STYLE = Path(__file__).with_name("papers.css")
"""The style sheet of the papers' pages, behind that of `dovetail.reports`."""
DOS_STYLE = Path(__file__).with_name("dos.css")
"""The same for pages that draw DOS's figure 7 and matrices of its tables 1 and 2."""
