"""The tables of methods: every entry has its function, and the documents list what they list."""

import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.methods import (
    PIPELINE_SCHEDULES,
    PLACED_OBJECTIVES,
    PLACERS,
    SCHEDULERS,
    Method,
    imported,
)
from dovetail.placers.auto import methods_of
from dovetail.placers.pipeline_schedules import SCHEDULES
from dovetail.plans import OBJECTIVES

EVERY = [*PLACERS.values(), *SCHEDULERS.values()]


@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)
def test_every_entry_names_a_function_and_says_what_it_does(method):
    assert callable(method.load())
    assert set(method.objectives) <= set(OBJECTIVES)
    assert set(method.first_for) <= set(method.objectives)
    assert method.help
    if method.with_policy:
        assert callable(imported(method.with_policy))


def test_the_page_of_methods_lists_the_tables():
    text = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
    placers = [
        f"| `{m.name}` | {m.help} | {', '.join(m.objectives)} | {m.role or '-'} |"
        for m in PLACERS.values()
    ]
    schedulers = [f"| `{m.name}` | {m.help} |" for m in SCHEDULERS.values()]
    assert [line for line in text.splitlines() if line.startswith("| `")] == placers + schedulers


def test_placers_search_for_all_objectives_of_plans_but_pipelines():
    assert (*PLACED_OBJECTIVES, "pipeline") == OBJECTIVES
    assert {name for m in PLACERS.values() for name in m.objectives} == set(PLACED_OBJECTIVES)


def test_the_schedules_of_pipelines_are_those_that_have_a_function():
    assert tuple(SCHEDULES) == PIPELINE_SCHEDULES


def test_the_tables_import_nothing_heavy():
    code = "import sys, dovetail.methods; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_auto_tries_methods_in_a_fixed_order():
    def names(role, objective):
        return [method.name for method in methods_of(role, objective)]

    assert names("constructive", "step") == [
        "m_topo", "heft", "linear_dp", "metis", "families", "scotch", "mincut", "sct",
    ]  # fmt: skip
    assert names("constructive", "load") == ["linear_dp", "ideal_dp", "m_topo", "metis", "scotch"]
    assert names("constructive", "latency") == ["linear_dp", "m_topo"]
    assert names("improving", "step") == ["multilevel", "local_search", "exact"]
    assert names("improving", "load") == ["local_search", "exact"]
    assert names("improving", "latency") == ["latency_search", "exact"]


def test_auto_runs_a_method_that_was_added_to_the_table(monkeypatch):
    method = Method("mine", lambda problem, budget: problem.fastest, ("step",), "x", "constructive")
    monkeypatch.setitem(PLACERS, "mine", method)
    assert method in methods_of("constructive", "step")
    assert method not in methods_of("constructive", "load")
