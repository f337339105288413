"""Options of commands are made from the fields of their requests, and exclude each other by one
table."""

from typing import Annotated

import pytest
import typer

from dovetail.cli.options import Options, OptionsOf, command
from dovetail.errors import UsageError
from dovetail.pipeline.requests import (
    CANDIDATES,
    EXCLUSIONS,
    PLAN_FIELDS,
    LearnRequest,
    PhasesRequest,
    PlanRequest,
    ScheduleRequest,
    TaskRequest,
)
from dovetail.request_fields import options_of
from dovetail.training.request import TrainRequest

RECORDS = (PlanRequest, PhasesRequest, TaskRequest, LearnRequest, ScheduleRequest, TrainRequest)


def given(record, *words):
    """The fields of a record that a command line sets."""
    app, filled = typer.Typer(add_completion=False), []

    @app.command()
    @command
    def fill(*, options: Annotated[Options, OptionsOf(record)]):
        filled.append(options)

    app(list(words), standalone_mode=False)
    return filled[0]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_has_its_options_in_its_docstring_and_no_two_of_one_spelling(record):
    options = options_of(record)
    flags = [flag for option in options.values() for flag in option.flags]
    assert len(flags) == len(set(flags)) > 0
    for name, option in options.items():
        assert f"\n    {name} " in record.__doc__
        assert option.help


def test_a_command_gets_what_was_given_and_the_record_knows_the_rest(monkeypatch):
    monkeypatch.delenv("DOVETAIL_COMPILE_BUDGET", raising=False)
    assert given(PlanRequest) == {}
    words = ("--pin", "a.*=cpu0", "--pin", "b=cpu1", "--cap", "cpu0=2GiB", "--min-gain", "2%")
    assert given(PlanRequest, *words, "--no-compile", "--for", "device-map") == {
        "pins": (("a.*", "cpu0"), ("b", "cpu1")),
        "caps": (("cpu0", 2 * 2**30),),
        "min_gain": 0.02,
        "compile": False,
        "format": "device-map",
    }
    # The default is given as well if the user has typed it: a trainer may have another one.
    assert given(TrainRequest, "--workers", "2", "--window", "all") == {
        "workers": 2,
        "window": None,
    }
    assert given(LearnRequest, "--setting", "rate=1e-3", "--setting", "trials=16") == {
        "settings": {"rate": 0.001, "trials": 16}
    }


def test_an_empty_text_is_not_given_and_a_variable_is(monkeypatch):
    monkeypatch.setenv("DOVETAIL_COMPILE_BUDGET", "9s")
    assert given(PlanRequest, "--machine", "", "--min-gain", "") == {"compile_budget": "9s"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--pin", "a"), "--pin: 'a' is not of the form NAME=VALUE"),
        (("--cap", "a=b"), "--cap: 'b' is not a size"),
        (("--min-gain", "200%"), "--min-gain: '200%' is not a share"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_by_its_spelling(words, says):
    with pytest.raises(UsageError, match=says):
        given(PlanRequest, *words)


def test_every_exclusion_is_of_fields_and_names_the_option_that_it_refuses():
    for exclusion in EXCLUSIONS:
        assert PLAN_FIELDS.issuperset(exclusion.options)
    with pytest.raises(UsageError, match="for: does not go with replicas auto"):
        PlanRequest(machine="2 x p100", replicas="auto", format="device-map")
    with pytest.raises(UsageError, match=r"finetune: is for gdp and gdp\+search, not for etf"):
        PlanRequest(machine="2 x p100", placer="etf", finetune=3)
    # What a format cannot say is known before anything is measured.
    with pytest.raises(UsageError, match="for: a device-map has no stages; use split-points or"):
        PlanRequest(machine="2 x p100", micro_batches=4, format="device-map")
    with pytest.raises(UsageError, match="placer: 'etf' keeps no order of stages; leave it out"):
        PlanRequest(machine="2 x p100", placer="etf", format="torchtitan")
    PlanRequest(machine="2 x p100", placer="etf", format="device-map")
    PlanRequest(machine="2 x p100", replicas="auto", objective="step", budget="5e", gap=0.1)


VALUES = {
    "micro_batches": 2, "schedule": "gpipe", "recompute": "never", "pins": [("a", "p100:0")],
    "stages": True, "format": "split-points", "place": {"a": 0}, "whole": ["a"], "per_op": True,
    "policy": "mine", "placer": "etf", "method": min, "objective": "load", "gap": 0.1,
    "min_gain": 0.1,
}  # fmt: skip
"""A value of each option that some kind of candidates does not take."""
REFUSED = {
    "as it is": (
        {"objective": "step"},
        ("micro_batches", "schedule", "recompute"),
        "is for objective pipeline; leave it out",
    ),
    "pipeline": (
        {"micro_batches": 2},
        ("stages", "place", "per_op", "policy", "placer", "gap", "min_gain", "method"),
        "does not go with objective pipeline; leave it out",
    ),
    "shared batch": (
        {"replicas": "auto"},
        (
            "micro_batches", "pins", "stages", "format", "place", "whole", "per_op", "policy",
            "placer", "method", "objective",
        ),
        "does not go with replicas auto; leave it out",
    ),
}  # fmt: skip
"""Kind of candidates -> (what asks for it, the options that it does not take, what is said)."""


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_kind_of_candidates_does_not_take_is_refused_and_nothing_else(kind):
    asks, refused, says = REFUSED[kind]
    for name in refused:
        with pytest.raises(UsageError) as caught:
            PlanRequest(machine="2 x p100", **asks, **{name: VALUES[name]})
        assert str(caught.value) == f"{'for' if name == 'format' else name}: {says}"
    elsewhere = {"contiguous", "finetune"} | asks.keys()  # refused for another reason, if at all
    taken = CANDIDATES[kind].takes - elsewhere - {"replicas"}
    assert not taken & set(refused)
    assert PLAN_FIELDS - taken - elsewhere == {*refused, "replicas"} - asks.keys()


def test_every_option_is_taken_by_some_kind_of_candidates():
    assert frozenset().union(*(CANDIDATES[kind].takes for kind in REFUSED)) == PLAN_FIELDS
