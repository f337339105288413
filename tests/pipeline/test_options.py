"""Options of commands are made from the fields of their requests, and exclude each other by one
table."""

from dataclasses import fields
from typing import Annotated

import pytest
import typer

from dovetail.cli.options import Options, OptionsOf, command
from dovetail.errors import UsageError
from dovetail.pipeline.requests import (
    EXCLUSIONS,
    LearnRequest,
    PlanRequest,
    ScheduleRequest,
    TaskRequest,
)
from dovetail.request_fields import options_of
from dovetail.training.request import TrainRequest

RECORDS = (PlanRequest, TaskRequest, LearnRequest, ScheduleRequest, TrainRequest)


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
    names = {field.name for field in fields(PlanRequest)}
    for exclusion in EXCLUSIONS:
        assert names.issuperset(exclusion.options)
    with pytest.raises(UsageError, match="for: does not go with replicas auto"):
        PlanRequest(machine="2 x p100", replicas="auto", format="device-map")
    with pytest.raises(UsageError, match=r"finetune: is for gdp and gdp\+search, not for etf"):
        PlanRequest(machine="2 x p100", placer="etf", finetune=3)
    PlanRequest(machine="2 x p100", replicas="auto", objective="step", budget="5e", gap=0.1)
