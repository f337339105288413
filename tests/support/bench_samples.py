"""Cases, rows and curves for the tests of what `bench` shows, made by hand."""

from dataclasses import replace

from reproductions.records import (
    Case,
    CaseResult,
    Column,
    LossCurve,
    MethodResult,
    PlanWork,
    Published,
    TowerResult,
)

EVIL = '</style><script>alert(1)</script><img src=x onerror="alert(2)">&'
GPUS = ("k80:0", "k80:1", "haswell")
PICTURE = '<svg class="graph" viewBox="0 0 9 9"><path d="M0 0h1v1z"/></svg>'


def fits(seconds, peak_bytes=2**30):
    return MethodResult(seconds, "", {"k80:0": peak_bytes, "haswell": 5}, 0.25)


def oom(text="OOM: k80:0 needs 13 GiB of 11.2 GiB"):
    return MethodResult(None, text, {"k80:0": 13 * 2**30}, 0.5)


def work(busy=(0.4, 0.3, 0.0), carried=0.05):
    return PlanWork(
        forward_seconds=dict(zip(GPUS, (0.25 * b for b in busy), strict=True)),
        backward_seconds=dict(zip(GPUS, (0.5 * b for b in busy), strict=True)),
        update_seconds=dict(zip(GPUS, (0.25 * b for b in busy), strict=True)),
        transfer_seconds={"k80:0->k80:1": carried, "k80:1->k80:0": 0.0},
        picture=PICTURE,
    )


METHODS = {
    "1 CPU": fits(6.9),
    "1 GPU": fits(1.57),
    "scotch": fits(1.1),
    "mincut": fits(1.0),
    "metis": fits(1.2),
    "expert": fits(0.92),
    "auto": fits(0.72),
}


def make_column(**changes):
    methods = METHODS | changes
    fitting = {name: found.seconds for name, found in methods.items() if found.seconds is not None}
    best = min(fitting, key=fitting.get) if fitting else ""
    shown = {name: work() for name in dict.fromkeys(("expert", best)) if name in fitting}
    return Column(methods, best, 0.7, "busiest device", shown)


def make_row(key="rnnlm-2gpu", **columns):
    return CaseResult(key, 3000, 165, 10**12, 10**8, columns or {"plain": make_column()}, 33.0)


def make_case(key="rnnlm-2gpu", **changes):
    """RL17's first row, or with other figures."""
    seconds = {"1 CPU": 6.89, "1 GPU": 1.57, "Scotch": 13.43, "MinCut": 11.94, "expert": 3.81,
               "RL": 1.57}  # fmt: skip
    case = Case(
        key=key,
        title="RNNLM, 2 GPUs",
        model="zoo:rnnlm?layers=2",
        train="adam",
        machine="rl17/2",
        gpus=2,
        published=Published(seconds, ops=8943, groups=188),
        ours="vocabulary 10,000",
    )
    return replace(case, **changes)


CURVES = [
    LossCurve("Inception-V3", "expert", 2.0, [3.0, 2.0, 1.0, 0.5]),
    LossCurve("Inception-V3", "planned", 1.0, [3.0, 2.0, 1.0, 0.5]),
]
TOWERS = [
    TowerResult("inception", "Inception-V3, 4 GPUs", "synchronous", 4, 32, 6.4),
    TowerResult("inception", "Inception-V3, 4 GPUs", "asynchronous", 4, 32, None, "OOM: k80:0"),
]
