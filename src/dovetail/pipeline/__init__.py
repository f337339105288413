"""The flow: MODEL and MACHINE texts -> costs -> placement -> plan -> timeline, report, exports.

Pipelines of micro-batches are one part of it: `pipelining`.

Names are imported when they are first used: the records in `requests`, from which the command line
takes its defaults and help, need none of the libraries that planning needs.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "learning": "LearningResult learn learn_all",
    "opening": "open_plan open_to_show planned timeline_of verify with_schedules",
    "optimizing": "optimize",
    "phases": "PhasesPlan phase_paths plan_phases",
    "planning": "find_plan plan",
    "requests": "LearnRequest PhasesRequest PlanRequest ScheduleRequest TaskRequest "
    "default_objective",
    "scheduling": "find_schedules schedule schedules",
    "sources": "Notes Step TellProgress check_replicas costs_of graph_of groups_of machine_of "
    "names_file replicated resolve_machine resolve_model silent",
    "training_steps": "TrainingStep training_step",
    "using": "EXPORTS FOLDERS check_export disturbance_of export make_folder report run uncompiled "
    "write_trace",
}
"""Maps each module of this package to those of its names that can be imported from here."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dovetail.pipeline' has no attribute {name!r}")
    return getattr(import_module(f"dovetail.pipeline.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
