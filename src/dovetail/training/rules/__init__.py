"""Update rules, one file each; `RULES` by name.

The class `ADAG` of the old dist-keras is `agn`, and its `Experimental` is `adag`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from dovetail.errors import UnknownRuleError, UsageError
from dovetail.training.rules.adag import adag, adag_agn
from dovetail.training.rules.aeasgd import aeasgd, eamsgd
from dovetail.training.rules.agn import agn
from dovetail.training.rules.async_diloco import async_diloco
from dovetail.training.rules.averaging import averaging, one_shot
from dovetail.training.rules.contract import Rule
from dovetail.training.rules.dc_asgd import dc_asgd, dc_asgd_adaptive
from dovetail.training.rules.diloco import diloco
from dovetail.training.rules.downpour import downpour, downpour_adagrad
from dovetail.training.rules.dynsgd import dynsgd
from dovetail.training.rules.easgd import easgd
from dovetail.training.rules.hogwild import hogwild
from dovetail.training.rules.ssp import ssp
from dovetail.training.rules.sync import sync

RULES: dict[str, Callable[..., Rule]] = {
    "sync": sync,
    "averaging": averaging,
    "one-shot": one_shot,
    "easgd": easgd,
    "aeasgd": aeasgd,
    "eamsgd": eamsgd,
    "downpour": downpour,
    "downpour-adagrad": downpour_adagrad,
    "dynsgd": dynsgd,
    "agn": agn,
    "adag": adag,
    "adag-agn": adag_agn,
    "hogwild": hogwild,
    "ssp": ssp,
    "dc-asgd": dc_asgd,
    "dc-asgd-adaptive": dc_asgd_adaptive,
    "diloco": diloco,
    "async-diloco": async_diloco,
}


def make_rule(name: str, **options: Any) -> Rule:
    """The rule of that name with its options bound.

    Raises UnknownRuleError, and UsageError with the name of an option that the rule has not or
    whose value it cannot take.
    """
    if name not in RULES:
        raise UnknownRuleError(name, tuple(RULES))
    factory = RULES[name]
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in parameters and not open_ended:
            known = ", ".join(parameters) or "none"
            raise UsageError(option, f"{name} has no such option; it has {known}")
    return factory(**options)


__all__ = ["RULES", "make_rule"]
