"""Placers: which device runs each op. One file per method."""

from dovetail.placers.baselines import BASELINES, Placer
from dovetail.placers.budget import Budget, Score, keeping_interrupts, parse_budget
from dovetail.placers.placing import PLACERS, PlacerOutcome, place
from dovetail.placers.problem import GroupPlacement, PlacementProblem, make_problem, permitted

__all__ = [
    "BASELINES",
    "PLACERS",
    "Budget",
    "GroupPlacement",
    "PlacementProblem",
    "Placer",
    "PlacerOutcome",
    "Score",
    "keeping_interrupts",
    "make_problem",
    "parse_budget",
    "permitted",
    "place",
]
