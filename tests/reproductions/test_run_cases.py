"""The rows of the papers' tables: what they name exists, and their figures are the papers'."""

import pytest

from dovetail.frontends import parse_optimizer
from dovetail.frontends.models import parse_zoo
from reproductions.cases import (
    AS_PUBLISHED,
    CASES,
    GDP_COLUMNS,
    LEARNED,
    METHOD_OF,
    RL17_COLUMNS,
    machine_of,
)
from reproductions.methods import METHODS, PLAIN

ROWS = [pytest.param(paper, case, id=case.key) for paper, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("paper", "case"), ROWS)
def test_every_row_names_a_network_an_optimizer_and_a_machine_with_its_gpus(paper, case):
    network, options = parse_zoo(case.model)
    assert set(options) <= set(network.defaults)
    assert parse_optimizer(case.train) is not None
    kinds = [device.kind for device in machine_of(case).devices]
    assert kinds.count("gpu") == case.gpus
    assert kinds.count("cpu") == 1


@pytest.mark.parametrize(("paper", "case"), ROWS)
def test_every_printed_column_has_a_method_that_plans_or_one_that_learns(paper, case):
    columns = {"rl17": RL17_COLUMNS, "gdp": GDP_COLUMNS}[paper]
    assert set(case.published.seconds if case.published else ()) <= set(columns)
    for column in columns:
        assert (METHOD_OF[column] in METHODS[PLAIN]) != (METHOD_OF[column] in LEARNED[paper])


def test_every_method_that_learns_for_a_printed_column_stands_there_as_published_too():
    for methods in LEARNED.values():
        for method in set(methods) & set(METHOD_OF.values()):
            assert AS_PUBLISHED[method] in methods


def test_rows_have_keys_of_their_own():
    keys = [case.key for cases in CASES.values() for case in cases]
    assert len(set(keys)) == len(keys) == 13 + 12


@pytest.mark.parametrize(
    ("key", "column", "seconds"),
    [
        ("rnnlm-2gpu", "Scotch", 13.43),
        ("rnnlm-4gpu", "expert", 4.46),
        ("nmt-2gpu", "1 GPU", None),
        ("nmt-2gpu", "RL", 4.04),
        ("nmt-4gpu", "MinCut", 11.78),
        ("nmt-4gpu", "1 CPU", 10.72),
        ("inception-v3-2gpu", "expert", 11.22),
        ("inception-v3-4gpu", "RL", 3.85),
        ("rnnlm-large-4gpu", "RL", 33.46),
        ("nmt-large-4gpu", "RL", 35.84),
        ("rnnlm-2-2gpu", "METIS", 0.355),
        ("gnmt-8-8gpu", "human", 0.610),
        ("gnmt-8-8gpu", "METIS", None),
        ("transformer-xl-4-4gpu", "HDP", 0.621),
        ("inception-2gpu", "METIS", 0.423),
        ("wavenet-4x36-4gpu", "GDP-one", 0.659),
    ],
)
def test_figures_are_those_of_the_papers_tables(key, column, seconds):
    found = {case.key: case.published for cases in CASES.values() for case in cases}
    assert found[key].seconds[column] == seconds


def test_ops_groups_and_search_times_are_those_of_the_papers():
    found = {case.key: case.published for cases in CASES.values() for case in cases}
    assert (found["rnnlm-4gpu"].ops, found["rnnlm-4gpu"].groups) == (8943, 188)
    assert (found["nmt-2gpu"].ops, found["nmt-2gpu"].groups) == (22097, 280)
    assert (found["inception-v3-2gpu"].ops, found["inception-v3-2gpu"].groups) == (31180, 83)
    assert found["amoebanet-4gpu"].hours == {"GDP-one": "58.8 times faster than HDP"}


def test_what_the_paper_does_not_give_is_said_to_be_ours():
    for case in CASES["gdp"]:
        assert "no optimizer" in case.ours
    assert "10,000" in CASES["rl17"][0].ours
