"""A plan beside what its user would run: what is measured, and what then is the plan."""

import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import dovetail as dt
from dovetail.errors import UsageError, WorkerError
from dovetail.executors import MODES
from dovetail.frontends import SGD, capture
from dovetail.machine import parse_machine
from dovetail.machine.local import local_machine
from dovetail.pipeline import open_plan, planning, segmenting, ways
from dovetail.pipeline.opening import verify
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.searching import search_plan
from dovetail.plans import COMPILED, EAGER, PLACED, REDUCED, load_plan
from dovetail.runtime.timers import Deadline, Repeats
from dovetail.transforms import towers
from dovetail.units import HERE, format_seconds
from tests.support.placing import plan_for, random_placement
from tests.support.played_gpus import gpu
from tests.support.small_models import branches

pytestmark = pytest.mark.compares_ways
MODEL = "tests.support.small_models:branches"


@pytest.fixture(scope="module")
def step():
    module, inputs = branches()
    return capture(module, *inputs)


class Timed:
    """Stands for a step at work that takes so many seconds on each number of threads."""

    made: ClassVar = []

    def __init__(self, seconds, fails=""):
        self.seconds, self.fails, self.threads, self.closed = seconds, fails, 0, False
        self.waits = 0
        Timed.made.append(self)

    def begin(self):
        return 0.1

    def feed(self):
        pass

    def send_first(self):
        pass

    def has_begun(self, _seconds):
        if self.fails:
            raise WorkerError("cpu0", "", f"Traceback\n{self.fails}")
        return not self.waits

    def set_threads(self, threads):
        self.threads = threads

    def step_seconds(self, steps):
        value = self.seconds.get(self.threads, 9.0) if self.threads else self.seconds[0]
        return [value] * (steps - 1)

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def timed(monkeypatch):
    """Sets the seconds of eager, compiled and placed steps; two cores."""
    Timed.made = []
    seconds = {EAGER: {1: 2.0, 2: 3.0}, COMPILED: {1: 1.0, 2: 0.9}, PLACED: {0: 1.2}}
    seconds[HERE] = {0: 1.3}
    fails = {}

    def plain(_step, machine, mode="", apart=False):
        assert apart, "it must be possible to end what compiles"
        way = next(way for way, of_way in MODES.items() if of_way == mode)
        found = Timed(seconds[way], fails.get(bool(mode), ""))
        found.threads = machine.devices[0].op_threads
        found.waits = fails.get("waits", False) and mode
        return found

    monkeypatch.setattr(ways, "PlainNetwork", plain)
    monkeypatch.setattr(
        ways, "run", lambda plan, *_, **__: Timed(seconds[HERE if plan.placer == HERE else PLACED])
    )
    monkeypatch.setattr(segmenting, "has_compiler", lambda: False)
    monkeypatch.setattr(ways, "has_compiler", lambda: not fails.get("no compiler"))
    monkeypatch.setattr(ways, "MEASURING_SECONDS", 1e9)
    monkeypatch.setattr(
        ways, "time_threads", lambda timers, _tell, **_: {n: t() for n, t in timers.items()}
    )
    monkeypatch.setattr(
        ways,
        "in_turns",
        lambda timers, repeats, _tell, **_: {n: (t(),) * repeats.most for n, t in timers.items()},
    )
    return seconds, fails


def found(step, **options):
    return dt.plan(step, "here/1", budget="5e", compile_budget="5s", **options)


def with_cores(machine, count):
    (device,) = machine.devices
    return replace(machine, devices=(replace(device, cores=device.cores[:count], threads=0),))


def told(plan):
    return " | ".join(plan.notes)


def test_the_users_fastest_way_is_the_plan_if_it_is_faster(step, timed, tmp_path):
    plan = found(step)
    assert (plan.way, plan.placer, plan.value) == (COMPILED, COMPILED, 1.0)
    assert plan.measured == {EAGER: 2.0, COMPILED: 1.0, PLACED: 1.2}
    assert (plan.baselines[EAGER], plan.baselines[COMPILED]) == (2.0, 1.0)
    assert plan.lower_bound == 0.0 and plan.gap == float("inf")
    assert "this plan 1.2 s" in told(plan)
    assert "no placement pays, but another way does: torch.compile" in told(plan)
    assert "is 2.00 x as fast as eager" in told(plan)
    assert all(network.closed for network in Timed.made)
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert (again.way, again.measured, again.value) == (COMPILED, plan.measured, 1.0)


def test_a_plan_that_is_faster_stays_and_shows_the_others(step, timed):
    timed[0][PLACED][0] = 0.5
    plan = found(step)
    assert plan.way == PLACED and plan.placer not in (EAGER, COMPILED)
    assert plan.baselines[COMPILED] == 1.0 and plan.measured[PLACED] == 0.5
    assert "2.00 x" in str(plan)
    assert "it pays: this plan is 2.00 x as fast as torch.compile (1 thread) (2.00 to" in told(plan)


def test_a_search_that_goes_on_lets_torch_compile_have_all_of_the_time(step, monkeypatch):
    shares = []

    def fastest_way(plans, *_arguments, own_share, **_options):
        shares.append(own_share)
        return plans[0]

    monkeypatch.setattr(ways, "fastest_way", fastest_way)
    for again in (False, True):
        found(step, placer="single", again=again)
    assert shares == [ways.OWN_SHARE, 1.0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_all_cores_and_the_best_number_of_threads_are_measured(step, timed):
    machine = with_cores(parse_machine("here"), 2)
    plan = found(step, placer="single")
    compared = ways.fastest_way(
        (plan, plan), step, machine, replaces=True, compile_seconds=5.0,
        progress=lambda *_: None,
    )  # fmt: skip
    said = told(compared)
    assert "eager (2 threads) 3 s, eager (1 thread) 2 s" in said
    assert "torch.compile (2 threads) 900 ms, torch.compile (1 thread) 1 s" in said
    assert compared.measured == {EAGER: 2.0, COMPILED: 0.9, PLACED: 1.2}
    assert [device.op_threads for device in compared.machine.devices] == [2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.parametrize(
    ("of_plan", "of_rival", "chosen"),
    [(0.5, 0.6, PLACED), (0.6, 0.5, HERE), (0.495, 0.5, HERE), (1.2, 0.95, COMPILED)],
)
def test_a_plan_for_all_cores_as_one_device_is_a_rival(step, timed, of_plan, of_rival, chosen):
    timed[0][PLACED][0], timed[0][HERE][0] = of_plan, of_rival
    machine = local_machine("here/2")
    several = plan_for(step, random_placement(step.graph, 0), machine=machine)
    several = replace(several, min_gain=0.02)
    single = search_plan(PlanRequest(step, "here", placer="single"), lambda *_: None)
    single = replace(single, placer=HERE)
    plan = ways.fastest_way(
        (several, several), step, parse_machine("here"), rivals={HERE: (single, single)},
        replaces=True, compile_seconds=5.0, progress=lambda *_: None,
    )  # fmt: skip
    assert f"a plan for all cores as one device {format_seconds(of_rival)}" in told(plan)
    assert plan.way == (COMPILED if chosen == COMPILED else PLACED)
    assert len(plan.machine.devices) == (2 if chosen == PLACED else 1)
    if chosen == PLACED:
        assert (plan.measured[PLACED], plan.baselines[HERE]) == (of_plan, of_rival)
    else:
        assert plan.measured[PLACED] == of_rival and HERE not in plan.measured
    if chosen == HERE:
        assert plan.placer == HERE
        verify(plan, step.graph)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_plans_on_several_devices_have_that_rival_unless_it_is_hopeless_or_the_user_has_chosen(
    step, timed, monkeypatch
):
    monkeypatch.setattr(planning, "HOPELESS", 1e9)
    plan = dt.plan(step, "here/2", budget="5e", compile_budget="5s")
    assert "a plan for all cores as one device 1.3 s" in told(plan)
    monkeypatch.setattr(planning, "HOPELESS", 1e-9)
    assert "one device" not in told(dt.plan(step, "here/2", budget="5e", compile_budget="5s"))
    monkeypatch.setattr(planning, "HOPELESS", 1e9)
    chosen = dt.plan(step, "here/2", budget="5e", compile_budget="5s", pins=[("left.0", "cpu0")])
    assert "one device" not in told(chosen)


def test_on_a_gpu_the_step_is_compiled_in_both_modes(step, timed, monkeypatch, tmp_path):
    monkeypatch.setattr(ways, "Workers", lambda _machine: nullcontext())
    machine = parse_machine("here/1")
    device = gpu(0)
    machine = replace(machine, devices=(device,), host=device.name, links=())
    seconds = timed[0]
    seconds |= {EAGER: {0: 2.0}, COMPILED: {0: 1.5}, REDUCED: {0: 1.0}}
    plan = plan_for(step, random_placement(step.graph, 0, 1), machine=machine)
    compared = ways.fastest_way(
        (plan, plan), step, machine, replaces=True, compile_seconds=5.0,
        progress=lambda *_: None,
    )  # fmt: skip
    assert compared.way == REDUCED
    assert compared.measured[REDUCED] == 1.0
    assert "torch.compile reduce-overhead (on a GPU) 1 s" in told(compared)
    compared.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").way == REDUCED


@pytest.mark.parametrize("options", [{"placer": "single"}, {"pins": [("left.0", "cpu0")]}])
def test_what_the_user_has_chosen_is_kept(step, timed, options):
    plan = found(step, **options)
    assert plan.way == PLACED and plan.baselines[EAGER] == 2.0


def test_nothing_is_compiled_where_that_is_not_wanted_or_not_possible(step, timed):
    plan = found(step, compile=False)
    assert plan.way == PLACED and COMPILED not in plan.baselines
    assert "torch.compile was not measured, as asked" in told(plan)
    timed[1]["no compiler"] = True
    assert "there is no C++ compiler" in told(found(step))


def test_a_compilation_that_fails_or_takes_too_long_is_told_of(step, timed, monkeypatch):
    timed[1][True] = "RuntimeError: no such kernel"
    plan = found(step)
    assert plan.way == PLACED and COMPILED not in plan.measured
    assert told(plan).count("failed: RuntimeError: no such kernel") == len(Timed.made[1:-1])
    timed[1].update({True: "", "waits": True})
    ticks = iter(range(1000))
    monkeypatch.setattr(ways, "clock", lambda: float(next(ticks)))
    # Of 5 s it has two thirds, and what came before has taken a little.
    late = r"not compiled within 3\.[23]\d* s, so not measured: torch\.compile \(1 thread\)"
    assert re.search(late, told(found(step)))


def test_an_eager_step_that_fails_leaves_the_plan(step, timed, monkeypatch):
    def fail(*_args, **_options):
        frames = 'Traceback (most recent call last):\n  File "model.py"\n    f()\n'
        raise WorkerError("cpu0", "", f"{frames}ValueError: my own mistake")

    monkeypatch.setattr(ways, "PlainNetwork", fail)
    plan = found(step)
    assert plan.way == PLACED and not plan.measured
    assert "eager was not measured: ValueError: my own mistake" in told(plan)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (WorkerError("cpu0", "", 'Traceback\n  File "a"\n    x()\nValueError: mine\n\nSet A=1 to'
                     " see more"), "ValueError: mine"),
        (OSError("the disk is full"), "the disk is full"),
        (UsageError("step", "has no plain form"), "step: has no plain form"),
    ],
)  # fmt: skip
def test_what_failed_is_told_in_one_line(error, cause):
    assert ways._cause_of(error) == cause


@pytest.mark.parametrize(("ratios", "way"), [((0.95, 1.1), PLACED), ((1.02, 0.9), COMPILED)])
def test_the_median_ratio_decides(step, timed, monkeypatch, ratios, way):
    most, few = ratios
    seconds = (most,) * 17 + (few,) * 15

    def in_turns(timers, repeats, _tell, calls):
        assert (repeats, calls) == (Repeats(len(seconds), 3, 1e9), 1)
        return {n: seconds if n == "this plan" else (1.0,) * repeats.most for n in timers}

    monkeypatch.setattr(ways, "in_turns", in_turns)
    assert found(step, compile=True).way in (way, EAGER if way == COMPILED else way)


def test_a_plan_that_was_not_compared_gives_way_to_the_module_as_it_is(
    step, timed, monkeypatch, caplog
):
    def fail(*_args, **_options):
        raise WorkerError("cpu0", "first", "Traceback\nRuntimeError: strides", "strides")

    monkeypatch.setattr(ways, "run", fail)
    plan = found(step)
    assert plan.way == EAGER and not plan.measured
    assert "this plan was not measured beside the module as it is, so that runs: strides" in told(
        plan
    )
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "in op 'first': strides" in record.getMessage()
    # What its user asked for by name stays.
    assert found(step, placer="single").way == PLACED


def test_an_interrupt_keeps_what_is_safe(step, timed, monkeypatch):
    def press(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(ways, "PlainNetwork", press)
    plan = found(step)
    assert plan.interrupted and plan.way == EAGER


def test_what_does_not_fit_beside_the_plan_is_not_measured(step, timed, monkeypatch):
    monkeypatch.setattr(ways, "available_bytes", lambda: 10)
    plan = found(step)
    assert plan.way == EAGER
    assert "so that runs: beside this plan it needs about" in told(plan)
    assert not Timed.made


def test_behind_the_deadline_nothing_is_compared_and_the_module_runs_as_it_is(step, timed):
    plan = plan_for(step, random_placement(step.graph, 0, 1), machine=local_machine("here/1"))
    given = {"replaces": True, "compile_seconds": 5.0, "progress": lambda *_: None}
    machine, late = parse_machine("here/1"), Deadline(0.0)
    found = ways.fastest_way((plan, plan), step, machine, deadline=late, **given)
    assert found.way == EAGER and not Timed.made
    assert "so that runs: the budget was spent before" in told(found)
    verify(found, step.graph)
    # With a moment left there is a race, for which nothing is compiled.
    deadline = Deadline(1000.0)
    found = ways.fastest_way(
        (plan, plan), step, machine, deadline=deadline, **given | {"compile_seconds": 0.5}
    )
    assert set(found.measured) == {EAGER, PLACED}
    assert deadline.missed == [COMPILED] and "no time left to compile" in told(found)


def test_a_step_of_several_towers_is_only_planned(timed):
    module, inputs = branches()
    trained = capture(
        module, *inputs, targets=torch.zeros(8, 32), loss=torch.nn.functional.mse_loss, train=SGD()
    )
    plan = found(towers(trained, 2))
    assert "several towers" in told(plan) and not plan.measured


@pytest.mark.parametrize(
    ("machine", "options"), [("2 x v100", {}), ("here/1", {"objective": "load"})]
)
def test_other_machines_and_objectives_have_no_ways_of_the_user(step, timed, machine, options):
    plan = dt.plan(step, machine, budget="5e", **options)
    assert not plan.measured and not Timed.made


def test_a_budget_of_compiling_is_in_seconds():
    with pytest.raises(UsageError, match="compile_budget"):
        PlanRequest(compile_budget="5e")
    assert PlanRequest(compile_budget="90s").compile_seconds == 90.0
    assert PlanRequest(compile=False).compile_seconds == 0.0


def test_an_eager_plan_is_run_by_the_command_line_as_it_is(dovetail, tmp_path, monkeypatch):
    """Nothing stands in here: both ways are measured, and the plan is made to lose."""
    machine = f"here/{min(2, len(os.sched_getaffinity(0)))}"
    monkeypatch.setattr(ways, "ratios_of", lambda *_: [2.0])
    path = tmp_path / "plan.json"
    status, out, err = dovetail(
        "plan", MODEL, "--machine", machine, "--budget", "5e", "--out", path, "--json"
    )
    assert status == 0, err
    summary = json.loads(out)
    assert summary["way"] == EAGER and summary["measured"][EAGER] == summary["value"]
    plan, captured = open_plan(path, MODEL)
    assert plan.way == EAGER
    with dt.run(plan, captured) as it:
        module, inputs = branches()
        (device,) = plan.machine.devices
        torch.set_num_threads(device.op_threads)
        with torch.no_grad():
            assert torch.equal(it.step(*inputs), module.eval()(*inputs))
    status, out, err = dovetail("run", path, MODEL, "--steps", "3")
    assert status == 0 and "step, median" in out
    status, out, err = dovetail("report", path, MODEL, "--out", tmp_path / "page.html")
    assert status == 0
    assert "no plan is faster than eager, which runs" in (tmp_path / "page.html").read_text()
