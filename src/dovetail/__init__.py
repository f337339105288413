"""dovetail: how to run a neural network fastest on the devices you have.

    import dovetail as dt

    step = dt.capture(model, *inputs, targets=targets, loss=loss_fn, train=dt.Adam(1e-3))
    plan = dt.plan(step, machine="here/2", budget="10s")
    with dt.run(plan, step) as placed:
        loss = placed.step(*inputs, *targets)
    plan.save("plan.json")
    dt.report(plan, step, "plan.html")

    dt.Trainer(model, loss_fn, dt.Adam(1e-3), workers=4, epochs=10).fit(dataset)

Names are imported when they are first used, so that what needs no torch does not wait for it.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "SGD": "dovetail.frontends",
    "Adam": "dovetail.frontends",
    "AdamW": "dovetail.frontends",
    "Callback": "dovetail.training",
    "Captured": "dovetail.frontends",
    "DovetailError": "dovetail.errors",
    "GradScaler": "dovetail.frontends",
    "Graph": "dovetail.graph",
    "History": "dovetail.training",
    "InfeasibleError": "dovetail.errors",
    "InvalidError": "dovetail.errors",
    "Machine": "dovetail.machine",
    "Optimizer": "dovetail.training",
    "Plan": "dovetail.plans",
    "RMSProp": "dovetail.frontends",
    "Timeline": "dovetail.timeline",
    "Trainer": "dovetail.training",
    "Instance": "dovetail.instances",
    "capture": "dovetail.frontends",
    "device_map": "dovetail.pipeline.mapping",
    "dispatch": "dovetail.exports",
    "export": "dovetail.pipeline",
    "learn": "dovetail.pipeline",
    "load_graph": "dovetail.graph",
    "load_instance": "dovetail.instances",
    "load_machine": "dovetail.machine",
    "load_onnx": "dovetail.frontends.onnx",
    "load_plan": "dovetail.plans",
    "make_rule": "dovetail.training",
    "open_plan": "dovetail.pipeline",
    "optimize": "dovetail.pipeline",
    "plan": "dovetail.pipeline",
    "plan_phases": "dovetail.pipeline",
    "replicate": "dovetail.transforms",
    "report": "dovetail.pipeline",
    "run": "dovetail.pipeline",
    "save_graph": "dovetail.graph",
    "save_instance": "dovetail.instances",
    "save_machine": "dovetail.machine",
    "schedule": "dovetail.pipeline",
    "split_points": "dovetail.exports",
    "towers": "dovetail.transforms",
    "training_step": "dovetail.pipeline",
    "undispatch": "dovetail.exports",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
