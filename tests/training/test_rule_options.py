"""Options of rules: all have defaults, are kept, and are refused by name."""

import json
import pickle
import subprocess
import sys

import pytest

from dovetail.errors import UnknownRuleError, UsageError
from dovetail.training.rules import RULES, make_rule


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_made_by_its_name_alone_and_again_from_its_options(name):
    rule = make_rule(name)
    assert rule.name == name
    assert rule.options == RULES[name].options
    again = make_rule(name, **json.loads(json.dumps(rule.options)))
    assert again.options == rule.options
    sent = pickle.loads(pickle.dumps(rule))
    assert (sent.name, sent.options) == (rule.name, rule.options)


def test_the_optimizer_s_settings_are_options_of_synchronous_sgd():
    rule = make_rule("sync", optimizer="adam", betas=(0.8, 0.9))
    assert rule.options == {"optimizer": "adam", "lr": None, "betas": [0.8, 0.9]}
    assert json.loads(json.dumps(rule.options)) == rule.options
    assert rule.server_slots == ("mean", "square")
    assert make_rule("sync").server_slots == ()


def test_an_unknown_rule_is_named_and_the_known_ones_listed():
    with pytest.raises(UnknownRuleError) as caught:
        make_rule("agd")
    assert caught.value.rule == "agd"
    assert caught.value.known == tuple(RULES)


@pytest.mark.parametrize(
    ("name", "options", "option"),
    [
        ("downpour", {"gamma": 1e-4}, "gamma"),
        ("sync", {"gamma": 1e-4}, "gamma"),
        ("sync", {"optimizer": "lbfgs"}, "optimizer"),
        ("sync", {"lr": 0}, "lr"),
        ("sync", {"momentum": 1.5}, "momentum"),
        ("easgd", {"alpha": 1.0}, "alpha"),
        ("easgd", {"alpha": -0.1}, "alpha"),
        ("aeasgd", {"alpha": float("inf")}, "alpha"),
        ("aeasgd", {"rho": 0}, "rho"),
        ("eamsgd", {"delta": 1.0}, "delta"),
        ("downpour-adagrad", {"lr": -1}, "lr"),
        ("downpour-adagrad", {"epsilon": -1}, "epsilon"),
        ("adag", {"gamma": 0}, "gamma"),
        ("adag-agn", {"gamma": "small"}, "gamma"),
        ("ssp", {"slack": -1}, "slack"),
        ("ssp", {"slack": 1.5}, "slack"),
        ("ssp", {"slack": True}, "slack"),
        ("dc-asgd", {"lam": -0.04}, "lam"),
        ("dc-asgd-adaptive", {"decay": 1.0}, "decay"),
        ("dc-asgd-adaptive", {"epsilon": 0}, "epsilon"),
        ("dc-asgd-adaptive", {"lam": None}, "lam"),
        ("diloco", {"lr": 0}, "lr"),
        ("diloco", {"momentum": 1}, "momentum"),
        ("async-diloco", {"delay": 0}, "delay"),
        ("async-diloco", {"spread": -0.1}, "spread"),
        ("async-diloco", {"delay": 4, "spread": 0.3}, "spread"),
        ("async-diloco", {"dynamic": "yes"}, "dynamic"),
    ],
)
def test_a_bad_option_is_named(name, options, option):
    with pytest.raises(UsageError) as caught:
        make_rule(name, **options)
    assert caught.value.option == option


def test_rules_import_neither_torch_nor_a_compiler():
    code = "import sys; from dovetail.training.rules import make_rule; make_rule('adag-agn')"
    code += "; print([m for m in ('torch', 'numba') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
