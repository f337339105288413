"""Plans: records, rules, files."""

from dovetail.plans.files import load_plan, save_plan
from dovetail.plans.records import (
    OBJECTIVES,
    OPTIMAL_GAP,
    SEARCH_PROOFS,
    Placement,
    Plan,
    Schedule,
    Source,
    Stage,
    describe_gap,
    format_value,
)
from dovetail.plans.rules import capacities_of, check, check_placement, normalise
from dovetail.plans.towers import tower_placement, tower_seconds

__all__ = [
    "OBJECTIVES",
    "OPTIMAL_GAP",
    "SEARCH_PROOFS",
    "Placement",
    "Plan",
    "Schedule",
    "Source",
    "Stage",
    "capacities_of",
    "check",
    "check_placement",
    "describe_gap",
    "format_value",
    "load_plan",
    "normalise",
    "save_plan",
    "tower_placement",
    "tower_seconds",
]
