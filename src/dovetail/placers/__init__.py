"""Placers: which device runs each op. One file per method."""

from dovetail.placers.auto import BASELINES, PLACERS, Outcome, Placer, place
from dovetail.placers.budget import Budget, Score, parse_budget
from dovetail.placers.problem import GroupPlacement, Problem, make_problem

__all__ = [
    "BASELINES",
    "PLACERS",
    "Budget",
    "GroupPlacement",
    "Outcome",
    "Placer",
    "Problem",
    "Score",
    "make_problem",
    "parse_budget",
    "place",
]
