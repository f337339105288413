"""A module that was made fast where it stands is the module that it was, with its numbers."""

import copy
import json
import pickle
import tomllib
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import dovetail as dt
from dovetail.errors import ModelError, UsageError
from dovetail.machine import parse_machine
from dovetail.pipeline import optimizing, sources
from dovetail.plans import COMPILED, EAGER, PLACED
from dovetail.runtime.setup import op_threads
from dovetail.runtime.torch_versions import plain_call, replaced_call
from dovetail.units import HERE_CPU

ROOT = Path(__file__).parents[2]


class Scaled(nn.Module):
    """Linear layers around a batch normalisation, and a number of Python's."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.settings = {"scale": 1.5}

    def forward(self, x, shift=0.0):
        hidden = torch.relu(self.norm(self.first(x))) * self.settings["scale"]
        return {"out": self.last(hidden) + shift, "hidden": hidden}


class Asks(nn.Module):
    """Asks for a number of its input, which no graph can say."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * (2 if x.sum().item() > 0 else 3)


def rival_wins(timers, *_args, **_settings):
    """Stands for the timer: whatever may take the place of the module's own call is faster."""
    return {way: (1.0 if way == EAGER else 0.5,) * 3 for way in timers}


@pytest.fixture(autouse=True)
def _own_records(tmp_path, monkeypatch):
    """Each test decides for itself."""
    monkeypatch.setattr(optimizing, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(optimizing, "in_turns", rival_wins)


@pytest.fixture
def in_order(monkeypatch):
    """Plans run the ops one by one. Nothing is measured for them."""
    machine = parse_machine(HERE_CPU)
    plan_of = partial(sources.in_order, machine=machine)
    monkeypatch.setattr(optimizing, "plan", lambda step, *_, **__: plan_of(step.graph))


def seeded(make):
    torch.manual_seed(0)
    return make()


def five_losses(module, call):
    """Losses of five steps of training, in which the module is called so."""
    torch.manual_seed(2)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = call(torch.randn(7, 6))["out"].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def ways_of(module):
    return [decision.way for decision in replaced_call(module)._decisions.values()]


def assert_equal(result, wanted):
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)


def test_calls_by_a_plan_are_those_of_the_module_whatever_becomes_of_it(in_order):
    module, plain = seeded(Scaled).eval(), seeded(Scaled).eval()
    assert dt.optimize(module, quick=True) is module
    x = torch.randn(5, 6)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 6)
            assert_equal(module(x), plain(x))
        assert ways_of(module) == [PLACED]
        planned = next(iter(replaced_call(module)._decisions.values()))
        # Weights change where they lie, by a whole state, and by other tensors.
        for each in (module, plain):
            each.first.weight.mul_(1.25)
            each.last.bias.data = torch.tensor([1.0, 2.0, 3.0])
        assert_equal(module(x), plain(x))
        torch.manual_seed(1)
        state = {k: torch.rand_like(v.float()).to(v.dtype) for k, v in plain.state_dict().items()}
        for assign in (False, True):
            state = {key: value + 1 for key, value in state.items()}
            for each in (module, plain):
                each.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign)
            assert_equal(module(x), plain(x))
        assert list(replaced_call(module)._decisions.values()) == [planned]
        assert module.state_dict().keys() == plain.state_dict().keys()
        # Hooks see their calls, and what they return counts.
        seen = []
        handle = module.norm.register_forward_hook(lambda *given: seen.append(given))
        assert_equal(module(x), plain(x))
        handle.remove()
        assert_equal(module(x), plain(x))
        assert len(seen) == 1
        # A number of Python's is another one.
        for each in (module, plain):
            each.settings["scale"] = -2.0
        for _ in range(optimizing.DECIDED_AT_CALL):
            assert_equal(module(x), plain(x))
        assert list(replaced_call(module)._decisions.values()) != [planned]
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert replaced_call(copied) is None
            assert_equal(copied(x), plain(x))
        # Another dtype is decided anew, and input that does not fit raises what the module raises.
        for each in (module, plain):
            each.to(torch.float64)
        with pytest.raises(RuntimeError, match="dtype"):
            module(x)
        for _ in range(optimizing.DECIDED_AT_CALL):
            assert_equal(module(x.double()), plain(x.double()))


def test_the_same_call_in_another_mode_or_shape_is_decided_by_itself(in_order):
    module, plain = seeded(Scaled), seeded(Scaled)
    dt.optimize(module, quick=True)
    x = torch.randn(5, 6)
    with torch.no_grad():
        for mode in (False, True, False):
            module.train(mode), plain.train(mode)
            for rows, shift in 3 * [(5, 0), (3, 0), (5, 2), (5, 2.0)]:
                assert_equal(module(x[:rows], shift), plain(x[:rows], shift))
    assert_equal(module.state_dict(), plain.state_dict())
    # In training mode a call writes to buffers.
    modes = {key[3]: decision.way for key, decision in replaced_call(module)._decisions.items()}
    assert modes == {False: PLACED, True: EAGER}


class Holds(nn.Module):
    """Two layers, and one value."""

    def __init__(self, value=None):
        super().__init__()
        self.first, self.last, self.value = nn.Linear(3, 3), nn.Linear(3, 3), value

    def forward(self, x, y=None):
        return self.last(self.first(x)) + (0 if y is None else 2 * y)


class Multiplies:
    """A callable with a number in a slot."""

    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


def test_gradients_are_needed_by_the_tensors_that_a_call_finds(in_order):
    module, plain = seeded(Holds).requires_grad_(False), seeded(Holds).requires_grad_(False)
    dt.optimize(module, quick=True)
    x = torch.randn(2, 3)
    assert_equal(module(x), plain(x))
    assert ways_of(module) == [PLACED]
    lent = {key: value.clone().requires_grad_() for key, value in plain.state_dict().items()}
    torch.func.functional_call(module, lent, (x,)).sum().backward()
    assert lent["last.weight"].grad is not None
    module.last.weight = nn.Parameter(module.last.weight.detach().clone())
    assert module(x).requires_grad
    module.last = nn.Linear(3, 3)
    for _ in range(2 * optimizing.DECIDED_AT_CALL):
        assert module(x).requires_grad


def test_tied_weights_that_are_untied_and_tensors_given_twice_are_seen(in_order):
    module, plain = seeded(Holds), seeded(Holds)
    for each in (module, plain):
        each.last.weight = each.first.weight
    dt.optimize(module, quick=True)
    x, y = torch.randn(2, 2, 3)
    with torch.no_grad():
        assert_equal(module(x, y), plain(x, y))
        assert_equal(module(x, x), plain(x, x))
        assert len({key[1] for key in replaced_call(module)._seen}) == 2
        for each in (module, plain):
            each.last.weight = nn.Parameter(torch.eye(3))
        for _ in range(2):
            assert_equal(module(x, y), plain(x, y))


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (Multiplies(2.0), lambda module: setattr(module.value, "factor", 3.0)),
        ({"a": 1}, lambda module: module.value.update(b=module.value.pop("a"))),
        ([1], lambda module: module.value.__setitem__(0, True)),
        (0.0, lambda module: setattr(module, "value", -0.0)),
        (torch.ones(2), lambda module: setattr(module.value, "data", torch.zeros(2))),
        (None, lambda module: setattr(type(module), "forward", lambda self, x: x)),
    ],
)
def test_what_a_module_holds_is_seen_to_change(value, change, monkeypatch):
    monkeypatch.setattr(Holds, "forward", Holds.forward)
    module = Holds(value)
    state = optimizing.ModuleState(module)
    assert state.holds() and not state.is_opaque
    change(module)
    assert not state.holds()
    for hidden in (bytearray(b"a"), torch.Generator(), torch.ones(1).numpy()):
        assert optimizing.ModuleState(Holds([hidden])).is_opaque


def test_results_agree_in_their_numbers_constants_and_need_of_gradients():
    x = torch.ones(2)
    assert optimizing.agree({"a": x, "b": 1}, {"a": x.clone(), "b": 1})
    assert not optimizing.agree({"a": x, "b": 1}, {"a": x, "b": 2})
    assert not optimizing.agree([x], [x.clone().requires_grad_()])


def test_a_module_that_changes_often_or_was_forked_or_does_not_compile_runs_as_it_is(
    in_order, monkeypatch, caplog
):
    module, plain = dt.optimize(seeded(Holds), quick=True), seeded(Holds)
    x = torch.randn(2, 3)
    with torch.no_grad():
        module(x)
        (planned,) = replaced_call(module)._decisions.values()
        with monkeypatch.context() as patch:
            patch.setattr(optimizing.os, "getpid", lambda: -1)
            patch.setattr(planned.step, "step", None)
            assert_equal(module(x), plain(x))
        for number in range(20):
            module.value = number
            assert_equal(module(x), plain(x))
        assert ways_of(module) == [] and caplog.text.count("plans of it ended 3 times") == 1
    assert "forked" in caplog.text

    # Stands for an error of torch's.
    module = dt.optimize(seeded(Holds))
    decision = optimizing.CallDecision(COMPILED, lambda _: 1 // 0)
    monkeypatch.setattr(optimizing.OptimizedCalls, "found", lambda *_: decision)
    monkeypatch.setattr(optimizing, "compile_errors", lambda: (ZeroDivisionError,))
    for _ in range(2):
        assert_equal(module(x), plain(x))
    assert ways_of(module) == [EAGER] and caplog.text.count("cannot compile it") == 1


def test_torchs_compilation_is_measured_again_here_where_it_is_close_to_a_plan(
    in_order, monkeypatch
):
    plan_of, measured = optimizing.plan, {EAGER: 3.0, COMPILED: 1.1, PLACED: 1.0}

    def plan(*args, **options):
        return replace(plan_of(*args, **options), measured=measured)

    def in_turns(timers, *_, **__):
        return {way: [here[way]] * 3 for way in timers}

    monkeypatch.setattr(optimizing, "plan", plan)
    monkeypatch.setattr(optimizing, "in_turns", in_turns)
    monkeypatch.setattr(optimizing.OptimizedCalls, "record_path", lambda *_: None)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: compiled(call, backend="aot_eager"))
    x, plain = torch.randn(5, 6), seeded(Scaled).eval()
    for of_compiled, own, way in ((1.1, 0.8, COMPILED), (1.1, 1.2, PLACED), (2.0, 0.8, PLACED)):
        measured[COMPILED], here = of_compiled, {EAGER: 3.0, COMPILED: own, PLACED: 1.0}
        module = dt.optimize(seeded(Scaled).eval())
        with torch.no_grad():
            for _ in range(2):
                assert_equal(module(x), plain(x))
        assert ways_of(module) == [way]


class AddsThreads(nn.Linear):
    """Tells on how many threads it runs."""

    def forward(self, x):
        return super().forward(x) + torch.get_num_threads()


@pytest.mark.parametrize("way", [EAGER, COMPILED])
def test_the_users_own_ways_run_on_as_many_threads_as_were_fastest_but_no_more_than_are_set(
    way, in_order, monkeypatch
):
    plan_of, compiled, x = optimizing.plan, torch.compile, torch.randn(3, 6)
    monkeypatch.setattr(torch, "compile", lambda call: compiled(call, backend="eager"))

    def plan(*args, **options):
        found = plan_of(*args, **options)
        return replace(found, way=way, machine=sources.with_threads(found.machine, 1))

    monkeypatch.setattr(optimizing, "plan", plan)
    for of_caller in (2, 1):
        with op_threads(of_caller), torch.no_grad():
            wanted = nn.Linear.forward(seeded(lambda: AddsThreads(6, 2)), x) + 1
            for finds in (plan, None):  # the second one is of what was kept
                monkeypatch.setattr(optimizing, "plan", finds)
                module = dt.optimize(seeded(lambda: AddsThreads(6, 2)))
                assert_equal(module(x), wanted)
                assert_equal(module(x), wanted)
                assert torch.get_num_threads() == of_caller
            (decision,) = replaced_call(module)._decisions.values()
            assert (decision.way, decision.threads) == (way, of_caller - 1)


def test_calls_of_many_keys_run_as_they_are(monkeypatch, caplog):
    monkeypatch.setattr(optimizing, "DECIDED_AT_CALL", 1)
    monkeypatch.setattr(
        optimizing.OptimizedCalls, "found", lambda self, *_: optimizing.CallDecision(EAGER, id)
    )
    module = dt.optimize(nn.Linear(2, 2))
    for rows in range(1, 3 * optimizing.MOST_KEYS):
        assert module(torch.ones(rows, 2)).shape == (rows, 2)
    assert len(ways_of(module)) == optimizing.MOST_KEYS
    assert len(caplog.records) == 1 and "more than 8 keys" in caplog.text


@pytest.mark.parametrize("way", [EAGER, COMPILED])
def test_training_takes_the_steps_of_the_plain_module(way, monkeypatch):
    decision = optimizing.CallDecision(way, replaced_call)
    monkeypatch.setattr(optimizing.OptimizedCalls, "raced", lambda *_: decision)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: compiled(call, backend="aot_eager"))
    module, plain = seeded(Scaled), seeded(Scaled)
    dt.optimize(module)
    assert five_losses(module, module) == pytest.approx(five_losses(plain, plain), rel=1e-6)
    assert ways_of(module) == [way]
    assert_equal(module.state_dict(), plain.state_dict())
    assert int(module.norm.num_batches_tracked) == 5


def test_a_module_without_a_graph_runs_as_it_is_and_the_log_says_why_once(caplog):
    module = dt.optimize(seeded(Asks), quick=True)
    plain, x = seeded(Asks), torch.randn(3, 4)
    with torch.no_grad():
        for sign in (1, -1, 1, -1):
            assert_equal(module(sign * x), plain(sign * x))
    (record,) = caplog.records
    assert "Asks: it has no plan: " in record.message and ".item()" in record.message


def test_what_each_call_changes_of_a_module_is_changed_by_each_call(in_order):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.texts = nn.Linear(2, 2), []

        def forward(self, x):
            self.texts.append("called")
            return self.linear(x)

    module = dt.optimize(Counts(), quick=True)
    with torch.no_grad():
        before = module(torch.ones(1, 2)), len(module.texts)
        after = module(torch.ones(1, 2)), len(module.texts)
    assert_equal(before[0], after[0])
    assert after[1] == before[1] + 1 and PLACED not in ways_of(module)


def test_another_process_begins_with_what_was_decided(tmp_path, monkeypatch):
    x = torch.randn(2, 6)
    with torch.no_grad():
        dt.optimize(seeded(Scaled).eval(), quick=True)(x)
        (path,) = (tmp_path / "ways").iterdir()
        assert json.loads(path.read_text())["way"] == PLACED
        monkeypatch.setattr(optimizing, "in_turns", None)
        monkeypatch.setattr(optimizing.OptimizedCalls, "raced", None)
        again = dt.optimize(seeded(Scaled).eval(), quick=True)
        assert_equal(again(x), plain_call(again)(x))
        assert ways_of(again) == [PLACED]
        path.write_text('{"way": "by magic", "seconds": {}}')
        monkeypatch.setattr(optimizing, "in_turns", rival_wins)
        dt.optimize(seeded(Scaled).eval(), quick=True)(x)
        assert json.loads(path.read_text())["way"] == PLACED


def test_what_was_decided_is_searched_on_from_and_decided_anew(tmp_path, monkeypatch):
    asked, find = [], optimizing.plan

    def plan(*arguments, **options):
        asked.append(options["again"])
        return find(*arguments, **options)

    monkeypatch.setattr(optimizing, "plan", plan)
    x = torch.randn(2, 6)
    with torch.no_grad():
        module = dt.optimize(seeded(Scaled).eval(), quick=True)
        module(x)
        (path,) = (tmp_path / "ways").iterdir()
        path.write_text(json.dumps({"way": EAGER, "seconds": {}}))
        again = dt.optimize(seeded(Scaled).eval(), quick=True, again=True)
        assert_equal(again(x), plain_call(again)(x))
        assert dt.optimize(module, quick=True, again=True) is module
        module(x)
    assert asked == [False, True, True]
    assert ways_of(again) == ways_of(module) == [PLACED]
    assert json.loads(path.read_text())["way"] == PLACED


def test_a_module_is_optimized_once_and_what_is_no_plain_module_is_refused():
    module = nn.Linear(2, 2)
    calls = replaced_call(dt.optimize(dt.optimize(module)))
    assert isinstance(calls, optimizing.OptimizedCalls)
    assert replaced_call(dt.optimize(module, quick=True)) is not calls
    for wrong in (len, torch.compile(nn.Linear(2, 2)), nn.LazyLinear(2)):
        with pytest.raises(ModelError, match=r"no torch.nn.Module|compiled already|no shape yet"):
            dt.optimize(wrong)
    module = nn.Linear(2, 2)
    module.compile()
    with pytest.raises(ModelError, match="compiled already"):
        dt.optimize(module)
    with pytest.raises(UsageError, match="machine"):
        dt.optimize(nn.Linear(2, 2), "here/2")
    with pytest.raises(UsageError, match="budget"):
        dt.optimize(nn.Linear(2, 2), budget="soon")


def test_both_ways_of_the_user_are_raced_in_processes_that_can_be_ended(monkeypatch, caplog):
    """The module here is compiled by nobody: a budget of a second ends what compiles."""
    monkeypatch.setattr(optimizing, "LEAST_SECONDS", 0.0)
    module, plain = seeded(Scaled), seeded(Scaled)
    dt.optimize(module, budget="1s")
    x = torch.randn(7, 6)
    for _ in range(2):
        assert_equal(module(x), plain(x))
    assert ways_of(module) == [EAGER] and "took longer than the budget" in caplog.text
    assert_equal(module.state_dict(), plain.state_dict())


def test_the_backend_of_torch_compile_runs_forward_and_backward_by_plans(in_order, caplog):
    caplog.set_level("INFO")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    where = points["torch_dynamo_backends"]["dovetail"]
    backend = EntryPoint("dovetail", where, "torch_dynamo_backends").load()
    module, plain = seeded(Scaled), seeded(Scaled)
    compiled = torch.compile(module, backend=backend, options={"quick": True})
    assert five_losses(module, compiled) == pytest.approx(five_losses(plain, plain), rel=1e-5)
    assert_equal(module.state_dict(), plain.state_dict())
    # A gradient that is nothing but rounding, of a bias before a normalisation, has no plan.
    assert "runs by placed" in caplog.text


@pytest.mark.parametrize("is_native", [True, False])
def test_what_a_module_holds_is_seen_to_change_with_the_runner_and_without(is_native, monkeypatch):
    if is_native and optimizing.native_runner() is None:
        pytest.skip("no C++ runner was built")
    if not is_native:
        monkeypatch.setattr(optimizing, "native_runner", lambda: None)

    def module():
        made = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        made.table = OrderedDict(a=1, b=[1.0, 2.0])
        made.scale, made.own = 0.5, {"x": (1, 2)}
        return made

    def a_parameter():
        return nn.Parameter(torch.ones(1))

    def moved(each):
        each.table.move_to_end("a")

    changes = {
        "a number": lambda each: setattr(each, "scale", 0.25),
        "its type": lambda each: each.own.update(x=(1, 2.0)),
        "an order": moved,
        "an entry of a list": lambda each: each.table["b"].append(3.0),
        "a table": lambda each: each.own.update(y=1),
        "a mode": lambda each: each[1].eval(),
        "a new name": lambda each: setattr(each, "other", 0.5),
        "a hook": lambda each: each[0].register_forward_hook(lambda *_: None),
        "a first parameter": lambda each: each[1].register_parameter("extra", a_parameter()),
        "a first buffer": lambda each: each[0].register_buffer("extra", torch.ones(1)),
    }  # fmt: skip
    for name, change in changes.items():
        each = module()
        state = optimizing.ModuleState(each)
        assert not state.is_opaque and state.holds() and state.holds(), name
        change(each)
        assert not state.holds(), name
    each = module()
    state = optimizing.ModuleState(each)
    # Equal values are no change, and neither are other tensors in the same places.
    each.scale = float("0.5")
    each[0].weight = nn.Parameter(torch.ones(4, 4))
    assert state.holds() and state.holds()
    # A tensor in two places is one.
    each[2].weight = each[0].bias
    assert not state.holds()
