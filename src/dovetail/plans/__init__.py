"""Plans: records, rules, files."""

from dovetail.plans.files import load_plan, save_plan
from dovetail.plans.records import (
    OBJECTIVES,
    Placement,
    Plan,
    Schedule,
    Source,
    Stage,
    describe_gap,
)
from dovetail.plans.rules import capacities_of, check, check_placement, normalise

__all__ = [
    "OBJECTIVES",
    "Placement",
    "Plan",
    "Schedule",
    "Source",
    "Stage",
    "capacities_of",
    "check",
    "check_placement",
    "describe_gap",
    "load_plan",
    "normalise",
    "save_plan",
]
