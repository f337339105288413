"""The table of update rules, `RULES`, by name. Each rule has a file of its own.

To add a rule, write its file and add an entry to the table. The command line, its help and the
trainer read the table. The files share these symbols:

    theta~    the center, which the server holds        theta_k   the parameters of worker k
    g         a gradient of one minibatch               U(g)      what the optimizer adds for g
    v         the vector of a commit                    lambda    local steps in a window
    eta       the workers' learning rate                n         number of workers
    tau       staleness of a commit                     theta~_base   theta~ as the worker pulled it

The class `ADAG` of the old dist-keras is `agn` here, and its `Experimental` is `adag`.
"""

import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.errors import UnknownRuleError, UsageError
from dovetail.training.rules.adag import adag, adag_agn
from dovetail.training.rules.aeasgd import aeasgd, eamsgd
from dovetail.training.rules.agn import agn
from dovetail.training.rules.async_diloco import async_diloco
from dovetail.training.rules.averaging import averaging, one_shot
from dovetail.training.rules.contract import Rule, RuleEntry
from dovetail.training.rules.dc_asgd import dc_asgd, dc_asgd_adaptive
from dovetail.training.rules.diloco import diloco
from dovetail.training.rules.downpour import downpour, downpour_adagrad
from dovetail.training.rules.dynsgd import dynsgd
from dovetail.training.rules.easgd import easgd
from dovetail.training.rules.hogwild import hogwild
from dovetail.training.rules.ssp import ssp
from dovetail.training.rules.sync import sync

_ENTRIES = (
    RuleEntry("sync", sync),
    RuleEntry("averaging", averaging, window=10, sends_parameters=True),
    RuleEntry("one-shot", one_shot, window=None, sends_parameters=True),
    RuleEntry("easgd", easgd, window=10),
    RuleEntry("aeasgd", aeasgd, window=10),
    RuleEntry("eamsgd", eamsgd, window=10),
    RuleEntry("downpour", downpour, adds_sums=True),
    RuleEntry("downpour-adagrad", downpour_adagrad, adds_sums=True),
    RuleEntry("dynsgd", dynsgd),
    RuleEntry("agn", agn),
    RuleEntry("adag", adag),
    RuleEntry("adag-agn", adag_agn),
    RuleEntry("hogwild", hogwild, adds_sums=True),
    RuleEntry("ssp", ssp, adds_sums=True),
    RuleEntry("dc-asgd", dc_asgd, adds_sums=True, server_steps=True),
    RuleEntry("dc-asgd-adaptive", dc_asgd_adaptive, adds_sums=True, server_steps=True),
    RuleEntry("diloco", diloco, window=50),
    RuleEntry("async-diloco", async_diloco, window=50),
)
RULES: dict[str, RuleEntry] = {entry.name: entry for entry in _ENTRIES}


def entry_of(rule: Rule | str) -> RuleEntry:
    """The line of a rule, or of its name, in the table. Raises `UnknownRuleError`."""
    name = rule if isinstance(rule, str) else getattr(rule, "name", rule)
    if not isinstance(name, str) or name not in RULES:
        raise UnknownRuleError(str(name), tuple(RULES))
    return RULES[name]


def make_rule(name: str, **options: Any) -> Rule:
    """Returns the rule of that name with its options bound.

    Raises `UnknownRuleError` for a name that is not in the table, and `UsageError` for an option
    that the rule does not have, or whose value it cannot take.
    """
    entry = entry_of(name)
    for option in options:
        if option not in entry.options and not entry.takes_any:
            offered = ", ".join(entry.options) or "none"
            raise UsageError(option, f"{name} has no such option; it has {offered}")
    return entry.make(**options)


def _sent(rule: Rule) -> tuple[Callable[[], Rule], tuple[()]]:
    """A rule is sent as its name and its options, since its functions are bound to them and cannot
    be pickled. So is a copy made: it has the table's functions, whatever the rule had.

    Raises `UnknownRuleError` for a rule that is not in the table."""
    return partial(make_rule, entry_of(rule).name, **rule.options), ()


copyreg.pickle(Rule, _sent)

__all__ = ["RULES", "entry_of", "make_rule"]
