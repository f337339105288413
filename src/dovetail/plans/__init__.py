"""Plans: records, rules, files."""

from dovetail.plans.files import load_plan, save_plan
from dovetail.plans.orders import Stages, check_completes, needs_of, stages_of
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
    planned_graph,
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
    "Stages",
    "capacities_of",
    "check",
    "check_completes",
    "check_placement",
    "describe_gap",
    "format_value",
    "load_plan",
    "needs_of",
    "normalise",
    "planned_graph",
    "save_plan",
    "stages_of",
    "tower_placement",
    "tower_seconds",
]
