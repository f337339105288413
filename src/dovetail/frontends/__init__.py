"""Captures networks: from a module, a MODEL text or a file to a graph and the calls behind it."""

from dovetail.frontends.capturing import capture
from dovetail.frontends.flops import MATRIX_KINDS, matrix_flops
from dovetail.frontends.interpret import (
    call_arguments,
    example_values,
    held_values,
    initial_values,
    run_call,
    run_step,
    seed_for,
    source_value,
)
from dovetail.frontends.models import resolve, resolve_phases
from dovetail.frontends.optimizers import (
    OPTIMIZERS,
    SGD,
    Adam,
    AdamW,
    GradScaler,
    Optimizer,
    RMSProp,
    format_optimizer,
    parse_optimizer,
)
from dovetail.frontends.program import Call, Captured, Program, Ref, SourceValue

__all__ = [
    "MATRIX_KINDS",
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "AdamW",
    "Call",
    "Captured",
    "GradScaler",
    "Optimizer",
    "Program",
    "RMSProp",
    "Ref",
    "SourceValue",
    "call_arguments",
    "capture",
    "example_values",
    "format_optimizer",
    "held_values",
    "initial_values",
    "matrix_flops",
    "parse_optimizer",
    "resolve",
    "resolve_phases",
    "run_call",
    "run_step",
    "seed_for",
    "source_value",
]
