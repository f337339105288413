"""`gdp+search`: the policy's proposals are in the ledger, and the search never ends above them."""

import numpy as np
import pytest

from dovetail.placers import PLACERS, Budget, place
from dovetail.placers.learned import files, placing
from dovetail.placers.learned.catalog import make_policy
from dovetail.placers.learned.features import look
from dovetail.placers.learned.files import save_policy
from dovetail.placers.learned.placing import PROPOSING_SHARE, make_gdp_search
from tests.support.learned_problems import random_problem


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "p.safetensors"
    save_policy(path, make_policy("gdp", look(random_problem(0)), 3, hidden=16), {})
    return path


def test_the_search_goes_on_from_the_best_that_the_policy_proposed(policy):
    problem = random_problem(5, groups=12, devices=3)
    alone, both = Budget(evaluations=200 * PROPOSING_SHARE), Budget(evaluations=200)
    proposed = placing.make_gdp(policy, 0)(problem, alone)
    found = make_gdp_search(policy, 0)(problem, both)
    assert "gdp" in both.ledger.results
    scores = both.score(problem, np.stack([proposed, found]), always=True)
    assert scores[1] <= scores[0]
    assert both.ledger.best is not None
    assert scores[1] == both.ledger.best[0]
    assert both.spent <= 200


def test_the_same_seed_and_evaluations_give_the_same_placement(policy):
    found = [
        make_gdp_search(policy, 1)(random_problem(6, groups=12), Budget(evaluations=120))
        for _ in range(2)
    ]
    assert (found[0] == found[1]).all()


def test_by_name_it_uses_the_shipped_policy(policy, monkeypatch):
    monkeypatch.setattr(files, "SHIPPED", policy)
    problem = random_problem(7)
    outcome = place(problem, "gdp+search", Budget(evaluations=100))
    assert outcome.placer == "gdp+search"
    assert outcome.value <= outcome.baselines["gdp"]
    assert outcome.value <= min(v for v in outcome.baselines.values() if v is not None)
    assert "gdp+search" in PLACERS
