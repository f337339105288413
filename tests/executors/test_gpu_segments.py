"""Compiled segments on GPUs that the CPU plays."""

import pytest
import torch
from torch import nn

from dovetail.executors import compiling, run
from dovetail.executors.compiling import CompileTarget
from dovetail.executors.gpus.worker import LoadedGpus
from dovetail.executors.shares import share_out
from dovetail.frontends import SGD, capture, initial_values, run_step
from dovetail.frontends.instructions import RunCompiled
from dovetail.machine import parse_machine
from dovetail.machine.gpu_rates import GpuTimer
from dovetail.pipeline.segmenting import compiled_seconds, with_segments
from dovetail.runtime.native import has_compiler
from tests.executors.test_gpu_races import Program
from tests.executors.test_gpus import close, random_plan
from tests.support.played_cuda import PlayedCuda
from tests.support.played_gpus import HOST, cpu, gpu, linked

pytestmark = pytest.mark.usefixtures("forked_compilers", "played_gpus")
STEPS = 5
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.first(x).tanh() * 2 + 1
        return self.second(nn.functional.dropout(hidden, 0.5)).sigmoid()


def squared(output, target):
    return ((output - target) ** 2).mean()


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 8), torch.randn(4, 8)
    optimizer = SGD(lr=0.1, momentum=0.9)
    return capture(Layers(), inputs, targets=targets, loss=squared, train=optimizer)


@pytest.fixture
def everything_is_faster(monkeypatch):
    monkeypatch.setattr(compiling, "FASTER", float("inf"))


def segmented(plan, step):
    return with_segments(plan, step, compile_seconds=300, progress=lambda *_: None)[1]


@needs_compiler
@pytest.mark.parametrize(
    "machine",
    [
        # With a CPU, so that there is code of both kinds; the next test has GPUs alone.
        linked("box", cpu(0), gpu(0)),
        *(pytest.param(text, marks=pytest.mark.gpu) for text in ("here/gpu", "here")),
    ],
)
def test_compiled_segments_compute_what_the_calls_do(everything_is_faster, step, machine):
    machine = parse_machine(machine) if isinstance(machine, str) else machine
    plain = random_plan(machine, step, 0)
    plan = segmented(plain, step)
    on_gpu = [
        (machine.devices[share.device], instruction.key)
        for share in share_out(plan, step.graph, step.program).shares
        for instruction in share.instructions
        if isinstance(instruction, RunCompiled) and machine.devices[share.device].kind == "gpu"
    ]
    assert on_gpu
    assert all(compiling.has_code(key, CompileTarget.of(device)) for device, key in on_gpu)
    found, states = [], []
    for each in (plain, plan):
        with run(each, step, seed=3) as placed:
            found.append([placed.step(*step.inputs, *step.targets) for _ in range(STEPS)])
            states.append(placed.state_dict())
            placed.timeline()
    assert close(found[0], found[1])
    assert close(states[0], states[1])


@needs_compiler
def test_the_code_itself_runs_also_as_a_graph(everything_is_faster, step, monkeypatch):
    loaded = []
    original = LoadedGpus.__init__

    def init(self, *args):
        original(self, *args)
        loaded.append(self)

    monkeypatch.setattr(LoadedGpus, "__init__", init)
    program = Program(0, step, lambda *args: segmented(random_plan(*args), step))
    assert program.run(program.steps, count=2) == "done"
    assert program.run(program.steps, first=program.steps) == "done"
    for own in loaded:
        codes = [code for on_gpu in own.gpus.values() for code in on_gpu.codes.values()]
        assert codes and None not in codes
    works = [
        getattr(entry, "name", "")
        for launch in loaded[1].launches.values()
        if launch.graph is not None
        for _, entry in launch.graph.log
    ]
    assert "compiled code" in works


def test_code_is_timed_as_a_graph_beside_its_calls():
    timer = GpuTimer(PlayedCuda(), torch.device("cpu"))
    value = torch.rand(400, 400)
    quick, slow = (lambda: value * 2), (lambda: value @ value @ value)
    share = compiling._share_as_graphs(timer, quick, slow)
    back = compiling._share_as_graphs(timer, slow, quick)
    assert 0 < share < 1 < back


def test_without_its_code_a_segment_runs_call_by_call(step, monkeypatch, tmp_path):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    monkeypatch.setattr("dovetail.pipeline.segmenting.has_compiler", lambda: True)
    monkeypatch.setattr(
        "dovetail.pipeline.segmenting.compile_all",
        lambda fused, *_args, **_options: {call.key: compiling.Compiled(0.5) for call in fused},
    )
    plan = segmented(random_plan(linked("box", HOST, gpu(0)), step, 0), step)
    values = initial_values(step)
    data = step.inputs, step.targets
    expected = [run_step(step, values, *data, seed=3, step=i) for i in range(STEPS)]
    with run(plan, step, seed=3) as placed:
        found = [placed.step(*step.inputs, *step.targets) for _ in range(STEPS)]
    assert close(found, expected)
    seconds = plan.compute_seconds
    assert (compiled_seconds(plan, step.graph, step.graph, seconds) <= seconds).all()
