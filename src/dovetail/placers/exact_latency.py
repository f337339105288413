"""The `latency` of one sample as a CP-SAT model.

    min T   with, for every accelerator d and each of its calls (forward ops, backward ops) S,
    start(S) >= end(u)                         for every u elsewhere that an op of S reads
    end(S)   >= start(S) + sum of w(v, d)      over its ops
                         + sum of c(u)         over the outside u that it reads, once a device
                         + sum of c(v)         over its v that are read elsewhere, once
    end(v)   >= end(S) on an accelerator,      end(u) + w(v) for all u that v reads on a CPU
    T        >= end(v)

where placements, memory and the order of alike accelerators are those of `exact_master`. Parts that
wait for each other are ruled out by the times, as far as these are not 0.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423, section 4. Differences: a second call for backward
ops, as in `simulator.latency`; integers, rounded down, so that the bound holds.
"""

from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from dovetail.placers.exact_master import HORIZON_UNITS, Master, add_hop, new_master
from dovetail.placers.problem import Problem
from dovetail.simulator.latency import LatencyModel, latency_model

Call = tuple[int, int]  # (device, 0: forward or 1: backward)


@dataclass(eq=False)
class _Calls:
    """A model under construction.

    carries     what a call's seconds are the sum of
    times       all starts and ends
    sum_units   of everything one after the other: no latency is longer
    """

    master: Master
    model: LatencyModel
    ends: dict[int, cp_model.IntVar] = field(default_factory=dict)
    starts: dict[Call, cp_model.IntVar] = field(default_factory=dict)
    call_ends: dict[Call, cp_model.IntVar] = field(default_factory=dict)
    carries: dict[Call, list[cp_model.LinearExprT]] = field(default_factory=dict)
    times: list[cp_model.IntVar] = field(default_factory=list)
    sum_units: int = 0


def latency_master(problem: Problem, scale_seconds: float) -> Master:
    """The model; O(reads x devices) literals."""
    master = new_master(problem, scale_seconds)
    model = latency_model(problem.graph, problem.machine, problem.costs)
    calls = _Calls(master, model)
    ops = [op for op in range(model.ops) if not model.is_source[op]]
    for op in ops:
        calls.ends[op] = _time(calls)
        master.model.add(master.objective >= calls.ends[op])
    for device in range(problem.devices):
        if model.accelerator[device]:
            for late in (0, 1):
                call = device, late
                calls.starts[call], calls.call_ends[call] = _time(calls), _time(calls)
                calls.carries[call] = []
            master.model.add(calls.starts[device, 1] >= calls.call_ends[device, 0])
    for op in ops:
        _add_op(calls, op)
        _add_reads(calls, op)
    for call, terms in calls.carries.items():
        took = cp_model.LinearExpr.sum(terms)
        master.model.add(calls.call_ends[call] >= calls.starts[call] + took)
        master.terms += len(terms)
    # Parts that wait for each other creep towards the horizon, one duration at a time.
    for moment in [master.objective, *calls.times]:
        master.model.add(moment <= calls.sum_units)
    return master


def _time(calls: _Calls) -> cp_model.IntVar:
    calls.times.append(calls.master.model.new_int_var(0, HORIZON_UNITS, ""))
    return calls.times[-1]


def _carry(calls: _Calls, call: Call, units: int, literal: cp_model.IntVar) -> None:
    calls.carries[call].append(units * literal)
    calls.sum_units += units


def _add_op(calls: _Calls, op: int) -> None:
    """What the op costs where, and when it ends there."""
    master, model = calls.master, calls.model
    for device, here in _at(calls, op).items():
        units = master.units(model.work_seconds[op, device])
        if model.accelerator[device]:
            call = device, int(model.late[op])
            _carry(calls, call, units, here)
            master.model.add(calls.ends[op] >= calls.call_ends[call]).only_enforce_if(here)
        else:
            master.model.add(calls.ends[op] >= units).only_enforce_if(here)
            calls.sum_units += units
            master.terms += 1


def _add_reads(calls: _Calls, op: int) -> None:
    """The users of what `op` makes wait for it, and where they are elsewhere it is moved."""
    master, model = calls.master, calls.model
    group = int(master.problem.groups.of_op[op])
    users = model.users[model.user_offsets[op] : model.user_offsets[op + 1]].tolist()
    everywhere = set(range(master.problem.devices))
    for user in users:
        master.model.add(calls.ends[user] >= calls.ends[op])
        for device, there in _at(calls, user).items():
            if not model.accelerator[device]:
                units = master.units(model.work_seconds[user, device])
                later = master.model.add(calls.ends[user] >= calls.ends[op] + units)
                later.only_enforce_if(there)
                continue
            start = calls.starts[device, int(model.late[user])]
            waits = master.model.add(start >= calls.ends[op])
            here = _at(calls, op).get(device)
            waits.only_enforce_if([there] if here is None else [there, ~here])
    targets = {late: _groups(calls, users, late) for late in (0, 1)}
    for device in everywhere:
        if not model.accelerator[device]:
            continue
        others = everywhere - {device}
        into = [add_hop(master, group, targets[late], others, {device}) for late in (0, 1)]
        units = master.units(model.in_seconds[op, device])
        if into[0] is not None:
            _carry(calls, (device, 0), units, into[0])
        if into[1] is not None:  # unless the forward call has fetched it already
            fetched = master.model.new_bool_var("")
            forward = [] if into[0] is None else [into[0]]
            master.model.add_bool_or([fetched, ~into[1], *forward])
            _carry(calls, (device, 1), units, fetched)
        if device in _at(calls, op):
            out = add_hop(master, group, targets[0] + targets[1], {device}, others)
            if out is not None:
                units = master.units(model.out_seconds[op, device])
                _carry(calls, (device, int(model.late[op])), units, out)


def _at(calls: _Calls, op: int) -> dict[int, cp_model.IntVar]:
    return calls.master.at[int(calls.master.problem.groups.of_op[op])]


def _groups(calls: _Calls, users: list[int], late: int) -> list[int]:
    """Groups of the users that run forward, or backward."""
    of_op = calls.master.problem.groups.of_op
    return sorted({int(of_op[user]) for user in users if calls.model.late[user] == late})
