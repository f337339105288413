"""Plans: their records and files, the rules that `check` applies, and placements of towers."""

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
    load_plan,
    planned_graph,
    save_plan,
)
from dovetail.plans.rules import (
    Stages,
    capacities_of,
    check,
    check_completes,
    check_placement,
    needs_of,
    normalise,
    stages_of,
)
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
