"""Keeps found plans in the cache, so that nothing is searched, compiled and raced twice.

    CACHE/plans/KEY.json    as `Plan.save` writes it

KEY is made of all that a plan follows from: the step's graph and source, the machine, the request,
and the versions of dovetail, torch and the runner. A file is a plan as any other, read as data and
checked. One that is damaged, that keeps no promise, or that another user can write, counts as
missing.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dovetail.errors import DovetailError
from dovetail.frontends import Captured
from dovetail.frontends.runners import runner_kind
from dovetail.machine.files import machine_to_dict
from dovetail.pipeline.opening import planned, verify
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.using import uncompiled
from dovetail.plans import EAGER, Plan, check, load_plan
from dovetail.runtime.files import cache_folder, is_own
from dovetail.runtime.native import has_compiler
from dovetail.units import HERE

_OF_KEY = (
    "placer", "objective", "micro_batches", "schedule", "recompute", "replicas", "contiguous",
    "whole_seconds", "limits", "gap", "seed", "pins", "caps", "finetune", "per_op", "whole",
    "format", "resolved_gain", "stages", "compile_seconds",
)  # fmt: skip
"""The fields and properties of a request that a plan follows from, beside its step and machine."""


def kept_path(request: PlanRequest) -> Path | None:
    """Where the plan of a request is kept. None if it is not: a budget of evaluations asks for the
    search itself, and what comes from the caller's own files or functions may change unseen."""
    step = request.step
    if (
        not isinstance(step, Captured)
        or request.limits.evaluations < float("inf")
        or request.method is not None
        or request.policy is not None
        or request.place is not None
    ):
        return None
    try:
        own_version = version("dovetail")
    except PackageNotFoundError:  # a checkout on the path has none, and changes under its user
        return None
    machine, named = request.asked_machine, request.machine or HERE
    # A machine that a text names has as much memory as is free now, and rates that are measured.
    is_text = isinstance(named, str) and machine.local
    cores = [(device.cores, device.torch_device) for device in machine.devices]
    key = json.dumps([
        own_version, torch.__version__, runner_kind(), has_compiler(), step.graph.fingerprint,
        repr(step.source), repr(step.transforms), machine.fingerprint, cores,
        named if is_text else machine_to_dict(machine),
        {name: repr(getattr(request, name)) for name in _OF_KEY},
    ])  # fmt: skip
    return cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def kept_plan(path: Path, step: Captured) -> Plan | None:
    """The plan that is kept there; None if there is none that can be used."""
    if not is_own(path):
        return None
    with suppress(DovetailError):
        plan = load_plan(path)
        graph = plan.graph or planned(plan, step).graph
        check(plan, graph)
        verify(plan, graph)
        # Code that is kept no more is compiled by planning again.
        if uncompiled(plan, step):
            return None
        return replace(plan, graph=graph)
    return None


def keep(plan: Plan, path: Path, *, may_race: bool) -> None:
    """Keep a plan, unless it was interrupted, or could be compared and was not: what failed this
    time, such as for lack of memory, is tried again. A disk that is full or cannot be written is no
    reason to lose the plan."""
    if plan.interrupted or (may_race and not plan.measured):
        return
    with suppress(DovetailError, OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        plan.save(path)
        path.chmod(0o600)


def is_better(plan: Plan, other: Plan) -> bool:
    """True if the plan is faster than another one of the same request, as far as is known: by what
    each took of the eager step of its own race, and where none was raced, as predicted."""
    if plan.measured and other.measured:
        shares = [each.measured[each.way] / each.measured[EAGER] for each in (plan, other)]
        return shares[0] < shares[1]
    if bool(plan.measured) != bool(other.measured):
        return bool(plan.measured)
    return plan.value < other.value
