"""From a network to its chosen schedule on this machine's cores, end to end."""

from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from dovetail.costs import CostCache
from dovetail.errors import MachineError, UnequalError, UsageError
from dovetail.executors.stages import measuring
from dovetail.frontends import capture
from dovetail.graph.files import save_graph
from dovetail.machine.local import local_machine
from dovetail.methods import SCHEDULERS
from dovetail.pipeline import resolve_model, scheduling
from dovetail.pipeline.scheduling import (
    ScheduleRequest,
    check_equal,
    find,
    schedule,
    schedules,
    search,
    target_of,
)
from dovetail.runtime import timers
from dovetail.schedulers.merge import can_merge
from dovetail.schedulers.races import check_races
from dovetail.schedulers.records import StageTiming, members
from dovetail.schedulers.results import SEQUENTIAL


@pytest.fixture(params=[1, 2], ids=["one core", "two cores"])
def cores(request, monkeypatch, tmp_path):
    """Threads of the device, whatever this machine has; everything is measured but briefly."""

    def machine(*_):
        found = local_machine()
        return replace(found, devices=(replace(found.devices[0], cores=(*range(request.param),)),))

    monkeypatch.setattr(scheduling, "local_machine", machine)
    for name, least in (("_SAMPLE_SECONDS", 1e-5), ("_VISITS", 1)):
        monkeypatch.setattr(measuring, name, least)
    monkeypatch.setattr(measuring, "_MOST_PASSES", 5)
    monkeypatch.setattr(timers, "ROUND_SECONDS", 1e-5)
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    before = torch.get_num_threads()
    yield request.param
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)


class Cell(nn.Module):
    """Convolutions of one image that can merge, pools, an index; several outputs."""

    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(7, 8)
        self.one = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.last = nn.Linear(11, 8)

    def forward(self, image, which):
        image = self.pool(image)
        joined = torch.cat([self.one(image), self.two(image), self.pool(image)], 1)
        scores = self.last(joined.mean((2, 3))) + self.names(which)
        return {"scores": scores, "best": (scores > 0, which + 1), "joined": joined}


def cell():
    torch.manual_seed(0)
    return Cell().eval(), (torch.randn(2, 3, 8, 8), torch.tensor([3, 5]))


def assert_close(found, expected):
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_chosen_step_computes_what_the_module_does(cores):
    module, inputs = cell()
    told = []
    found, step = schedule(
        capture(module, *inputs), rounds=5, progress=lambda *what: told.append(what)
    )
    for _ in range(2):
        given = (torch.randn(2, 3, 8, 8), torch.tensor([0, 6]))
        with torch.no_grad():
            assert_close(step(*given), module(*given))
    names = [c.scheduler for c in found.candidates]
    assert names == [*SCHEDULERS, *(["one thread"] if cores > 1 else [])]
    assert found.chosen in names
    assert found.batch == 2
    for candidate in found.candidates:
        assert len(candidate.seconds) in (5, 10, 20, 30)  # of all; of the pair that decides
        assert candidate.predicted_seconds > 0
        assert len(candidate.streams.orders) <= cores
        check_races(found.block, candidate.streams)
    assert [k for own in found.blocks for k in own] == list(range(len(found.kernels)))
    assert all(0 <= fraction <= 1 for _, fraction, _ in told)


def test_every_schedule_computes_what_the_module_does(cores):
    module, inputs = cell()
    target = target_of(capture(module, *inputs))
    with torch.no_grad():
        expected = module(*inputs)
    merged = {}
    for name in SCHEDULERS:
        candidate = search(target, name)
        assert_close(target.step(candidate)(*inputs), expected)
        forced = replace(target, problem=_paying(target.problem))
        candidate = search(forced, name)
        merged[name] = [stage.kernels for stage in candidate.stages if stage.merged]
        assert_close(forced.step(candidate)(*inputs), expected)
    assert [len(merged[name]) for name in ("merge", "dos", "ios")] == [1, 1, 1]


def _paying(problem):
    """As if stages always paid, and merged ones more."""

    def of(stage):
        kernels = list(members(stage))
        if can_merge(problem.keys, kernels):
            return StageTiming(0.1, merged=True)
        return StageTiming(1.0 if len(kernels) == 1 else 0.45 * len(kernels))

    def timer(stages):
        return list(map(of, stages))

    return replace(problem, timer=timer, bounded=timer)


def test_a_second_search_measures_nothing_and_finds_the_same(cores):
    module, inputs = cell()
    cache = CostCache()
    first = target_of(capture(module, *inputs), cache=cache)
    found = {name: search(first, name) for name in SCHEDULERS}
    assert first.costs.timed > 0
    second = target_of(capture(module, *inputs), cache=cache)
    for name in SCHEDULERS:
        again = search(second, name)
        assert again.stages == found[name].stages
        assert again.streams == found[name].streams
        assert again.predicted_seconds == found[name].predicted_seconds
    assert second.costs.timed == 0


def test_the_users_random_numbers_and_inputs_are_left_alone(cores):
    module, inputs = cell()
    kept = [value.clone() for value in inputs]
    state = torch.get_rng_state()
    find(target_of(capture(module, *inputs)), ["dos"], rounds=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


class Infinite(nn.Module):
    def forward(self, rows):
        low = torch.log(rows.relu() * 0)
        return low, low - low, torch.cat([low, rows]), rows.long()


def test_outputs_that_are_not_finite_are_equal_to_themselves(cores):
    rows = torch.randn(3, 4)
    _, step = schedule(capture(Infinite(), rows), schedulers=["dataflow"], rounds=1)
    for a, b in zip(step(rows), Infinite()(rows), strict=True):
        assert torch.equal(a, b) or (a.isnan() & b.isnan()).all()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda value: value + 1, 0.5),
        (lambda value: torch.full_like(value, torch.nan), torch.nan),
        (lambda value: torch.full_like(value, torch.inf), torch.inf),
        (lambda value: value.clone().index_fill_(0, torch.tensor([0]), -torch.inf), torch.inf),
    ],
    ids=["other", "nan", "inf", "one inf"],
)
def test_a_schedule_with_other_outputs_is_refused(change, error):
    value = torch.tensor([2.0, -1.0, 0.0])
    target = type("Target", (), {"inputs": ()})
    check_equal(target, {SEQUENTIAL: lambda: value, "dos": lambda: value * (1 + 1e-5)})
    with pytest.raises(UnequalError) as raised:
        check_equal(target, {SEQUENTIAL: lambda: value, "dos": lambda: change(value)})
    assert raised.value.scheduler == "dos"
    assert raised.value.error == error or error != error


def test_whole_numbers_must_be_equal():
    target = type("Target", (), {"inputs": ()})
    value = torch.tensor([2, 1])
    check_equal(target, {SEQUENTIAL: lambda: value, "dos": lambda: value.clone()})
    with pytest.raises(UnequalError):
        check_equal(target, {SEQUENTIAL: lambda: value, "dos": lambda: value + 1})


class Same(nn.Module):
    def forward(self, rows):
        return rows


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, values):
        self.total.add_(values)
        return values * 2


class Drawing(nn.Module):
    def forward(self, values):
        return nn.functional.dropout(values, 0.5) + 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: capture(Same(), torch.ones(3)), "nothing to run"),
        (lambda: capture(Counting(), torch.ones(3)), "buffers"),
        (lambda: capture(Drawing(), torch.ones(3)), "random"),
        (
            lambda: resolve_model("zoo:rnnlm?hidden=8&vocabulary=9&steps=2&batch=2", "sgd"),
            "--train",
        ),
    ],
    ids=["no kernels", "written buffers", "random numbers", "training"],
)
def test_steps_that_stages_are_not_made_of_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        schedule(make())


def test_a_graph_without_its_network_is_refused(tmp_path):
    module, inputs = cell()
    path = tmp_path / "cell.json"
    save_graph(capture(module, *inputs).graph, path)
    with pytest.raises(UsageError, match="captured"):
        schedules(str(path))


def test_requests_that_make_no_sense_are_refused():
    module, inputs = cell()
    step = capture(module, *inputs)
    with pytest.raises(UsageError, match="'best' is not one of sequential, greedy"):
        schedule(step, schedulers=["dos", "best"])
    with pytest.raises(UsageError, match="1 or more"):
        schedule(step, rounds=0)
    with pytest.raises(UsageError, match="1 or more"):
        ScheduleRequest("zoo:rnnlm", rounds=0)
    with pytest.raises((UsageError, MachineError)):
        schedule(step, "cuda:99")
    with pytest.raises(MachineError):
        schedule(step, "abacus")
