"""The paper's orderings against hand-made rows of ours."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.machine import parse_machine
from reproductions.methods import HYPOTHESIS, PLAIN
from reproductions.orderings import orderings_of, relation
from reproductions.records import MethodResult, Published
from reproductions.running import best_of
from tests.support.bench_samples import METHODS, fits, make_case, make_column, make_row, oom

LEARNED = {"seq2seq": fits(0.72)}
PUBLISHED = make_case().published.seconds
PATTERN = r"(.*?) (?:is|fits into) (faster than|slower than|as fast as|out of memory|memory) ?(.*)"


def orderings(case=None, name=PLAIN, **methods):
    case = case or make_case()
    row = make_row(**{name: make_column(**methods)})
    found = orderings_of(case, row, name, parse_machine(case.machine))
    assert len({one.statement for one in found}) == len(found)
    return {one.statement: one for one in found}


def test_the_papers_statements_are_read_off_its_figures():
    assert list(orderings()) == [
        "1 GPU is faster than 1 CPU",
        "expert is slower than 1 GPU",
        "Scotch is slower than 1 CPU",
        "MinCut is slower than 1 CPU",
        "RL is faster than expert",
        "RL is as fast as 1 GPU",
    ]


def test_a_plain_cost_model_has_two_of_rl17s_orderings():
    holds = {statement: one.holds for statement, one in orderings(**LEARNED).items()}
    assert [statement for statement, yes in holds.items() if yes] == [
        "1 GPU is faster than 1 CPU",
        "RL is faster than expert",
    ]


def test_every_ordering_that_does_not_hold_says_why():
    for name in (PLAIN, HYPOTHESIS):
        for one in orderings(name=name, **LEARNED).values():
            assert one.holds or len(one.why) > 40
            assert one.published
            assert one.found


def test_figures_that_agree_with_the_paper_hold_all_of_it():
    same = {"scotch": 13.0, "mincut": 12.0, "metis": 9.0, "expert": 3.8, "seq2seq": 1.56}
    same = {method: fits(seconds) for method, seconds in same.items()}
    assert all(one.holds for one in orderings(**same).values())


def test_the_reason_is_in_the_rows_own_figures():
    why = orderings()["expert is slower than 1 GPU"].why
    assert "59 % of the time of one GPU" in why  # .92 of 1.57
    assert "k80:0 43 %, k80:1 33 %" in why  # .4 and .3 of .92
    assert "transfers take 50 ms" in why
    assert "650 ms longer" in why  # 1.57 - .92
    assert "3,000 ops" in why


def test_what_a_cut_would_have_to_move_depends_on_the_columns_link():
    plain = orderings()["Scotch is slower than 1 CPU"].why
    slow = orderings(name=HYPOTHESIS)["Scotch is slower than 1 CPU"].why
    assert "5.8 s more" in plain
    assert "5.8 s more" in slow
    assert "at 3.5 GB/s" in slow
    assert "at 3.5 GB/s" not in plain


def test_the_fit_is_named_where_an_ordering_is_owed_to_it():
    assert "fitted" in orderings()["1 GPU is faster than 1 CPU"].why
    assert "fitted" not in orderings(name=HYPOTHESIS)["1 GPU is faster than 1 CPU"].why


def test_out_of_memory_in_the_paper_and_not_in_ours_is_told_with_what_ours_needs():
    seconds = {"1 CPU": 10.72, "1 GPU": None, "expert": 4.99, "RL": 4.04}
    found = orderings(make_case(published=Published(seconds)))
    assert "expert is slower than 1 GPU" not in found
    one = found["1 GPU is out of memory"]
    assert one.holds is False
    assert one.published == "OOM"
    assert one.found.startswith("1 GPU: 1 GiB of 11.2 GiB on k80:0")
    assert "vocabulary 10,000" in one.why


def test_out_of_memory_in_both_holds():
    case = make_case(published=Published({"1 GPU": None}))
    assert orderings(case, **{"1 GPU": oom()})["1 GPU is out of memory"].holds


def test_out_of_memory_in_ours_alone_fails_both_the_memory_and_the_pair():
    found = orderings(expert=oom())
    assert found["expert fits into memory"].holds is False
    assert found["expert is slower than 1 GPU"].holds  # nothing is slower
    found = orderings(**{"1 GPU": oom()})
    assert found["1 GPU is faster than 1 CPU"].holds is False
    assert "13 GiB of 11.2 GiB" in found["1 GPU is faster than 1 CPU"].why


def test_a_method_that_refused_or_did_not_run_leaves_the_ordering_open():
    found = orderings(scotch=MethodResult(None, "the library Scotch is not installed"))
    one = found["Scotch is slower than 1 CPU"]
    assert one.holds is None
    assert one.why == "the library Scotch is not installed"


def test_gdps_orderings_are_of_what_was_learned_and_the_reason_names_the_best_that_was_not():
    seconds = {"GDP-one": 0.649, "human": 0.610, "METIS": None, "HDP": 0.693}
    case = make_case(machine="gdp/2", published=Published(seconds), ours="batch 64")
    found = orderings(case, gdp=fits(0.75), hdp=fits(0.9))
    assert {statement: one.holds for statement, one in found.items()} == {
        "GDP-one is slower than human": False,
        "GDP-one is faster than HDP": True,
        "HDP is slower than human": False,  # .9 against .92
        "METIS is out of memory": False,
    }
    why = found["GDP-one is slower than human"].why
    assert "gdp takes 82 % of the time of the expert's plan" in why
    assert "104 % of auto's" in why


def test_a_learned_method_that_was_not_run_leaves_its_orderings_open():
    found = orderings()
    for statement in ("RL is faster than expert", "RL is as fast as 1 GPU"):
        assert found[statement].holds is None
        assert found[statement].why == "not run"


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (1.0, 1.019, "as fast as"),
        (1.0, 1.03, "faster than"),
        (1.03, 1.0, "slower than"),
        (None, 1.0, "slower than"),
        (1.0, None, "faster than"),
        (None, None, "as fast as"),
        (0.0, 0.0, "as fast as"),
    ],
)
def test_two_within_two_percent_are_as_fast_and_out_of_memory_is_slowest(a, b, said):
    assert relation(a, b) == said


def test_a_case_without_published_figures_has_no_orderings():
    case = make_case(published=None)
    assert orderings_of(case, make_row(), PLAIN, parse_machine("rl17/2")) == ()


def found_ones():
    seconds = st.floats(1e-6, 1e3).map(fits)
    return st.one_of(seconds, st.just(oom()), st.just(MethodResult(None, "refused")), st.none())


@given(
    st.dictionaries(st.sampled_from([*PUBLISHED, "METIS", "human", "GDP-one", "HDP"]),
                    st.none() | st.floats(1e-3, 1e2)),
    st.fixed_dictionaries({name: found_ones() for name in [*METHODS, "seq2seq", "gdp", "hdp"]}),
    st.sampled_from([PLAIN, HYPOTHESIS]),
)  # fmt: skip
def test_whatever_was_found_every_ordering_is_judged_by_its_figures(published, methods, name):
    case = make_case(published=Published(published))
    column = make_column(**{name: found for name, found in methods.items() if found})
    present = {name: column.methods[name] for name, found in methods.items() if found}
    column = replace(column, methods=present, best=best_of(present))
    row = make_row(**{name: column})
    for one in orderings_of(case, row, name, parse_machine(case.machine)):
        if one.holds is None:
            assert one.why
            assert not one.found
        else:
            assert one.found
            assert one.holds or one.why
        a, said, b = re.fullmatch(PATTERN, one.statement).groups()
        if said != "out of memory" and b:
            assert relation(published[a], published[b]) == said
