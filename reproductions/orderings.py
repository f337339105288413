"""Says which of a paper's orderings hold in our results, and why one does not.

Papers: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, table 2; Zhou et al., "GDP: Generalized Device Placement for
Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578, table 1.

An ordering compares two columns of one row, or says whether one column fits into memory. The
paper's ordering follows from its printed seconds, and ours from our seconds by the same rule: two
figures within `TIE` are equal, and out of memory is slower than anything. A learned method counts
by its run of the median. The reasons are built from figures of the row itself, with what is known
of such cases. None of them is used to change a cost.
"""

import math
from dataclasses import dataclass

from dovetail.machine import Device, Machine
from dovetail.units import format_bandwidth, format_bytes, format_seconds
from reproductions.cases import METHOD_OF
from reproductions.hypothesis import LINK_BYTES_PER_SECOND
from reproductions.methods import HYPOTHESIS
from reproductions.records import Case, CaseResult, Column, MethodResult, PlanWork

TIE = 0.02
"""Two figures are equally fast if they differ by at most this share."""
PAIRS = (
    ("1 GPU", "1 CPU"),
    ("expert", "1 GPU"),
    ("Scotch", "1 CPU"),
    ("MinCut", "1 CPU"),
    ("RL", "expert"),
    ("RL", "1 GPU"),
    ("METIS", "human"),
    ("GDP-one", "human"),
    ("GDP-one", "HDP"),
    ("HDP", "human"),
)


@dataclass(frozen=True)
class Ordering:
    """One ordering of a row.

    statement          the ordering in the paper's columns: "expert is slower than 1 GPU"
    published, found   the paper's figures and ours, as text
    holds              whether it holds for ours; None: we have no figure for it
    why                the reason if it does not hold, else a remark or ""
    """

    statement: str
    published: str
    found: str
    holds: bool | None
    why: str


@dataclass(frozen=True)
class _Ground:
    """The row, column and machine that reasons are read off."""

    case: Case
    row: CaseResult
    column: Column
    name: str
    machine: Machine

    def found(self, paper_column: str) -> MethodResult | None:
        """Our result for a column of the paper; None if that method was not run."""
        return self.column.methods.get(METHOD_OF[paper_column])

    def work(self, paper_column: str) -> PlanWork | None:
        return self.column.shown.get(METHOD_OF[paper_column])

    @property
    def gpu(self) -> Device:
        """The first GPU; of a machine without one the first device."""
        devices = self.machine.devices
        return next((device for device in devices if device.kind == "gpu"), devices[0])

    @property
    def link_bytes_per_second(self) -> float:
        if self.name == HYPOTHESIS:
            return LINK_BYTES_PER_SECOND
        return max(link.bandwidth_bytes_per_second for link in self.machine.links)


def orderings_of(case: Case, row: CaseResult, name: str, machine: Machine) -> tuple[Ordering, ...]:
    """The orderings of one row in one of our columns, "plain" or "hypothesis"; () if the paper has
    no figures for the row."""
    if case.published is None:
        return ()
    ground = _Ground(case, row, row.columns[name], name, machine)
    published = case.published.seconds
    pairs = [
        _pair(ground, a, b)
        for a, b in PAIRS
        if published.get(a) is not None and published.get(b) is not None
    ]
    memory = [_memory(ground, column) for column in published]
    return (*pairs, *(ordering for ordering in memory if ordering is not None))


def relation(a_seconds: float | None, b_seconds: float | None) -> str:
    """How a compares with b: "faster than", "slower than" or "as fast as". None seconds mean out of
    memory."""
    a, b = (math.inf if seconds is None else seconds for seconds in (a_seconds, b_seconds))
    if a == b or abs(a - b) <= TIE * min(a, b):
        return "as fast as"
    return "faster than" if a < b else "slower than"


def is_oom(result: MethodResult) -> bool:
    """True for a method whose placement does not fit into memory."""
    return result.seconds is None and result.reason.startswith("OOM")


def _pair(ground: _Ground, a: str, b: str) -> Ordering:
    assert ground.case.published is not None
    paper_seconds = [ground.case.published.seconds[column] for column in (a, b)]
    expected = relation(*paper_seconds)
    published = " against ".join(format_step(seconds) for seconds in paper_seconds)
    statement = f"{a} is {expected} {b}"
    results = [ground.found(column) for column in (a, b)]
    present = [result for result in results if result is not None]
    lacking = next(
        (result.reason for result in present if result.seconds is None and not is_oom(result)),
        None,
    )
    if len(present) < 2 or lacking is not None:
        return Ordering(statement, published, "", None, lacking or "not run")
    our_seconds = [result.seconds for result in present]
    ours = " against ".join(format_step(seconds) for seconds in our_seconds)
    found = f"{METHOD_OF[a]} against {METHOD_OF[b]}: {ours}"
    if relation(*our_seconds) == expected:
        is_fitted = ground.name != HYPOTHESIS and ground.case.machine.startswith("rl17/")
        remark = "both are what the machine was fitted to"
        why = remark if is_fitted and (a, b) == ("1 GPU", "1 CPU") else ""
        return Ordering(statement, published, found, True, why)
    oom = next((f"Ours: {result.reason}." for result in present if result.seconds is None), None)
    return Ordering(statement, published, found, False, oom or _why(ground, a, b))


def _memory(ground: _Ground, column: str) -> Ordering | None:
    """Whether a column fits into memory, as an ordering; None if it fits both in the paper and
    here."""
    assert ground.case.published is not None
    paper_seconds, result = ground.case.published.seconds[column], ground.found(column)
    ours_oom = result is not None and is_oom(result)
    if paper_seconds is not None and not ours_oom:
        return None
    statement = (
        f"{column} fits into memory" if paper_seconds is not None else f"{column} is out of memory"
    )
    printed = format_step(paper_seconds)
    if result is None or (result.seconds is None and not ours_oom):
        return Ordering(statement, printed, "", None, result.reason if result else "not run")
    # The peak of the device that is fullest by share: "3.5 GiB of 11.2 GiB on k80:0".
    capacities = {device.name: device.memory_bytes for device in ground.machine.devices}
    shares = {
        name: size / capacities[name]
        for name, size in result.peak_memory_bytes.items()
        if capacities.get(name)
    }
    peak = format_step(result.seconds)
    if shares:
        name = max(shares, key=lambda name: shares[name])
        size, capacity = result.peak_memory_bytes[name], capacities[name]
        peak = f"{format_bytes(size)} of {format_bytes(capacity)} on {name}"
    found = f"{METHOD_OF[column]}: {result.reason if ours_oom else peak}"
    if (paper_seconds is None) == ours_oom:
        return Ordering(statement, printed, found, True, "")
    sizes = f"Of its sizes: {ground.case.ours.rstrip('.')}. " if ground.case.ours else ""
    if ours_oom:
        why = (
            f"Ours needs more than there is. {sizes}When an op runs, and with it how long its "
            "tensors live, is our schedule's, not the paper's."
        )
    else:
        why = (
            f"By our count it needs {peak}. {sizes}Memory hangs most on two things that no paper "
            "states: where variables live, and whether gradients are summed as they come or kept "
            "until all are there. Ours are summed as autograd does, two by two, and a tensor is "
            "freed after its last reader."
        )
    return Ordering(statement, printed, found, False, why)


def _why(ground: _Ground, a: str, b: str) -> str:
    """Why an ordering of two columns does not hold; both have seconds."""
    first, second = ground.found(a), ground.found(b)
    assert first is not None and second is not None
    assert first.seconds is not None and second.seconds is not None
    seconds, other = first.seconds, second.seconds
    work = ground.work("expert")
    if a == "1 GPU":
        moved = f" (the expert's plan: {_transfers(work)})" if work else ""
        if ground.name == HYPOTHESIS:
            return (
                "A weight that several devices read is on the CPU: it is sent over a link at "
                f"{format_bandwidth(ground.link_bytes_per_second)} to each of them, every gradient "
                f"is sent back, and the CPU updates it{moved}. One GPU keeps all weights."
            )
        return f"{_step_of(ground)}."
    if a == "expert":
        text = f"Ours takes {_ratio(seconds, other)} of the time of one GPU"
        if work is not None:
            parts = [
                f"{name} {100 * busy / seconds:.0f} %"
                for name, busy in busy_seconds(work).items()
                if busy > 0 and seconds > 0
            ]
            at_work = "at work are " + ", ".join(parts) if parts else "no device works"
            text += f": {at_work}, and {_transfers(work)}"
        if seconds < other:
            wait = format_seconds(other - seconds)
            text += f". To be as slow as one GPU it would have to wait {wait} longer for transfers"
            text += _why_shared(ground)
        return f"{text}."
    if a in ("Scotch", "MinCut"):
        text = f"Ours takes {_ratio(seconds, other)} of the time of one CPU"
        if seconds < other:
            rate = ground.link_bytes_per_second
            moved = format_bytes((other - seconds) * rate)
            text += (
                f". Even without any overlap, transfers would have to take "
                f"{format_seconds(other - seconds)} more to be slower: {moved} at "
                f"{format_bandwidth(rate)}. Balancing loads without a schedule costs a cut much "
                "against a search, but nothing in these costs puts it behind one CPU"
            )
        return f"{text}."
    if a == "METIS":
        return (
            f"Ours takes {_ratio(seconds, other)} of the expert's time. METIS balances load and "
            "cuts few bytes without a schedule; the paper does not say which loads and which "
            "devices it gave it."
        )
    # What is left are learned methods, which stand beside the best that does not learn, too.
    whose = {"1 GPU": "one GPU", "HDP": "hdp"}.get(b, "the expert's plan")
    text = f"{METHOD_OF[a]} takes {_ratio(seconds, other)} of the time of {whose}"
    best = ground.column.methods.get(ground.column.best)
    if (a, b) == ("RL", "1 GPU"):
        text += _why_shared(ground)
    elif best is not None and best.seconds:
        text += (
            f", and {_ratio(seconds, best.seconds)} of {ground.column.best}'s, the best of ours "
            "that does not learn"
        )
    return f"{text}."


def _step_of(ground: _Ground) -> str:
    """A text on how much of the step on one GPU is overhead of its ops."""
    single = ground.found("1 GPU")
    overhead = ground.gpu.op_overhead_seconds * ground.row.ops
    text = (
        f"{ground.row.ops:,} ops at {format_seconds(ground.gpu.op_overhead_seconds)} each are "
        f"{format_seconds(overhead)} of overhead"
    )
    if single is not None and single.seconds:
        text += f", {100 * overhead / single.seconds:.0f} % of the step on one GPU"
    return text


def _why_shared(ground: _Ground) -> str:
    """Sentences on why several GPUs can share the work of one GPU's step."""
    text = ""
    if ground.name != HYPOTHESIS:
        text = f". {_step_of(ground)}, which several GPUs share"
    if ground.case.model.startswith(("zoo:rnnlm", "zoo:nmt", "zoo:gnmt")):
        text += ". Layers of an unrolled network work on different steps at once"
    return text


def _transfers(work: PlanWork) -> str:
    seconds = list(work.transfer_seconds.values())
    total, busiest = sum(seconds), max(seconds, default=0.0)
    if not total:
        return "nothing is transferred"
    return (
        f"transfers take {format_seconds(total)} over all channels, {format_seconds(busiest)} on "
        "the busiest"
    )


def busy_seconds(work: PlanWork) -> dict[str, float]:
    """device -> seconds in which it computes, over all phases."""
    return {
        name: work.forward_seconds[name]
        + work.backward_seconds.get(name, 0.0)
        + work.update_seconds.get(name, 0.0)
        for name in work.forward_seconds
    }


def _ratio(a: float, b: float) -> str:
    return f"{100 * a / b:.0f} %"


def format_step(seconds: float | None) -> str:
    """Seconds of a step as the papers print them, always in seconds; None gives "OOM"."""
    if seconds is None:
        return "OOM"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.3f} s"
