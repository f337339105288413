"""The flow: MODEL and MACHINE texts -> costs -> placement -> plan -> timeline, report, exports."""

from dovetail.pipeline.opening import open_plan, timeline_of, verify
from dovetail.pipeline.planning import check_request, plan
from dovetail.pipeline.sources import (
    Progress,
    Step,
    check_replicas,
    costs_of,
    default_objective,
    graph_of,
    groups_of,
    machine_of,
    names_file,
    replicated,
    resolve_machine,
    resolve_model,
    silent,
)
from dovetail.pipeline.using import EXPORTS, check_export, export, report, run, write_trace

__all__ = [
    "EXPORTS",
    "Progress",
    "Step",
    "check_export",
    "check_replicas",
    "check_request",
    "costs_of",
    "default_objective",
    "export",
    "graph_of",
    "groups_of",
    "machine_of",
    "names_file",
    "open_plan",
    "plan",
    "replicated",
    "report",
    "resolve_machine",
    "resolve_model",
    "run",
    "silent",
    "timeline_of",
    "verify",
    "write_trace",
]
