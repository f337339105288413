"""Placers: which device runs each op. One file per method, and `methods.PLACERS` lists them."""

from dovetail.methods import PLACERS
from dovetail.placers.baselines import BASELINES, Placer
from dovetail.placers.budget import (
    Budget,
    Limits,
    Score,
    keeping_interrupts,
    parse_budget,
    parse_limits,
)
from dovetail.placers.placing import PlacerOutcome, place
from dovetail.placers.problem import GroupPlacement, PlacementProblem, make_problem, permitted

__all__ = [
    "BASELINES",
    "PLACERS",
    "Budget",
    "GroupPlacement",
    "Limits",
    "PlacementProblem",
    "Placer",
    "PlacerOutcome",
    "Score",
    "keeping_interrupts",
    "make_problem",
    "parse_budget",
    "parse_limits",
    "permitted",
    "place",
]
