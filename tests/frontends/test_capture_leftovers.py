"""A capture leaves no tensor without numbers in the user's process: what a model keeps outside of
its parameters and buffers is put back, or refused by name."""

import functools
import sys
import types
import weakref
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import CaptureError
from dovetail.frontends import SGD, capture, initial_values, run_step
from dovetail.frontends.leftovers import take_back

pytestmark = pytest.mark.searches_all_objects

TABLES = {}
TABLE = None
SEEN = []


class Keeps(nn.Module):
    memory: ClassVar = {}

    def __init__(self, table):
        super().__init__()
        self.a, self.table = nn.Linear(4, 4), table

    def forward(self, x):
        return self.a(x) + self.table(self)


def made():
    return torch.arange(4.0) * 2


def in_a_dictionary(_model):
    if "table" not in TABLES:
        TABLES["table"] = made()
    return TABLES["table"]


def in_a_global_variable(_model):
    global TABLE
    if TABLE is None:
        TABLE = made()
    return TABLE


def in_a_list(_model):
    if not SEEN:
        SEEN.append((made(), made()))
    return SEEN[0][1]


def in_the_class(model):
    if "table" not in model.memory:
        model.memory["table"] = made()
    return model.memory["table"]


def in_an_attribute_of_the_class(model):
    if not hasattr(Keeps, "late"):
        Keeps.late = made()
    return Keeps.late


@functools.lru_cache
def of_a_cache(_number):
    return made()


@functools.cache
def of_an_endless_cache(_number):
    return {"both": [made(), made()]}


def in_a_cached_function(_model):
    return of_a_cache(1)


def in_an_endless_cache(_model):
    return of_an_endless_cache(1)["both"][1]


PUT_BACK = (
    in_a_dictionary,
    in_a_global_variable,
    in_a_list,
    in_the_class,
    in_an_attribute_of_the_class,
    in_a_cached_function,
    in_an_endless_cache,
)


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    globals()["TABLE"] = None
    for kept in (TABLES, SEEN, Keeps.memory):
        kept.clear()
    if hasattr(Keeps, "late"):
        del Keeps.late
    for cached in (of_a_cache, of_an_endless_cache):
        cached.cache_clear()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("table", PUT_BACK)
def test_a_table_that_a_model_keeps_is_put_back(table, training):
    model, x = Keeps(table), torch.randn(3, 4)
    more = {"loss": lambda output: output.square().mean(), "train": SGD()} if training else {}
    captured = capture(model, x, **more)
    assert captured.notes == ()
    found, expected = run_step(captured, initial_values(captured), (x,)), model(x)
    assert type(expected) is torch.Tensor
    assert torch.allclose(found, expected.square().mean() if training else expected)


def test_a_cached_function_is_cleared_after_a_refusal_as_well():
    model, x = Keeps(lambda model: float(in_a_cached_function(model).sum())), torch.randn(3, 4)
    model.a.register_forward_hook(lambda _module, _given, y: y * float(y.sum()))
    with pytest.raises(CaptureError, match="turns a tensor into a number"):
        capture(model, x)
    model = Keeps(
        lambda model: in_a_cached_function(model) * float(in_an_endless_cache(model).sum())
    )
    with pytest.raises(CaptureError):
        capture(model, x)
    assert type(of_a_cache(1)) is type(of_an_endless_cache(1)["both"][0]) is torch.Tensor


def test_what_a_global_variable_counts_is_named_and_put_back():
    def counted(model):
        TABLES["count"] = TABLES.get("count", 0) + 1
        return TABLES["count"]

    with pytest.raises(CaptureError, match=r"changes .*test_capture_leftovers\.TABLES\.count"):
        capture(Keeps(counted), torch.randn(3, 4))
    assert not TABLES


def test_the_data_of_a_program_are_not_copied(monkeypatch):
    class Refuses(np.ndarray):
        def __copy__(self):
            raise AssertionError("copied")

    array = np.zeros(100_000_000, np.uint8).view(Refuses)
    monkeypatch.setitem(TABLES, "data", array)
    capture(Keeps(in_the_class), torch.randn(3, 4))


def closure():
    kept = None

    def table(_model):
        nonlocal kept
        kept = made() if kept is None else kept
        return kept

    return table


class Object:
    def __init__(self):
        self.kept = None
        self.tables = {}
        self.list = []


@dataclass(frozen=True)
class Frozen:
    @functools.cached_property
    def table(self):
        return made()


class Slotted:
    __slots__ = ("kept",)

    def __init__(self):
        self.kept = None


@pytest.fixture
def elsewhere(monkeypatch):
    module = types.ModuleType("elsewhere")
    module.kept, module.tables, module.object = None, {}, Object()
    module.frozen, module.slotted = Frozen(), Slotted()
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    return module


def in_a_variable_elsewhere(module):
    if module.kept is None:
        module.kept = made()
    return module.kept


def in_a_dictionary_elsewhere(module):
    if "table" not in module.tables:
        module.tables["table"] = made(), 1
    return module.tables["table"][0]


def in_an_object_elsewhere(module):
    if module.object.kept is None:
        module.object.kept = made()
    return module.object.kept


def in_a_list_elsewhere(module):
    if not module.object.list:
        module.object.list.append(made())
    return module.object.list[0]


def in_an_attribute_of_a_frozen_object(module):
    return module.frozen.table


def in_a_slot_elsewhere(module):
    if module.slotted.kept is None:
        module.slotted.kept = made()
    return module.slotted.kept


NAMED = {
    in_an_attribute_of_a_frozen_object: r"Frozen\.table",
    in_a_slot_elsewhere: r"Slotted\.kept",
    in_a_variable_elsewhere: r"elsewhere\.kept",
    in_a_dictionary_elsewhere: r"elsewhere\.tables\['table'\]",
    in_an_object_elsewhere: r"Object\.kept",
    in_a_list_elsewhere: r"Object\.list",
}


@pytest.mark.parametrize("table", NAMED)
def test_a_table_that_is_kept_elsewhere_is_refused_by_name_and_taken_away(table, elsewhere):
    # The model's own module has no name for the place, as if a library kept the table.
    model, x = Keeps(lambda _model: table(sys.modules["elsewhere"])), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=f"a step leaves a tensor in {NAMED[table]}"):
        capture(model, x)
    assert torch.equal(model(x), model.a(x) + made())


@pytest.mark.parametrize("train", [None, SGD()])
def test_a_refusal_takes_away_what_a_closure_keeps(train):
    table = closure()
    model = Keeps(lambda model: table(model) * float(model.a.weight.sum()))
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match="turns a tensor into a number"):
        capture(model, x, loss=lambda output: output.sum(), train=train)
    assert torch.equal(model(x), model.a(x) + made() * float(model.a.weight.sum()))


def test_a_table_in_a_closure_is_put_back():
    table = closure()
    for keeps in (table, lambda model: table(model)):
        model, x = Keeps(keeps), torch.randn(3, 4)
        captured = capture(model, x)
        assert table.__closure__[0].cell_contents is None
        assert torch.equal(run_step(captured, initial_values(captured), (x,)), model(x))
        table.__closure__[0].cell_contents = None


def test_what_cannot_give_up_a_tensor_is_named():
    kept = functools.partial(torch.add, made())
    assert take_back([weakref.ref(kept.args[0])]) == ["an object of class partial"]


def test_what_a_run_leaves_that_only_tries_an_answer_is_taken_back(elsewhere):
    def asks(model):
        kept = sys.modules["elsewhere"].tables
        kept["last"] = made()
        if not (model.a.weight < 1e6).all():
            kept["large"] = made()
            raise ValueError("large")
        return kept["last"]

    model, x = Keeps(asks), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"tables\['last'\] and elsewhere.tables\['large'\]"):
        capture(model, x)
    assert not elsewhere.tables
    assert torch.equal(model(x), model.a(x) + made())


def test_batch_norm_is_called_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=None)

        def forward(self, x):
            return self.norm(input=x)

    module, x = Named(), torch.randn(3, 4)
    captured = capture(module, x)
    assert torch.allclose(run_step(captured, initial_values(captured), (x,)), module(x))
