"""The flow: MODEL and MACHINE texts -> costs -> placement -> plan -> timeline, report, exports."""

from dovetail.pipeline.courses import Course, Subject, check_course, check_subject, settings_for
from dovetail.pipeline.learning import Lesson, learn, learn_all
from dovetail.pipeline.opening import open_plan, timeline_of, verify, with_schedules
from dovetail.pipeline.phases import PhasesPlan, phase_paths, plan_phases, weights_of
from dovetail.pipeline.planning import check_policy, check_request, plan
from dovetail.pipeline.schedules import Wanted, schedules
from dovetail.pipeline.scheduling import schedule
from dovetail.pipeline.sharing import planned
from dovetail.pipeline.sources import (
    Notes,
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
from dovetail.pipeline.using import (
    EXPORTS,
    FOLDERS,
    check_export,
    disturbance_of,
    export,
    make_folder,
    report,
    run,
    write_trace,
)

__all__ = [
    "EXPORTS",
    "FOLDERS",
    "Course",
    "Lesson",
    "Notes",
    "PhasesPlan",
    "Progress",
    "Step",
    "Subject",
    "Wanted",
    "check_course",
    "check_export",
    "check_policy",
    "check_replicas",
    "check_request",
    "check_subject",
    "costs_of",
    "default_objective",
    "disturbance_of",
    "export",
    "graph_of",
    "groups_of",
    "learn",
    "learn_all",
    "machine_of",
    "make_folder",
    "names_file",
    "open_plan",
    "phase_paths",
    "plan",
    "plan_phases",
    "planned",
    "replicated",
    "report",
    "resolve_machine",
    "resolve_model",
    "run",
    "schedule",
    "schedules",
    "settings_for",
    "silent",
    "timeline_of",
    "verify",
    "weights_of",
    "with_schedules",
    "write_trace",
]
